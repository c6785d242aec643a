// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// How much a launch takes by value.
#ifndef KVSPEED_CUDA_LAUNCH_PARAMS_H_
#define KVSPEED_CUDA_LAUNCH_PARAMS_H_

namespace kvspeed::cuda {

// Every driver takes 4 KB; 32,764 bytes need a driver of 2023 (530) or later. Larger parameters cost a launch a little
// more, so they are for what does not fit into small ones.
constexpr int kSmallParams = 4096;
constexpr int kLargeParams = 32752;  // the limit, down to whole vectors

}  // namespace kvspeed::cuda

#endif  // KVSPEED_CUDA_LAUNCH_PARAMS_H_
