// All CUDA kernels of the engine, as one plain C interface.
//
// Every function enqueues on `stream` (a cudaStream_t) and returns a cudaError_t as int, 0 = ok. None of them waits,
// allocates or reads device memory on the host, so each can be captured in a CUDA graph. Pointers are device pointers.
// Scratch memory is handed in; where it is needed a `dllm_<noun>_scratch_bytes` query says how much. Sizes that a kernel
// cannot do give cudaErrorInvalidValue (1) and enqueue nothing.
#ifndef DLLM_KERNELS_H
#define DLLM_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define DLLM_API extern "C" __declspec(dllexport)
#else
#define DLLM_API extern "C" __attribute__((visibility("default")))
#endif

// Element and block types, with the numbers that GGUF files use for them.
enum dllm_type {
    DLLM_F32 = 0,
    DLLM_F16 = 1,
    DLLM_Q8_0 = 8,
    DLLM_Q4_K = 12,
    DLLM_Q6_K = 14,
    DLLM_BF16 = 30
};

#include "attention.h"
#include "dense.h"
#include "library.h"
#include "likeliest.h"
#include "norms.h"
#include "position_stats.h"
#include "rope_kv.h"
#include "router.h"
#include "soft_embed.h"
#include "quant_mm.h"

#endif
