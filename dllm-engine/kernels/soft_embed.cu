// A warp reads 256 columns of a table row, 8 per lane, in the order in which the block format stores them; `Cols` tells
// which columns those are. Block layouts are ggml's.
#include <cuda_bf16.h>

#include "dllm_device.cuh"

namespace dllm {
namespace {

constexpr int TOKEN_WARPS = 4;    // warps that share the tokens of one row and 256 columns
constexpr int MAX_TOKENS = 512;

__device__ __forceinline__ unsigned u16_at(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }
__device__ __forceinline__ float half_at(const uint8_t* p) {
    return __half2float(*reinterpret_cast<const __half*>(p));
}

// Byte e of `bytes` as a float plus 2^23, without a conversion instruction.
__device__ __forceinline__ float byte_float(unsigned bytes, int e) {
    return __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440 + e));
}
constexpr float BYTE_BIAS = 8388608.f;

// load: the lane's 8 values of the 256 columns from `first` on.  col(i): where value i belongs, relative to `first`.
template <int TYPE> struct Table;

template <> struct Table<DLLM_F32> {
    static __host__ __device__ size_t row_bytes(int hidden) { return hidden * 4ull; }
    static __device__ __forceinline__ int col(int lane, int i) { return lane * 8 + i; }
    static __device__ __forceinline__ void load(const uint8_t* row, int first, int lane, float* v) {
        const float4* p = reinterpret_cast<const float4*>(row) + (first + lane * 8) / 4;
        const float4 a = p[0], b = p[1];
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
};

template <> struct Table<DLLM_F16> {
    static __host__ __device__ size_t row_bytes(int hidden) { return hidden * 2ull; }
    static __device__ __forceinline__ int col(int lane, int i) { return lane * 8 + i; }
    static __device__ __forceinline__ void load(const uint8_t* row, int first, int lane, float* v) {
        const uint4 q = reinterpret_cast<const uint4*>(row)[(first + lane * 8) / 8];
        const float4 a = unpack_half4(make_uint2(q.x, q.y)), b = unpack_half4(make_uint2(q.z, q.w));
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
};

template <> struct Table<DLLM_BF16> {
    static __host__ __device__ size_t row_bytes(int hidden) { return hidden * 2ull; }
    static __device__ __forceinline__ int col(int lane, int i) { return lane * 8 + i; }
    static __device__ __forceinline__ void load(const uint8_t* row, int first, int lane, float* v) {
        const uint4 q = reinterpret_cast<const uint4*>(row)[(first + lane * 8) / 8];
        const unsigned w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[2 * i] = __uint_as_float(w[i] << 16);
            v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
        }
    }
};

// 32 values: f16 scale, 32 int8. 34 bytes, so only 2-byte loads are aligned.
template <> struct Table<DLLM_Q8_0> {
    static __host__ __device__ size_t row_bytes(int hidden) { return hidden / 32 * 34ull; }
    static __device__ __forceinline__ int col(int lane, int i) { return lane * 8 + i; }
    static __device__ __forceinline__ void load(const uint8_t* row, int first, int lane, float* v) {
        const uint8_t* b = row + static_cast<size_t>((first + lane * 8) / 32) * 34;
        const float d = half_at(b);
        const uint8_t* q = b + 2 + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < 2; i++) {  // q + 128 as an unsigned byte
            const unsigned w = (u16_at(q + 4 * i) | u16_at(q + 4 * i + 2) << 16) ^ 0x80808080u;
#pragma unroll
            for (int e = 0; e < 4; e++) v[4 * i + e] = d * (byte_float(w, e) - (BYTE_BIAS + 128.f));
        }
    }
};

// 256 values in 144 bytes: f16 d, f16 dmin, 12 bytes with eight 6-bit scales and mins, 128 bytes of nibbles. Bytes
// 32j .. 32j+31 hold columns 64j .. 64j+31 in the low and 64j+32 .. 64j+63 in the high nibbles.
template <> struct Table<DLLM_Q4_K> {
    static __host__ __device__ size_t row_bytes(int hidden) { return hidden / 256 * 144ull; }
    static __device__ __forceinline__ int col(int lane, int i) {
        return lane / 8 * 64 + i / 4 * 32 + lane % 8 * 4 + i % 4;
    }
    static __device__ __forceinline__ void load(const uint8_t* row, int first, int lane, float* v) {
        const uint8_t* b = row + static_cast<size_t>(first / 256) * 144;
        const float d = half_at(b), dmin = half_at(b + 2);
        const unsigned q = *reinterpret_cast<const unsigned*>(b + 16 + 4 * lane);
        const uint8_t* s = b + 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int j = lane / 8 * 2 + h;
            const int sc = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
            const int mn = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
            const float scale = d * sc, low = dmin * mn;
#pragma unroll
            for (int e = 0; e < 4; e++)
                v[4 * h + e] = scale * (byte_float(q >> 4 * h & 0x0f0f0f0fu, e) - BYTE_BIAS) - low;
        }
    }
};

