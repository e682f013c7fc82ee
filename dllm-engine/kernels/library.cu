// See library.h.
#include "library.h"

#include <cuda_runtime.h>

DLLM_API int dllm_abi(void) { return DLLM_ABI; }

DLLM_API int dllm_set_device(int device) { return cudaSetDevice(device); }

DLLM_API int dllm_wait(void) { return cudaStreamSynchronize(nullptr); }

DLLM_API const char* dllm_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }
