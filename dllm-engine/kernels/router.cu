// The product runs as m16n8k8 TF32 with split factors (hi*hi + hi*lo + lo*hi). The shape is small and latency-bound: the
// hidden axis is cut into slices so that the grid fills the chip, and the last block of a row tile to finish adds the
// slices in order and picks the experts, which saves a launch. Fragments come straight from memory: since a sum over
// the hidden axis may take its terms in any order, a lane reads 16 neighbouring bytes and uses them as its terms of two
// successive mma steps.
#include "dllm_device.cuh"

namespace dllm {
namespace {

constexpr int TILE_ROWS = 32, TILE_EXPERTS = 128, WARPS = 8, STEP = 16;
constexpr int MAX_EXPERTS = 256, MAX_USED = 16;

__device__ __forceinline__ void split(float x, unsigned& hi, unsigned& lo) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(hi) : "f"(x));
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(lo) : "f"(x - __uint_as_float(hi)));
}

__device__ __forceinline__ void mma(float* c, const unsigned* a, const unsigned* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// One warp picks the experts of one row: lane l holds experts l, l+32, ...
__device__ void pick(const float* part, int slices, size_t slice_stride, int experts, int used,
                     const float* expert_scale, int32_t* ids, float* weights, float* logits_out) {
    const int lane = threadIdx.x & 31;
    float v[MAX_EXPERTS / 32];
#pragma unroll
    for (int i = 0; i < MAX_EXPERTS / 32; i++) v[i] = 0.f;
#pragma unroll 4
    for (int s = 0; s < slices; s++)
#pragma unroll
        for (int i = 0; i < MAX_EXPERTS / 32; i++)
            if (i * 32 + lane < experts) v[i] += __ldcg(part + s * slice_stride + i * 32 + lane);
    unsigned long long key[MAX_EXPERTS / 32];  // sorts by logit, then by lower id; 0 = none
#pragma unroll
    for (int i = 0; i < MAX_EXPERTS / 32; i++) {
        const int e = i * 32 + lane;
        if (e < experts && logits_out) logits_out[e] = v[i];
        key[i] = e < experts ? static_cast<unsigned long long>(sort_key(v[i])) << 32 | (0xffffffffu - e) : 0ull;
    }
    float top = 0.f, total = 0.f, mine = 0.f;
    int my_id = 0;
    for (int u = 0; u < used; u++) {
        unsigned long long best = 0;
#pragma unroll
        for (int i = 0; i < MAX_EXPERTS / 32; i++) best = key[i] > best ? key[i] : best;
#pragma unroll
        for (int o = 16; o; o >>= 1) {
            const unsigned long long other = __shfl_xor_sync(FULL, best, o);
            best = other > best ? other : best;
        }
#pragma unroll
        for (int i = 0; i < MAX_EXPERTS / 32; i++)
            if (key[i] == best) key[i] = 0;
        const unsigned k = static_cast<unsigned>(best >> 32);
        const float logit = __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k);
        if (u == 0) top = logit;
        const float p = expf(logit - top);  // softmax's denominator cancels in p / sum of the chosen p
        total += p;
        if (lane == u) mine = p, my_id = static_cast<int>(0xffffffffu - static_cast<unsigned>(best));
    }
    if (lane < used) {
        ids[lane] = my_id;
        weights[lane] = mine / total * (expert_scale ? expert_scale[my_id] : 1.f);
    }
}

