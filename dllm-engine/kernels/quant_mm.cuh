// The matrix product kernel: repacked weights (A operand, 16 output rows a tile) times f16 activations (B operand).
//
// A block of WM x WN warps makes WM * MT tiles of 16 outputs for WN * NT * 8 tokens. Along k it works in chunks
// of 64 columns: the weights of a chunk and the tokens' 64 values come through a ring of STAGES buffers filled with
// cp.async. Each warp decodes its weights into registers once per chunk and uses them for all its tokens.
#pragma once
#include "quant_blocks.cuh"
#include "quant_mm.h"

#include <type_traits>

namespace dllm {

enum Epilogue { OUT_F32 = DLLM_MM_F32, OUT_F16 = DLLM_MM_F16, OUT_GELU = DLLM_MM_GELU, OUT_WEIGHTED, OUT_WEIGHTED_F16 };

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
    const float* weights;    // [entries], OUT_WEIGHTED and OUT_WEIGHTED_F16
    unsigned wait_blocks;    // down: an expert's rows are ready when its counter has this, times its number of tiles of
    int wait_tokens;         //       so many tokens
    // parts of k
    int splits;
    float* partial;          // [splits][rows][n]
    unsigned* counters;      // one per output tile; experts: one per expert, or null
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
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// gelu in its tanh form; 0.5 (1 + tanh y) = 1 / (1 + e^(-2y))
__device__ __forceinline__ float gelu(float x) {
    const float y = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return __fdividef(x, 1.0f + __expf(-2.0f * y));
}
__device__ __forceinline__ __half to_half(float x) { return __float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f)); }

// CHUNKS: chunks of k per stage.
template <class L, int MT_, int NT_, int WM_, int WN_, int STAGES_, int CHUNKS_ = 1> struct Tiling {
    static constexpr int MT = MT_, NT = NT_, WM = WM_, WN = WN_, CHUNKS = CHUNKS_, STAGES = STAGES_;
    static constexpr int THREADS = 32 * WM * WN;
    static constexpr int TILES = WM * MT;             // of 16 weight rows
    static constexpr int TOKENS = WN * NT * 8;
    static constexpr int W_BYTES = TILES * L::UNIT;   // of one chunk
    static constexpr int X_BYTES = TOKENS * 128;
    static constexpr int STAGE = (W_BYTES + X_BYTES) * CHUNKS;  // X of all chunks, then W of all chunks
    static constexpr int W_AT = X_BYTES * CHUNKS;
    static constexpr int SMEM = STAGE * STAGES;
    static_assert(SMEM + 1024 <= 99 * 1024, "must fit on 8.9 and 12.0 too");
    static_assert(TILES == BLOCK_TILES || (TILES == BLOCK_TILES / 2 && CHUNKS == 1), "weights of a stage are contiguous");
    static_assert(STAGE % 128 == 0, "the swizzle of the activations wants 128-byte rows");
    static_assert(NT % 2 == 0, "ldmatrix brings 16 tokens");
};

// Where a lane reads in a stage: byte offsets, constant over the whole kernel.
struct LaneOffsets {
    uint32_t w, h, s, x, piece;
};

