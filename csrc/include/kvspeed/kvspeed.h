// Copyright 2026 the kvspeed authors. SPDX-License-Identifier: Apache-2.0
//
// kvspeed: the C API.
//
// Two kernels make long prompts cheap, and a third joins their results:
//
//   rope_concat        copy many KV segments, all layers, into one cache, rotating keys to their new positions
//   segment_attention  attention over a list of KV segments where they lie, rotating the query instead
//   merge_states       join two partial attention results by their log-sum-exp
//
// Rules for an embedder
//   * Plain structs, pointers and 64-bit strides, all in ELEMENTS. The head dimension has stride 1 everywhere; every
//     other stride is free, and 0 is allowed in inputs. Outputs overlap neither themselves nor a source.
//   * Nothing here allocates, throws, prints, or reads an environment variable. Scratch memory comes from the caller:
//     ask `*_workspace` for its size, pass it in `kvspeed_execution`.
//   * Every argument is checked before the first write; a status other than KVSPEED_OK means nothing was written.
//   * With KVSPEED_CUDA the pointers are device memory, but for the structs themselves and inv_freq, which the host
//     reads. A call enqueues on `stream` and returns: no synchronisation, no host read of device memory, no host
//     pointer kept. So it can be captured into a CUDA graph.
//   * Two calls may run at once from two threads as long as they do not share a workspace or an output.
//   * Zero-initialise a struct before filling it, so that fields added later keep their defaults.

#ifndef KVSPEED_KVSPEED_H_
#define KVSPEED_KVSPEED_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KVSPEED_API __attribute__((visibility("default")))
#else
#define KVSPEED_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvspeed_status {
  KVSPEED_OK = 0,
  KVSPEED_INVALID_ARGUMENT = 1,     // a size, stride or pointer that cannot be right
  KVSPEED_UNSUPPORTED = 2,          // right in itself, but not built or not covered (dtype, head_dim, device, isa)
  KVSPEED_OUT_OF_RANGE = 3,         // tokens or pages beyond the output's capacity
  KVSPEED_WORKSPACE_TOO_SMALL = 4,  // fewer bytes than `*_workspace` asked for
  KVSPEED_DEVICE_ERROR = 5          // the device's runtime reported a failure
} kvspeed_status;

typedef enum kvspeed_dtype { KVSPEED_FLOAT32 = 0, KVSPEED_BFLOAT16 = 1, KVSPEED_FLOAT16 = 2 } kvspeed_dtype;

// How a packet's numbers are stored. 8-bit ones stand for stored * scale, with one scale a layer and head.
typedef enum kvspeed_storage {
  KVSPEED_STORED_PLAIN = 0,  // in the call's dtype
  KVSPEED_STORED_INT8 = 1,
  KVSPEED_STORED_FLOAT8_E4M3FN = 2
} kvspeed_storage;

typedef enum kvspeed_device { KVSPEED_CPU = 0, KVSPEED_CUDA = 1 } kvspeed_device;

// Instruction sets of the CPU kernels. AUTO takes the best that is built and that this processor runs.
typedef enum kvspeed_isa {
  KVSPEED_ISA_AUTO = 0,
  KVSPEED_ISA_BASELINE = 1,
  KVSPEED_ISA_AVX2 = 2,  // AVX2 + FMA + F16C
  KVSPEED_ISA_AVX512 = 3,
  KVSPEED_ISA_NEON = 4
} kvspeed_isa;

// Where and with what a call runs. Separate from the arguments, so that those can be built once and run often.
typedef struct kvspeed_execution {
  kvspeed_device device;
  kvspeed_isa isa;       // CPU only
  int32_t num_threads;   // CPU only, >= 1: OpenMP threads of this call
  int32_t device_index;  // CUDA only: the device of the tensors, current or not
  void* stream;          // CUDA only: a cudaStream_t of that device
  void* workspace;       // 64-byte aligned, memory of the device; may be NULL where the size asked for is 0
  size_t workspace_bytes;
} kvspeed_execution;

// ------------------------------------------------------------------------------------------------------------------
// rope_concat
// ------------------------------------------------------------------------------------------------------------------

// One packet: keys and values [layers, heads, tokens, head_dim], by strides.
typedef struct kvspeed_packet {
  const void* key;
  const void* value;
  int64_t key_stride[3];    // layer, head, token
  int64_t value_stride[3];  // layer, head, token
  int64_t tokens;           // >= 0
  int64_t offset;           // new position minus the position the keys were rotated for
  // 8-bit packets only: float32 [layers, heads] by strides, each stored number times the scale of its layer and head.
  const float* key_scale;
  const float* value_scale;
  int64_t key_scale_stride[2], value_scale_stride[2];
} kvspeed_packet;

