// The matrix product kernel: repacked weights (A operand, 16 output rows a tile) times f16 activations (B operand).
//
// A block of WM x WN warps makes WM * MT tiles of 16 outputs for WN * NT * 8 tokens. Along k it works in chunks of 64
// columns: the weights of a chunk and the tokens' 64 values come through a ring of STAGES buffers filled with
// cp.async. Each warp decodes its weights into registers once per chunk and uses them for all its tokens.
#pragma once
#include "quant_blocks.cuh"
#include "quant_mm.h"

#include <type_traits>

namespace dllm {

enum Epilogue { OUT_F32 = DLLM_MM_F32, OUT_F16 = DLLM_MM_F16, OUT_GELU = DLLM_MM_GELU, OUT_WEIGHTED, OUT_ATOMIC };

struct MatmulArgs {
    const unsigned char* w;  // repacked weights, of expert 0
    int64_t expert_bytes;    // distance between experts
    const __half* x;         // [rows][ldx]
    int64_t ldx;
    void* out;               // [rows][ldo]
    int64_t ldo;
    int rows;                // tokens (dense)
    int k, n;                // inner dimension, weight rows
    float alpha;
    // experts
    const int* plan;         // see dllm_moe_route; null: dense
    int n_expert;
    int gather;              // source row of plan entry i: i / gather
    const float* weights;    // [entries], OUT_WEIGHTED and OUT_ATOMIC
    int top_k;               // OUT_ATOMIC: destination row of entry i is i / top_k
    // parts of k
    int splits;
    float* partial;          // [splits][rows][n]
    unsigned* counters;      // one per output tile
};

__device__ __forceinline__ uint32_t smem_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(uint32_t dst, const void* src) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src));
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

__device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address));
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// gelu in its tanh form; 0.5 (1 + tanh y) = 1 / (1 + e^(-2y))
__device__ __forceinline__ float gelu(float x) {
    const float y = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x / (1.0f + __expf(-2.0f * y));
}
__device__ __forceinline__ __half to_half(float x) { return __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f)); }

// Layouts for which a tuning build (DLLM_TUNE) has all tile variants.
template <class L> constexpr bool TUNED =
    std::is_same_v<L, L4o> || std::is_same_v<L, L5> || std::is_same_v<L, L6> || std::is_same_v<L, L8>;

template <class L, int MT_, int NT_, int WM_, int WN_, int STAGES_> struct Tiling {
    static constexpr int MT = MT_, NT = NT_, WM = WM_, WN = WN_, STAGES = STAGES_;
    static constexpr int THREADS = 32 * WM * WN;
    static constexpr int TILES = WM * MT;             // of 16 weight rows
    static constexpr int TOKENS = WN * NT * 8;
    static constexpr int W_BYTES = TILES * L::UNIT;   // of one chunk
    static constexpr int X_BYTES = TOKENS * 128;
    static constexpr int STAGE = W_BYTES + X_BYTES;
    static constexpr int SMEM = STAGE * STAGES;
    static_assert(TILES % 4 == 0, "the layout keeps 4 tiles together");
    static_assert(W_BYTES % 128 == 0, "the swizzle of the activations wants 128-byte rows");
    static_assert(NT % 2 == 0, "ldmatrix brings 16 tokens");
};

// One k-step of 16 columns for NP pairs of token tiles.
template <int J, int NP, class T, class L>
__device__ __forceinline__ void k_step(float (&acc)[T::MT][T::NT][4], const Unit<L> (&unit)[T::MT], uint32_t x_row,
                                       int lane) {
    uint32_t a[T::MT][4];
#pragma unroll
    for (int m = 0; m < T::MT; ++m) unit[m].template pairs<J>(a[m]);
    // lane's part of ldmatrix: token (lane & 7) + 8 (lane >> 4), columns 8 ((lane >> 3) & 1) of the step; the 16-byte
    // pieces of a token's 128 bytes are swizzled by the token number
    const uint32_t piece = ((2 * J + ((lane >> 3) & 1)) ^ (lane & 7)) * 16;
#pragma unroll
    for (int n = 0; n < NP; ++n) {
        uint32_t b[4];
        load_b(b, x_row + n * 16 * 128 + piece);
#pragma unroll
        for (int m = 0; m < T::MT; ++m) {
            mma(acc[m][2 * n], a[m], b[0], b[1]);
            mma(acc[m][2 * n + 1], a[m], b[2], b[3]);
        }
    }
}

