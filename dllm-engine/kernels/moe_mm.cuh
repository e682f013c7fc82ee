// The expert products: every expert's weights times the rows that were routed to it.
//
// One thread block makes 128 weight rows for one token tile of one expert. The tiles of all experts form one list, so that
// a busy expert does not hold up the others; blocks of one expert follow each other and share its weights through the cache.
//
// Overlap (compute capability 9.0 on, when asked for): the down product may start while the last gate/up blocks are
// still running. Each of these counts itself at its expert when its results are written, and a down block waits for its
// own expert only. All gate/up blocks have started by then, so nobody waits for a block that cannot run.
#pragma once
#include "quant_mm.cuh"

namespace dllm {

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Finds the expert and the token tile of the block's number in the list of all tiles. False behind the list's end.
template <int THREADS>
__device__ __forceinline__ bool find_tile(const int* __restrict__ plan, int n_expert, int tokens, int number, int& expert,
                                          int& tile) {
    __shared__ int warp_sum[THREADS / 32], found[2];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int per = (n_expert + THREADS - 1) / THREADS, begin = min(tid * per, n_expert), end = min(begin + per, n_expert);
    auto tiles = [&](int e) { return (plan[e + 1] - plan[e] + tokens - 1) / tokens; };
    int own = 0;
    for (int e = begin; e < end; ++e) own += tiles(e);
    int scan = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int v = __shfl_up_sync(0xffffffffu, scan, d);
        if (lane >= d) scan += v;
    }
    if (lane == 31) warp_sum[warp] = scan;
    if (tid == 0) found[0] = -1;
    __syncthreads();
    int before = scan - own;
    for (int w = 0; w < warp; ++w) before += warp_sum[w];
    if (number >= before && number < before + own) {
        int e = begin, left = number - before;
        for (; left >= tiles(e); ++e) left -= tiles(e);
        found[0] = e;
        found[1] = left;
    }
    __syncthreads();
    expert = found[0];
    tile = found[1];
    return expert >= 0;
}

// Grid (weight tiles, most token tiles of all experts).
template <class L, class T, int EPI, int MIN_BLOCKS>
__global__ void __launch_bounds__(T::THREADS, MIN_BLOCKS) expert_kernel(const MatmulArgs p) {
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ int entry[T::TOKENS];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, wm = warp % T::WM, wn = warp / T::WM;
    const int chunks = p.k / 64;
    if constexpr (EPI == OUT_GELU) let_next_kernel_start();
    int expert, tile;
    if (!find_tile<T::THREADS>(p.plan, p.n_expert, T::TOKENS, blockIdx.y, expert, tile)) return;
    const int first = p.plan[expert], n = p.plan[expert + 1] - first, start = tile * T::TOKENS;
    unsigned* done = p.counters ? p.counters + expert : nullptr;
    if constexpr (EPI != OUT_GELU) {
        if (done) {
            const unsigned blocks = p.wait_blocks * ((n + p.wait_tokens - 1) / p.wait_tokens);
            if (tid == 0)
                while (atomicAdd(done, 0u) < blocks) {}
            __syncthreads();
            __threadfence();
        }
    }

    const unsigned char* w = p.w + expert * p.expert_bytes + (int64_t)blockIdx.x * chunks * (BLOCK_TILES * L::UNIT);
    const uint32_t ring_at = smem_address(ring);
    const LaneOffsets at = lane_offsets<L, T>(ring_at, wm, wn);
    Copier<L, T> copier(ring_at);
    const int tokens = min(n - start, T::TOKENS);
    for (int i = tid; i < T::TOKENS; i += T::THREADS)
        entry[i] = p.plan[p.n_expert + 1 + first + start + min(i, tokens - 1)];
    __syncthreads();
    copier.start(w, p.x, chunks, tokens, [&](int i) { return entry[i] / p.gather * p.ldx; });
    float acc[T::MT][T::NT][4];
    const int groups = max(0, min(T::NT / 2, (tokens - wn * T::NT * 8 + 15) / 16));
    tile_product<L, T, true>(acc, copier, chunks, ring, at, groups);
    store<T, EPI>(acc, p, blockIdx.x * T::TILES + wm * T::MT, wn * T::NT * 8, tokens, entry, lane);
    if constexpr (EPI == OUT_GELU) {
        if (done) {
            __threadfence();
            __syncthreads();
            if (tid == 0) atomicAdd(done, 1u);
        }
    }
}

// Every expert may have a tile that is not full.
inline int most_tiles(int entries, int n_expert, int tokens) { return n_expert + entries / tokens; }

inline bool can_overlap() {
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

template <class L, class T, int EPI, int MIN_BLOCKS>
cudaError_t launch_experts(cudaStream_t stream, const MatmulArgs& p, int entries) {
    static_assert(T::TILES == BLOCK_TILES, "a tile is a block of the layout");
    auto* kernel = expert_kernel<L, T, EPI, MIN_BLOCKS>;
    // not a stream operation, so allowed while a graph is captured; cheap enough to repeat
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::SMEM);
    if (e != cudaSuccess) return e;
    cudaLaunchAttribute overlap;
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)((p.n + 127) / 128), most_tiles(entries, p.n_expert, T::TOKENS));
    config.blockDim = dim3(T::THREADS);
    config.dynamicSmemBytes = T::SMEM;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = EPI != OUT_GELU && p.counters ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, p);
}

// Tile variants, 128 weight rows each: 1: 32 tokens, 4 warps   2: the same, two chunks of k per stage
//   3: 64 tokens, 4 warps. All fit in 99 KiB of shared memory.
template <class L, int EPI> cudaError_t run_expert_tile(cudaStream_t s, const MatmulArgs& p, int entries, int tile) {
    constexpr bool wide = L::BITS >= 8;
    switch (tile) {
    case 1: return launch_experts<L, Tiling<L, 2, 4, 4, 1, 4>, EPI, wide ? 3 : 4>(s, p, entries);
    case 2: return launch_experts<L, Tiling<L, 2, 4, 4, 1, L::BITS == 16 ? 2 : 3, 2>, EPI, wide ? 2 : 4>(s, p, entries);
    case 3: return launch_experts<L, Tiling<L, 2, 8, 4, 1, 4>, EPI, L::BITS == 16 ? 2 : 3>(s, p, entries);
    default: return cudaErrorInvalidValue;
    }
}

inline int expert_tile(int tile, int entries, int n_expert, int k) {
    if (tile != 0) return tile;
    if (entries / n_expert > 20) return 3;
    return k > 1024 ? 2 : 1;
}
inline int expert_tile_tokens(int tile) { return tile == 3 ? 64 : 32; }

}  // namespace dllm
