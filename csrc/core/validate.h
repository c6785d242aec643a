// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// Every check of the C API, made before anything is written. What lies in device memory is not looked at.
#ifndef KVSPEED_CORE_VALIDATE_H_
#define KVSPEED_CORE_VALIDATE_H_

#include <kvspeed/kvspeed.h>

namespace kvspeed {

kvspeed_status validate(const kvspeed_rope_concat_args* args, kvspeed_device device);
kvspeed_status validate(const kvspeed_segment_attention_args* args, kvspeed_device device);
kvspeed_status validate(const kvspeed_merge_states_args* args);

}  // namespace kvspeed

#endif  // KVSPEED_CORE_VALIDATE_H_
