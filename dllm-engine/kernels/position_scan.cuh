// How position_stats.cu and likeliest.cu cut a row of logits into pieces, and what the first leaves for the second.
#pragma once

#include "dllm_device.cuh"

namespace dllm {

constexpr int CHUNK = 4096;         // elements of a row that one warp reads
constexpr int BATCH = 512;          // elements that a warp has in flight: 16 per lane
constexpr int BATCHES = CHUNK / BATCH;
constexpr int GROUP = CHUNK / 32;   // elements that one lane reads
constexpr float LOWEST = -1e30f;    // below every logit that counts, and finite after scaling

inline int chunks_of(int vocab) { return (vocab + CHUNK - 1) / CHUNK; }

// z in units of log2, so that the exponential is one instruction. tanh(y) = 1 - 2 / (1 + exp(2y)): right at both ends
// (exp over- and underflows to inf and 0), absolute error about 2e-7.
template <bool CAP>
struct Scale {
    float a, b, c;
    __device__ Scale(float cap, float temp) {
        if (CAP) {
            a = cap * LOG2E / temp;
            b = -2.f * a;
            c = 2.f * LOG2E / cap;
        } else {
            a = LOG2E / temp;
            b = c = 0.f;
        }
    }
    // z(x) - m2
    __device__ __forceinline__ float diff(float x, float a_minus_m2, float m2) const {
        if (CAP) return fmaf(b, rcp_fast(1.f + exp2_fast(x * c)), a_minus_m2);
        return fmaf(x, a, -m2);
    }
    // The same for two at once with one reciprocal: the pass is bound by the special-function unit. The exponent is
    // bounded so that the product stays finite; beyond 2^60 tanh is 1 anyway.
    __device__ __forceinline__ void diff2(float x, float y, float a_minus_m2, float m2, float& dx, float& dy) const {
        if (CAP) {
            const float p = 1.f + exp2_fast(fminf(x * c, 60.f)), q = 1.f + exp2_fast(fminf(y * c, 60.f));
            const float r = rcp_fast(p * q) * b;
            dx = fmaf(r, q, a_minus_m2);
            dy = fmaf(r, p, a_minus_m2);
        } else {
            dx = fmaf(x, a, -m2);
            dy = fmaf(y, a, -m2);
        }
    }
    __device__ __forceinline__ float z(float x) const {
        if (CAP) return fmaf(b, rcp_fast(1.f + exp2_fast(x * c)), a);
        return x * a;
    }
};

// 16 bytes of a row as floats: 4 of f32 or 8 of f16.
template <typename T> struct Vec;
template <> struct Vec<float> {
    static constexpr int N = 4;
    static __device__ __forceinline__ void load(const float* p, float* v) {
        float4 q = *reinterpret_cast<const float4*>(p);
        v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
    }
};
template <> struct Vec<__half> {
    static constexpr int N = 8;
    static __device__ __forceinline__ void load(const __half* p, float* v) {
        uint4 q = *reinterpret_cast<const uint4*>(p);
        float4 a = unpack_half4(make_uint2(q.x, q.y)), b = unpack_half4(make_uint2(q.z, q.w));
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
};

// x: largest logit; s, sz: sums over the chunk of e = exp2(z - z(x)) and of (z - z(x)) * e, s is NaN if the chunk holds
// a non-finite logit; id: where x is.
struct __align__(16) Part {
    float x, s, sz;
    unsigned id;
};

__device__ __forceinline__ double warp_prefix(double v) {  // inclusive
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        double w = __shfl_up_sync(FULL, v, o);
        if (lane >= o) v += w;
    }
    return v;
}

struct Scratch {
    Part* part;
    float* gmax;
};

inline Scratch scratch_of(void* scratch, int rows, int vocab) {
    const size_t n = static_cast<size_t>(rows) * chunks_of(vocab);
    Part* part = static_cast<Part*>(scratch);
    return Scratch{part, reinterpret_cast<float*>(part + n)};
}

}  // namespace dllm
