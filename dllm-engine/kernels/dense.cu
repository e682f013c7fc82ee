// Dense products and the gated activation. See dense.h.
#include "dense.h"

#include <cublas_v2.h>

#include <mutex>

#include "dllm_device.cuh"

namespace dllm {
namespace {

constexpr int THREADS = 256;
constexpr float PROB_SCALE = 32768.0f;
constexpr int MOST_DEVICES = 64;
constexpr int PIECE = 16384;  // tokens of a table that are expanded at a time

// One library handle per device. A handle holds a stream and a workspace, so a product is enqueued under the lock.
struct Handles {
    std::mutex lock;
    cublasHandle_t of[MOST_DEVICES] = {};
};

Handles& handles() {
    static Handles all;
    return all;
}

// op_w is N for a table [k][n] (n contiguous), T for weights [n][k].
int product(cudaStream_t stream, cublasOperation_t op_w, const void* w, int64_t ldw, const void* x, int rows, int k, int n,
            int64_t ldx, float alpha, float beta, void* out, cudaDataType out_type, void* scratch) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= MOST_DEVICES) return cudaErrorInvalidDevice;
    Handles& all = handles();
    std::lock_guard<std::mutex> guard(all.lock);
    cublasHandle_t& handle = all.of[device];
    if (!handle && cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS) return cudaErrorInitializationError;
    if (cublasSetStream(handle, stream) != CUBLAS_STATUS_SUCCESS ||
        cublasSetWorkspace(handle, scratch, DLLM_GEMM_SCRATCH_BYTES) != CUBLAS_STATUS_SUCCESS)
        return cudaErrorUnknown;
    const cublasStatus_t status =
        cublasGemmEx(handle, op_w, CUBLAS_OP_N, n, rows, k, &alpha, w, CUDA_R_16F, (int)ldw, x, CUDA_R_16F, (int)ldx, &beta, out,
                     out_type, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    return status == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}

__device__ __forceinline__ float gelu(float x) {
    const float inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    // tanh(a) = 1 - 2 / (exp(2a) + 1): right at both ends, where exp overflows or vanishes
    return x * (1.0f - 1.0f / (__expf(2.0f * inner) + 1.0f));
}

__global__ void __launch_bounds__(THREADS) geglu_kernel(const float4* __restrict__ x, int64_t total, int n4,
                                                        __half2* __restrict__ out) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= total) return;
    const int64_t row = i / n4, c = i - row * n4;
    wait_for_inputs();
    const float4 g = x[row * 2 * n4 + c], u = x[row * 2 * n4 + n4 + c];
    out[2 * i] = __halves2half2(to_half(gelu(g.x) * u.x), to_half(gelu(g.y) * u.y));
    out[2 * i + 1] = __halves2half2(to_half(gelu(g.z) * u.z), to_half(gelu(g.w) * u.w));
}

__global__ void __launch_bounds__(THREADS) half_kernel(const float4* __restrict__ x, int64_t n4, __half2* __restrict__ out) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n4) return;
    const float4 v = x[i];
    out[2 * i] = __halves2half2(to_half(v.x), to_half(v.y));
    out[2 * i + 1] = __halves2half2(to_half(v.z), to_half(v.w));
}

// probs = 2^15 softmax(z), from the maximum and the sum that the statistics found. Row on y, four tokens a thread.
__global__ void __launch_bounds__(THREADS) probs_kernel(const float* __restrict__ logits, int vocab,
                                                        const float* __restrict__ temp, float cap,
                                                        const uint32_t* __restrict__ stats, __half* __restrict__ probs) {
    const int row = blockIdx.y, at = 4 * (blockIdx.x * THREADS + threadIdx.x);
    if (at >= vocab) return;
    const uint32_t* s = stats + 8 * (int64_t)row;
    const float inv_t = 1.0f / temp[row], max_z = __uint_as_float(s[5]);
    const float factor = s[0] == 0xFFFFFFFFu ? 0.0f : PROB_SCALE / __uint_as_float(s[6]);
    const float4 x = *reinterpret_cast<const float4*>(logits + (int64_t)row * vocab + at);
    auto prob = [&](float v) {
        const float z = (cap > 0.0f ? cap * tanhf(v / cap) : v) * inv_t;
        return factor == 0.0f ? 0.0f : __expf(z - max_z) * factor;
    };
    __half2* out = reinterpret_cast<__half2*>(probs + (int64_t)row * vocab + at);
    out[0] = __halves2half2(to_half(prob(x.x)), to_half(prob(x.y)));
    out[1] = __halves2half2(to_half(prob(x.z)), to_half(prob(x.w)));
}

}  // namespace
}  // namespace dllm

