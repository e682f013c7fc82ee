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

// Bytes of a repacked matrix of `rows` output rows and inner dimension k (rows are padded to a multiple of 128).
// 0 if the type or k is not supported.
DLLM_API int64_t dllm_repack_bytes(int type, int64_t rows, int64_t k);

// Repack a slice of rows. src: rows x k in ggml blocks, on the device. dst: the whole repacked matrix, in tiles of 16
// output rows. With src2 = null the slice's rows 16 i .. 16 i + 15 become tile tile0 + i, so a matrix can be sent in
// slices of a multiple of 16 rows, and several matrices of one type and k can be stacked (q, k, v).
// With src2 (of the same shape) tile tile0 + i holds rows 8 i .. 8 i + 7 of src and then those of src2: this is the
// form that the GELU products want, src = gate, src2 = up. The repacked matrix then has 2 * rows rows.
// A slice whose rows do not fill its last tile is padded with zero rows.
DLLM_API int dllm_repack(void* stream, int type, const void* src, const void* src2, int64_t rows, int64_t k, void* dst,
                         int64_t tile0);

// Bytes of a row of k values in ggml blocks; 0 if the type is not supported.
DLLM_API int64_t dllm_file_row_bytes(int type, int64_t k);

// ggml blocks -> half [rows][k], for a library product where memory is plenty.
DLLM_API int dllm_dequant_f16(void* stream, int type, const void* src, int64_t rows, int64_t k, void* dst);

// ---- dense ---------------------------------------------------------------------------------------------------------

#define DLLM_MM_F32 0   // out: float
#define DLLM_MM_F16 1   // out: half
#define DLLM_MM_GELU 2  // out: half, n/2 columns, gelu(gate) * up of a matrix repacked from a gate and an up matrix

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
// A good choice of `splits` for this shape.
DLLM_API int dllm_qmm_auto_splits(int rows, int k, int n);

// ---- experts -------------------------------------------------------------------------------------------------------

// Routing plan from the chosen expert ids. ids: i32 [n_ids = rows * top_k], values outside 0..n_expert-1 are skipped.
// plan: i32 [n_expert + 1] offsets, then [n_ids] indices into ids, grouped by expert and ascending inside a group, then
// [n_expert] counters.
DLLM_API int64_t dllm_moe_plan_bytes(int n_ids, int n_expert);
DLLM_API int dllm_moe_route(void* stream, const int32_t* ids, int n_ids, int n_expert, int32_t* plan);

// act[row * top_k + j][c] = 2^-4 * gelu(g) * u, with [g; u] = w[expert] x[row], for every choice j of every row.
// w: n_expert matrices of 2 * n_ff rows, repacked from gate and up (src, src2), one after the other;
// x: half [rows][ldx]; act: half [rows * top_k][n_ff]; n_ff a multiple of 8, k and n_ff multiples of 64.
// overlap: 0, or 1 to let the next kernel on the stream, which must be dllm_moe_down with overlap = 1 on the same plan,
// start before this one has ended (compute capability 9.0 on, ignored elsewhere; gains at up to about 20 rows per expert,
// loses at 128). The plan must then be fresh from dllm_moe_route: it counts the finished blocks.
// tile: 0 = chosen here, else a variant number (moe_mm.cuh), for tuning.
DLLM_API int dllm_moe_gate_up(void* stream, int type, const void* w, const void* x, int64_t ldx, int32_t* plan, int rows,
                              int top_k, int n_expert, int k, int n_ff, void* act, int overlap, int tile);

// part[row * top_k + j][c] = weights[row * top_k + j] * 2^4 * w[expert] act[row * top_k + j].
// w: n_expert repacked matrices of n rows and inner dimension n_ff; act: half [rows * top_k][n_ff];
// weights: f32 [rows * top_k]; part: [rows * top_k][n], part_type DLLM_MM_F32 or DLLM_MM_F16 (clamped to its range). Entries
// of skipped ids are not written.
// overlap: as given to dllm_moe_gate_up; then gate_up_tile and gate_up_k are its tile and k.
DLLM_API int dllm_moe_down(void* stream, int type, const void* w, const void* act, int32_t* plan, const float* weights,
                           int rows, int top_k, int n_expert, int n_ff, int n, void* part, int part_type,
                           int overlap, int gate_up_tile, int gate_up_k, int tile);

// out[row][c] = sum over j of part[row * top_k + j][c]; out: f32 [rows][n], n a multiple of 4.
DLLM_API int dllm_moe_sum(void* stream, const float* part, int rows, int top_k, int n, float* out);
