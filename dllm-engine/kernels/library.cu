// See library.h.
#include "library.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

namespace dllm {
namespace {

struct Side {
    cudaStream_t stream = nullptr;
    cudaEvent_t fork = nullptr, join = nullptr;
};

// One per stream that ever forked: a handful of streams live as long as the process.
struct Sides {
    std::mutex lock;
    std::map<std::pair<int, cudaStream_t>, Side> of;
};

Sides& sides() {
    static Sides all;
    return all;
}

cudaError_t side_of(cudaStream_t stream, Side& out) {
    int device = 0;
    cudaError_t e = cudaGetDevice(&device);
    if (e != cudaSuccess) return e;
    Sides& all = sides();
    std::lock_guard<std::mutex> guard(all.lock);
    Side& side = all.of[{device, stream}];
    if (!side.join) {
        if ((e = cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking)) != cudaSuccess) return e;
        if ((e = cudaEventCreateWithFlags(&side.fork, cudaEventDisableTiming)) != cudaSuccess) return e;
        if ((e = cudaEventCreateWithFlags(&side.join, cudaEventDisableTiming)) != cudaSuccess) return e;
    }
    out = side;
    return cudaSuccess;
}

}  // namespace
}  // namespace dllm

DLLM_API int dllm_abi(void) { return DLLM_ABI; }

DLLM_API int dllm_set_device(int device) { return cudaSetDevice(device); }

DLLM_API int dllm_wait(void) { return cudaStreamSynchronize(nullptr); }

DLLM_API const char* dllm_error(int code) { return cudaGetErrorName(static_cast<cudaError_t>(code)); }

DLLM_API int dllm_fork(void* stream, void** out) {
    const cudaStream_t main = static_cast<cudaStream_t>(stream);
    dllm::Side side;
    cudaError_t e = dllm::side_of(main, side);
    if (e == cudaSuccess) e = cudaEventRecord(side.fork, main);
    if (e == cudaSuccess) e = cudaStreamWaitEvent(side.stream, side.fork, 0);
    *out = side.stream;
    return e;
}

DLLM_API int dllm_join(void* stream, void* side_stream) {
    const cudaStream_t main = static_cast<cudaStream_t>(stream);
    dllm::Side side;
    cudaError_t e = dllm::side_of(main, side);
    if (e == cudaSuccess && side.stream != static_cast<cudaStream_t>(side_stream)) e = cudaErrorInvalidValue;
    if (e == cudaSuccess) e = cudaEventRecord(side.join, side.stream);
    if (e == cudaSuccess) e = cudaStreamWaitEvent(main, side.join, 0);
    return e;
}
