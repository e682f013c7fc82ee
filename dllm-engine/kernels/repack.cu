// ggml blocks -> the layout of quant_blocks.cuh, on the device, a slice of rows at a time.
#include "quant_blocks.cuh"
#include "quant_mm.h"

#include <cuda_bf16.h>

namespace dllm {
namespace {

__device__ __forceinline__ float half_at(const uint8_t* p) {  // blocks are only 2-byte aligned
    return __half2float(*reinterpret_cast<const __half*>(p));
}

// code(row, i): the integer code of column i. scales(row, i, s, o): value = s * code + o around column i.
template <int TYPE> struct Block;

template <> struct Block<T_Q4_0> {
    static constexpr int BYTES = 18, COLUMNS = 32;
    static __device__ int code(const uint8_t* b, int i) { return i < 16 ? b[2 + i] & 15 : b[2 + i - 16] >> 4; }
    static __device__ void scales(const uint8_t* b, int, float& s, float& o) { s = half_at(b); o = -8.0f * s; }
};
template <> struct Block<T_Q4_1> {
    static constexpr int BYTES = 20, COLUMNS = 32;
    static __device__ int code(const uint8_t* b, int i) { return i < 16 ? b[4 + i] & 15 : b[4 + i - 16] >> 4; }
    static __device__ void scales(const uint8_t* b, int, float& s, float& o) { s = half_at(b); o = half_at(b + 2); }
};
template <> struct Block<T_Q5_0> {
    static constexpr int BYTES = 22, COLUMNS = 32;
    static __device__ int code(const uint8_t* b, int i) {
        const int low = i < 16 ? b[6 + i] & 15 : b[6 + i - 16] >> 4;
        return low | ((b[2 + i / 8] >> (i % 8)) & 1) << 4;
    }
    static __device__ void scales(const uint8_t* b, int, float& s, float& o) { s = half_at(b); o = -16.0f * s; }
};
template <> struct Block<T_Q5_1> {
    static constexpr int BYTES = 24, COLUMNS = 32;
    static __device__ int code(const uint8_t* b, int i) {
        const int low = i < 16 ? b[8 + i] & 15 : b[8 + i - 16] >> 4;
        return low | ((b[4 + i / 8] >> (i % 8)) & 1) << 4;
    }
    static __device__ void scales(const uint8_t* b, int, float& s, float& o) { s = half_at(b); o = half_at(b + 2); }
};
template <> struct Block<T_Q8_0> {
    static constexpr int BYTES = 34, COLUMNS = 32;
    static __device__ int code(const uint8_t* b, int i) { return (int)(int8_t)b[2 + i] + 128; }
    static __device__ void scales(const uint8_t* b, int, float& s, float& o) { s = half_at(b); o = -128.0f * s; }
};

// The 6-bit scales and minima of the 4- and 5-bit K types: 8 + 8 of them in 12 bytes.
__device__ __forceinline__ void k_scales(const uint8_t* b, int i, float& s, float& o) {
    const uint8_t* q = b + 4;
    const int j = i / 32;
    int sc, mn;
    if (j < 4) {
        sc = q[j] & 63; mn = q[j + 4] & 63;
    } else {
        sc = (q[j + 4] & 15) | (q[j - 4] >> 6) << 4;
        mn = (q[j + 4] >> 4) | (q[j] >> 6) << 4;
    }
    s = half_at(b) * sc; o = -half_at(b + 2) * mn;
}
template <> struct Block<T_Q4_K> {
    static constexpr int BYTES = 144, COLUMNS = 256;
    static __device__ int code(const uint8_t* b, int i) { return (b[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4)) & 15; }
    static __device__ void scales(const uint8_t* b, int i, float& s, float& o) { k_scales(b, i, s, o); }
};
template <> struct Block<T_Q5_K> {
    static constexpr int BYTES = 176, COLUMNS = 256;
    static __device__ int code(const uint8_t* b, int i) {
        const int low = (b[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4)) & 15;
        return low | ((b[16 + i % 32] >> (i / 32)) & 1) << 4;
    }
    static __device__ void scales(const uint8_t* b, int i, float& s, float& o) { k_scales(b, i, s, o); }
};
template <> struct Block<T_Q6_K> {
    static constexpr int BYTES = 210, COLUMNS = 256;
    static __device__ int code(const uint8_t* b, int i) {
        const int half = i / 128, part = i % 128 / 32, l = i % 32;
        const int low = (b[half * 64 + part % 2 * 32 + l] >> (part / 2 * 4)) & 15;
        return low | ((b[128 + half * 32 + l] >> (2 * part)) & 3) << 4;
    }
    static __device__ void scales(const uint8_t* b, int i, float& s, float& o) {
        s = half_at(b + 208) * (int)(int8_t)b[192 + i / 16]; o = -32.0f * s;
    }
};
template <> struct Block<T_F16> { static constexpr int BYTES = 2, COLUMNS = 1; };
template <> struct Block<T_BF16> { static constexpr int BYTES = 2, COLUMNS = 1; };

__device__ __forceinline__ float clamp_half(float x) { return fminf(fmaxf(x, -65504.0f), 65504.0f); }

// One warp per unit: lane l builds its own words; the lanes with t = 0 .. 3 share the scales of rows g and g + 8.
// With src2 rows 0..7 of a tile come from src, rows 8..15 from src2.
template <int TYPE, class L>
__global__ void repack_kernel(const uint8_t* __restrict__ src, const uint8_t* __restrict__ src2, int64_t rows, int64_t k,
                              uint8_t* __restrict__ dst, int64_t tile0) {
    using B = Block<TYPE>;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int64_t chunks = k / 64, row_bytes = k / B::COLUMNS * B::BYTES;
    const int64_t unit = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int64_t src_tile = unit / chunks, chunk = unit % chunks;
    const int tile_rows = src2 ? 8 : 16;
    if (src_tile * tile_rows >= rows) return;
    const int64_t tile = tile0 + src_tile;
    uint8_t* out = dst + ((tile / BLOCK_TILES * chunks + chunk) * BLOCK_TILES + tile % BLOCK_TILES) * L::UNIT;

    const uint8_t* row[2];
    bool valid[2];
    for (int h = 0; h < 2; ++h) {
        const int64_t r = src_tile * tile_rows + g + (src2 ? 0 : 8 * h);
        valid[h] = r < rows;
        row[h] = (src2 && h == 1 ? src2 : src) + (valid[h] ? r : 0) * row_bytes;
    }
    auto column = [&](int j, int p, int e) { return (int)chunk * 64 + j * 16 + 2 * t + (p / 2) * 8 + e; };

    if constexpr (L::BITS == 16) {
        for (int j = 0; j < 4; ++j)
            for (int p = 0; p < 4; ++p) {
                uint32_t w = 0;
                for (int e = 0; e < 2; ++e) {
                    const uint8_t* at = row[p % 2] + column(j, p, e) * 2;
                    float v = 0.0f;
                    if (valid[p % 2])
                        v = TYPE == T_BF16 ? __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(at)) : half_at(at);
                    w |= (uint32_t)__half_as_ushort(__float2half_rn(clamp_half(v * WEIGHT_SCALE))) << (16 * e);
                }
                *reinterpret_cast<uint32_t*>(out + j * 512 + lane * 16 + p * 4) = w;
            }
        return;
    } else {
        uint32_t code[L::CODE_WORDS] = {}, high[2] = {};
        for (int j = 0; j < 4; ++j)
            for (int p = 0; p < 4; ++p)
                for (int e = 0; e < 2; ++e) {
                    const int c = column(j, p, e);
                    const uint32_t q = B::code(row[p % 2] + c / B::COLUMNS * B::BYTES, c % B::COLUMNS);
                    if (L::BITS == 8) {
                        code[2 * j + p / 2] |= q << (p % 2 * 16 + e * 8);
                    } else {
                        code[j] |= (q & 15) << (4 * p + 16 * e);
                        if (L::BITS == 5) {
                            const int i = 2 * j + p / 2, b = i < 4 ? i : i + 4;
                            high[0] |= (q >> 4) << (b + 4 * (p % 2) + 16 * e);
                        }
                        if (L::BITS == 6) {
                            const int i = 2 * (j % 2) + p / 2, b = (i & 1) * 2 + (i >> 1) * 8;
                            high[j / 2] |= (q >> 4) << (b + 4 * (p % 2) + 16 * e);
                        }
                    }
                }
        for (int i = 0; i < L::CODE_WORDS; ++i)
            *reinterpret_cast<uint32_t*>(out + i / 4 * 512 + lane * 16 + i % 4 * 4) = code[i];
        for (int i = 0; i < L::HIGH_WORDS; ++i)
            *reinterpret_cast<uint32_t*>(out + L::HIGH_AT + lane * L::HIGH_WORDS * 4 + i * 4) = high[i];

        // lane t writes the scale of columns 16 t of the chunk (groups of 32: only even t), for both rows
        for (int h = 0; h < 2; ++h) {
            const int c = (int)chunk * 64 + 16 * t;
            float s, o;
            B::scales(row[h] + c / B::COLUMNS * B::BYTES, c % B::COLUMNS, s, o);
            o += L::CENTRE * s;  // 0 for the types without offset
            if (!valid[h]) s = o = 0.0f;
            const uint16_t sh = __half_as_ushort(__float2half_rn(clamp_half(s * WEIGHT_SCALE)));
            const uint16_t oh = __half_as_ushort(__float2half_rn(clamp_half(o * WEIGHT_SCALE)));
            uint8_t* at = out + L::SCALE_AT + g * L::SCALE_WORDS * 4;
            if (L::OFFSET) {
                if (t % 2 == 0) *reinterpret_cast<uint32_t*>(at + h * 8 + t / 2 * 4) = sh | (uint32_t)oh << 16;
            } else if (L::GROUP == 16) {
                *reinterpret_cast<uint16_t*>(at + h * 8 + t * 2) = sh;
            } else if (t % 2 == 0) {
                *reinterpret_cast<uint16_t*>(at + h * 4 + t / 2 * 2) = sh;
            }
        }
    }
}

template <int TYPE, class L>
cudaError_t launch(cudaStream_t stream, const void* src, const void* src2, int64_t rows, int64_t k, void* dst,
                   int64_t tile0) {
    const int64_t tile_rows = src2 ? 8 : 16, units = (rows + tile_rows - 1) / tile_rows * (k / 64);
    repack_kernel<TYPE, L><<<(unsigned)((units + 7) / 8), 256, 0, stream>>>(
        static_cast<const uint8_t*>(src), static_cast<const uint8_t*>(src2), rows, k, static_cast<uint8_t*>(dst), tile0);
    return cudaGetLastError();
}

int columns_of(int type) { return type == T_Q4_K || type == T_Q5_K || type == T_Q6_K ? 256 : 64; }

}  // namespace
}  // namespace dllm