// The product of one chunk for NP pairs of token tiles. w: where the lane's part of the weights begins, x: shared
// address of the lane's token row.
template <int NP, class T, class L>
__device__ __forceinline__ void chunk_product(float (&acc)[T::MT][T::NT][4], const unsigned char* w, uint32_t x,
                                              const LaneOffsets& at) {
    Unit<L> unit[T::MT];
#pragma unroll
    for (int m = 0; m < T::MT; ++m) {
        const unsigned char* u = w + m * L::UNIT;
        unit[m].load(u + at.w, u + at.h, u + at.s);
    }
    auto step = [&](auto j) {
        constexpr int J = decltype(j)::value;
        uint32_t a[T::MT][4];
#pragma unroll
        for (int m = 0; m < T::MT; ++m) unit[m].template pairs<J>(a[m]);
#pragma unroll
        for (int n = 0; n < NP; ++n) {
            uint32_t b[4];
            load_b(b, x + n * 16 * 128 + (at.piece ^ (J * 32)));
#pragma unroll
            for (int m = 0; m < T::MT; ++m) {
                mma(acc[m][2 * n], a[m], b[0], b[1]);
                mma(acc[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    };
    step(std::integral_constant<int, 0>{});
    step(std::integral_constant<int, 1>{});
    step(std::integral_constant<int, 2>{});
    step(std::integral_constant<int, 3>{});
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
                for (int m = 0; m < T::MT; ++m) {  // rows 0..7 of a tile are gates, 8..15 the ups of the same columns
                    const int c = (first_tile + m) * 8 + g;
                    const float gate = acc[m][n][e] * (1.0f / WEIGHT_SCALE), up = acc[m][n][2 + e] * (1.0f / WEIGHT_SCALE);
                    if (c < p.n / 2) out[c] = to_half(gelu(gate) * up * p.alpha);
                }
            } else {
                float alpha = p.alpha * (1.0f / WEIGHT_SCALE);
                if constexpr (EPI == OUT_WEIGHTED || EPI == OUT_WEIGHTED_F16) alpha *= p.weights[row];
#pragma unroll
                for (int m = 0; m < T::MT; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int c = (first_tile + m) * 16 + g + 8 * h;
                        const float v = acc[m][n][2 * h + e] * alpha;
                        if (c >= p.n) continue;
                        if constexpr (EPI == OUT_F16 || EPI == OUT_WEIGHTED_F16) static_cast<__half*>(p.out)[row * p.ldo + c] = to_half(v);
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

// The ring's filling: the pieces of a stage that this thread copies. All its weights lie at one pointer, the tokens'
// values at one pointer per token.
template <class L, class T> struct Copier {
    static constexpr int PIECES = T::W_BYTES * T::CHUNKS / 16, W_COPIES = (PIECES + T::THREADS - 1) / T::THREADS;
    static constexpr int W_STEP = BLOCK_TILES * L::UNIT;
    static constexpr int ROW_PIECES = 8 * T::CHUNKS, ROWS_AT_ONCE = T::THREADS / ROW_PIECES;
    static constexpr int X_COPIES = (T::TOKENS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    static_assert(ROWS_AT_ONCE % 8 == 0, "the swizzle must not depend on the copy's number");

    uint32_t w_dst, x_dst;
    const unsigned char* w;
    const __half* x[X_COPIES];
    bool used[X_COPIES];
    int left;  // chunks still to be copied

    __device__ __forceinline__ explicit Copier(uint32_t ring_at) {
        const int token = threadIdx.x / ROW_PIECES, piece = threadIdx.x % 8, chunk = threadIdx.x % ROW_PIECES / 8;
        x_dst = ring_at + chunk * T::X_BYTES + token * 128 + ((piece ^ (token & 7)) * 16);
        w_dst = ring_at + T::W_AT + threadIdx.x * 16;
    }
    // w_tile: weights of the output tile at the first chunk; x_begin: the activations at that chunk; row(i): element
    // offset of token i's row
    template <class Row>
    __device__ __forceinline__ void start(const unsigned char* w_tile, const __half* x_begin, int chunks, int tokens,
                                          Row row) {
        const int token = threadIdx.x / ROW_PIECES, piece = threadIdx.x % 8, chunk = threadIdx.x % ROW_PIECES / 8;
        w = w_tile + threadIdx.x * 16;
        left = chunks;
#pragma unroll
        for (int i = 0; i < X_COPIES; ++i) {
            const int t = token + i * ROWS_AT_ONCE;
            x[i] = x_begin + row(min(t, T::TOKENS - 1)) + chunk * 64 + piece * 8;
            used[i] = t < tokens;  // the columns of absent tokens hold anything and are not stored
        }
    }
    __device__ __forceinline__ void fetch(uint32_t stage) {
        const bool all = T::CHUNKS == 1 || left >= T::CHUNKS;
        const int tid = threadIdx.x;
#pragma unroll
        for (int i = 0; i < W_COPIES; ++i)
            if ((PIECES % T::THREADS == 0 || tid + i * T::THREADS < PIECES) &&
                (all || tid + i * T::THREADS < PIECES / T::CHUNKS))
                copy16(w_dst + stage + i * T::THREADS * 16, w + i * T::THREADS * 16);
#pragma unroll
        for (int i = 0; i < X_COPIES; ++i) {
            if (used[i] && (all || tid % ROW_PIECES < 8)) copy16(x_dst + stage + i * ROWS_AT_ONCE * 128, x[i]);
            x[i] += 64 * T::CHUNKS;
        }
        w += W_STEP * T::CHUNKS;
        left -= T::CHUNKS;
    }
};

template <class L, class T> __device__ __forceinline__ LaneOffsets lane_offsets(uint32_t ring_at, int wm, int wn) {
    const int lane = threadIdx.x & 31;
    LaneOffsets at;
    const uint32_t unit_at = T::W_AT + wm * T::MT * L::UNIT;
    at.w = unit_at + lane * 16;
    at.h = unit_at + L::HIGH_AT + lane * (L::HIGH_WORDS * 4);
    at.s = unit_at + L::SCALE_AT + (lane >> 2) * (L::SCALE_WORDS * 4);
    // ldmatrix: token (lane & 7) + 8 (lane >> 4), columns 8 ((lane >> 3) & 1) of a k-step; the 16-byte pieces of a
    // token's 128 bytes are swizzled by the token number
    at.x = ring_at + (wn * T::NT * 8 + (lane & 7) + 8 * (lane >> 4)) * 128;
    at.piece = (((lane >> 3) & 1) ^ (lane & 7)) * 16;
    return at;
}

// All chunks of one output tile. groups: how many groups of 16 tokens this warp has to do; ADAPT: it may be fewer than
// all (experts see few tokens, so the work follows their number).
template <class L, class T, bool ADAPT>
__device__ __forceinline__ void tile_product(float (&acc)[T::MT][T::NT][4], Copier<L, T>& copier, int chunks,
                                             const unsigned char* ring, const LaneOffsets& at, int groups) {
#pragma unroll
    for (int m = 0; m < T::MT; ++m)
#pragma unroll
        for (int n = 0; n < T::NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
#pragma unroll
    for (int s = 0; s < T::STAGES - 1; ++s) {
        if (copier.left > 0) copier.fetch(s * T::STAGE);
        copy_commit();
    }
    uint32_t slot = 0, fill = (T::STAGES - 1) * T::STAGE;
    for (int todo = chunks; todo > 0; todo -= T::CHUNKS) {
        copy_wait<T::STAGES - 2>();
        __syncthreads();
        if (copier.left > 0) copier.fetch(fill);
        copy_commit();
        const int here = T::CHUNKS == 1 ? 1 : min(todo, T::CHUNKS);
#pragma unroll 1
        for (int c = 0; c < here; ++c) {
            const unsigned char* w = ring + slot + c * T::W_BYTES;
            const uint32_t x = at.x + slot + c * T::X_BYTES;
            if constexpr (ADAPT && T::NT > 2) {
                if (groups == 1) chunk_product<1, T, L>(acc, w, x, at);
                else if (groups == 2) chunk_product<2, T, L>(acc, w, x, at);
                else if (groups > 2) chunk_product<T::NT / 2, T, L>(acc, w, x, at);
            } else {
                chunk_product<T::NT / 2, T, L>(acc, w, x, at);
            }
        }
        slot = slot == (T::STAGES - 1) * T::STAGE ? 0 : slot + T::STAGE;
        fill = fill == (T::STAGES - 1) * T::STAGE ? 0 : fill + T::STAGE;
    }
    copy_wait<0>();
}

// Dense product. Grid (token tiles, weight tiles, splits).
template <class L, class T, int EPI, int MIN_BLOCKS>
__global__ void __launch_bounds__(T::THREADS, MIN_BLOCKS) matmul_kernel(const MatmulArgs p) {
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ int entry[T::TOKENS];
    __shared__ int flag;
    const int warp = threadIdx.x >> 5, wm = warp % T::WM, wn = warp / T::WM;
    const int all = p.k / 64, c0 = (int)((int64_t)all * blockIdx.z / p.splits);
    const int chunks = (int)((int64_t)all * (blockIdx.z + 1) / p.splits) - c0;
    constexpr int PER_BLOCK = BLOCK_TILES / T::TILES;
    const unsigned char* w = p.w + ((int64_t)(blockIdx.y / PER_BLOCK) * all + c0) * (BLOCK_TILES * L::UNIT) +
                             blockIdx.y % PER_BLOCK * T::W_BYTES;
    const int start = blockIdx.x * T::TOKENS, tokens = min(p.rows - start, T::TOKENS);
    for (int i = threadIdx.x; i < T::TOKENS; i += T::THREADS) entry[i] = start + min(i, tokens - 1);

    const uint32_t ring_at = smem_address(ring);
    const LaneOffsets at = lane_offsets<L, T>(ring_at, wm, wn);
    Copier<L, T> copier(ring_at);
    copier.start(w, p.x + c0 * 64, chunks, tokens,
                 [&](int i) { return (int64_t)(start + min(i, tokens - 1)) * p.ldx; });
    float acc[T::MT][T::NT][4];
    tile_product<L, T, false>(acc, copier, chunks, ring, at, T::NT / 2);
    if (p.splits > 1 && !join_parts<T>(acc, p, blockIdx.z, blockIdx.y * gridDim.x + blockIdx.x, &flag)) return;
    store<T, EPI>(acc, p, blockIdx.y * T::TILES + wm * T::MT, wn * T::NT * 8, tokens, entry, threadIdx.x & 31);
}

}  // namespace dllm
