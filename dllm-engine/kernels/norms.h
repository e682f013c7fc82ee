// RMS norms, alone and fused into the chains of a layer. rms(x) = x / sqrt(mean(x^2) + eps), rms(x; w) = rms(x) * w.
#ifndef DLLM_NORMS_H
#define DLLM_NORMS_H

#include "dllm_kernels.h"

// Common to all: matrices are [rows][hidden], contiguous, 16-byte aligned; hidden a multiple of 4, at most 8192; `*_type`
// is F32 or F16; norm weights are [hidden] f32. Sums run in f32. f16 outputs are clamped to the f16 range.

// out = rms(pre_scale * x; weight); weight may be null.
DLLM_API int dllm_rms_norm(void* stream, const void* x, int x_type, const float* weight, float pre_scale, float eps,
                           void* out, int out_type, int rows, int hidden);

// Input of the stack and of its first layer.
//   e  f32: embedding rows, times e_scale      sc f32: self-conditioning signal, times sc_flag[row]; both may be null
//   x = e * e_scale + sc_flag * sc;  h = rms(x) for canvas rows, x for rows with causal[row] != 0;
//   x1 = rms(h; attn_norm)
//   causal [rows] i32, null = all rows are canvas rows;  h f32 (may be e itself), x1 of x1_type
DLLM_API int dllm_norm_input(void* stream, const float* e, float e_scale, const float* sc, const float* sc_flag,
                             const int32_t* causal, const float* attn_norm, float eps, float* h, void* x1, int x1_type,
                             int rows, int hidden);

// After the attention block:
//   r  = h + rms(a; post_attention_norm)       r f32 (may be h itself)
//   x  = rms(r; ffn_norm)   y = rms(r; pre_ffw_norm_2)      both of xy_type
//   zr = rms(r) * router_scale / sqrt(hidden)  f32, the router's input
DLLM_API int dllm_norm_attn_out(void* stream, const float* h, const void* a, int a_type,
                                const float* post_attention_norm, const float* ffn_norm, const float* pre_ffw_norm_2,
                                const float* router_scale, float eps, float* r, void* x, void* y, int xy_type,
                                float* zr, int rows, int hidden);

// End of a layer:
//   f = rms(rms(d; post_ffw_norm_1) + rms(m; post_ffw_norm_2); post_ffw_norm)
//   h_next = (r + f) * s               h_next f32 (may be r itself, may be null)
//   x_next = rms(h_next; next_norm)    of x_type; next_norm = the next layer's attn_norm, or output_norm; may be null
//   d [rows][hidden] of d_type; m = sum of m_parts parts of m_type: part p of row i starts at element
//   i * m_row_stride + p * m_part_stride (multiples of 4)
//   s: scale_canvas[0], or scale_causal[0] for rows with causal[row] != 0 (causal null: all canvas rows)
DLLM_API int dllm_norm_layer_out(void* stream, const float* r, const void* d, int d_type, const void* m, int m_type,
                                 int m_parts, int64_t m_row_stride, int64_t m_part_stride,
                                 const float* post_ffw_norm_1, const float* post_ffw_norm_2,
                                 const float* post_ffw_norm, const float* scale_canvas, const float* scale_causal,
                                 const int32_t* causal, const float* next_norm, float eps, float* h_next, void* x_next,
                                 int x_type, int rows, int hidden);

#endif