// grid: (slices, row tiles, expert tiles); part [slices][rows][experts]; done [row tiles]
__global__ void __launch_bounds__(32 * WARPS)
    router_kernel(const float* __restrict__ zr, const float* __restrict__ wr, const float* __restrict__ expert_scale,
                  int rows, int experts, int hidden, int used, int slice, int32_t* ids, float* weights,
                  float* logits_out, float* part, unsigned* done) {
    __shared__ bool last;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int row0 = blockIdx.y * TILE_ROWS, e0 = blockIdx.z * TILE_EXPERTS + warp * 16;
    const int k0 = blockIdx.x * slice, k1 = min(k0 + slice, hidden);

    // Rows beyond the end are read from the last one and not written.
    const float *a_row[4], *b_row[2];
#pragma unroll
    for (int i = 0; i < 4; i++) a_row[i] = zr + static_cast<size_t>(min(row0 + i * 8 + g, rows - 1)) * hidden + 4 * t;
#pragma unroll
    for (int i = 0; i < 2; i++) b_row[i] = wr + static_cast<size_t>(min(e0 + i * 8 + g, experts - 1)) * hidden + 4 * t;

    float c[2][2][4] = {};
    if (e0 < experts) {
#pragma unroll 3
        for (int k = k0; k < k1; k += STEP) {
            float4 a[4], b[2];
#pragma unroll
            for (int i = 0; i < 2; i++) b[i] = __ldg(reinterpret_cast<const float4*>(b_row[i] + k));
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = __ldg(reinterpret_cast<const float4*>(a_row[i] + k));
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
                        mma(c[m][n], al[m], bh[n]);
                        mma(c[m][n], ah[m], bl[n]);
                        mma(c[m][n], ah[m], bh[n]);
                    }
            }
        }
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

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned all = gridDim.x * gridDim.z;
        last = atomicAdd(done + blockIdx.y, 1u) == all - 1;
        if (last) done[blockIdx.y] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int r = row0 + warp; r < min(row0 + TILE_ROWS, rows); r += WARPS)
        pick(part + static_cast<size_t>(r) * experts, gridDim.x, static_cast<size_t>(rows) * experts, experts, used,
             expert_scale, ids + static_cast<size_t>(r) * used, weights + static_cast<size_t>(r) * used,
             logits_out ? logits_out + static_cast<size_t>(r) * experts : nullptr);
}

int tiles_of(int n, int tile) { return (n + tile - 1) / tile; }

// Enough slices for about 176 blocks (a little over one per multiprocessor of the chips in question), at least 64 wide.
int slice_of(int rows, int experts, int hidden) {
    const int tiles = tiles_of(rows, TILE_ROWS) * tiles_of(experts, TILE_EXPERTS);
    const int slices = tiles >= 176 ? 1 : 176 / tiles;
    const int slice = tiles_of(tiles_of(hidden, slices), STEP) * STEP;
    return slice < 64 ? 64 : slice;
}

size_t counter_bytes(int rows) { return (tiles_of(rows, TILE_ROWS) * sizeof(unsigned) + 255) / 256 * 256; }

}  // namespace
}  // namespace dllm

using namespace dllm;

DLLM_API size_t dllm_router_scratch_bytes(int rows, int experts, int hidden) {
    const size_t slices = tiles_of(hidden, slice_of(rows, experts, hidden));
    return counter_bytes(rows) + slices * rows * experts * sizeof(float);
}

DLLM_API int dllm_router(void* stream, const float* zr, const float* wr, const float* expert_scale, int rows,
                         int experts, int hidden, int used, int32_t* ids, float* weights, float* logits_out,
                         void* scratch) {
    if (rows < 1 || hidden < STEP || hidden % STEP || experts < 1 || experts > MAX_EXPERTS || used < 1 ||
        used > MAX_USED || used > experts)
        return BAD_SIZE;
    const int slice = slice_of(rows, experts, hidden);
    const dim3 grid(tiles_of(hidden, slice), tiles_of(rows, TILE_ROWS), tiles_of(experts, TILE_EXPERTS));
    float* part = reinterpret_cast<float*>(static_cast<char*>(scratch) + counter_bytes(rows));
    router_kernel<<<grid, 32 * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(
        zr, wr, expert_scale, rows, experts, hidden, used, slice, ids, weights, logits_out, part,
        static_cast<unsigned*>(scratch));
    return last_error();
}