// Output, contiguous:  [layers, heads, capacity, head_dim]; page_table is NULL.
// Output, paged:       [layers, pages, page_size, heads, head_dim]; token t lies in page page_table[t / page_size].
typedef struct kvspeed_rope_concat_args {
  kvspeed_dtype dtype;      // of the output, and of plain packets
  kvspeed_storage storage;  // of all packets of the call
  int64_t layers, heads, head_dim;
  int64_t rotary_dim;   // R, even, 0 <= R <= head_dim; dimensions from R on are copied bit for bit
  int32_t interleaved;  // 0: pairs (i, i + R/2), as in Llama; 1: pairs (2i, 2i + 1), as in GPT-J

  const kvspeed_packet* packets;
  int64_t num_packets;

  const float* inv_freq;          // [R/2], or [layers, R/2] with a layer stride; a zero row leaves that layer as it is
  int64_t inv_freq_layer_stride;  // 0: one row for all layers

  void* out_key;
  void* out_value;
  int64_t out_key_stride[4];    // layer, page (ignored without pages), head, token
  int64_t out_value_stride[4];  // the same
  int64_t start;                // the first packet's first token is written at this token index
  int64_t capacity;             // tokens that the output holds; paged: page_table_length * page_size

  // [page_table_length] or NULL. Entries that are used must be distinct; those outside [0, pages) are an error on the
  // CPU, while on CUDA, where the host cannot look, their tokens are dropped.
  const int32_t* page_table;
  int64_t page_table_length, page_size, pages;
} kvspeed_rope_concat_args;

KVSPEED_API kvspeed_status kvspeed_rope_concat_workspace(const kvspeed_rope_concat_args* args,
                                                         const kvspeed_execution* execution, size_t* bytes);
KVSPEED_API kvspeed_status kvspeed_rope_concat(const kvspeed_rope_concat_args* args,
                                               const kvspeed_execution* execution);

// ------------------------------------------------------------------------------------------------------------------
// segment_attention
// ------------------------------------------------------------------------------------------------------------------

// A run of keys and values [batch, heads_kv, tokens, head_dim], by strides; batch stride 0 shares it between the rows.
typedef struct kvspeed_segment {
  const void* key;
  const void* value;
  int64_t key_stride[3];    // batch, head, token
  int64_t value_stride[3];  // batch, head, token
  int64_t tokens;           // >= 0
  int64_t offset;           // position it is used at minus the position its keys were rotated for
  int64_t start;            // the position token 0 was rotated for (matters to the window only)
  const int32_t* first;     // [batch] or NULL: tokens before it are padding in that row, and invisible
  // Optional: cos[R/2], then sin[R/2] of offset * inv_freq (see kvspeed_rope_row), memory of the device. With it the
  // host computes no angle and, on CUDA, no launch is spent on bringing the row over; NULL: the call does both.
  const float* rope;
  // CUDA only, optional: token t of row b lies in page page_table[b * page_table_stride + t / page_size], and the first
  // entry of key_stride and value_stride is the stride between pages. Tokens in pages outside [0, pages) are invisible.
  const int32_t* page_table;
  int64_t page_table_stride, page_size, pages;
} kvspeed_segment;

typedef struct kvspeed_segment_attention_args {
  kvspeed_dtype dtype;  // of query, keys, values and output
  int64_t batch, heads, heads_kv, query_tokens, head_dim;
  int64_t rotary_dim;
  int32_t interleaved;
  const float* inv_freq;  // [R/2]; may be NULL when every offset is 0

  const void* query;        // [batch, heads, query_tokens, head_dim], rotated at its own positions
  int64_t query_stride[3];  // batch, head, token

  const kvspeed_segment* segments;  // every query row sees every segment (window and padding aside)
  int64_t num_segments;

  // Causal, aligned bottom-right: query row i sees tail tokens up to tail.tokens - query_tokens + i. Its `offset` is 0.
  // Positions: tail token j is at tail.start + j, query row i at tail.start + tail.tokens - query_tokens + i.
  kvspeed_segment tail;
  // CUDA only, optional: int32 [batch] in device memory, the tail's length in each row, at most tail.tokens. A captured
  // CUDA graph so serves a tail that grows: tail.tokens is its capacity, the rest follows this number.
  const int32_t* tail_tokens;

  float scale;         // scores are scale * (q . k), then softcap * tanh(score / softcap) where softcap > 0
  float softcap;       // 0: none; neither it nor |scale| may exceed 1e38
  int64_t window;      // 0: none. W: a query at p sees a key at m when p - W < m <= p
  const float* sinks;  // [heads] or NULL: one logit a head that joins the denominator and the LSE

  void* out;              // [batch, heads, query_tokens, head_dim]
  int64_t out_stride[3];  // batch, head, token
  float* lse;             // [batch, heads, query_tokens] contiguous, natural log, or NULL

  // Tokens a split covers, at most 2^40; 0 lets the library choose. Where it is given, and on the CPU always, splits
  // depend on lengths, positions and window alone, never on batch or threads, so a row's result is the same bits alone
  // and in a batch. On CUDA the library's own choice also looks at the batch, the heads and the device's number of
  // multiprocessors: the same row may then differ in its last bits.
  int64_t split_tokens;
} kvspeed_segment_attention_args;

