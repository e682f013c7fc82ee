// One pass over the logits. A warp owns a chunk of a row and keeps, per lane, the running maximum, the sum of
// exponentials and the sum of z * exponential; a second small kernel joins the chunks of a row in f64 and rescans the
// one chunk in which the draw falls.
#include "position_scan.cuh"

namespace dllm {
namespace {

template <typename T, bool CAP, bool WHOLE>
__device__ __forceinline__ void scan_chunk(const T* __restrict__ row, int first, int vocab, Scale<CAP> sc, Part* part,
                                           float* gmax) {
    constexpr int N = Vec<T>::N, V = 16 / N;
    const int lane = threadIdx.x & 31;
    float top = LOWEST, low = 0.f, m2 = sc.z(LOWEST), am = sc.a - m2, s = 0.f, sz = 0.f, bad = 0.f;
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
                for (int e = 0; e < N; e++) bmax = fmaxf(bmax, x[j][e]), low = fminf(low, x[j][e]);
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
    const bool any_bad = __any_sync(FULL, !(bad == 0.f) || x > -LOWEST || low < LOWEST);
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
