// The likeliest tokens of each position, for the soft embedding.
#ifndef DLLM_LIKELIEST_H
#define DLLM_LIKELIEST_H

#include "dllm_kernels.h"

// The k likeliest tokens of each row, likeliest first (equal logits: lowest id first), exact.
// Call after dllm_position_stats with the same logits, temp, cap, stats and scratch.
//   ids     [rows][k] i32           weights [rows][k] f32: probability, 0 where it is below `tau`;
//                                   renorm != 0: divided by the sum of what was kept
//   dropped [rows] f32: probability mass that was not kept (may be null)
// 1 <= k <= 256, k <= vocab, vocab <= 524288. A row that was refused (argmax 0xFFFFFFFF) gets weights 0, dropped 1.
DLLM_API int dllm_likeliest(void* stream, const void* logits, int logits_type, int rows, int vocab, const float* temp,
                            float cap, const uint32_t* stats, const void* scratch, int k, float tau, int renorm,
                            int32_t* ids, float* weights, float* dropped);

#endif
