// Matrix products on repacked quantized weights: dense, and over the experts of a mixture.
//
// All functions return a cudaError_t as int (0 = ok), only enqueue work on `stream`, allocate nothing and may be
// captured in a CUDA graph. Unsupported shapes and types give cudaErrorInvalidValue (1) and enqueue nothing.
//
// Weights are used in a repacked layout (see quant_blocks.cuh), made once at load from the ggml blocks as they lie in
// a GGUF file. `type` is ggml's type number: F16 1, Q4_0 2, Q4_1 3, Q5_0 6, Q5_1 7, Q8_0 8, Q4_K 12, Q5_K 13, Q6_K 14,
// BF16 30. The inner dimension k must be a multiple of 64 (256 for the K types).
#pragma once
#include <stdint.h>

#ifndef DLLM_API
#if defined(_WIN32)
#define DLLM_API extern "C" __declspec(dllexport)
#else
#define DLLM_API extern "C" __attribute__((visibility("default")))
#endif
#endif

// ---- repacking -----------------------------------------------------------------------------------------------------

// Bytes of a repacked matrix of `rows` output rows and inner dimension k (rows are padded to a multiple of 64).
// 0 if the type or k is not supported.
DLLM_API int64_t dllm_repack_bytes(int type, int64_t rows, int64_t k);

// Repack a slice of rows. src: src_rows x k in ggml blocks, on the device. dst: the whole repacked matrix.
// The slice's rows 16 i .. 16 i + 15 become tile `tile0 + i * tile_stride` of dst (a tile is 16 output rows), so a
// matrix can be sent in slices of a multiple of 16 rows, several matrices of one type and k can be stacked (q, k, v),
// and the gate and up halves can be interleaved: gate with tile0 = 0, up with tile0 = 1, both with tile_stride = 2.
// A slice whose rows are no multiple of 16 is padded with zero rows.
DLLM_API int dllm_repack(void* stream, int type, const void* src, int64_t src_rows, int64_t k, void* dst,
                         int64_t tile0, int64_t tile_stride);

// ---- dense ---------------------------------------------------------------------------------------------------------

#define DLLM_MM_F32 0   // out: float
#define DLLM_MM_F16 1   // out: half
#define DLLM_MM_GELU 2  // out: half, n/2 columns, gelu(gate) * up of a matrix with interleaved gate and up tiles

// out[row][c] = alpha * sum_i x[row][i] * w[c][i].
// w: repacked [n][k]; x: half [rows][ldx], 16-byte aligned, ldx a multiple of 8; out: [rows][ldo].
// epilogue: DLLM_MM_*. For GELU alpha multiplies gelu(g) * u (2^-4 keeps large products inside half's range).
// splits: 1, or the number of parts in which k is worked off (fills the chip when n * rows is small); scratch then
// needs dllm_qmm_scratch_bytes and must be zero before the first use (each call leaves its counters zero again).
// The order of additions is fixed, so results do not change between runs.
// tile: 0 = chosen here, else a variant number (see quant_mm.cu), for tuning.
DLLM_API int64_t dllm_qmm_scratch_bytes(int rows, int n, int splits);
DLLM_API int dllm_qmm(void* stream, int type, const void* w, const void* x, int64_t ldx, int rows, int k, int n,
                      void* out, int64_t ldo, int epilogue, float alpha, int splits, void* scratch, int tile);
// The automatic choice of `splits` for this shape on the current device.
DLLM_API int dllm_qmm_auto_splits(int type, int rows, int k, int n, int epilogue);

// ---- experts -------------------------------------------------------------------------------------------------------

// Routing plan from the chosen expert ids. ids: i32 [n_ids = rows * top_k], values outside 0..n_expert-1 are skipped.
// plan: i32 [n_expert + 1] offsets, then [n_ids] indices into ids, grouped by expert and ascending inside a group.
DLLM_API int64_t dllm_moe_plan_bytes(int n_ids, int n_expert);
DLLM_API int dllm_moe_route(void* stream, const int32_t* ids, int n_ids, int n_expert, int32_t* plan);

// act[row * top_k + j][c] = 2^-4 * gelu(g) * u, with [g; u] = w[expert] x[row], for every choice j of every row.
// w: n_expert repacked matrices of 2 * n_ff rows with interleaved tiles, one after the other; x: half [rows][ldx];
// act: half [rows * top_k][n_ff]; n_ff a multiple of 16.
DLLM_API int dllm_moe_gate_up(void* stream, int type, const void* w, const void* x, int64_t ldx, const int32_t* plan,
                              int rows, int top_k, int n_expert, int k, int n_ff, void* act, int tile);

// part[row * top_k + j][c] = weights[row * top_k + j] * 2^4 * w[expert] act[row * top_k + j].
// w: n_expert repacked matrices of n rows and inner dimension n_ff; act: half [rows * top_k][n_ff];
// weights: f32 [rows * top_k]; part: f32 [rows * top_k][n]. Entries of skipped ids are not written.
DLLM_API int dllm_moe_down(void* stream, int type, const void* w, const void* act, const int32_t* plan,
                           const float* weights, int rows, int top_k, int n_expert, int n_ff, int n, float* part,
                           int tile);

// The same, added with atomics into out f32 [rows][n], which the caller has zeroed. The order of additions varies.
DLLM_API int dllm_moe_down_atomic(void* stream, int type, const void* w, const void* act, const int32_t* plan,
                                  const float* weights, int rows, int top_k, int n_expert, int n_ff, int n, float* out,
                                  int tile);

// out[row][c] = sum over j of part[row * top_k + j][c]; out: f32 [rows][n], n a multiple of 4.
DLLM_API int dllm_moe_sum(void* stream, const float* part, int rows, int top_k, int n, float* out);