template <int NP, class T, class L>
__device__ __forceinline__ void chunk_product(float (&acc)[T::MT][T::NT][4], const unsigned char* stage, int lane,
                                              int wm, int wn) {
    Unit<L> unit[T::MT];
#pragma unroll
    for (int m = 0; m < T::MT; ++m) unit[m].load(stage + (wm * T::MT + m) * L::UNIT, lane);
    const uint32_t x_row =
        smem_address(stage) + T::W_BYTES + (wn * T::NT * 8 + (lane & 7) + 8 * (lane >> 4)) * 128;
    k_step<0, NP, T, L>(acc, unit, x_row, lane);
    k_step<1, NP, T, L>(acc, unit, x_row, lane);
    k_step<2, NP, T, L>(acc, unit, x_row, lane);
    k_step<3, NP, T, L>(acc, unit, x_row, lane);
}

// Accumulators of one warp -> out. entry[] maps the block's tokens to output entries (dense: rows).
template <class T, int EPI>
__device__ __forceinline__ void store(const float (&acc)[T::MT][T::NT][4], const MatmulArgs& p, int first_tile,
                                      int first_token, int tokens, const int* entry, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < T::NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int token = first_token + n * 8 + 2 * t + e;
            if (token >= tokens) continue;
            const int64_t row = entry[token];
            if constexpr (EPI == OUT_GELU) {
                __half* out = static_cast<__half*>(p.out) + row * p.ldo;
#pragma unroll
                for (int m = 0; m < T::MT; m += 2)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int c = (first_tile + m) * 8 + g + 8 * h;
                        const float gate = acc[m][n][2 * h + e] * (1.0f / WEIGHT_SCALE);
                        const float up = acc[m + 1][n][2 * h + e] * (1.0f / WEIGHT_SCALE);
                        if (c < p.n / 2) out[c] = to_half(gelu(gate) * up * p.alpha);
                    }
            } else {
                float alpha = p.alpha * (1.0f / WEIGHT_SCALE);
                if constexpr (EPI == OUT_WEIGHTED || EPI == OUT_ATOMIC) alpha *= p.weights[row];
#pragma unroll
                for (int m = 0; m < T::MT; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int c = (first_tile + m) * 16 + g + 8 * h;
                        const float v = acc[m][n][2 * h + e] * alpha;
                        if (c >= p.n) continue;
                        if constexpr (EPI == OUT_F16) static_cast<__half*>(p.out)[row * p.ldo + c] = to_half(v);
                        else if constexpr (EPI == OUT_ATOMIC)
                            atomicAdd(static_cast<float*>(p.out) + row / p.top_k * p.ldo + c, v);
                        else static_cast<float*>(p.out)[row * p.ldo + c] = v;
                    }
            }
        }
}

