// The product runs as m16n8k8 TF32 with split factors (hi*hi + hi*lo + lo*hi). The shape is small and bound by latency:
// the hidden axis is cut into slices so that the grid fills the chip, and a second kernel, one block per row, adds the
// slices in order and picks the experts. A sum over the hidden axis may take its terms in any order, so a lane
// reads 16 neighbouring bytes and uses them as its terms of two successive mma steps.
#include "dllm_device.cuh"

namespace dllm {
namespace {

constexpr int TILE_ROWS = 32, TILE_EXPERTS = 128, WARPS = 8, STEP = 16, PICK_WARPS = 4;
constexpr int CHUNK = 96, PITCH = CHUNK + 16;  // pitch: a quarter warp's 16-byte reads fall into different banks
static_assert(CHUNK <= 128, "a warp copies a row at once");
constexpr int SHARED = (TILE_ROWS + TILE_EXPERTS) * PITCH * 4;
constexpr int MAX_EXPERTS = 256, MAX_USED = 16;

// hi + lo = x to 2^-21. Integer steps: the conversion instruction of PTX costs five, for infinities that we may let become
// NaN (which the low part does for us).
__device__ __forceinline__ void split(float x, unsigned& hi, unsigned& lo) {
    hi = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
    lo = __float_as_uint(x - __uint_as_float(hi)) & 0xffffe000u;
}

__device__ __forceinline__ void mma(float* c, const unsigned* a, const unsigned* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void copy16(float* dst, const float* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(dst))),
                 "l"(src) : "memory");
}

// grid: (slices, row tiles, expert tiles); part [slices][rows][experts]. A block takes CHUNK columns at a time into
// shared memory, all in flight at once; for few rows that is all it does.
__global__ void __launch_bounds__(32 * WARPS, 2)
    product_kernel(const float* __restrict__ zr, const float* __restrict__ wr, int rows, int experts, int hidden,
                   int slice, float* __restrict__ part) {
    extern __shared__ __align__(16) float smem[];  // [TILE_ROWS + TILE_EXPERTS][PITCH]
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int row0 = blockIdx.y * TILE_ROWS, tile0 = blockIdx.z * TILE_EXPERTS, e0 = tile0 + warp * 16;
    const int k0 = blockIdx.x * slice, k1 = min(k0 + slice, hidden);
    const int tall = TILE_ROWS + min(TILE_EXPERTS, experts - tile0);

    const float *a_at[4], *b_at[2];
#pragma unroll
    for (int i = 0; i < 4; i++) a_at[i] = smem + (i * 8 + g) * PITCH + 4 * t;
#pragma unroll
    for (int i = 0; i < 2; i++) b_at[i] = smem + (TILE_ROWS + warp * 16 + i * 8 + g) * PITCH + 4 * t;

    float c[2][2][4] = {};
    for (int kc = k0; kc < k1; kc += CHUNK) {
        const int width = min(CHUNK, k1 - kc);
        if (kc > k0) __syncthreads();
        // Rows beyond the end are read from the last one and not written.
        if (lane * 4 < width) {  // a warp per row, 16 bytes per lane
            const float* col = zr + kc + 4 * lane;
            for (int r = warp; r < TILE_ROWS; r += WARPS)
                copy16(smem + r * PITCH + 4 * lane, col + static_cast<size_t>(min(row0 + r, rows - 1)) * hidden);
            const float* src = wr + static_cast<size_t>(tile0 + warp) * hidden + kc + 4 * lane;
            for (int r = TILE_ROWS + warp; r < tall; r += WARPS, src += WARPS * hidden)
                copy16(smem + r * PITCH + 4 * lane, src);
        }
        asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        if (e0 >= experts) continue;
#pragma unroll 2
        for (int k = 0; k < width; k += STEP) {
            float4 a[4], b[2];
#pragma unroll
            for (int i = 0; i < 2; i++) b[i] = *reinterpret_cast<const float4*>(b_at[i] + k);
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = *reinterpret_cast<const float4*>(a_at[i] + k);
            // The tensor cores cut off when they add, which would pile up over a long sum: each step has its own sums.
            float d[2][2][4] = {};
#pragma unroll
            for (int h = 0; h < 2; h++) {
                unsigned ah[2][4], al[2][4], bh[2][2], bl[2][2];
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    split(h ? b[n].z : b[n].x, bh[n][0], bl[n][0]);
                    split(h ? b[n].w : b[n].y, bh[n][1], bl[n][1]);
                }
#pragma unroll
                for (int m = 0; m < 2; m++) {  // a fragment: (row g, k t), (g+8, t), (g, t+4), (g+8, t+4)
                    split(h ? a[2 * m].z : a[2 * m].x, ah[m][0], al[m][0]);
                    split(h ? a[2 * m + 1].z : a[2 * m + 1].x, ah[m][1], al[m][1]);
                    split(h ? a[2 * m].w : a[2 * m].y, ah[m][2], al[m][2]);
                    split(h ? a[2 * m + 1].w : a[2 * m + 1].y, ah[m][3], al[m][3]);
                }
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int n = 0; n < 2; n++) {
                        mma(d[m][n], al[m], bh[n]);
                        mma(d[m][n], ah[m], bl[n]);
                        mma(d[m][n], ah[m], bh[n]);
                    }
            }
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) c[m][n][i] += d[m][n][i];
        }
    }
    if (e0 >= experts) return;
    float* out = part + static_cast<size_t>(blockIdx.x) * rows * experts;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = row0 + m * 16 + g + 8 * (i >> 1), e = e0 + n * 8 + 2 * t + (i & 1);
                if (r < rows && e < experts) out[static_cast<size_t>(r) * experts + e] = c[m][n][i];
            }
}

