// A warp takes one head of one row. A lane holds groups of four from the lower half of the head and the groups of the
// upper half that they are rotated with, so the rotation needs no exchange.
#include "dllm_device.cuh"

namespace dllm {
namespace {

constexpr int WARPS = 8;

// grid: ceil(rows * head / 2 / 256)
__global__ void table_kernel(const int32_t* __restrict__ pos, int rows, int half_head, float theta,
                             const float* __restrict__ factors, float2* table) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= rows * half_head) return;
    const int i = at % half_head;
    const float freq = static_cast<float>(exp2(-log2(static_cast<double>(theta)) * i / half_head));
    const float angle = static_cast<float>(pos[at / half_head]) * (factors ? freq / factors[i] : freq);
    float s, c;
    sincosf(angle, &s, &c);
    table[at] = make_float2(c, s);
}

struct Shape {
    int rows, rows_per_lane, q_heads, kv_heads, head, has_v;
};

// NV: groups of four per lane in half a head
template <int NV>
__global__ void __launch_bounds__(32 * WARPS)
    rope_kernel(const void* __restrict__ qkv, int qkv_type, Shape sh, const float* __restrict__ q_norm,
                const float* __restrict__ k_norm, float eps, const float2* __restrict__ table,
                const int64_t* __restrict__ slots, void* q_out, int q_type, __half* k_cache, __half* v_cache,
                int64_t cache_stride) {
    const int lane = threadIdx.x & 31, jobs = sh.q_heads + 2 * sh.kv_heads;
    const int job = blockIdx.x * WARPS + (threadIdx.x >> 5), row = job / jobs, which = job % jobs;
    if (row >= sh.rows) return;
    const bool is_q = which < sh.q_heads, is_v = which >= sh.q_heads + sh.kv_heads;
    const int kv = is_q ? 0 : (which - sh.q_heads) % sh.kv_heads;
    const int64_t slot = is_q ? 0 : slots[row];
    if (slot < 0) return;
    const int width4 = (sh.q_heads + sh.kv_heads * (sh.has_v ? 2 : 1)) * (sh.head / 4), half4 = sh.head / 8;
    const int src_head = is_v && !sh.has_v ? which - sh.kv_heads : which;
    const size_t src = static_cast<size_t>(row) * width4 + static_cast<size_t>(src_head) * (sh.head / 4);

    float4 lo[NV], hi[NV];
    float ss = 0.f;
#pragma unroll
    for (int n = 0; n < NV; n++)
        if (const int i = n * 32 + lane; i < half4) {
            lo[n] = load4(qkv, qkv_type, src + i);
            hi[n] = load4(qkv, qkv_type, src + half4 + i);
            ss += dot4(lo[n]) + dot4(hi[n]);
        }
    const float inv = rsqrtf(warp_sum(ss) / sh.head + eps);
    const float* norm = is_q ? q_norm : k_norm;

#pragma unroll
    for (int n = 0; n < NV; n++)
        if (const int i = n * 32 + lane; i < half4) {
            float4 a = lo[n] * inv, b = hi[n] * inv;
            if (!is_v) {
                a = a * reinterpret_cast<const float4*>(norm)[i];
                b = b * reinterpret_cast<const float4*>(norm)[half4 + i];
                // cos, sin of four pairs
                const float4* cs = reinterpret_cast<const float4*>(table + static_cast<size_t>(row) * half4 * 4) + 2 * i;
                const float4 p = cs[0], q = cs[1], a0 = a, b0 = b;
                a = make_float4(a0.x * p.x - b0.x * p.y, a0.y * p.z - b0.y * p.w, a0.z * q.x - b0.z * q.y,
                                a0.w * q.z - b0.w * q.w);
                b = make_float4(b0.x * p.x + a0.x * p.y, b0.y * p.z + a0.y * p.w, b0.z * q.x + a0.z * q.y,
                                b0.w * q.z + a0.w * q.w);
            }
            if (is_q) {
                const int l = row / sh.rows_per_lane, r = row % sh.rows_per_lane;
                const size_t dst = (static_cast<size_t>(l * sh.q_heads + which) * sh.rows_per_lane + r) * (sh.head / 4);
                store4(q_out, q_type, dst + i, a);
                store4(q_out, q_type, dst + half4 + i, b);
            } else {
                __half* dst = (is_v ? v_cache : k_cache) + slot * cache_stride + kv * sh.head;
                reinterpret_cast<uint2*>(dst)[i] = pack_half4(a);
                reinterpret_cast<uint2*>(dst)[half4 + i] = pack_half4(b);
            }
        }
}

}  // namespace
}  // namespace dllm

using namespace dllm;

DLLM_API int dllm_rope_table(void* stream, const int32_t* pos, int rows, int head, float theta, const float* factors,
                             float* table) {
    if (rows < 1 || head < 8 || head % 8 || head > 512) return BAD_SIZE;
    const int n = rows * (head / 2);
    table_kernel<<<(n + 255) / 256, 256, 0, static_cast<cudaStream_t>(stream)>>>(pos, rows, head / 2, theta, factors,
                                                                               reinterpret_cast<float2*>(table));
    return last_error();
}

DLLM_API int dllm_rope_kv(void* stream, const void* qkv, int qkv_type, int rows, int lanes, int q_heads, int kv_heads,
                          int head, int has_v, const float* q_norm, const float* k_norm, float eps, const float* table,
                          const int64_t* slots, void* q_out, int q_type, void* k_cache, void* v_cache,
                          int64_t cache_stride) {
    if (rows < 1 || lanes < 1 || rows % lanes || q_heads < 1 || kv_heads < 1 || head < 8 || head % 8 || head > 512 ||
        cache_stride % 4 || !is_float_type(qkv_type) || !is_float_type(q_type))
        return BAD_SIZE;
    const Shape sh{rows, rows / lanes, q_heads, kv_heads, head, has_v};
    const int blocks = (rows * (q_heads + 2 * kv_heads) + WARPS - 1) / WARPS;
    auto s = static_cast<cudaStream_t>(stream);
    auto* t = reinterpret_cast<const float2*>(table);
    if (head <= 256)
        rope_kernel<1><<<blocks, 32 * WARPS, 0, s>>>(qkv, qkv_type, sh, q_norm, k_norm, eps, t, slots, q_out, q_type,
                                                     static_cast<__half*>(k_cache), static_cast<__half*>(v_cache),
                                                     cache_stride);
    else
        rope_kernel<2><<<blocks, 32 * WARPS, 0, s>>>(qkv, qkv_type, sh, q_norm, k_norm, eps, t, slots, q_out, q_type,
                                                     static_cast<__half*>(k_cache), static_cast<__half*>(v_cache),
                                                     cache_stride);
    return last_error();
}
