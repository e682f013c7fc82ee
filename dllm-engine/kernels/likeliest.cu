// The exact top k of a row from the maxima that position_stats.cu leaves: only those lanes' elements whose maximum can
// belong to the top k are read again.
#include "position_scan.cuh"

namespace dllm {
namespace {

constexpr int MAX_K = 256;
constexpr int MAX_GROUP_LISTS = 512;
constexpr int MAX_CANDIDATES = 2048;
constexpr int MAX_GROUPS = 524288 / GROUP;
constexpr int PICK_THREADS = 512;

// Sorts by logit, then by lower id; never 0 for a real token.
__device__ __forceinline__ unsigned long long rank_key(float x, int id) {
    return static_cast<unsigned long long>(sort_key(x)) << 32 | (0xffffffffu - static_cast<unsigned>(id));
}

// k times the best of the whole row below the one before. Slow; for rows with masses of equal logits.
template <typename T>
__device__ void pick_slowly(const T* row, int vocab, int k, unsigned long long* picked) {
    __shared__ unsigned long long best[PICK_THREADS / 32];
    unsigned long long below = ~0ull;
    for (int i = 0; i < k; i++) {
        unsigned long long mine = 0;
        for (int v = threadIdx.x; v < vocab; v += PICK_THREADS) {
            const unsigned long long key = rank_key(static_cast<float>(row[v]), v);
            if (key < below && key > mine) mine = key;
        }
        for (int o = 16; o; o >>= 1) {
            const unsigned long long other = __shfl_xor_sync(FULL, mine, o);
            mine = other > mine ? other : mine;
        }
        if ((threadIdx.x & 31) == 0) best[threadIdx.x >> 5] = mine;
        __syncthreads();
        below = best[0];
        for (int w = 1; w < PICK_THREADS / 32; w++) below = best[w] > below ? best[w] : below;
        if (threadIdx.x == 0) picked[i] = below;
        __syncthreads();
    }
}

// grid: rows. Any of the top k lies in a group (the elements of one lane) whose maximum is at least the k-th largest
// group maximum, so about k groups are read again.
template <typename T, bool CAP>
__global__ void __launch_bounds__(PICK_THREADS)
    likeliest_kernel(const T* __restrict__ logits, int vocab, int groups, const float* __restrict__ temp, float cap,
                     const uint32_t* __restrict__ stats, const float* __restrict__ gmax, int k, float tau, int renorm,
                     int32_t* ids, float* weights, float* dropped) {
    constexpr int N = Vec<T>::N, VECS = GROUP / N, WARPS = PICK_THREADS / 32, OWN = MAX_GROUPS / PICK_THREADS;
    __shared__ unsigned long long cand[MAX_CANDIDATES], picked[MAX_K];
    __shared__ int list[MAX_GROUP_LISTS], counts[2][WARPS], n_list, n_cand;
    __shared__ double sums[WARPS];
    const int row = blockIdx.x, t = threadIdx.x, lane = t & 31, warp = t >> 5;
    const uint32_t* st = stats + static_cast<size_t>(row) * DLLM_STAT_WORDS;
    int32_t* id_out = ids + static_cast<size_t>(row) * k;
    float* w_out = weights + static_cast<size_t>(row) * k;
    if (st[DLLM_STAT_ARGMAX] == 0xffffffffu) {
        if (t < k) id_out[t] = 0, w_out[t] = 0.f;
        if (t == 0 && dropped) dropped[row] = 1.f;
        return;
    }

    unsigned key[OWN];
    const float* g = gmax + static_cast<size_t>(row) * groups;
#pragma unroll
    for (int i = 0; i < OWN; i++) key[i] = i * PICK_THREADS + t < groups ? sort_key(g[i * PICK_THREADS + t]) : 0u;

    // The k-th largest group maximum, one bit per round.
    unsigned bar = 0;
    for (int bit = 31; bit >= 0; bit--) {
        const unsigned trial = bar | 1u << bit;
        int c = 0;
#pragma unroll
        for (int i = 0; i < OWN; i++) c += key[i] >= trial;
        c = __reduce_add_sync(FULL, c);
        if (lane == 0) counts[bit & 1][warp] = c;
        __syncthreads();
        int all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) all += counts[bit & 1][w];
        if (all >= k) bar = trial;
        if (all == k) break;  // these k groups hold k elements of at least `bar`: low enough
    }
    if (t == 0) n_list = n_cand = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (i * PICK_THREADS + t < groups && key[i] >= bar) {
            const int at = atomicAdd(&n_list, 1);
            if (at < MAX_GROUP_LISTS) list[at] = i * PICK_THREADS + t;
        }
    __syncthreads();

