// One block per row; a thread keeps its part of the row and of the weights in registers, loaded one reduction ahead, so
// every value is read and written once and few loads wait behind a barrier. All of it is bound by the latency of a few
// block reductions: hence as many threads as the row has groups of four.
#include "dllm_device.cuh"

namespace dllm {
namespace {

struct Sum2 {
    float a, b;
};

// Sum over the block of one or two values. `buf` is two rows of 32, used alternately (which = 0, 1, 0, ...), so that one
// barrier per reduction is enough.
__device__ __forceinline__ Sum2 block_sum(Sum2 v, Sum2 (*buf)[32], int which) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    v.a = warp_sum(v.a), v.b = warp_sum(v.b);
    if (lane == 0) buf[which][warp] = v;
    __syncthreads();
    v = lane < warps ? buf[which][lane] : Sum2{0.f, 0.f};
    return Sum2{warp_sum(v.a), warp_sum(v.b)};
}
__device__ __forceinline__ float block_sum(float v, Sum2 (*buf)[32], int which) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    v = warp_sum(v);
    if (lane == 0) buf[which][warp].a = v;
    __syncthreads();
    return warp_sum(lane < warps ? buf[which][lane].a : 0.f);
}

__device__ __forceinline__ float4 to_float4(float4 v) { return v; }
__device__ __forceinline__ float4 to_float4(uint2 v) { return unpack_half4(v); }

__device__ __forceinline__ float4 weight4(const float* w, int i) { return reinterpret_cast<const float4*>(w)[i]; }

// Sum of the parts of one group of four; the loads of a round are issued together, of f16 more at a time.
template <typename RAW, int ROUND>
__device__ __forceinline__ float4 sum_parts(const void* m, int parts, size_t at, int64_t stride) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int p = 0; p < parts; p += ROUND) {
        RAW raw[ROUND] = {};
#pragma unroll
        for (int j = 0; j < ROUND; j++)
            if (p + j < parts) raw[j] = reinterpret_cast<const RAW*>(m)[at + (p + j) * stride];
#pragma unroll
        for (int j = 0; j < ROUND; j++) sum = sum + to_float4(raw[j]);
    }
    return sum;
}

// Every kernel: NV groups of four per thread, group i of a thread at t + i * blockDim.x. Always behind an
// unroll pragma, which keeps the arrays in registers.
#define EACH_GROUP(i, g)              \
    for (int i = 0; i < NV; i++)      \
        if (const int g = threadIdx.x + i * blockDim.x; g < n4)

template <int NV, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS) rms_kernel(const void* __restrict__ x, int x_type,
                                                   const float* __restrict__ weight, float pre_scale, float eps,
                                                   void* out, int out_type, int n4) {
    __shared__ Sum2 buf[2][32];
    const size_t row = static_cast<size_t>(blockIdx.x) * n4;
    float4 v[NV], w[NV];
    float ss = 0.f;
#pragma unroll
    EACH_GROUP(i, g) {
        v[i] = load4(x, x_type, row + g) * pre_scale;
        w[i] = weight ? weight4(weight, g) : make_float4(1.f, 1.f, 1.f, 1.f);
        ss += dot4(v[i]);
    }
    const float inv = rsqrtf(block_sum(ss, buf, 0) / (4 * n4) + eps);
#pragma unroll
    EACH_GROUP(i, g) store4(out, out_type, row + g, v[i] * inv * w[i]);
}

template <int NV, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    input_kernel(const float* e, float e_scale, const float* __restrict__ sc, const float* __restrict__ sc_flag,
                 const int32_t* __restrict__ causal, const float* __restrict__ attn_norm, float eps, float* h, void* x1,
                 int x1_type, int n4) {
    __shared__ Sum2 buf[2][32];
    const size_t row = static_cast<size_t>(blockIdx.x) * n4;
    const float flag = sc ? (sc_flag ? sc_flag[blockIdx.x] : 1.f) : 0.f;
    const bool bare = causal && causal[blockIdx.x];
    float4 v[NV], w[NV];
    float ss = 0.f;
#pragma unroll
    EACH_GROUP(i, g) {
        v[i] = reinterpret_cast<const float4*>(e)[row + g] * e_scale;
        w[i] = weight4(attn_norm, g);
        // A row without a signal must not see what lies there: 0 * NaN.
        if (flag != 0.f) v[i] = v[i] + reinterpret_cast<const float4*>(sc)[row + g] * flag;
        ss += dot4(v[i]);
    }
    const float mean = block_sum(ss, buf, 0) / (4 * n4);
    // mean(rms(x)^2) follows from mean(x^2): no second reduction.
    const float first = bare ? 1.f : rsqrtf(mean + eps);
    const float second = rsqrtf(mean * first * first + eps);
#pragma unroll
    EACH_GROUP(i, g) {
        const float4 y = v[i] * first;
        reinterpret_cast<float4*>(h)[row + g] = y;
        store4(x1, x1_type, row + g, y * second * w[i]);
    }
}

