// Which rows go to which expert: offsets and a grouped list, made without waiting between blocks.
#include "quant_mm.h"

#include <cuda_runtime.h>

namespace dllm {
namespace {

constexpr int THREADS = 256;

// Block e counts the ids below e (its offset) and lists the positions of its own, each thread over a contiguous part.
__global__ void __launch_bounds__(THREADS) route_kernel(const int* __restrict__ ids, int n, int n_expert,
                                                        int* __restrict__ plan) {
    __shared__ int warp_own[THREADS / 32], warp_less[THREADS / 32];
    const int e = blockIdx.x, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int part = (n + THREADS - 1) / THREADS, begin = min(tid * part, n), end = min(begin + part, n);
    int own = 0, less = 0;
    for (int i = begin; i < end; ++i) {
        const int v = ids[i];
        own += v == e;
        less += v >= 0 && v < e;
    }
    int scan = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int v = __shfl_up_sync(0xffffffffu, scan, d);
        if (lane >= d) scan += v;
        less += __shfl_xor_sync(0xffffffffu, less, d);
    }
    if (lane == 31) { warp_own[warp] = scan; warp_less[warp] = less; }
    __syncthreads();
    int before = 0, all = 0, offset = 0;
    for (int w = 0; w < THREADS / 32; ++w) {
        if (w < warp) before += warp_own[w];
        all += warp_own[w];
        offset += warp_less[w];
    }
    int at = n_expert + 1 + offset + before + scan - own;
    for (int i = begin; i < end; ++i)
        if (ids[i] == e) plan[at++] = i;
    if (tid == 0) {
        plan[e] = offset;
        plan[n_expert + 1 + n + e] = 0;  // see moe_mm.cuh
        if (e == n_expert - 1) plan[n_expert] = offset + all;
    }
}

}  // namespace
}  // namespace dllm

DLLM_API int64_t dllm_moe_plan_bytes(int n_ids, int n_expert) { return 4 * (2 * (int64_t)n_expert + 1 + n_ids); }

DLLM_API int dllm_moe_route(void* stream, const int32_t* ids, int n_ids, int n_expert, int32_t* plan) {
    if (n_ids < 1 || n_expert < 1) return cudaErrorInvalidValue;
    dllm::route_kernel<<<n_expert, dllm::THREADS, 0, static_cast<cudaStream_t>(stream)>>>(ids, n_ids, n_expert, plan);
    return cudaGetLastError();
}
