// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
#ifndef KVSPEED_SIMT_ORACLE_H_
#define KVSPEED_SIMT_ORACLE_H_

namespace kvspeed::oracle {

// Where value v of thread t lies, as column-major indices into A [16 x 16], B [8 x 16] (by n, then k) and C [16 x 8].
int index_a(bool bf16, int t, int v);
int index_b(bool bf16, int t, int v);
int index_c(bool bf16, int t, int v);
// The number (0 to 255, eight a row) that is element e of thread t after a load of four matrices.
int loaded_number(bool transposed, int t, int e);

}  // namespace kvspeed::oracle

#endif  // KVSPEED_SIMT_ORACLE_H_