template <int NV, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    attn_out_kernel(const float* h, const void* __restrict__ a, int a_type, const float* __restrict__ post,
                    const float* __restrict__ ffn_norm, const float* __restrict__ pre_2,
                    const float* __restrict__ router_scale, float router_factor, float eps, float* r, void* x, void* y,
                    int xy_type, float* zr, int n4) {
    __shared__ Sum2 buf[2][32];
    const size_t row = static_cast<size_t>(blockIdx.x) * n4;
    float4 v[NV], res[NV], w[NV], wx[NV], wy[NV], wz[NV];
    float ss = 0.f;
#pragma unroll
    EACH_GROUP(i, g) {
        w[i] = weight4(post, g);
        wx[i] = weight4(ffn_norm, g), wy[i] = weight4(pre_2, g), wz[i] = weight4(router_scale, g);
    }
    wait_for_inputs();
#pragma unroll
    EACH_GROUP(i, g) {
        v[i] = load4(a, a_type, row + g);
        res[i] = reinterpret_cast<const float4*>(h)[row + g];
        ss += dot4(v[i]);
    }
    const float inv_a = rsqrtf(block_sum(ss, buf, 0) / (4 * n4) + eps);
    ss = 0.f;
#pragma unroll
    EACH_GROUP(i, g) {
        res[i] = res[i] + v[i] * inv_a * w[i];
        reinterpret_cast<float4*>(r)[row + g] = res[i];
        ss += dot4(res[i]);
    }
    const float inv = rsqrtf(block_sum(ss, buf, 1) / (4 * n4) + eps);
#pragma unroll
    EACH_GROUP(i, g) {
        const float4 n = res[i] * inv;
        store4(x, xy_type, row + g, n * wx[i]);
        store4(y, xy_type, row + g, n * wy[i]);
        reinterpret_cast<float4*>(zr)[row + g] = n * wz[i] * router_factor;
    }
}

template <int NV, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    layer_out_kernel(const float* r, const void* __restrict__ d, int d_type, const void* __restrict__ m, int m_type,
                     int m_parts, int64_t m_row4, int64_t m_part4, const float* __restrict__ post_1,
                     const float* __restrict__ post_2, const float* __restrict__ post,
                     const float* __restrict__ scale_canvas, const float* __restrict__ scale_causal,
                     const int32_t* __restrict__ causal, const float* __restrict__ next_norm, float eps, float* h_next,
                     void* x_next, int x_type, int n4) {
    __shared__ Sum2 buf[2][32];
    const size_t row = static_cast<size_t>(blockIdx.x) * n4;
    const float s = causal && causal[blockIdx.x] ? *scale_causal : *scale_canvas;
    float4 a[NV], b[NV], res[NV], w1[NV], w2[NV];
    Sum2 two{0.f, 0.f};
#pragma unroll
    EACH_GROUP(i, g) {
        const size_t at = blockIdx.x * m_row4 + g;
        a[i] = load4(d, d_type, row + g);
        b[i] = m_type == DLLM_F16 ? sum_parts<uint2, 8>(m, m_parts, at, m_part4)
                                  : sum_parts<float4, 4>(m, m_parts, at, m_part4);
        res[i] = reinterpret_cast<const float4*>(r)[row + g];
        w1[i] = weight4(post_1, g), w2[i] = weight4(post_2, g);
        two.a += dot4(a[i]), two.b += dot4(b[i]);
    }
    two = block_sum(two, buf, 0);
    const float inv_a = rsqrtf(two.a / (4 * n4) + eps), inv_b = rsqrtf(two.b / (4 * n4) + eps);
    float ss = 0.f;
#pragma unroll
    EACH_GROUP(i, g) {
        a[i] = a[i] * inv_a * w1[i] + b[i] * inv_b * w2[i];
        ss += dot4(a[i]);
        w1[i] = weight4(post, g);
        if (x_next) w2[i] = weight4(next_norm, g);
    }
    const float inv = rsqrtf(block_sum(ss, buf, 1) / (4 * n4) + eps);
    ss = 0.f;
#pragma unroll
    EACH_GROUP(i, g) {
        res[i] = (res[i] + a[i] * inv * w1[i]) * s;
        if (h_next) reinterpret_cast<float4*>(h_next)[row + g] = res[i];
        ss += dot4(res[i]);
    }
    if (!x_next) return;
    const float inv_h = rsqrtf(block_sum(ss, buf, 0) / (4 * n4) + eps);
#pragma unroll
    EACH_GROUP(i, g) store4(x_next, x_type, row + g, res[i] * inv_h * w2[i]);
}