// Several blocks share one output tile, each with a part of k: everyone leaves its sums in scratch, the last one to
// arrive adds them up in the order of the parts. Returns false for the others.
template <class T>
__device__ __forceinline__ bool join_parts(float (&acc)[T::MT][T::NT][4], const MatmulArgs& p, int split, int tile_id,
                                           int* flag) {
    float4* mine = reinterpret_cast<float4*>(p.partial) +
                   ((int64_t)tile_id * p.splits) * (T::THREADS * T::MT * T::NT) + threadIdx.x;
    constexpr int PART = T::THREADS * T::MT * T::NT;
#pragma unroll
    for (int m = 0; m < T::MT; ++m)
#pragma unroll
        for (int n = 0; n < T::NT; ++n)
            mine[(int64_t)split * PART + (m * T::NT + n) * T::THREADS] =
                make_float4(acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned before = atomicAdd(p.counters + tile_id, 1u);
        *flag = before == (unsigned)p.splits - 1;
        if (*flag) p.counters[tile_id] = 0;  // ready for the next call
    }
    __syncthreads();
    if (!*flag) return false;
    __threadfence();
#pragma unroll
    for (int m = 0; m < T::MT; ++m)
#pragma unroll
        for (int n = 0; n < T::NT; ++n) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int s = 0; s < p.splits; ++s) {
                const float4 v = __ldcg(mine + (int64_t)s * PART + (m * T::NT + n) * T::THREADS);
                sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
            }
            acc[m][n][0] = sum.x; acc[m][n][1] = sum.y; acc[m][n][2] = sum.z; acc[m][n][3] = sum.w;
        }
    return true;
}

