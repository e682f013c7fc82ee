// The router of the expert branch: f32 logits, softmax, the best few experts and their weights.
#ifndef DLLM_ROUTER_H
#define DLLM_ROUTER_H

#include "dllm_kernels.h"

DLLM_API size_t dllm_router_scratch_bytes(int rows, int experts, int hidden);

// logits = wr zr; p = softmax(logits); the `used` likeliest experts (equal logits: lowest id first), likeliest first;
// weight = p / (sum of the chosen p) * expert_scale[id].
//   zr [rows][hidden] f32           wr [experts][hidden] f32         expert_scale [experts] f32 or null
//   ids [rows][used] i32            weights [rows][used] f32         logits_out [rows][experts] f32 or null
// hidden a multiple of 16, experts a multiple of 4 and at most 256, used <= 16 and <= experts. Products run on the tensor cores with both factors
// split into two TF32 numbers, which is as exact as f32.
DLLM_API int dllm_router(void* stream, const float* zr, const float* wr, const float* expert_scale, int rows,
                         int experts, int hidden, int used, int32_t* ids, float* weights, float* logits_out,
                         void* scratch);

#endif
