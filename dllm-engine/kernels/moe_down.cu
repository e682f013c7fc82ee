// Expert products, second half: the down projection with the router's weights, and the sum over a row's choices.
#include "moe_mm.cuh"

namespace dllm {
namespace {

__global__ void sum_kernel(const float4* __restrict__ part, int64_t total, int top_k, int n4, float4* __restrict__ out) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    const int64_t row = i / n4, c = i - row * n4;
    const float4* at = part + row * top_k * n4 + c;
    float4 sum = at[0];
    for (int j = 1; j < top_k; ++j) {
        const float4 v = at[(int64_t)j * n4];
        sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;
    }
    out[i] = sum;
}

}  // namespace
}  // namespace dllm

using namespace dllm;

DLLM_API int dllm_moe_down(void* stream, int type, const void* w, const void* act, int32_t* plan, const float* weights,
                           int rows, int top_k, int n_expert, int n_ff, int n, void* part, int part_type, int overlap,
                           int gate_up_tile, int gate_up_k, int tile) {
    if (rows < 1 || top_k < 1 || n_expert < 1 || n < 1 || n_ff % 8 != 0) return cudaErrorInvalidValue;
    if (part_type != DLLM_MM_F32 && part_type != DLLM_MM_F16) return cudaErrorInvalidValue;
    const int entries = rows * top_k;
    MatmulArgs p = {};
    p.expert_bytes = dllm_repack_bytes(type, n, n_ff);
    if (p.expert_bytes == 0) return cudaErrorInvalidValue;
    p.w = static_cast<const unsigned char*>(w);
    p.x = static_cast<const __half*>(act); p.ldx = n_ff;
    p.out = part; p.ldo = n;
    p.rows = rows; p.k = n_ff; p.n = n;
    p.alpha = 16.0f;
    p.plan = plan; p.n_expert = n_expert; p.gather = 1; p.weights = weights; p.splits = 1;
    if (overlap && can_overlap()) {
        // as many blocks of an expert as dllm_moe_gate_up started
        gate_up_tile = expert_tile(gate_up_tile, entries, n_expert, gate_up_k);
        p.counters = reinterpret_cast<unsigned*>(plan + n_expert + 1 + entries);
        p.wait_blocks = (2 * n_ff + 127) / 128;
        p.wait_tokens = expert_tile_tokens(gate_up_tile);
    }
    tile = expert_tile(tile, entries, n_expert, n_ff);
    return with_layout(type, cudaErrorInvalidValue, [&](auto l) {
        const cudaStream_t s = static_cast<cudaStream_t>(stream);
        return part_type == DLLM_MM_F16 ? run_expert_tile<decltype(l), OUT_WEIGHTED_F16>(s, p, entries, tile)
                                        : run_expert_tile<decltype(l), OUT_WEIGHTED>(s, p, entries, tile);
    });
}

DLLM_API int dllm_moe_sum(void* stream, const float* part, int rows, int top_k, int n, float* out) {
    if (rows < 1 || top_k < 1 || n < 4 || n % 4 != 0) return cudaErrorInvalidValue;
    const int64_t total = (int64_t)rows * (n / 4);
    sum_kernel<<<(unsigned)((total + 255) / 256), 256, 0, static_cast<cudaStream_t>(stream)>>>(
        reinterpret_cast<const float4*>(part), total, top_k, n / 4, reinterpret_cast<float4*>(out));
    return cudaGetLastError();
}
