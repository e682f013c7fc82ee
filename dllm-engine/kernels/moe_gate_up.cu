// Expert products, first half: gathers the routed rows, makes gate and up in one pass and applies the activation.
#include "moe_mm.cuh"

using namespace dllm;

DLLM_API int dllm_moe_gate_up(void* stream, int type, const void* w, const void* x, int64_t ldx, int32_t* plan, int rows,
                              int top_k, int n_expert, int k, int n_ff, void* act, int overlap, int tile) {
    if (rows < 1 || top_k < 1 || n_expert < 1 || n_ff % 8 != 0 || ldx % 8 != 0) return cudaErrorInvalidValue;
    const int entries = rows * top_k;
    MatmulArgs p = {};
    p.expert_bytes = dllm_repack_bytes(type, 2 * (int64_t)n_ff, k);
    if (p.expert_bytes == 0) return cudaErrorInvalidValue;
    p.w = static_cast<const unsigned char*>(w);
    p.x = static_cast<const __half*>(x); p.ldx = ldx;
    p.out = act; p.ldo = n_ff;
    p.rows = rows; p.k = k; p.n = 2 * n_ff;
    p.alpha = 1.0f / 16.0f;
    p.plan = plan; p.n_expert = n_expert; p.gather = top_k; p.splits = 1;
    if (overlap && can_overlap()) p.counters = reinterpret_cast<unsigned*>(plan + n_expert + 1 + entries);
    tile = expert_tile(tile, entries, n_expert, k);
    return with_layout(type, cudaErrorInvalidValue, [&](auto l) {
        return run_expert_tile<decltype(l), OUT_GELU>(static_cast<cudaStream_t>(stream), p, entries, tile);
    });
}