    const T* p = logits + static_cast<size_t>(row) * vocab;
    if (n_list <= MAX_GROUP_LISTS) {
        // A thread takes 16 bytes of a group; four such loads in flight.
#pragma unroll 1
        for (int i = t; i < n_list * VECS; i += 4 * PICK_THREADS) {
            float x[4][N];
            int at[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int n = i + j * PICK_THREADS, group = n < n_list * VECS ? list[n / VECS] : 0;
                at[j] = n < n_list * VECS ? group / 32 * CHUNK + group % 32 * N + n % VECS * 32 * N : vocab;
                if (at[j] < vocab) Vec<T>::load(p + at[j], x[j]);
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (at[j] < vocab)
#pragma unroll
                    for (int e = 0; e < N; e++)
                        if (sort_key(x[j][e]) >= bar) {
                            const int c = atomicAdd(&n_cand, 1);
                            if (c < MAX_CANDIDATES) cand[c] = rank_key(x[j][e], at[j] + e);
                        }
        }
    }
    __syncthreads();

    const int n = n_cand;
    if (n_list > MAX_GROUP_LISTS || n > MAX_CANDIDATES || n < k) {
        pick_slowly<T>(p, vocab, k, picked);
    } else {
        // Rank = number of better candidates; four threads share the counting for one of them.
        for (int c = t / 4; c < (n + 7) / 8 * 8; c += PICK_THREADS / 4) {
            const unsigned long long mine = c < n ? cand[c] : 0;
            int rank = 0;
#pragma unroll 8
            for (int o = t % 4; o < n; o += 4) rank += cand[o] > mine;
            rank += __shfl_xor_sync(FULL, rank, 1);
            rank += __shfl_xor_sync(FULL, rank, 2);
            if (c < n && rank < k) picked[rank] = mine;
        }
    }
    __syncthreads();

    // weights: k is at most the number of threads
    const Scale<CAP> sc(cap, temp[row]);
    const float m2 = sc.z(__uint_as_float(st[DLLM_STAT_MAX_LOGIT])), s = __uint_as_float(st[DLLM_STAT_SUM_EXP]);
    float w = 0.f;
    int id = 0;
    if (t < k) {
        id = static_cast<int>(0xffffffffu - static_cast<unsigned>(picked[t]));
        w = exp2_fast(sc.z(static_cast<float>(p[id])) - m2) / s;
        if (w < tau) w = 0.f;
    }
    const double kept = warp_prefix(w);
    if (lane == 31) sums[warp] = kept;
    __syncthreads();
    double all = 0;
    for (int i = 0; i < WARPS; i++) all += sums[i];
    if (t < k) {
        id_out[t] = id;
        w_out[t] = renorm && all > 0 ? static_cast<float>(w / all) : w;
    }
    if (t == 0 && dropped) dropped[row] = static_cast<float>(fmax(0.0, 1.0 - all));
}

}  // namespace
}  // namespace dllm

using namespace dllm;

DLLM_API int dllm_likeliest(void* stream, const void* logits, int logits_type, int rows, int vocab, const float* temp,
                            float cap, const uint32_t* stats, const void* scratch, int k, float tau, int renorm,
                            int32_t* ids, float* weights, float* dropped) {
    const int groups = chunks_of(vocab) * 32;
    if (rows < 1 || vocab < 8 || vocab % 8 || cap < 0.f || !is_float_type(logits_type) || k < 1 || k > MAX_K ||
        k > vocab || groups > MAX_GROUPS)
        return BAD_SIZE;
    auto s = static_cast<cudaStream_t>(stream);
    const float* gmax = scratch_of(const_cast<void*>(scratch), rows, vocab).gmax;
#define DLLM_LIKELIEST(T, CAP)                                                                                        \
    likeliest_kernel<T, CAP><<<rows, PICK_THREADS, 0, s>>>(static_cast<const T*>(logits), vocab, groups, temp, cap,   \
                                                           stats, gmax, k, tau, renorm, ids, weights, dropped)
    if (logits_type == DLLM_F16) {
        if (cap > 0.f) DLLM_LIKELIEST(__half, true); else DLLM_LIKELIEST(__half, false);
    } else {
        if (cap > 0.f) DLLM_LIKELIEST(float, true); else DLLM_LIKELIEST(float, false);
    }
#undef DLLM_LIKELIEST
    return last_error();
}
