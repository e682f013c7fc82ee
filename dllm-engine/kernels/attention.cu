// Online-softmax attention on m16n8k16. Query heads that share a KV head are packed into one tall query matrix, so a
// block reads each key once for all of them. A warp owns 16 query rows and shares them with a second warp. Heads of 512:
// each of the two has one half of the head; they exchange half sums of the scores and keep half of the output each, which
// is what fits the registers. Smaller heads: each of the two takes half of the keys of every tile, and their results are
// joined at the end. Where shared memory has room, K and V of the next tile are fetched during the whole of this one (two
// stages); else K and V have one buffer each, V of a tile is fetched while its scores are computed and K of the next tile
// while V is used. Long key lists are cut into parts that a second kernel joins.
#include "dllm_device.cuh"

namespace dllm {
namespace {

constexpr int MAX_SPLITS = 16;
constexpr float LOWEST = -1e30f;

struct Args {
    const __half *q, *k, *v;
    const int64_t* spans;
    int64_t stride;
    int lanes, lane_rows, q_heads, kv_heads, splits, out_type;
    void* out;
    float *part, *stat;  // part [splits][lanes * q_heads * lane_rows][head], stat [same rows][2] = max (in log2), sum
};

__device__ __forceinline__ unsigned smem_addr(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
// 16 bytes to shared memory; zeros if !real.
__device__ __forceinline__ void copy16(unsigned dst, const void* src, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(real ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copies_issued() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void ldsm4(unsigned* r, unsigned addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ void ldsm4t(unsigned* r, unsigned addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ void mma16(float* c, const unsigned* a, const unsigned* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ unsigned half_pair(float a, float b) {
    __half2 h = __floats2half2_rn(a, b);
    return *reinterpret_cast<unsigned*>(&h);
}

// PART: width of the head that a warp has; HALVES: warps that share a head; SIDES: warps that share a tile's keys;
// GROUPS: groups of 16 rows; KEYS: of a tile; STAGES: tiles in shared memory.
template <int PART_, int HALVES_, int SIDES_, int GROUPS_, int KEYS_, int STAGES_>
struct Tile {
    static constexpr int PART = PART_, HALVES = HALVES_, SIDES = SIDES_, GROUPS = GROUPS_, KEYS = KEYS_,
                         STAGES = STAGES_;
    static_assert(HALVES * SIDES == 2, "a pair of warps shares 16 rows");
    static constexpr int HEAD = PART * HALVES, WARPS = GROUPS * 2, ROWS = GROUPS * 16, THREADS = WARPS * 32;
    static constexpr int PITCH = HEAD + 8;  // 16 bytes more than the row: ldmatrix without bank conflicts
    static constexpr int EXCHANGE = HALVES == 2 ? WARPS * 16 * KEYS * 4 : 0;
    static constexpr int STAGE = 2 * KEYS * PITCH;  // elements: K, then V
    static constexpr int BYTES = (ROWS * PITCH + STAGES * STAGE) * 2 + EXCHANGE;
};

// grid: (row tiles, splits, lanes * kv_heads)
template <class T>
__global__ void __launch_bounds__(T::THREADS) attend_kernel(const Args p) {
    extern __shared__ __align__(16) unsigned char smem[];
    constexpr int CHUNKS = T::HEAD / 8, O_TILES = T::PART / 8;
    constexpr int KEYS = T::KEYS / T::SIDES, S_TILES = KEYS / 8;  // of this warp, in a tile
    constexpr int STEP = T::THREADS / CHUNKS;                     // keys that the block fetches at once
    static_assert(T::THREADS % CHUNKS == 0 && T::KEYS % STEP == 0, "a thread fetches the same column of several keys");
    __half* const q_s = reinterpret_cast<__half*>(smem);
    __half* const k_s = q_s + T::ROWS * T::PITCH;
    __half* const v_s = k_s + T::KEYS * T::PITCH;
    float4* const exchange = reinterpret_cast<float4*>(k_s + T::STAGES * T::STAGE);

    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, group = warp / 2;
    const int half = T::HALVES == 2 ? warp % 2 : 0, side = T::SIDES == 2 ? warp % 2 : 0;
    const int dlane = blockIdx.z / p.kv_heads, kv = blockIdx.z % p.kv_heads, rep = p.q_heads / p.kv_heads;
    const int packed = rep * p.lane_rows, row0 = blockIdx.x * T::ROWS;
    // The query heads of one KV head lie one after the other: row r of the packed matrix is row r of this.
    const size_t base = (static_cast<size_t>(dlane) * p.q_heads + kv * rep) * p.lane_rows;
    const __half* q = p.q + base * T::HEAD;
    const __half *k = p.k + kv * T::HEAD, *v = p.v + kv * T::HEAD;

    const int64_t first0 = p.spans[dlane * 4], first1 = p.spans[dlane * 4 + 2];
    const int n0 = static_cast<int>(p.spans[dlane * 4 + 1]), n = n0 + static_cast<int>(p.spans[dlane * 4 + 3]);
    const int tiles = (n + T::KEYS - 1) / T::KEYS;
    const int t0 = tiles * blockIdx.y / p.splits, t1 = tiles * (blockIdx.y + 1) / p.splits;

    const int my_key = tid / CHUNKS, my_col = tid % CHUNKS * 8;
    auto fetch = [&](const __half* src, __half* dst, int tile) {
        const int j0 = tile * T::KEYS, j1 = j0 + T::KEYS;
        const unsigned to = smem_addr(dst + my_key * T::PITCH + my_col);
        if (j1 <= n0 || (j0 >= n0 && j1 <= n)) {  // all of it in one run
            const __half* from = src + ((j0 < n0 ? first0 : first1 - n0) + j0 + my_key) * p.stride + my_col;
#pragma unroll
            for (int i = 0; i < T::KEYS / STEP; i++, from += STEP * p.stride)
                copy16(to + i * STEP * T::PITCH * 2, from, true);
        } else {
#pragma unroll 1
            for (int i = 0; i < T::KEYS / STEP; i++) {
                const int j = j0 + my_key + i * STEP;
                const int64_t row = j < n0 ? first0 + j : j < n ? first1 + (j - n0) : 0;
                copy16(to + i * STEP * T::PITCH * 2, src + (j < n ? row * p.stride + my_col : 0), j < n);
            }
        }
        copies_issued();
    };

    float o[O_TILES][4] = {};
    float top[2] = {LOWEST, LOWEST}, sum[2] = {0.f, 0.f};
    if (t0 < t1) {
#pragma unroll 4
        for (int c = tid; c < T::ROWS * CHUNKS; c += T::THREADS) {
            const int r = c / CHUNKS, col = c % CHUNKS * 8;
            copy16(smem_addr(q_s + r * T::PITCH + col), q + static_cast<size_t>(row0 + r) * T::HEAD + col,
                   row0 + r < packed);
        }
        fetch(k, k_s, t0);
        if (T::STAGES == 2) fetch(v, v_s, t0);
    }
    // Addresses of this lane for ldmatrix: a row of the first tile each.
    const unsigned q_at = smem_addr(q_s + (group * 16 + lane % 16) * T::PITCH + half * T::PART + lane / 16 * 8);
    const unsigned k_at = smem_addr(k_s + (side * KEYS + lane % 8 + lane / 16 * 8) * T::PITCH + half * T::PART + lane / 8 % 2 * 8);
    const unsigned v_at = smem_addr(v_s + (side * KEYS + lane % 8 + lane / 8 % 2 * 8) * T::PITCH + half * T::PART + lane / 16 * 8);

    for (int t = t0; t < t1; t++) {
        copies_done();
        __syncthreads();  // K of this tile (two stages: V too) is there; nobody reads the last one any more
        const int flip = T::STAGES == 2 ? (t - t0) % 2 * T::STAGE * 2 : 0;  // bytes to this tile's stage
        if (T::STAGES == 1) {
            fetch(v, v_s, t);
        } else if (t + 1 < t1) {
            const int other = T::STAGE - flip / 2;
            fetch(k, k_s + other, t + 1);
            fetch(v, v_s + other, t + 1);
        }

        float s[S_TILES][4] = {};
#pragma unroll
        for (int d = 0; d < T::PART / 16; d++) {
            unsigned a[4];
            ldsm4(a, q_at + d * 32);
#pragma unroll
            for (int j = 0; j < S_TILES / 2; j++) {
                unsigned b[4];
                ldsm4(b, k_at + flip + j * 16 * T::PITCH * 2 + d * 32);
                mma16(s[2 * j], a, b);
                mma16(s[2 * j + 1], a, b + 2);
            }
        }
        if (T::HALVES == 2) {
            float4* mine = exchange + warp * S_TILES * 32 + lane;
            const float4* other = exchange + (warp ^ 1) * S_TILES * 32 + lane;
#pragma unroll
            for (int j = 0; j < S_TILES; j++) mine[j * 32] = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
            asm volatile("bar.sync %0, 64;" ::"r"(group + 1) : "memory");
#pragma unroll
            for (int j = 0; j < S_TILES; j++) {
                const float4 x = other[j * 32];
                s[j][0] += x.x, s[j][1] += x.y, s[j][2] += x.z, s[j][3] += x.w;
            }
        }
        if ((t + 1) * T::KEYS > n) {
#pragma unroll
            for (int j = 0; j < S_TILES; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (t * T::KEYS + side * KEYS + j * 8 + lane % 4 * 2 + (i & 1) >= n) s[j][i] = -INFINITY;
        }

        // Rows lane/4 (values 0, 1) and lane/4 + 8 (values 2, 3); four lanes share a row.
        float fix[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float m = LOWEST;
#pragma unroll
            for (int j = 0; j < S_TILES; j++) m = fmaxf(m, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
            m = fmaxf(m, __shfl_xor_sync(FULL, m, 1));
            m = fmaxf(m, __shfl_xor_sync(FULL, m, 2));
            m = fmaxf(top[h], m * LOG2E);
            fix[h] = exp2_fast(top[h] - m);
            top[h] = m;
            float add = 0.f;
#pragma unroll
            for (int j = 0; j < S_TILES; j++)
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; i++) {
                    s[j][i] = exp2_fast(fmaf(s[j][i], LOG2E, -m));
                    add += s[j][i];
                }
            sum[h] = sum[h] * fix[h] + add;
        }
        if (__any_sync(FULL, fix[0] != 1.f || fix[1] != 1.f)) {
#pragma unroll
            for (int j = 0; j < O_TILES; j++) o[j][0] *= fix[0], o[j][1] *= fix[0], o[j][2] *= fix[1], o[j][3] *= fix[1];
        }

        if (T::STAGES == 1) {
            copies_done();
            __syncthreads();  // V is there; nobody reads K of this tile any more
            if (t + 1 < t1) fetch(k, k_s, t + 1);
        }
#pragma unroll
        for (int j = 0; j < S_TILES / 2; j++) {
            const unsigned a[4] = {half_pair(s[2 * j][0], s[2 * j][1]), half_pair(s[2 * j][2], s[2 * j][3]),
                                   half_pair(s[2 * j + 1][0], s[2 * j + 1][1]), half_pair(s[2 * j + 1][2], s[2 * j + 1][3])};
#pragma unroll
            for (int d = 0; d < O_TILES / 2; d++) {
                unsigned b[4];
                ldsm4t(b, v_at + flip + j * 16 * T::PITCH * 2 + d * 32);
                mma16(o[2 * d], a, b);
                mma16(o[2 * d + 1], a, b + 2);
            }
        }
    }

    if (T::SIDES == 2) {  // the second warp of a pair hands over; K, V and Q are not needed any more
        float4* const o_x = reinterpret_cast<float4*>(k_s) + group * O_TILES * 32 + lane;
        float4* const st_x = reinterpret_cast<float4*>(q_s) + group * 32 + lane;
        static_assert(T::GROUPS * O_TILES * 512 <= 2 * T::KEYS * T::PITCH * 2, "fits K and V");
        __syncthreads();
        if (side == 1) {
#pragma unroll
            for (int j = 0; j < O_TILES; j++) o_x[j * 32] = make_float4(o[j][0], o[j][1], o[j][2], o[j][3]);
            *st_x = make_float4(top[0], top[1], sum[0], sum[1]);
        }
        __syncthreads();
        if (side == 1) return;
        const float4 st = *st_x;
        const float m[2] = {fmaxf(top[0], st.x), fmaxf(top[1], st.y)};
        const float mine[2] = {exp2_fast(top[0] - m[0]), exp2_fast(top[1] - m[1])};
        const float other[2] = {exp2_fast(st.x - m[0]), exp2_fast(st.y - m[1])};
        sum[0] = sum[0] * mine[0] + st.z * other[0];
        sum[1] = sum[1] * mine[1] + st.w * other[1];
        top[0] = m[0], top[1] = m[1];
#pragma unroll
        for (int j = 0; j < O_TILES; j++) {
            const float4 x = o_x[j * 32];
            o[j][0] = o[j][0] * mine[0] + x.x * other[0], o[j][1] = o[j][1] * mine[0] + x.y * other[0];
            o[j][2] = o[j][2] * mine[1] + x.z * other[1], o[j][3] = o[j][3] * mine[1] + x.w * other[1];
        }
    }

#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(FULL, sum[h], 1);
        sum[h] += __shfl_xor_sync(FULL, sum[h], 2);
        const int r = row0 + group * 16 + lane / 4 + 8 * h;
        if (r >= packed) continue;
        const int col = half * T::PART + lane % 4 * 2;
        if (p.splits > 1) {
            const size_t at = static_cast<size_t>(blockIdx.y) * p.lanes * p.q_heads * p.lane_rows + base + r;
            if (half == 0 && lane % 4 == 0)
                *reinterpret_cast<float2*>(p.stat + at * 2) = make_float2(top[h], sum[h]);
#pragma unroll
            for (int j = 0; j < O_TILES; j++)
                *reinterpret_cast<float2*>(p.part + at * T::HEAD + col + j * 8) = make_float2(o[j][2 * h], o[j][2 * h + 1]);
        } else {
            const float inv = sum[h] > 0.f ? 1.f / sum[h] : 0.f;
            const size_t at = ((static_cast<size_t>(dlane) * p.lane_rows + r % p.lane_rows) * p.q_heads + kv * rep +
                               r / p.lane_rows) * T::HEAD + col;
#pragma unroll
            for (int j = 0; j < O_TILES; j++) {
                const float x = o[j][2 * h] * inv, y = o[j][2 * h + 1] * inv;
                if (p.out_type == DLLM_F16)
                    *reinterpret_cast<unsigned*>(static_cast<__half*>(p.out) + at + j * 8) = half_pair(x, y);
                else
                    *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at + j * 8) = make_float2(x, y);
            }
        }
    }
}

// grid: ceil(lanes * q_heads * lane_rows * head / 4 / 256)
template <int ROOM>
__global__ void __launch_bounds__(256) join_parts_kernel(const Args p, int head) {
    const int head4 = head / 4, rows = p.lanes * p.q_heads * p.lane_rows;
    const int at = blockIdx.x * 256 + threadIdx.x, r = at / head4, c = at % head4;
    if (r >= rows) return;
    float2 st[ROOM];
    float top = LOWEST;
#pragma unroll
    for (int s = 0; s < ROOM; s++)
        if (s < p.splits) {
            st[s] = reinterpret_cast<const float2*>(p.stat)[static_cast<size_t>(s) * rows + r];
            top = fmaxf(top, st[s].x);
        }
    float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
    float sum = 0.f;
    constexpr int ROUND = ROOM < 4 ? ROOM : 4;
    float4 x[ROUND];
#pragma unroll
    for (int s0 = 0; s0 < ROOM; s0 += ROUND) {
#pragma unroll
        for (int s = 0; s < ROUND; s++)
            if (s0 + s < p.splits)
                x[s] = reinterpret_cast<const float4*>(p.part)[(static_cast<size_t>(s0 + s) * rows + r) * head4 + c];
#pragma unroll
        for (int s = 0; s < ROUND; s++)
            if (s0 + s < p.splits) {
                const float w = exp2_fast(st[s0 + s].x - top);
                sum += w * st[s0 + s].y;
                acc = acc + x[s] * w;
            }
    }
    const int row = r % p.lane_rows, h = r / p.lane_rows % p.q_heads, dlane = r / p.lane_rows / p.q_heads;
    const size_t dst = ((static_cast<size_t>(dlane) * p.lane_rows + row) * p.q_heads + h) * head4 + c;
    store4(p.out, p.out_type, dst, acc * (sum > 0.f ? 1.f / sum : 0.f));
}

using Head32 = Tile<32, 1, 2, 4, 64, 2>;
using Head64 = Tile<64, 1, 2, 4, 64, 2>;
using Head128 = Tile<128, 1, 2, 4, 64, 1>;
using Head256 = Tile<256, 1, 2, 4, 64, 2>;       // 165 KiB
using Head256Small = Tile<256, 1, 2, 4, 64, 1>;  // 99 KiB: just fits a chip with 100 KiB
using Head512 = Tile<256, 2, 1, 4, 32, 2>;       // 211 KiB
using Head512Small = Tile<256, 2, 1, 2, 16, 1>;  // 69 KiB

template <class T>
int launch(cudaStream_t s, const Args& a) {
    // Set each time, since it belongs to the current device.
    cudaError_t e = cudaFuncSetAttribute(attend_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, T::BYTES);
    if (e != cudaSuccess) return static_cast<int>(e);
    const int packed = a.q_heads / a.kv_heads * a.lane_rows;
    const dim3 grid((packed + T::ROWS - 1) / T::ROWS, a.splits, a.lanes * a.kv_heads);
    attend_kernel<T><<<grid, T::THREADS, T::BYTES, s>>>(a);
    if (a.splits > 1) {
        const int n = a.lanes * a.q_heads * a.lane_rows * (T::HEAD / 4);
        auto join = a.splits <= 2 ? join_parts_kernel<2> : a.splits <= 4 ? join_parts_kernel<4> : join_parts_kernel<MAX_SPLITS>;
        join<<<(n + 255) / 256, 256, 0, s>>>(a, T::HEAD);
    }
    return last_error();
}

int device_attribute(cudaDeviceAttr attr) {
    int dev = 0, value = 0;
    if (cudaGetDevice(&dev) != cudaSuccess || cudaDeviceGetAttribute(&value, attr, dev) != cudaSuccess) return 0;
    return value;
}

// DLLM_SMALL_SHARED: build for a test of the small variant on a large chip.
#ifdef DLLM_SMALL_SHARED
bool fits(int) { return false; }
#else
bool fits(int bytes) { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= bytes; }
#endif

}  // namespace
}  // namespace dllm

using namespace dllm;

DLLM_API size_t dllm_canvas_attention_scratch_bytes(int rows, int q_heads, int head, int splits) {
    return splits < 2 ? 0 : static_cast<size_t>(splits) * rows * q_heads * (head + 2) * sizeof(float);
}

DLLM_API int dllm_canvas_attention_splits(int rows, int lanes, int q_heads, int kv_heads, int head, int max_keys) {
    if (lanes < 1 || kv_heads < 1) return 1;
    const int packed = rows / lanes * (q_heads / kv_heads), block_rows = head == 512 && !fits(Head512::BYTES) ? 32 : 64;
    const int blocks = (packed + block_rows - 1) / block_rows * lanes * kv_heads;
    const int room = device_attribute(cudaDevAttrMultiProcessorCount);
    const int keys = head == 512 ? 32 : 64, tiles = (max_keys + keys - 1) / keys;
    int splits = blocks > 0 ? room / blocks : 1;
    if (splits > tiles / 2) splits = tiles / 2;  // a part is worth its overhead from two tiles on
    return splits < 1 ? 1 : splits > MAX_SPLITS ? MAX_SPLITS : splits;
}

DLLM_API int dllm_canvas_attention(void* stream, const void* q, int rows, int lanes, int q_heads, int kv_heads, int head,
                                   const void* k_cache, const void* v_cache, int64_t cache_stride,
                                   const int64_t* spans, int splits, void* out, int out_type, void* scratch) {
    if (rows < 1 || lanes < 1 || rows % lanes || kv_heads < 1 || q_heads < 1 || q_heads % kv_heads || splits < 1 ||
        splits > MAX_SPLITS || cache_stride % 8 || !is_float_type(out_type) || (splits > 1 && !scratch))
        return BAD_SIZE;
    Args a{static_cast<const __half*>(q), static_cast<const __half*>(k_cache), static_cast<const __half*>(v_cache), spans,
           cache_stride, lanes, rows / lanes, q_heads, kv_heads, splits, out_type, out, static_cast<float*>(scratch),
           static_cast<float*>(scratch) + static_cast<size_t>(splits) * rows * q_heads * head};
    auto s = static_cast<cudaStream_t>(stream);
    switch (head) {
        case 32: return launch<Head32>(s, a);
        case 64: return launch<Head64>(s, a);
        case 128: return launch<Head128>(s, a);
        case 256: return fits(Head256::BYTES) ? launch<Head256>(s, a) : launch<Head256Small>(s, a);
        case 512: return fits(Head512::BYTES) ? launch<Head512>(s, a) : launch<Head512Small>(s, a);
        default: return BAD_SIZE;
    }
}
