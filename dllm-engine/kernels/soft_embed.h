// Rows of the embedding table, read straight from the blocks of the GGUF file.
#ifndef DLLM_SOFT_EMBED_H
#define DLLM_SOFT_EMBED_H

#include "dllm_kernels.h"

// table: [vocab][hidden] of `table_type` (F32, F16, BF16, Q8_0, Q4_K, Q6_K) as in the file, 16-byte aligned.
// hidden: a multiple of 256 for Q4_K and Q6_K, of 32 for Q8_0, of 8 for the others. An id outside the table gives a row
// of NaN (loud, no stray read).

// out[row] = scale * table[ids[row]]                        ids [rows] i32, out [rows][hidden] f32
DLLM_API int dllm_embed_rows(void* stream, const void* table, int table_type, int vocab, int hidden,
                             const int32_t* ids, int rows, float scale, float* out);

// out[row] = scale * sum_j weights[row][j] * table[ids[row][j]]
//   ids [rows][k] i32, weights [rows][k] f32, out [rows][hidden] f32; 1 <= k <= 512
//   Tokens behind the last weight that is not 0 are not read.
DLLM_API int dllm_soft_embed(void* stream, const void* table, int table_type, int vocab, int hidden,
                             const int32_t* ids, const float* weights, int rows, int k, float scale, float* out);

#endif
