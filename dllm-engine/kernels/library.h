// The library as a whole.
#ifndef DLLM_LIBRARY_H
#define DLLM_LIBRARY_H

#include "dllm_kernels.h"

// Raised whenever a signature or a contract changes; the engine refuses a library of another number.
#define DLLM_ABI 3

DLLM_API int dllm_abi(void);

// Makes `device` (CUDA's number) the calling thread's, for calls on its default stream.
DLLM_API int dllm_set_device(int device);

// Waits for the calling thread's default stream: the end of repacking.
DLLM_API int dllm_wait(void);

// A second stream beside `stream`, which goes on from where `stream` is now; `dllm_join` makes `stream` wait for it. The two
// may be captured. One fork of a stream at a time.
DLLM_API int dllm_fork(void* stream, void** side);
DLLM_API int dllm_join(void* stream, void* side);

// The name of an error that a function here returned.
DLLM_API const char* dllm_error(int code);

#endif