bool bad(int rows, int hidden) { return rows < 1 || hidden < 4 || hidden % 4 || hidden > 8192; }

int threads_for(int n4, int nv) { return ((n4 + nv - 1) / nv + 31) / 32 * 32; }

}  // namespace
}  // namespace dllm

using namespace dllm;

// Two blocks of up to 768 threads fit a multiprocessor (40 registers each), so 256 rows of 2816 run in one wave.
#define DLLM_LAUNCH(launch, kernel, ...)                                                                             \
    do {                                                                                                             \
        const int n4 = hidden / 4;                                                                                   \
        auto s = static_cast<cudaStream_t>(stream);                                                                  \
        return n4 <= 768 ? launch(kernel<1, 768, 2>, rows, threads_for(n4, 1), 0, s, __VA_ARGS__, n4)                \
                         : launch(kernel<4, 512, 1>, rows, threads_for(n4, 4), 0, s, __VA_ARGS__, n4);               \
    } while (0)

DLLM_API int dllm_rms_norm(void* stream, const void* x, int x_type, const float* weight, float pre_scale, float eps,
                           void* out, int out_type, int rows, int hidden) {
    if (bad(rows, hidden) || !is_float_type(x_type) || !is_float_type(out_type)) return BAD_SIZE;
    DLLM_LAUNCH(launch_plain, rms_kernel, x, x_type, weight, pre_scale, eps, out, out_type);
}

DLLM_API int dllm_norm_input(void* stream, const float* e, float e_scale, const float* sc, const float* sc_flag,
                             const int32_t* causal, const float* attn_norm, float eps, float* h, void* x1, int x1_type,
                             int rows, int hidden) {
    if (bad(rows, hidden) || !is_float_type(x1_type)) return BAD_SIZE;
    DLLM_LAUNCH(launch_plain, input_kernel, e, e_scale, sc, sc_flag, causal, attn_norm, eps, h, x1, x1_type);
}

DLLM_API int dllm_norm_attn_out(void* stream, const float* h, const void* a, int a_type,
                                const float* post_attention_norm, const float* ffn_norm, const float* pre_ffw_norm_2,
                                const float* router_scale, float eps, float* r, void* x, void* y, int xy_type,
                                float* zr, int rows, int hidden) {
    if (bad(rows, hidden) || !is_float_type(a_type) || !is_float_type(xy_type)) return BAD_SIZE;
    const float factor = 1.f / sqrtf(static_cast<float>(hidden));
    DLLM_LAUNCH(launch_chained, attn_out_kernel, h, a, a_type, post_attention_norm, ffn_norm, pre_ffw_norm_2, router_scale, factor, eps,
                r, x, y, xy_type, zr);
}

DLLM_API int dllm_norm_layer_out(void* stream, const float* r, const void* d, int d_type, const void* m, int m_type,
                                 int m_parts, int64_t m_row_stride, int64_t m_part_stride,
                                 const float* post_ffw_norm_1, const float* post_ffw_norm_2,
                                 const float* post_ffw_norm, const float* scale_canvas, const float* scale_causal,
                                 const int32_t* causal, const float* next_norm, float eps, float* h_next, void* x_next,
                                 int x_type, int rows, int hidden) {
    if (bad(rows, hidden) || !is_float_type(d_type) || !is_float_type(m_type) || !is_float_type(x_type) ||
        m_parts < 1 || m_row_stride % 4 || m_part_stride % 4)
        return BAD_SIZE;
    DLLM_LAUNCH(launch_plain, layer_out_kernel, r, d, d_type, m, m_type, m_parts, m_row_stride / 4, m_part_stride / 4,
                post_ffw_norm_1, post_ffw_norm_2, post_ffw_norm, scale_canvas, scale_causal, causal, next_norm, eps,
                h_next, x_next, x_type);
}
