// From the fused q,k,v projection to what attention reads: head norms, rotation, and the write into the KV cache.
#ifndef DLLM_ROPE_KV_H
#define DLLM_ROPE_KV_H

#include "dllm_kernels.h"

// cos and sin of every rotated pair of every row; made once per set of positions and shared by all layers of one kind.
//   pos [rows] i32;  factors [head/2] f32 or null (rope_freqs: 1 for rotated pairs, 1e30 for the others)
//   table [rows][head/2][2] f32 = cos, sin of pos * theta^(-2i/head) / factors[i]
// Angles are rounded to f32 as the reference does.
DLLM_API int dllm_rope_table(void* stream, const int32_t* pos, int rows, int head, float theta, const float* factors,
                             float* table);

// qkv [rows][(q_heads + kv_heads * (has_v ? 2 : 1)) * head] of qkv_type (F32 or F16): q, then k, then v.
//   q = rope(rms(q; q_norm)), k = rope(rms(k; k_norm)), v = rms(v); without has_v, v is the raw k.
//   Pairs are (i, i + head/2).  q_norm, k_norm [head] f32;  table: dllm_rope_table's
//   q_out [lanes][q_heads][rows / lanes][head] of q_type, rows being lane-major
//   k_cache, v_cache f16: row of slot s starts at element s * cache_stride and holds kv_heads * head values;
//   slots [rows] i64: where row i goes, negative = nowhere. No two rows may share a slot.
// head a multiple of 8, at most 512; cache_stride a multiple of 4.
DLLM_API int dllm_rope_kv(void* stream, const void* qkv, int qkv_type, int rows, int lanes, int q_heads, int kv_heads,
                          int head, int has_v, const float* q_norm, const float* k_norm, float eps, const float* table,
                          const int64_t* slots, void* q_out, int q_type, void* k_cache, void* v_cache,
                          int64_t cache_stride);

#endif
