// Small device helpers that several kernels share.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <utility>

#include "dllm_kernels.h"

namespace dllm {

constexpr unsigned FULL = 0xffffffffu;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, o));
    return v;
}

// Two ulp of error, flushes denormals: the only exponential that runs at the rate of the memory bus.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rcp_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// f16 has no room above 65504: an outlier is clamped, since an infinity would poison the whole row in the next matmul.
__device__ __forceinline__ __half to_half(float x) { return __float2half_rn(fminf(fmaxf(x, -65504.f), 65504.f)); }

__device__ __forceinline__ uint2 pack_half4(float4 v) {
    __half2 a = __halves2half2(to_half(v.x), to_half(v.y));
    __half2 b = __halves2half2(to_half(v.z), to_half(v.w));
    return make_uint2(*reinterpret_cast<unsigned*>(&a), *reinterpret_cast<unsigned*>(&b));
}

__device__ __forceinline__ float4 unpack_half4(uint2 u) {
    float2 a = __half22float2(*reinterpret_cast<__half2*>(&u.x));
    float2 b = __half22float2(*reinterpret_cast<__half2*>(&u.y));
    return make_float4(a.x, a.y, b.x, b.y);
}

// Four neighbours at element 4*i of an f32 or f16 array; the type is the same for a whole launch, so the branch is free.
__device__ __forceinline__ float4 load4(const void* p, int type, size_t i) {
    if (type == DLLM_F16) return unpack_half4(reinterpret_cast<const uint2*>(p)[i]);
    return reinterpret_cast<const float4*>(p)[i];
}

__device__ __forceinline__ void store4(void* p, int type, size_t i, float4 v) {
    if (type == DLLM_F16)
        reinterpret_cast<uint2*>(p)[i] = pack_half4(v);
    else
        reinterpret_cast<float4*>(p)[i] = v;
}

__device__ __forceinline__ float4 operator*(float4 a, float s) { return make_float4(a.x * s, a.y * s, a.z * s, a.w * s); }
__device__ __forceinline__ float4 operator*(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float dot4(float4 a) { return a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w; }

// float -> unsigned that sorts the same way; -0 counts as +0 so that equal floats have equal keys.
__device__ __forceinline__ unsigned sort_key(float x) {
    unsigned u = __float_as_uint(x + 0.f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Chained launches (compute capability 9.0 on; elsewhere ordinary ones): a chained kernel may start while the kernel in front
// of it in the stream still runs, so that its start costs nothing. Every thread block calls wait_for_inputs() before it
// touches what an earlier kernel writes or reads; loading weights may come before. The kernel in front must be the only
// one that the stream waits for: do not chain behind dllm_join.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

inline bool can_chain() {
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

template <class... P, class... A>
int launch_plain(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream, A&&... args) {
    kernel<<<grid, block, shared, stream>>>(std::forward<A>(args)...);
    return static_cast<int>(cudaGetLastError());
}

template <class... P, class... A>
int launch_chained(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream, A&&... args) {
    cudaLaunchAttribute chained;
    chained.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    chained.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &chained;
    config.numAttrs = can_chain() ? 1 : 0;
    return static_cast<int>(cudaLaunchKernelEx(&config, kernel, std::forward<A>(args)...));
}

inline int last_error() { return static_cast<int>(cudaGetLastError()); }
constexpr int BAD_SIZE = static_cast<int>(cudaErrorInvalidValue);

inline bool is_float_type(int t) { return t == DLLM_F32 || t == DLLM_F16; }

}  // namespace dllm
