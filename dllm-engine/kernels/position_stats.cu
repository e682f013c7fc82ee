// One pass over the logits. A warp owns a chunk of a row and keeps, per lane, the running maximum, the sum of
// exponentials and the sum of z * exponential; a second small kernel joins the chunks of a row in f64 and rescans the
// one chunk in which the draw falls. dllm_likeliest finds the top k by rescanning only those lanes' elements whose
// maximum can belong to it.
#include "dllm_device.cuh"

#ifndef DLLM_STATS_CHUNK
#define DLLM_STATS_CHUNK 4096
#endif

namespace dllm {
namespace {

constexpr int CHUNK = DLLM_STATS_CHUNK;    // elements of a row that one warp reads
constexpr int BATCH = 512;                 // elements that a warp has in flight: 16 per lane
constexpr int BATCHES = CHUNK / BATCH;
constexpr int GROUP = CHUNK / 32;          // elements that one lane reads
constexpr float LOWEST = -1e30f;           // below every logit that counts, and finite after scaling
constexpr int MAX_K = 256;
constexpr int MAX_GROUP_LISTS = 512;
constexpr int MAX_CANDIDATES = 2048;
constexpr int MAX_GROUPS = 524288 / GROUP;
constexpr int PICK_THREADS = 512;

inline int chunks_of(int vocab) { return (vocab + CHUNK - 1) / CHUNK; }

// z in units of log2, so that the exponential is one instruction. tanh(y) = 1 - 2 / (1 + exp(2y)): right at both ends
// (exp over- and underflows to inf and 0), absolute error about 2e-7.
template <bool CAP>
struct Scale {
    float a, b, c;
    __device__ Scale(float cap, float temp) {
        if (CAP) {
            a = cap * LOG2E / temp;
            b = -2.f * a;
            c = 2.f * LOG2E / cap;
        } else {
            a = LOG2E / temp;
            b = c = 0.f;
        }
    }
    // z(x) - m2
    __device__ __forceinline__ float diff(float x, float a_minus_m2, float m2) const {
        if (CAP) return fmaf(b, rcp_fast(1.f + exp2_fast(x * c)), a_minus_m2);
        return fmaf(x, a, -m2);
    }
    // The same for two at once with one reciprocal: the pass is bound by the special-function unit. The exponent is
    // bounded so that the product stays finite; beyond 2^60 tanh is 1 anyway.
    __device__ __forceinline__ void diff2(float x, float y, float a_minus_m2, float m2, float& dx, float& dy) const {
        if (CAP) {
            const float p = 1.f + exp2_fast(fminf(x * c, 60.f)), q = 1.f + exp2_fast(fminf(y * c, 60.f));
            const float r = rcp_fast(p * q) * b;
            dx = fmaf(r, q, a_minus_m2);
            dy = fmaf(r, p, a_minus_m2);
        } else {
            dx = fmaf(x, a, -m2);
            dy = fmaf(y, a, -m2);
        }
    }
    __device__ __forceinline__ float z(float x) const {
        if (CAP) return fmaf(b, rcp_fast(1.f + exp2_fast(x * c)), a);
        return x * a;
    }
};

// 16 bytes of a row as floats: 4 of f32 or 8 of f16.
template <typename T> struct Vec;
template <> struct Vec<float> {
    static constexpr int N = 4;
    static __device__ __forceinline__ void load(const float* p, float* v) {
        float4 q = *reinterpret_cast<const float4*>(p);
        v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
    }
};
template <> struct Vec<__half> {
    static constexpr int N = 8;
    static __device__ __forceinline__ void load(const __half* p, float* v) {
        uint4 q = *reinterpret_cast<const uint4*>(p);
        float4 a = unpack_half4(make_uint2(q.x, q.y)), b = unpack_half4(make_uint2(q.z, q.w));
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    }
};

// x: largest logit; s, sz: sums over the chunk of e = exp2(z - z(x)) and of (z - z(x)) * e, s is NaN if the chunk holds
// a non-finite logit; id: where x is.
struct __align__(16) Part {
    float x, s, sz;
    unsigned id;
};

template <typename T, bool CAP, bool WHOLE>
__device__ __forceinline__ void scan_chunk(const T* __restrict__ row, int first, int vocab, Scale<CAP> sc, Part* part,
                                           float* gmax) {
    constexpr int N = Vec<T>::N, V = 16 / N;
    const int lane = threadIdx.x & 31;
    float top = LOWEST, m2 = sc.z(LOWEST), am = sc.a - m2, s = 0.f, sz = 0.f, bad = 0.f;
    unsigned id = 0xffffffffu;

#pragma unroll 2
    for (int b = 0; b < BATCHES; b++) {
        const int base = first + b * BATCH + lane * N;
        float x[V][N];
        float bmax = LOWEST;
#pragma unroll
        for (int j = 0; j < V; j++)
            if (WHOLE || base + j * 32 * N < vocab) Vec<T>::load(row + base + j * 32 * N, x[j]);
#pragma unroll
        for (int j = 0; j < V; j++)
            if (WHOLE || base + j * 32 * N < vocab)
#pragma unroll
                for (int e = 0; e < N; e++) bmax = fmaxf(bmax, x[j][e]);
        if (bmax > top) {  // a few times per lane only
            const float m2n = sc.z(bmax), f = exp2_fast(m2 - m2n);
            sz = f * fmaf(m2 - m2n, s, sz);
            s *= f;
            top = bmax, m2 = m2n, am = sc.a - m2;
            bool found = false;
#pragma unroll
            for (int j = 0; j < V; j++)
                if (WHOLE || base + j * 32 * N < vocab)
#pragma unroll
                    for (int e = 0; e < N; e++)
                        if (!found && x[j][e] == bmax) found = true, id = base + j * 32 * N + e;
        }
#pragma unroll
        for (int j = 0; j < V; j++)
            if (WHOLE || base + j * 32 * N < vocab)
#pragma unroll
                for (int e = 0; e < N; e += 2) {
                    float d0, d1;
                    sc.diff2(x[j][e], x[j][e + 1], am, m2, d0, d1);
                    const float p0 = exp2_fast(d0), p1 = exp2_fast(d1);
                    s += p0 + p1;
                    sz = fmaf(d0, p0, fmaf(d1, p1, sz));
                    bad = fmaf(x[j][e], 0.f, fmaf(x[j][e + 1], 0.f, bad));  // NaN from the first NaN or infinity on
                }
    }
    gmax[lane] = top;

    const float x = warp_max(top), m2w = sc.z(x), f = exp2_fast(m2 - m2w);
    sz = warp_sum(f * fmaf(m2 - m2w, s, sz));
    s = warp_sum(s * f);
    const unsigned best = __reduce_min_sync(FULL, top == x ? id : 0xffffffffu);
    const bool any_bad = __any_sync(FULL, !(bad == 0.f) || x > -LOWEST);
    if (lane == 0) *part = Part{x, any_bad ? __int_as_float(0x7fffffff) : s, sz, best};
}

// grid: (ceil(chunks / 8), rows); part [rows][chunks], gmax [rows][chunks][32]
template <typename T, bool CAP>
__global__ void __launch_bounds__(256) scan_kernel(const T* __restrict__ logits, int vocab, int chunks,
                                                   const float* __restrict__ temp, float cap, Part* part, float* gmax) {
    const int row = blockIdx.y, chunk = blockIdx.x * 8 + (threadIdx.x >> 5);
    if (chunk >= chunks) return;
    const Scale<CAP> sc(cap, temp[row]);
    const T* p = logits + static_cast<size_t>(row) * vocab;
    const size_t c = static_cast<size_t>(row) * chunks + chunk;
    const int first = chunk * CHUNK;
    if (first + CHUNK <= vocab)
        scan_chunk<T, CAP, true>(p, first, vocab, sc, part + c, gmax + c * 32);
    else
        scan_chunk<T, CAP, false>(p, first, vocab, sc, part + c, gmax + c * 32);
}

__device__ __forceinline__ double warp_prefix(double v) {  // inclusive
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        double w = __shfl_up_sync(FULL, v, o);
        if (lane >= o) v += w;
    }
    return v;
}

struct Joined {
    float m2, s;
    int chunk;       // in which the draw falls; -1 = row refused
    double rest;     // of the draw's target, inside that chunk
};

// One warp joins the chunks of a row; lane l owns a run of neighbouring chunks so that prefix sums follow the ids.
template <bool CAP>
__device__ void join_row(const Part* part, int chunks, Scale<CAP> sc, float u, uint32_t* out, Joined* joined) {
    const int lane = threadIdx.x & 31, per = (chunks + 31) / 32;
    const int lo = min(lane * per, chunks), hi = min(lo + per, chunks);
    float x = LOWEST;
    unsigned id = 0xffffffffu;
    bool bad = false;
    for (int c = lo; c < hi; c++) {
        const Part p = part[c];
        bad |= !(p.s == p.s);
        if (p.x > x) x = p.x, id = p.id;
    }
    const float top = warp_max(x), m2 = sc.z(top);
    id = __reduce_min_sync(FULL, x == top ? id : 0xffffffffu);
    bad = __any_sync(FULL, bad) || id == 0xffffffffu;

    double s = 0, sz = 0;
    for (int c = lo; c < hi; c++) {
        const Part p = part[c];
        const float d = sc.z(p.x) - m2;
        const double f = exp2_fast(d);
        s += f * p.s;
        sz += f * (p.sz + static_cast<double>(d) * p.s);
    }
    const double upto = warp_prefix(s), total = __shfl_sync(FULL, upto, 31);
    const double total_z = __shfl_sync(FULL, warp_prefix(sz), 31), target = u * total;

    // The first chunk whose end exceeds the target; the last chunk with any mass if rounding leaves none.
    int mine = -1;
    double rest = 0, run = upto - s;
    for (int c = lo; c < hi && mine < 0; c++) {
        const double next = run + static_cast<double>(exp2_fast(sc.z(part[c].x) - m2)) * part[c].s;
        if (next > target) mine = c, rest = target - run;
        run = next;
    }
    unsigned owners = __ballot_sync(FULL, mine >= 0);
    if (!owners) {
        for (int c = lo; c < hi; c++)
            if (part[c].s > 0.f && exp2_fast(sc.z(part[c].x) - m2) > 0.f) mine = c;
        rest = 1e300;
        owners = __ballot_sync(FULL, mine >= 0);
        owners = owners ? 1u << (31 - __clz(owners)) : 0u;
    }
    const int owner = owners ? __ffs(owners) - 1 : 0;
    mine = __shfl_sync(FULL, mine, owner);
    rest = __shfl_sync(FULL, rest, owner);

    if (lane == 0) {
        const double log_s = log(total);
        joined->m2 = m2, joined->s = static_cast<float>(total), joined->chunk = bad ? -1 : mine, joined->rest = rest;
        out[DLLM_STAT_ARGMAX] = bad ? 0xffffffffu : id;
        out[DLLM_STAT_ENTROPY] = __float_as_uint(static_cast<float>(fmax(0.0, log_s - LN2 * (total_z / total))));
        out[DLLM_STAT_P_ARGMAX] = __float_as_uint(static_cast<float>(1.0 / total));
        out[DLLM_STAT_MAX_Z] = __float_as_uint(m2 * LN2);
        out[DLLM_STAT_SUM_EXP] = __float_as_uint(static_cast<float>(total));
        out[DLLM_STAT_MAX_LOGIT] = __float_as_uint(top);
        if (bad) out[DLLM_STAT_DRAWN] = 0xffffffffu, out[DLLM_STAT_P_DRAWN] = 0u;
    }
}

// grid: rows. Warp 0 joins the chunks, then all 8 warps rescan the chunk of the draw, each thread a run of neighbours.
template <typename T, bool CAP>
__global__ void __launch_bounds__(256) join_kernel(const T* __restrict__ logits, int vocab, int chunks,
                                                   const float* __restrict__ temp, const float* __restrict__ u,
                                                   float cap, const Part* __restrict__ part, uint32_t* stats) {
    constexpr int RUN = CHUNK / 256, N = Vec<T>::N;
    static_assert(RUN % N == 0, "a thread reads whole vectors");
    __shared__ Joined joined;
    __shared__ double ends[8];
    __shared__ int hit, last;
    const int row = blockIdx.x, t = threadIdx.x, lane = t & 31, warp = t >> 5;
    const Scale<CAP> sc(cap, temp[row]);
    uint32_t* out = stats + static_cast<size_t>(row) * DLLM_STAT_WORDS;
    if (warp == 0) join_row<CAP>(part + static_cast<size_t>(row) * chunks, chunks, sc, u[row], out, &joined);
    if (t == 32) hit = 0x7fffffff, last = -1;
    __syncthreads();
    if (joined.chunk < 0) return;

    const T* p = logits + static_cast<size_t>(row) * vocab;
    const int first = joined.chunk * CHUNK + t * RUN;
    float e[RUN];
    double sum = 0;
#pragma unroll
    for (int i = 0; i < RUN; i += N) {
        float x[N];
        const bool in = first + i < vocab;
        if (in) Vec<T>::load(p + first + i, x);
#pragma unroll
        for (int j = 0; j < N; j++) {
            e[i + j] = in ? exp2_fast(sc.diff(x[j], sc.a - joined.m2, joined.m2)) : 0.f;
            sum += e[i + j];
        }
    }
    const double upto = warp_prefix(sum);
    if (lane == 31) ends[warp] = upto;
    __syncthreads();
    double run = upto - sum;
    for (int w = 0; w < warp; w++) run += ends[w];
    int found = 0x7fffffff, mass = -1;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        run += e[i];
        if (found == 0x7fffffff && e[i] > 0.f && run > joined.rest) found = first + i;
        if (e[i] > 0.f) mass = first + i;
    }
    if (found != 0x7fffffff) atomicMin(&hit, found);
    if (mass >= 0) atomicMax(&last, mass);
    __syncthreads();
    const int id = hit != 0x7fffffff ? hit : last;
    if (id >= first && id < first + RUN) {
        float pe = 0.f;
#pragma unroll
        for (int i = 0; i < RUN; i++)
            if (first + i == id) pe = e[i];
        out[DLLM_STAT_DRAWN] = static_cast<uint32_t>(id);
        out[DLLM_STAT_P_DRAWN] = __float_as_uint(pe / joined.s);
    }
}

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