namespace dllm {
namespace {

// One thread per column pair of a row.
template <int TYPE>
__global__ void dequant_kernel(const uint8_t* __restrict__ src, int64_t pairs, int64_t k, __half2* __restrict__ dst) {
    using B = Block<TYPE>;
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    float v[2];
    const int64_t at = 2 * i;
    const uint8_t* b = src + at / B::COLUMNS * B::BYTES;
    if constexpr (B::COLUMNS == 1) {
        for (int e = 0; e < 2; ++e)
            v[e] = TYPE == T_BF16 ? __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(b + 2 * e)) : half_at(b + 2 * e);
    } else {
        const int c = (int)(at % B::COLUMNS);
        float s, o;
        B::scales(b, c, s, o);
        for (int e = 0; e < 2; ++e) v[e] = s * B::code(b, c + e) + o;
    }
    dst[i] = __halves2half2(__float2half_rn(clamp_half(v[0])), __float2half_rn(clamp_half(v[1])));
}

template <int TYPE> cudaError_t dequant(cudaStream_t s, const void* src, int64_t rows, int64_t k, void* dst) {
    const int64_t pairs = rows * k / 2;
    dequant_kernel<TYPE><<<(unsigned)((pairs + 255) / 256), 256, 0, s>>>(static_cast<const uint8_t*>(src), pairs, k,
                                                                       static_cast<__half2*>(dst));
    return cudaGetLastError();
}

}  // namespace
}  // namespace dllm