KVSPEED_API kvspeed_status kvspeed_segment_attention_workspace(const kvspeed_segment_attention_args* args,
                                                               const kvspeed_execution* execution, size_t* bytes);
KVSPEED_API kvspeed_status kvspeed_segment_attention(const kvspeed_segment_attention_args* args,
                                                     const kvspeed_execution* execution);

// ------------------------------------------------------------------------------------------------------------------
// merge_states
// ------------------------------------------------------------------------------------------------------------------

// out = (a * exp(lse_a) + b * exp(lse_b)) / (exp(lse_a) + exp(lse_b)), lse = log(exp(lse_a) + exp(lse_b)); two empty
// states (both -inf) give 0 and -inf.
typedef struct kvspeed_merge_states_args {
  kvspeed_dtype dtype_a, dtype_b;  // the output has dtype_a
  int64_t batch, heads, tokens, head_dim;
  const void *out_a, *out_b;  // [batch, heads, tokens, head_dim]
  int64_t out_a_stride[3], out_b_stride[3];
  const float *lse_a, *lse_b;  // [batch, heads, tokens], by strides
  int64_t lse_a_stride[3], lse_b_stride[3];
  void* out;
  int64_t out_stride[3];
  float* lse;  // contiguous
} kvspeed_merge_states_args;

KVSPEED_API kvspeed_status kvspeed_merge_states(const kvspeed_merge_states_args* args,
                                                const kvspeed_execution* execution);

// ------------------------------------------------------------------------------------------------------------------
// Rotation rows
// ------------------------------------------------------------------------------------------------------------------

// cos[half], then sin[half] of offset * inv_freq, formed in float64: what kvspeed_segment.rope points to, once copied
// to the device. Host memory in and out.
KVSPEED_API kvspeed_status kvspeed_rope_row(int64_t offset, const float* inv_freq, int64_t half, float* row);

// ------------------------------------------------------------------------------------------------------------------
// What is built, and what this machine runs
// ------------------------------------------------------------------------------------------------------------------

KVSPEED_API const char* kvspeed_status_string(kvspeed_status status);
KVSPEED_API const char* kvspeed_isa_name(kvspeed_isa isa);
// 1 when the kernels of `isa` are in this build and the processor can run them.
KVSPEED_API int kvspeed_isa_available(kvspeed_isa isa);
// What KVSPEED_ISA_AUTO stands for on this machine.
KVSPEED_API kvspeed_isa kvspeed_isa_best(void);
// 1 when CUDA kernels are in this build, whether or not a device is there.
KVSPEED_API int kvspeed_cuda_built(void);
// Devices that the driver shows; 0 and a reason in *message (static text) where there is no driver or it is too old.
KVSPEED_API int kvspeed_cuda_device_count(const char** message);
// 1 when the kernels in this build run on that device; *capability gets e.g. 90 for compute capability 9.0.
KVSPEED_API int kvspeed_cuda_device_supported(int32_t device_index, int32_t* capability);
// The architectures in this build, e.g. "80;86;89;90;100;120;80-ptx"; "" without CUDA.
KVSPEED_API const char* kvspeed_cuda_archs(void);
// Text of the runtime's last error that made a call of this thread return KVSPEED_DEVICE_ERROR.
KVSPEED_API const char* kvspeed_cuda_last_error(void);
// Ask the system to back [data, data + bytes) with huge pages; a hint, and harmless where it is not understood.
KVSPEED_API void kvspeed_advise_huge_pages(void* data, size_t bytes);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // KVSPEED_KVSPEED_H_
