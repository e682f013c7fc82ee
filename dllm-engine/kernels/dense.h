// Dense products on half-precision weights, through the vendor's library, and what goes between them.
#ifndef DLLM_DENSE_H
#define DLLM_DENSE_H

#include "dllm_kernels.h"

// Room that the library may use for one product; it must not be shared by products that run at the same time.
#define DLLM_GEMM_SCRATCH_BYTES (32 << 20)

// out[row][c] = sum_i x[row][i] * w[c][i], sums in f32.
//   w f16 [n][k]   x f16 [rows][k]   out [rows][n] of out_type (F32 or F16)   k a multiple of 8, 16-byte aligned
DLLM_API int dllm_gemm(void* stream, const void* w, const void* x, int rows, int k, int n, void* out, int out_type,
                       void* scratch);

// out[row][c] = gelu(x[row][c]) * x[row][n + c], tanh form.
//   x f32 [rows][2 n]   out f16 [rows][n], clamped to the f16 range   n a multiple of 4
DLLM_API int dllm_geglu(void* stream, const float* x, int rows, int n, void* out);

// f32 -> f16, clamped to the f16 range; count a multiple of 4.
DLLM_API int dllm_to_half(void* stream, const float* x, int64_t count, void* out);

// Soft embedding over the whole vocabulary: out[row] = scale * sum_v softmax(z)[v] * table[v], z as in
// dllm_position_stats, whose `stats` of the same logits are read.
//   table [vocab][hidden]: F16, or any type that dllm_dequant_f16 knows; then it is expanded piece by piece
//   logits f32 [rows][vocab]   probs f16 [rows][vocab] scratch, holds 2^15 times the probabilities, so that a flat
//   distribution keeps its precision   piece: scratch as the query says   out f32 [rows][hidden]
// A row that was refused (argmax 0xFFFFFFFF) gives zeros.
DLLM_API size_t dllm_dense_soft_piece_bytes(int table_type, int hidden);
DLLM_API int dllm_dense_soft_embed(void* stream, const void* table, int table_type, const float* logits, const float* temp,
                                   float cap, const uint32_t* stats, int rows, int vocab, int hidden, float scale,
                                   void* probs, void* piece, float* out, void* scratch);

#endif
