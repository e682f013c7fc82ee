// Dense products on repacked weights: attention projections, the dense MLP, the LM head.
#include "quant_mm.cuh"

namespace dllm {
namespace {

constexpr int MAX_SPLIT_TILES = 16384;

// Tile variants: weight rows x tokens of a block, and the warps in it.
//   1  128 x  64, 4 warps of 32 x 64      2  128 x 128, 4 warps of 32 x 128
//   3  128 x  32, 8 warps of 16 x 32
// Stages are chosen so that every variant fits in 99 KiB of shared memory (compute capability 8.9 and 12.0).
template <class L, int EPI> cudaError_t run_tile(cudaStream_t s, const MatmulArgs& p, int tile) {
    auto go = [&](auto t, auto min_blocks) {
        using T = decltype(t);
        const dim3 grid((p.rows + T::TOKENS - 1) / T::TOKENS, ((p.n + 15) / 16 + T::TILES - 1) / T::TILES, p.splits);
        auto* kernel = matmul_kernel<L, T, EPI, decltype(min_blocks)::value>;
        // not a stream operation, so allowed while a graph is captured; cheap enough to repeat
        const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::SMEM);
        if (e != cudaSuccess) return e;
        kernel<<<grid, T::THREADS, T::SMEM, s>>>(p);
        return cudaGetLastError();
    };
    using std::integral_constant;
    switch (tile) {
    case 1: return go(Tiling<L, 2, 8, 4, 1, 4>{}, integral_constant<int, L::BITS == 16 ? 2 : 3>{});
    case 2: return go(Tiling<L, 2, 16, 4, 1, L::BITS == 16 ? 3 : 4>{}, integral_constant<int, L::BITS == 16 ? 1 : 2>{});
    case 3: return go(Tiling<L, 1, 4, 8, 1, 4>{}, integral_constant<int, 2>{});
    default: return cudaErrorInvalidValue;
    }
}

// Measured on 132 SMs: the large tile needs very many blocks to win.
int pick_tile(int rows, int n) {
    if (rows <= 32) return 3;
    const int64_t large = (int64_t)((rows + 127) / 128) * ((n + 127) / 128);
    return rows > 64 && large > 600 ? 2 : 1;
}

}  // namespace
}  // namespace dllm

using namespace dllm;

DLLM_API int64_t dllm_qmm_scratch_bytes(int rows, int n, int splits) {
    if (splits <= 1) return 0;
    const int64_t r = (rows + 255) / 256 * 256, c = (n + 255) / 256 * 256;
    return 4 * (r * c * splits + MAX_SPLIT_TILES);
}

DLLM_API int dllm_qmm_auto_splits(int rows, int k, int n) {
    if (rows > 32) return 1;  // parts of k cost more than they gain once the chip is half full
    const int blocks = (n + 127) / 128, splits = 264 / blocks, most = k / 64 / 8;
    return splits < 1 || most < 1 ? 1 : splits > 8 ? (most < 8 ? most : 8) : splits < most ? splits : most;
}

DLLM_API int dllm_qmm(void* stream, int type, const void* w, const void* x, int64_t ldx, int rows, int k, int n,
                      void* out, int64_t ldo, int epilogue, float alpha, int splits, void* scratch, int tile) {
    if (rows < 1 || n < 1 || splits < 1 || ldx % 8 != 0 || dllm_repack_bytes(type, n, k) == 0) return cudaErrorInvalidValue;
    if (splits > 1 && (!scratch || splits > k / 64)) return cudaErrorInvalidValue;
    if (epilogue == DLLM_MM_GELU && n % 16 != 0) return cudaErrorInvalidValue;
    MatmulArgs p = {};
    p.w = static_cast<const unsigned char*>(w);
    p.x = static_cast<const __half*>(x); p.ldx = ldx;
    p.out = out; p.ldo = ldo;
    p.rows = rows; p.k = k; p.n = n; p.alpha = alpha; p.splits = splits;
    if (splits > 1) {
        // the counters come first: they must stay zero between calls, also when those differ in shape
        if ((int64_t)((rows + 31) / 32) * ((n + 63) / 64) > MAX_SPLIT_TILES) return cudaErrorInvalidValue;
        p.counters = static_cast<unsigned*>(scratch);
        p.partial = reinterpret_cast<float*>(p.counters + MAX_SPLIT_TILES);
    }
    if (tile == 0) tile = pick_tile(rows, n);
    const cudaStream_t s = static_cast<cudaStream_t>(stream);
    return with_layout(type, cudaErrorInvalidValue, [&](auto l) {
        using L = decltype(l);
        switch (epilogue) {
        case DLLM_MM_F32: return run_tile<L, OUT_F32>(s, p, tile);
        case DLLM_MM_F16: return run_tile<L, OUT_F16>(s, p, tile);
        case DLLM_MM_GELU: return run_tile<L, OUT_GELU>(s, p, tile);
        default: return cudaErrorInvalidValue;
        }
    });
}
