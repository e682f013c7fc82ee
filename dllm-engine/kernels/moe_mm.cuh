// Tile variants of the expert products, shared by the gate/up and the down kernels.
//   1  128 weight rows x 32 tokens, 4 warps, 4 stages     2  the same, 6 stages     3  128 x 64, 4 warps
//   4   64 x 32, 2 warps, 6 stages                        5  128 x 128, 8 warps (many rows)
#pragma once
#include "quant_mm.cuh"

#include <type_traits>

namespace dllm {

template <class L, int EPI>
cudaError_t run_expert_tile(cudaStream_t s, const MatmulArgs& p, int entries, int tile) {
    auto go = [&](auto t, auto min_blocks) {
        using T = decltype(t);
        // mean tokens of an expert; busier ones loop
        const int mean = (entries + p.n_expert - 1) / p.n_expert;
        const int depth = mean / T::TOKENS + 1;
        const dim3 grid(((p.n + 15) / 16 + T::TILES - 1) / T::TILES, p.n_expert, depth);
        return launch_matmul<L, T, EPI, true, decltype(min_blocks)::value>(s, p, grid);
    };
    using std::integral_constant;
    constexpr bool wide = L::BITS >= 8;
    switch (tile) {
    case 1: return go(Tiling<L, 2, 4, 4, 1, 4>{}, integral_constant<int, wide ? 3 : 4>{});
    case 3: return go(Tiling<L, 2, 8, 4, 1, 4>{}, integral_constant<int, 3>{});
    case 5: return go(Tiling<L, 2, 8, 4, 2, 4>{}, integral_constant<int, L::BITS == 16 ? 1 : 2>{});
#ifdef DLLM_TUNE
    case 2: if constexpr (TUNED<L>) return go(Tiling<L, 2, 4, 4, 1, 6>{}, integral_constant<int, wide ? 3 : 4>{}); else return cudaErrorInvalidValue;
    case 4: if constexpr (TUNED<L>) return go(Tiling<L, 2, 4, 2, 1, 6>{}, integral_constant<int, 6>{}); else return cudaErrorInvalidValue;
#endif
    default: return cudaErrorInvalidValue;
    }
}

inline int pick_expert_tile(int entries, int n_expert) {
    const int mean = entries / n_expert;
    return mean <= 20 ? 1 : mean <= 48 ? 3 : 5;
}

}  // namespace dllm