// 256 values in 210 bytes: 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 int8 scales, f16 d. In each half n
// of 128 columns, nibble byte 64n+l serves columns l and l+64, byte 64n+32+l columns l+32 and l+96; byte 32n+l of the
// upper bits serves all four.
template <> struct Table<DLLM_Q6_K> {
    static __host__ __device__ size_t row_bytes(int hidden) { return hidden / 256 * 210ull; }
    static __device__ __forceinline__ int col(int lane, int i) {
        return lane / 16 * 128 + i / 2 * 32 + lane % 16 * 2 + i % 2;
    }
    static __device__ __forceinline__ void load(const uint8_t* row, int first, int lane, float* v) {
        const uint8_t* b = row + static_cast<size_t>(first / 256) * 210;
        const int n = lane / 16, l = lane % 16 * 2;
        const unsigned lo = u16_at(b + 64 * n + l) | u16_at(b + 64 * n + 32 + l) << 16;
        const unsigned hi = u16_at(b + 128 + 32 * n + l);
        const int8_t* s = reinterpret_cast<const int8_t*>(b) + 192 + 8 * n + l / 16;
        const float d = half_at(b + 208);
        // bytes: columns l, l+1, l+32, l+33 and then the same + 64
        const unsigned q[2] = {
            (lo & 0x0f0f0f0fu) | ((hi & 0x0303u) | (hi & 0x0c0cu) << 14) << 4,
            (lo >> 4 & 0x0f0f0f0fu) | ((hi >> 4 & 0x0303u) | (hi & 0xc0c0u) << 10) << 4};
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float scale = d * s[2 * c];
#pragma unroll
            for (int e = 0; e < 2; e++)
                v[2 * c + e] = scale * (byte_float(q[c >> 1], 2 * (c & 1) + e) - (BYTE_BIAS + 32.f));
        }
    }
};

// grid: (ceil(hidden / 1024), rows), 4 warps of 256 columns each
template <int TYPE>
__global__ void __launch_bounds__(128) embed_kernel(const uint8_t* __restrict__ table, int vocab, int hidden,
                                                    const int32_t* __restrict__ ids, float scale, float* out) {
    const int row = blockIdx.y, lane = threadIdx.x & 31, first = (blockIdx.x * 4 + (threadIdx.x >> 5)) * 256;
    if (first + Table<TYPE>::col(lane, 0) >= hidden) return;
    const int id = ids[row];
    float v[8];
    if (id >= 0 && id < vocab) {
        Table<TYPE>::load(table + id * Table<TYPE>::row_bytes(hidden), first, lane, v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = __int_as_float(0x7fffffff);
    }
    float* o = out + static_cast<size_t>(row) * hidden + first;
#pragma unroll
    for (int i = 0; i < 8; i += 2)
        *reinterpret_cast<float2*>(o + Table<TYPE>::col(lane, i)) = make_float2(scale * v[i], scale * v[i + 1]);
}

// grid: (ceil(hidden / 256), rows). Warp w takes tokens w, w+4, ...; the four sums are added in order.
template <int TYPE>
__global__ void __launch_bounds__(32 * TOKEN_WARPS)
    soft_kernel(const uint8_t* __restrict__ table, int vocab, int hidden, const int32_t* __restrict__ ids,
                const float* __restrict__ weights, int k, float scale, float* out) {
    constexpr int AHEAD = 4;  // tokens of a warp in flight
    __shared__ float sums[TOKEN_WARPS][256], w_of[MAX_TOKENS];
    __shared__ int id_of[MAX_TOKENS], used;
    const int row = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = blockIdx.x * 256;
    const bool in = first + Table<TYPE>::col(lane, 0) < hidden;
    const size_t bytes = Table<TYPE>::row_bytes(hidden);
    ids += static_cast<size_t>(row) * k;
    weights += static_cast<size_t>(row) * k;

    // The list is filled up with weight 0 to whole rounds, so that the loop has no branch and its loads can run ahead;
    // a tail of zero weights is cut off.
    int mine = 0;
    const int room = (k + TOKEN_WARPS * AHEAD - 1) / (TOKEN_WARPS * AHEAD) * (TOKEN_WARPS * AHEAD);
    for (int j = threadIdx.x; j < room; j += 32 * TOKEN_WARPS) {
        const float w = j < k ? weights[j] : 0.f;
        const int id = j < k ? ids[j] : 0;
        const bool ok = id >= 0 && id < vocab;
        id_of[j] = ok ? id : 0;
        w_of[j] = ok || w == 0.f ? w : __int_as_float(0x7fffffff);
        if (w != 0.f) mine = j + 1;
    }
    if (threadIdx.x == 0) used = 0;
    __syncthreads();
    mine = __reduce_max_sync(FULL, mine);
    if (lane == 0) atomicMax(&used, mine);
    __syncthreads();

    float acc[8] = {};
    if (in)
        for (int j0 = 0; j0 < used; j0 += TOKEN_WARPS * AHEAD)
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                const int j = j0 + a * TOKEN_WARPS + warp;
                float v[8];
                Table<TYPE>::load(table + id_of[j] * bytes, first, lane, v);
                const float w = w_of[j];
#pragma unroll
                for (int i = 0; i < 8; i++) acc[i] = fmaf(w, v[i], acc[i]);
            }
#pragma unroll
    for (int i = 0; i < 8; i++) sums[warp][Table<TYPE>::col(lane, i)] = acc[i];
    __syncthreads();
    const int c = threadIdx.x * 2;
    if (first + c >= hidden) return;
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int w = 0; w < TOKEN_WARPS; w++) a += sums[w][c], b += sums[w][c + 1];
    *reinterpret_cast<float2*>(out + static_cast<size_t>(row) * hidden + first + c) = make_float2(scale * a, scale * b);
}