// Dense: grid (token tiles, weight tiles, splits). Experts: grid (weight tiles, experts, token tiles or fewer).
template <class L, class T, int EPI, bool MOE, int MIN_BLOCKS>
__global__ void __launch_bounds__(T::THREADS, MIN_BLOCKS) matmul_kernel(const MatmulArgs p) {
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ int entry[T::TOKENS];
    __shared__ int flag;
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int wm = warp % T::WM, wn = warp / T::WM;
    const int block_m = MOE ? blockIdx.x : blockIdx.y;
    const int chunks = p.k / 64;
    int first = 0, total = p.rows;
    const unsigned char* w = p.w;
    if constexpr (MOE) {
        first = p.plan[blockIdx.y];
        total = p.plan[blockIdx.y + 1] - first;
        w += blockIdx.y * p.expert_bytes;
    }
    const int c0 = MOE ? 0 : (int)((int64_t)chunks * blockIdx.z / p.splits);
    const int c1 = MOE ? chunks : (int)((int64_t)chunks * (blockIdx.z + 1) / p.splits);
    const int64_t stream = (int64_t)chunks * 4 * L::UNIT;  // bytes of 64 rows
    const int last_block = (p.n + 63) / 64 - 1;

    // this thread's pieces of a chunk's weights
    constexpr int PIECES = T::W_BYTES / 16, PER_STREAM = L::UNIT / 4, W_COPIES = (PIECES + T::THREADS - 1) / T::THREADS;
    uint32_t w_src[W_COPIES];  // offsets from w: 32 bits spare registers, a matrix has less than 4 GiB
#pragma unroll
    for (int i = 0; i < W_COPIES; ++i) {
        const int piece = tid + i * T::THREADS, s = piece / PER_STREAM;
        const int block = min(block_m * (T::TILES / 4) + s, last_block);  // past the end: read the last one again
        w_src[i] = (uint32_t)(block * stream + (piece - s * PER_STREAM) * 16);
    }
    constexpr int ROWS_AT_ONCE = T::THREADS / 8, X_COPIES = (T::TOKENS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    const int x_token = tid / 8, x_piece = tid % 8;
    const uint32_t x_dst = T::W_BYTES + x_token * 128 + ((x_piece ^ (x_token & 7)) * 16);
    static_assert(ROWS_AT_ONCE % 8 == 0, "the swizzle must not depend on the copy's number");

    const int token_step = (MOE ? gridDim.z : gridDim.x) * T::TOKENS;
    for (int start = (MOE ? blockIdx.z : blockIdx.x) * T::TOKENS; start < total; start += token_step) {
        const int tokens = min(total - start, T::TOKENS);
        for (int i = tid; i < T::TOKENS; i += T::THREADS) {
            const int at = start + min(i, tokens - 1);
            entry[i] = MOE ? p.plan[p.n_expert + 1 + first + at] : at;
        }
        __syncthreads();
        uint32_t x_src[X_COPIES];  // offsets from x, in elements
#pragma unroll
        for (int i = 0; i < X_COPIES; ++i) {
            const int e = entry[min(x_token + i * ROWS_AT_ONCE, T::TOKENS - 1)];
            x_src[i] = (uint32_t)((MOE ? e / p.gather : e) * p.ldx) + x_piece * 8;
        }
        const int padded = (tokens + 15) & ~15;

        auto fetch = [&](int chunk, int slot) {
            const uint32_t base = smem_address(ring) + slot * T::STAGE;
#pragma unroll
            for (int i = 0; i < W_COPIES; ++i)
                if (PIECES % T::THREADS == 0 || tid + i * T::THREADS < PIECES)
                    copy16(base + (tid + i * T::THREADS) * 16, w + w_src[i] + (int64_t)chunk * (4 * L::UNIT));
#pragma unroll
            for (int i = 0; i < X_COPIES; ++i)
                if (x_token + i * ROWS_AT_ONCE < padded)
                    copy16(base + x_dst + i * ROWS_AT_ONCE * 128, p.x + x_src[i] + chunk * 64);
        };

        float acc[T::MT][T::NT][4];
#pragma unroll
        for (int m = 0; m < T::MT; ++m)
#pragma unroll
            for (int n = 0; n < T::NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;

#pragma unroll
        for (int s = 0; s < T::STAGES - 1; ++s) {
            if (c0 + s < c1) fetch(c0 + s, s);
            copy_commit();
        }
        int slot = 0, fill = T::STAGES - 1;
        // 16-token groups that this warp has to do: whole experts are small, so the work follows the token count
        const int groups = MOE ? max(0, min(T::NT / 2, (tokens - wn * T::NT * 8 + 15) / 16)) : T::NT / 2;
        for (int c = c0; c < c1; ++c) {
            copy_wait<T::STAGES - 2>();
            __syncthreads();
            if (c + T::STAGES - 1 < c1) fetch(c + T::STAGES - 1, fill);
            copy_commit();
            const unsigned char* stage = ring + slot * T::STAGE;
            if constexpr (MOE && T::NT > 2) {
                if (groups == 1) chunk_product<1, T, L>(acc, stage, lane, wm, wn);
                else if (groups == 2) chunk_product<2, T, L>(acc, stage, lane, wm, wn);
                else if (groups > 2) chunk_product<T::NT / 2, T, L>(acc, stage, lane, wm, wn);
            } else {
                chunk_product<T::NT / 2, T, L>(acc, stage, lane, wm, wn);
            }
            slot = slot + 1 == T::STAGES ? 0 : slot + 1;
            fill = fill + 1 == T::STAGES ? 0 : fill + 1;
        }
        copy_wait<0>();

        bool write = true;
        if constexpr (!MOE)
            if (p.splits > 1) {
                // gridDim.x covers all tokens in the dense case, so the tile's number is that of the block
                write = join_parts<T>(acc, p, blockIdx.z, blockIdx.y * gridDim.x + blockIdx.x, &flag);
            }
        if (write)
            store<T, EPI>(acc, p, block_m * T::TILES + wm * T::MT, wn * T::NT * 8, tokens, entry, lane);
        __syncthreads();  // entry[] and the ring are used again
    }
}

template <class L, class T, int EPI, bool MOE, int MIN_BLOCKS>
cudaError_t launch_matmul(cudaStream_t stream, const MatmulArgs& p, dim3 grid) {
    auto* kernel = matmul_kernel<L, T, EPI, MOE, MIN_BLOCKS>;
    // not a stream operation, so allowed while a graph is captured; cheap enough to repeat
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::SMEM);
    if (e != cudaSuccess) return e;
    kernel<<<grid, T::THREADS, T::SMEM, stream>>>(p);
    return cudaGetLastError();
}

}  // namespace dllm
