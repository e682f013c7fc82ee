// The repacked weight layout and its decoding in registers.
//
// A matrix [n][k] is cut into tiles of 16 rows and chunks of 64 columns. One (tile, chunk) is a unit, stored in the
// order the tensor cores want it (A operand of mma.m16n8k16), so that decoding needs no shuffles:
//
//   unit = codes [32 lanes] | high bits [32 lanes] | scales
//
// Eight tiles (128 rows) form a block; the units lie as [block][chunk][tile in block], so the weights of 128 rows are
// one sequential stream along k.
//
// Lane l = 4 g + t owns, in k-step j (16 columns) of the chunk, the four pairs
//   p0 = row g, columns 2t, 2t+1      p1 = row g+8, same columns
//   p2 = row g, columns 2t+8, 2t+9    p3 = row g+8, same columns
// which are the four A registers of the instruction.
//
// codes: 4..6 bit types keep the low 4 bits of a k-step in one word: bits 4 p .. 4 p + 3 of the low half word hold the
//        first element of pair p, the same bits of the high half word the second. The lane's four words of a chunk
//        are 16 bytes. 8-bit types: two words per k-step, bytes (p0 p0 p1 p1), (p2 p2 p3 p3), code = value + 128,
//        stored as two 16-byte planes. 16-bit types: the four registers as halves, one plane per k-step.
// high bits: 5-bit types: one word per lane; the bits of (j, p) lie at base b and b + 16, b = b(2 j + p / 2) + 4 (p % 2)
//        with b(i) = i for i < 4, else i + 4. 6-bit types: two words, word j / 2, two bits at b and b + 16 with
//        b = {0, 2, 8, 10}[2 (j % 2) + p / 2] + 4 (p % 2).
// scales: value = scale * (code - centre) + offset, in half, all multiplied by 2^6 so that small scales stay normal.
//        With offset: per g (scale, offset) for (g, columns 0..31), (g, 32..63), (g+8, 0..31), (g+8, 32..63).
//        Without, groups of 32: per g four scales in the same order; groups of 16: per g 4 scales of row g, 4 of g+8.
// The offset belongs to the centre of the code range, not to code 0: it is small then, and rounding it to half costs
// less than half the error.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