// grid: rows. The warps add up a share of the slices each, then the first one picks; its lane l holds experts
// 4l .. 4l+3 and, for more than 128 experts, 128 + 4l ..
template <int OWN>
__global__ void __launch_bounds__(32 * PICK_WARPS)
    pick_kernel(const float* __restrict__ part, int slices, int rows, int experts, int used,
                const float* __restrict__ expert_scale, int32_t* ids, float* weights, float* logits_out) {
    __shared__ float4 shares[PICK_WARPS][OWN / 4][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.x;
    const size_t stride4 = static_cast<size_t>(rows) * experts / 4;
#pragma unroll
    for (int i = 0; i < OWN / 4; i++) {
        const float4* p = reinterpret_cast<const float4*>(part + static_cast<size_t>(row) * experts) + i * 32 + lane;
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        if (i * 128 + lane * 4 < experts)
            for (int s0 = warp; s0 < slices; s0 += 8 * PICK_WARPS) {  // eight loads in flight
                float4 x[8] = {};
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (s0 + j * PICK_WARPS < slices) x[j] = p[(s0 + j * PICK_WARPS) * stride4];
#pragma unroll
                for (int j = 0; j < 8; j++) sum = sum + x[j];
            }
        shares[warp][i][lane] = sum;
    }
    __syncthreads();
    if (warp) return;
    float v[OWN];
#pragma unroll
    for (int i = 0; i < OWN / 4; i++) {
        float4 sum = shares[0][i][lane];
#pragma unroll
        for (int w = 1; w < PICK_WARPS; w++) sum = sum + shares[w][i][lane];
        v[4 * i] = sum.x, v[4 * i + 1] = sum.y, v[4 * i + 2] = sum.z, v[4 * i + 3] = sum.w;
        if (logits_out && i * 128 + lane * 4 < experts)
            reinterpret_cast<float4*>(logits_out + static_cast<size_t>(row) * experts)[i * 32 + lane] = sum;
    }
    auto expert = [lane](int i) { return i / 4 * 128 + lane * 4 + i % 4; };
    unsigned key[OWN];  // 0 = none or taken
#pragma unroll
    for (int i = 0; i < OWN; i++) key[i] = expert(i) < experts ? sort_key(v[i]) : 0u;
    unsigned my_key = 0;
    int my_id = 0;
    for (int u = 0; u < used; u++) {
        unsigned best = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) best = key[i] > best ? key[i] : best;
        best = __reduce_max_sync(FULL, best);
        unsigned id = 0xffffffffu;  // the lowest with that logit
#pragma unroll
        for (int i = OWN - 1; i >= 0; i--)
            if (key[i] == best) id = expert(i);
        id = __reduce_min_sync(FULL, id);
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (static_cast<int>(id) == expert(i)) key[i] = 0;
        if (lane == u) my_key = best, my_id = static_cast<int>(id);
    }
    const float logit = __uint_as_float(my_key & 0x80000000u ? my_key & 0x7fffffffu : ~my_key);
    const float top = __shfl_sync(FULL, logit, 0);
    const float mine = lane < used ? expf(logit - top) : 0.f;  // softmax's denominator cancels in p / sum of the chosen p
    const float total = warp_sum(mine);
    if (lane < used) {
        const size_t at = static_cast<size_t>(row) * used + lane;
        ids[at] = my_id;
        weights[at] = mine / total * (expert_scale ? expert_scale[my_id] : 1.f);
    }
}

int tiles_of(int n, int tile) { return (n + tile - 1) / tile; }

// Enough slices for about 264 blocks (two per multiprocessor of the chips in question), in whole chunks.
int slice_of(int rows, int experts, int hidden) {
    const int tiles = tiles_of(rows, TILE_ROWS) * tiles_of(experts, TILE_EXPERTS);
    const int slices = tiles >= 264 ? 1 : 264 / tiles;
    return tiles_of(tiles_of(hidden, slices), CHUNK) * CHUNK;
}

}  // namespace
}  // namespace dllm

using namespace dllm;

DLLM_API size_t dllm_router_scratch_bytes(int rows, int experts, int hidden) {
    const size_t slices = tiles_of(hidden, slice_of(rows, experts, hidden));
    return slices * rows * experts * sizeof(float);
}

DLLM_API int dllm_router(void* stream, const float* zr, const float* wr, const float* expert_scale, int rows,
                         int experts, int hidden, int used, int32_t* ids, float* weights, float* logits_out,
                         void* scratch) {
    if (rows < 1 || hidden < STEP || hidden % STEP || experts < 4 || experts % 4 || experts > MAX_EXPERTS || used < 1 ||
        used > MAX_USED || used > experts)
        return BAD_SIZE;
    const int slice = slice_of(rows, experts, hidden), slices = tiles_of(hidden, slice);
    const dim3 grid(slices, tiles_of(rows, TILE_ROWS), tiles_of(experts, TILE_EXPERTS));
    auto s = static_cast<cudaStream_t>(stream);
    float* part = static_cast<float*>(scratch);
    const cudaError_t e = cudaFuncSetAttribute(product_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    if (e != cudaSuccess) return static_cast<int>(e);
    product_kernel<<<grid, 32 * WARPS, SHARED, s>>>(zr, wr, rows, experts, hidden, slice, part);
    auto pick = experts <= 128 ? pick_kernel<4> : pick_kernel<8>;
    pick<<<rows, 32 * PICK_WARPS, 0, s>>>(part, slices, rows, experts, used, expert_scale, ids, weights, logits_out);
    return last_error();
}
