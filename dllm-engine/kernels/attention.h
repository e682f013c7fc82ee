// Attention of canvas rows: every query of a lane sees the same keys.
#ifndef DLLM_ATTENTION_H
#define DLLM_ATTENTION_H

#include "dllm_kernels.h"

DLLM_API size_t dllm_canvas_attention_scratch_bytes(int rows, int q_heads, int head, int splits);

// How many parts to cut the keys into so that the grid fills the chip; `max_keys` is the largest key count of any lane
// that the call may meet. Never more than 16.
DLLM_API int dllm_canvas_attention_splits(int rows, int lanes, int q_heads, int kv_heads, int head, int max_keys);

// out = softmax(q k^T) v per head, softmax in f32, scale 1.
//   q [lanes][q_heads][rows / lanes][head] f16 (dllm_rope_kv's q_out);  query head i uses KV head i / (q_heads/kv_heads)
//   k_cache, v_cache f16: row s starts at element s * cache_stride and holds kv_heads * head values
//   spans [lanes][4] i64: first row, count, first row, count: the keys of a lane are two runs of cache rows (a ring that
//   wraps, or a prompt and a canvas apart); order is of no account, an unused run has count 0. A lane without keys gets
//   rows of 0.
//   out [rows][q_heads * head] of out_type (F16 or F32)
//   splits: 1 to 16, see above; scratch as the query says (may be null for splits = 1)
// head is 32, 64, 128, 256 or 512; cache_stride a multiple of 8; pointers 16-byte aligned.
DLLM_API int dllm_canvas_attention(void* stream, const void* q, int rows, int lanes, int q_heads, int kv_heads, int head,
                                   const void* k_cache, const void* v_cache, int64_t cache_stride,
                                   const int64_t* spans, int splits, void* out, int out_type, void* scratch);

#endif