namespace dllm {

enum GgmlType { T_F16 = 1, T_Q4_0 = 2, T_Q4_1 = 3, T_Q5_0 = 6, T_Q5_1 = 7, T_Q8_0 = 8, T_Q4_K = 12, T_Q5_K = 13,
                T_Q6_K = 14, T_BF16 = 30 };

constexpr int BLOCK_TILES = 8;

// Stored weights are 2^6 times the true ones; every epilogue multiplies by 2^-6.
constexpr float WEIGHT_SCALE = 64.0f;

// A layout: bits per code, offsets or not, columns per scale. Several ggml types share one.
template <int BITS_, bool OFFSET_, int GROUP_> struct Layout {
    static constexpr int BITS = BITS_;
    static constexpr bool OFFSET = OFFSET_;
    static constexpr int GROUP = GROUP_;
    static constexpr int CENTRE = BITS < 16 ? 1 << (BITS - 1) : 0;
    static constexpr int CODE_WORDS = BITS >= 16 ? 16 : BITS >= 8 ? 8 : 4;  // per lane and unit
    static constexpr int HIGH_WORDS = BITS == 5 ? 1 : BITS == 6 ? 2 : 0;
    static constexpr int SCALE_WORDS = BITS == 16 ? 0 : (OFFSET || GROUP == 16) ? 4 : 2;  // per g
    static constexpr int HIGH_AT = CODE_WORDS * 128;
    static constexpr int SCALE_AT = HIGH_AT + HIGH_WORDS * 128;
    static constexpr int UNIT = SCALE_AT + SCALE_WORDS * 32;
};

using L4 = Layout<4, false, 32>;
using L4o = Layout<4, true, 32>;
using L5 = Layout<5, false, 32>;
using L5o = Layout<5, true, 32>;
using L6 = Layout<6, false, 16>;
using L8 = Layout<8, false, 32>;
using L16 = Layout<16, false, 32>;

// Calls f with the layout of a ggml type as its argument; `none` for types that have none.
template <class F, class R> static inline R with_layout(int type, R none, F f) {
    switch (type) {
    case T_Q4_1: case T_Q4_K: return f(L4o{});
    case T_Q5_0: return f(L5{});
    case T_Q6_K: return f(L6{});
    case T_Q8_0: return f(L8{});
    case T_Q4_0: return f(L4{});
    case T_Q5_1: case T_Q5_K: return f(L5o{});
    case T_F16: case T_BF16: return f(L16{});
    default: return none;
    }
}

#ifdef __CUDACC__
__device__ __forceinline__ __half2 as_h2(uint32_t x) { return *reinterpret_cast<__half2*>(&x); }
__device__ __forceinline__ uint32_t as_u32(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }
__device__ __forceinline__ uint32_t rep16(int bits) { return (uint32_t)bits * 0x10001u; }

// (a & b) | c in one instruction
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// One unit in registers. load() reads it from shared memory, pairs<J>() decodes k-step J.
template <class L> struct Unit {
    uint32_t code[L::CODE_WORDS];
    uint32_t high[L::HIGH_WORDS > 0 ? L::HIGH_WORDS : 1];
    uint32_t scale[L::SCALE_WORDS > 0 ? L::SCALE_WORDS : 1];

    // w, h, s: the lane's places of its codes, high bits and scales
    __device__ __forceinline__ void load(const unsigned char* w, const unsigned char* h, const unsigned char* s) {
#pragma unroll
        for (int i = 0; i < L::CODE_WORDS / 4; ++i) {
            const uint4 v = *reinterpret_cast<const uint4*>(w + i * 512);
            code[4 * i] = v.x; code[4 * i + 1] = v.y; code[4 * i + 2] = v.z; code[4 * i + 3] = v.w;
        }
        if constexpr (L::HIGH_WORDS == 1) high[0] = *reinterpret_cast<const uint32_t*>(h);
        if constexpr (L::HIGH_WORDS == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(h);
            high[0] = v.x; high[1] = v.y;
        }
        if constexpr (L::SCALE_WORDS == 4) {
            const uint4 v = *reinterpret_cast<const uint4*>(s);
            scale[0] = v.x; scale[1] = v.y; scale[2] = v.z; scale[3] = v.w;
        }
        if constexpr (L::SCALE_WORDS == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(s);
            scale[0] = v.x; scale[1] = v.y;
        }
    }

    // codes of one k-step as exact halves, minus the centre
    template <int J> __device__ __forceinline__ void centred(__half2 (&v)[4]) const {
        if constexpr (L::BITS == 8) {
            // 0x64uu is 1024 + u in half
            const __half2 c = as_h2(rep16(0x6480));  // 1024 + 128
            v[0] = __hsub2(as_h2(__byte_perm(code[2 * J], 0x64646464u, 0x4140)), c);
            v[1] = __hsub2(as_h2(__byte_perm(code[2 * J], 0x64646464u, 0x4342)), c);
            v[2] = __hsub2(as_h2(__byte_perm(code[2 * J + 1], 0x64646464u, 0x4140)), c);
            v[3] = __hsub2(as_h2(__byte_perm(code[2 * J + 1], 0x64646464u, 0x4342)), c);
        } else {
            const uint32_t magic = rep16(0x6400), w = code[J], w8 = w >> 8;
            uint32_t x0 = and_or(w, rep16(0x000f), magic), x1 = and_or(w, rep16(0x00f0), magic);
            uint32_t x2 = and_or(w8, rep16(0x000f), magic), x3 = and_or(w8, rep16(0x00f0), magic);
            if constexpr (L::BITS == 5) {
                constexpr int i0 = 2 * J, i1 = 2 * J + 1;
                constexpr int b0 = i0 < 4 ? i0 : i0 + 4, b1 = i1 < 4 ? i1 : i1 + 4;
                const uint32_t h0 = b0 <= 4 ? high[0] << (4 - b0 & 31) : high[0] >> (b0 - 4 & 31);
                const uint32_t h1 = b1 <= 4 ? high[0] << (4 - b1 & 31) : high[0] >> (b1 - 4 & 31);
                x0 = and_or(h0, rep16(0x0010), x0); x1 = and_or(h0, rep16(0x0100), x1);
                x2 = and_or(h1, rep16(0x0010), x2); x3 = and_or(h1, rep16(0x0100), x3);
            }
            if constexpr (L::BITS == 6) {
                const uint32_t h = high[J / 2];
                const uint32_t h0 = J % 2 == 0 ? h << 4 : h >> 4, h1 = J % 2 == 0 ? h << 2 : h >> 6;
                x0 = and_or(h0, rep16(0x0030), x0); x1 = and_or(h0, rep16(0x0300), x1);
                x2 = and_or(h1, rep16(0x0030), x2); x3 = and_or(h1, rep16(0x0300), x3);
            }
            // x0, x2 are 1024 + q, x1, x3 are 1024 + 16 q; both subtractions are exact
            const __half2 c = __float2half2_rn(1024.0f + L::CENTRE), sixteenth = __float2half2_rn(0.0625f);
            const __half2 c16 = __float2half2_rn(-(64.0f + L::CENTRE));
            v[0] = __hsub2(as_h2(x0), c); v[1] = __hfma2(as_h2(x1), sixteenth, c16);
            v[2] = __hsub2(as_h2(x2), c); v[3] = __hfma2(as_h2(x3), sixteenth, c16);
        }
    }

    template <int J> __device__ __forceinline__ void pairs(uint32_t (&a)[4]) const {
        if constexpr (L::BITS == 16) {
#pragma unroll
            for (int p = 0; p < 4; ++p) a[p] = code[4 * J + p];
        } else {
            __half2 v[4];
            centred<J>(v);
            // low2 and high2 cost nothing: the instruction picks a half of its operand
            if constexpr (L::OFFSET) {
                const __half2 lo = as_h2(scale[J / 2]), hi = as_h2(scale[2 + J / 2]);
                const __half2 s0 = __low2half2(lo), o0 = __high2half2(lo), s1 = __low2half2(hi), o1 = __high2half2(hi);
                a[0] = as_u32(__hfma2(v[0], s0, o0)); a[1] = as_u32(__hfma2(v[1], s1, o1));
                a[2] = as_u32(__hfma2(v[2], s0, o0)); a[3] = as_u32(__hfma2(v[3], s1, o1));
            } else {
                constexpr int at = L::GROUP == 16 ? J / 2 : 0, at8 = L::GROUP == 16 ? 2 + J / 2 : 1;
                constexpr bool second = L::GROUP == 16 ? J % 2 == 1 : J / 2 == 1;
                const __half2 w0 = as_h2(scale[at]), w1 = as_h2(scale[at8]);
                const __half2 s0 = second ? __high2half2(w0) : __low2half2(w0);
                const __half2 s1 = second ? __high2half2(w1) : __low2half2(w1);
                a[0] = as_u32(__hmul2(v[0], s0)); a[1] = as_u32(__hmul2(v[1], s1));
                a[2] = as_u32(__hmul2(v[2], s0)); a[3] = as_u32(__hmul2(v[3], s1));
            }
        }
    }
};
#endif

}  // namespace dllm