using namespace dllm;

DLLM_API int dllm_gemm(void* stream, const void* w, const void* x, int rows, int k, int n, void* out, int out_type,
                       void* scratch) {
    if (rows < 1 || k < 8 || k % 8 != 0 || n < 1 || !scratch) return cudaErrorInvalidValue;
    if (out_type != DLLM_F32 && out_type != DLLM_F16) return cudaErrorInvalidValue;
    return product(static_cast<cudaStream_t>(stream), CUBLAS_OP_T, w, k, x, rows, k, n, k, 1.0f, 0.0f, out,
                   out_type == DLLM_F32 ? CUDA_R_32F : CUDA_R_16F, scratch);
}

DLLM_API int dllm_geglu(void* stream, const float* x, int rows, int n, void* out) {
    if (rows < 1 || n < 4 || n % 4 != 0) return cudaErrorInvalidValue;
    const int64_t total = (int64_t)rows * (n / 4);
    // Behind the product that made x.
    return launch_chained(geglu_kernel, (unsigned)((total + THREADS - 1) / THREADS), THREADS, 0,
                          static_cast<cudaStream_t>(stream), reinterpret_cast<const float4*>(x), total, n / 4,
                          static_cast<__half2*>(out));
}

DLLM_API int dllm_to_half(void* stream, const float* x, int64_t count, void* out) {
    if (count < 4 || count % 4 != 0) return cudaErrorInvalidValue;
    const int64_t n4 = count / 4;
    half_kernel<<<(unsigned)((n4 + THREADS - 1) / THREADS), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
        reinterpret_cast<const float4*>(x), n4, static_cast<__half2*>(out));
    return cudaGetLastError();
}

DLLM_API size_t dllm_dense_soft_piece_bytes(int table_type, int hidden) {
    return table_type == DLLM_F16 ? 16 : (size_t)2 * PIECE * hidden;
}

DLLM_API int dllm_dense_soft_embed(void* stream, const void* table, int table_type, const float* logits, const float* temp,
                                   float cap, const uint32_t* stats, int rows, int vocab, int hidden, float scale,
                                   void* probs, void* piece, float* out, void* scratch) {
    if (rows < 1 || rows > 65535 || vocab < 8 || vocab % 8 != 0 || hidden < 8 || !scratch) return cudaErrorInvalidValue;
    // before the first launch: what is refused enqueues nothing
    if (table_type != DLLM_F16 && dllm_repack_bytes(table_type, vocab, hidden) == 0) return cudaErrorInvalidValue;
    const cudaStream_t s = static_cast<cudaStream_t>(stream);
    const dim3 grid((vocab / 4 + THREADS - 1) / THREADS, rows);
    probs_kernel<<<grid, THREADS, 0, s>>>(logits, vocab, temp, cap, stats, static_cast<__half*>(probs));
    int e = cudaGetLastError();
    if (e != cudaSuccess) return e;
    const float alpha = scale / PROB_SCALE;
    if (table_type == DLLM_F16)
        return product(s, CUBLAS_OP_N, table, hidden, probs, rows, vocab, hidden, vocab, alpha, 0.0f, out, CUDA_R_32F,
                       scratch);
    const int64_t row_bytes = dllm_file_row_bytes(table_type, hidden);
    for (int at = 0; at < vocab; at += PIECE) {
        const int here = vocab - at < PIECE ? vocab - at : PIECE;
        const char* blocks = static_cast<const char*>(table) + at * row_bytes;
        if ((e = dllm_dequant_f16(stream, table_type, blocks, here, hidden, piece)) != cudaSuccess) return e;
        e = product(s, CUBLAS_OP_N, piece, hidden, static_cast<const __half*>(probs) + at, rows, here, hidden, vocab,
                    alpha, at ? 1.0f : 0.0f, out, CUDA_R_32F, scratch);
        if (e != cudaSuccess) return e;
    }
    return cudaSuccess;
}