using namespace dllm;

DLLM_API int dllm_dequant_f16(void* stream, int type, const void* src, int64_t rows, int64_t k, void* dst) {
    if (dllm_repack_bytes(type, rows, k) == 0) return cudaErrorInvalidValue;
    const cudaStream_t s = static_cast<cudaStream_t>(stream);
    switch (type) {
    case T_Q4_0: return dequant<T_Q4_0>(s, src, rows, k, dst);
    case T_Q4_1: return dequant<T_Q4_1>(s, src, rows, k, dst);
    case T_Q5_0: return dequant<T_Q5_0>(s, src, rows, k, dst);
    case T_Q5_1: return dequant<T_Q5_1>(s, src, rows, k, dst);
    case T_Q8_0: return dequant<T_Q8_0>(s, src, rows, k, dst);
    case T_Q4_K: return dequant<T_Q4_K>(s, src, rows, k, dst);
    case T_Q5_K: return dequant<T_Q5_K>(s, src, rows, k, dst);
    case T_Q6_K: return dequant<T_Q6_K>(s, src, rows, k, dst);
    case T_F16: return dequant<T_F16>(s, src, rows, k, dst);
    case T_BF16: return dequant<T_BF16>(s, src, rows, k, dst);
    default: return cudaErrorInvalidValue;
    }
}