struct Scratch {
    Part* part;
    float* gmax;
};

Scratch scratch_of(void* scratch, int rows, int vocab) {
    const size_t n = static_cast<size_t>(rows) * chunks_of(vocab);
    Part* part = static_cast<Part*>(scratch);
    return Scratch{part, reinterpret_cast<float*>(part + n)};
}

template <typename T, bool CAP>
int run_stats(cudaStream_t s, const void* logits, int rows, int vocab, const float* temp, const float* u, float cap,
              uint32_t* stats, void* scratch) {
    const int chunks = chunks_of(vocab);
    const Scratch sc = scratch_of(scratch, rows, vocab);
    const T* x = static_cast<const T*>(logits);
    scan_kernel<T, CAP><<<dim3((chunks + 7) / 8, rows), 256, 0, s>>>(x, vocab, chunks, temp, cap, sc.part, sc.gmax);
    join_kernel<T, CAP><<<rows, 256, 0, s>>>(x, vocab, chunks, temp, u, cap, sc.part, stats);
    return last_error();
}

}  // namespace
}  // namespace dllm

using namespace dllm;

DLLM_API size_t dllm_position_stats_scratch_bytes(int rows, int vocab) {
    return static_cast<size_t>(rows) * chunks_of(vocab) * (sizeof(Part) + 32 * sizeof(float));
}

DLLM_API int dllm_position_stats(void* stream, const void* logits, int logits_type, int rows, int vocab,
                                 const float* temp, const float* u, float cap, uint32_t* stats, void* scratch) {
    if (rows < 1 || rows > 65535 || vocab < 8 || vocab % 8 || cap < 0.f || !is_float_type(logits_type)) return BAD_SIZE;
    auto s = static_cast<cudaStream_t>(stream);
    if (logits_type == DLLM_F16)
        return cap > 0.f ? run_stats<__half, true>(s, logits, rows, vocab, temp, u, cap, stats, scratch)
                         : run_stats<__half, false>(s, logits, rows, vocab, temp, u, cap, stats, scratch);
    return cap > 0.f ? run_stats<float, true>(s, logits, rows, vocab, temp, u, cap, stats, scratch)
                     : run_stats<float, false>(s, logits, rows, vocab, temp, u, cap, stats, scratch);
}

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