template <int TYPE>
int run(cudaStream_t s, const void* table, int vocab, int hidden, const int32_t* ids, const float* weights, int rows,
        int k, float scale, float* out) {
    const uint8_t* t = static_cast<const uint8_t*>(table);
    if (weights)
        soft_kernel<TYPE><<<dim3((hidden + 255) / 256, rows), 32 * TOKEN_WARPS, 0, s>>>(t, vocab, hidden, ids, weights, k,
                                                                                  scale, out);
    else
        embed_kernel<TYPE><<<dim3((hidden + 1023) / 1024, rows), 128, 0, s>>>(t, vocab, hidden, ids, scale, out);
    return last_error();
}

int run_type(void* stream, const void* table, int table_type, int vocab, int hidden, const int32_t* ids,
             const float* weights, int rows, int k, float scale, float* out) {
    if (rows < 1 || rows > 65535 || k < 1 || k > MAX_TOKENS || hidden < 8 || hidden % 8) return BAD_SIZE;
    auto s = static_cast<cudaStream_t>(stream);
    switch (table_type) {
        case DLLM_F32: return run<DLLM_F32>(s, table, vocab, hidden, ids, weights, rows, k, scale, out);
        case DLLM_F16: return run<DLLM_F16>(s, table, vocab, hidden, ids, weights, rows, k, scale, out);
        case DLLM_BF16: return run<DLLM_BF16>(s, table, vocab, hidden, ids, weights, rows, k, scale, out);
        case DLLM_Q8_0:
            return hidden % 32 ? BAD_SIZE : run<DLLM_Q8_0>(s, table, vocab, hidden, ids, weights, rows, k, scale, out);
        case DLLM_Q4_K:
            return hidden % 256 ? BAD_SIZE : run<DLLM_Q4_K>(s, table, vocab, hidden, ids, weights, rows, k, scale, out);
        case DLLM_Q6_K:
            return hidden % 256 ? BAD_SIZE : run<DLLM_Q6_K>(s, table, vocab, hidden, ids, weights, rows, k, scale, out);
        default: return BAD_SIZE;
    }
}

}  // namespace
}  // namespace dllm

using namespace dllm;

DLLM_API int dllm_embed_rows(void* stream, const void* table, int table_type, int vocab, int hidden,
                             const int32_t* ids, int rows, float scale, float* out) {
    return run_type(stream, table, table_type, vocab, hidden, ids, nullptr, rows, 1, scale, out);
}

DLLM_API int dllm_soft_embed(void* stream, const void* table, int table_type, int vocab, int hidden,
                             const int32_t* ids, const float* weights, int rows, int k, float scale, float* out) {
    if (!weights) return BAD_SIZE;
    return run_type(stream, table, table_type, vocab, hidden, ids, weights, rows, k, scale, out);
}