DLLM_API int64_t dllm_file_row_bytes(int type, int64_t k) {
    auto bytes = [&](auto block) -> int64_t { return k / decltype(block)::COLUMNS * decltype(block)::BYTES; };
    switch (type) {
    case T_Q4_0: return bytes(Block<T_Q4_0>{});
    case T_Q4_1: return bytes(Block<T_Q4_1>{});
    case T_Q5_0: return bytes(Block<T_Q5_0>{});
    case T_Q5_1: return bytes(Block<T_Q5_1>{});
    case T_Q8_0: return bytes(Block<T_Q8_0>{});
    case T_Q4_K: return bytes(Block<T_Q4_K>{});
    case T_Q5_K: return bytes(Block<T_Q5_K>{});
    case T_Q6_K: return bytes(Block<T_Q6_K>{});
    case T_F16: return bytes(Block<T_F16>{});
    case T_BF16: return bytes(Block<T_BF16>{});
    default: return 0;
    }
}

DLLM_API int64_t dllm_repack_bytes(int type, int64_t rows, int64_t k) {
    if (rows <= 0 || k <= 0 || k % columns_of(type) != 0) return 0;
    const int64_t unit = with_layout(type, (int64_t)0, [](auto l) -> int64_t { return decltype(l)::UNIT; });
    return (rows + 16 * BLOCK_TILES - 1) / (16 * BLOCK_TILES) * BLOCK_TILES * (k / 64) * unit;
}

DLLM_API int dllm_repack(void* stream, int type, const void* src, const void* src2, int64_t rows, int64_t k, void* dst,
                         int64_t tile0) {
    if (dllm_repack_bytes(type, rows, k) == 0 || tile0 < 0) return cudaErrorInvalidValue;
    const cudaStream_t s = static_cast<cudaStream_t>(stream);
    switch (type) {
    case T_Q4_0: return launch<T_Q4_0, L4>(s, src, src2, rows, k, dst, tile0);
    case T_Q4_1: return launch<T_Q4_1, L4o>(s, src, src2, rows, k, dst, tile0);
    case T_Q5_0: return launch<T_Q5_0, L5>(s, src, src2, rows, k, dst, tile0);
    case T_Q5_1: return launch<T_Q5_1, L5o>(s, src, src2, rows, k, dst, tile0);
    case T_Q8_0: return launch<T_Q8_0, L8>(s, src, src2, rows, k, dst, tile0);
    case T_Q4_K: return launch<T_Q4_K, L4o>(s, src, src2, rows, k, dst, tile0);
    case T_Q5_K: return launch<T_Q5_K, L5o>(s, src, src2, rows, k, dst, tile0);
    case T_Q6_K: return launch<T_Q6_K, L6>(s, src, src2, rows, k, dst, tile0);
    case T_F16: return launch<T_F16, L16>(s, src, src2, rows, k, dst, tile0);
    case T_BF16: return launch<T_BF16, L16>(s, src, src2, rows, k, dst, tile0);
    default: return cudaErrorInvalidValue;
    }
}
