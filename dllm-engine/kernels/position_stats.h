// What the sampler needs to know about each position, from the LM head's logits, without moving them to the host.
#ifndef DLLM_POSITION_STATS_H
#define DLLM_POSITION_STATS_H

#include "dllm_kernels.h"

// Words of one row of the statistics; the first two are uint32, the others f32.
enum dllm_stat {
    DLLM_STAT_ARGMAX = 0,    // lowest id of the largest logit; 0xFFFFFFFF if the row holds a NaN or an infinity
    DLLM_STAT_DRAWN = 1,     // first id whose cumulative probability exceeds u
    DLLM_STAT_ENTROPY = 2,   // of softmax(z), in nats
    DLLM_STAT_P_ARGMAX = 3,
    DLLM_STAT_P_DRAWN = 4,
    DLLM_STAT_MAX_Z = 5,     // m: largest z
    DLLM_STAT_SUM_EXP = 6,   // s: sum of exp(z - m); log-sum-exp = m + log(s)
    DLLM_STAT_MAX_LOGIT = 7, // the raw logit of the argmax
    DLLM_STAT_WORDS = 8
};

DLLM_API size_t dllm_position_stats_scratch_bytes(int rows, int vocab);

// z = cap * tanh(x / cap) / T per row (cap = 0: z = x / T); statistics of softmax(z).
//   logits  [rows][vocab] f32 or f16 (logits_type), 16-byte aligned, vocab a multiple of 8
//   temp    [rows] f32 > 0          u      [rows] f32 in [0, 1)
//   stats   [rows][8] words         scratch: see the query; dllm_likeliest reads it afterwards
// Reads the logits once. Sums run in f32 inside a chunk of the row and in f64 over chunks, in a fixed order, so the
// result does not change from run to run. Logits beyond 1e30 in size count as infinite.
DLLM_API int dllm_position_stats(void* stream, const void* logits, int logits_type, int rows, int vocab,
                                 const float* temp, const float* u, float cap, uint32_t* stats, void* scratch);

#endif
