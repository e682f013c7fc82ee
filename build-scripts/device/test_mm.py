"""Matmul kernels: correctness and timing on a GPU. Usage: test_mm.py MODE, see the end. Needs torch and the library."""
import sys, traceback
import torch
from mm_common import *

GELU_SCALE = 1 / 16


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x ** 3)))


def qmm(t, w, x, n, k, epi=0, alpha=1.0, splits=1, tile=0, out=None, scratch=None):
    rows = x.shape[0]
    cols = n // 2 if epi == 2 else n
    if out is None:
        out = torch.full((rows, cols), float("nan"), device=dev, dtype=torch.float32 if epi == 0 else torch.float16)
    if splits > 1 and scratch is None:
        scratch = torch.zeros(lib.dllm_qmm_scratch_bytes(rows, n, splits), dtype=torch.uint8, device=dev)
    ok(lib.dllm_qmm(stream(), t, P(w), P(x), I64(x.stride(0)), rows, k, n, P(out), I64(cols), epi,
                    ctypes.c_float(alpha), splits, P(scratch), tile))
    return out


def check_dense(t, n, k, rows, epi, splits, tile):
    raw = make_raw(t, n, k)
    w = repack(t, raw, k, interleave=epi == 2)
    x = torch.randn(rows, k, device=dev)
    out = qmm(t, w, x.half(), n, k, epi, GELU_SCALE if epi == 2 else 1.0, splits, tile)
    ref = x.double() @ dequant(t, raw).T
    if epi == 2:
        ref = gelu(ref[:, :n // 2]) * ref[:, n // 2:] * GELU_SCALE
    return rel(out, ref)


def routing(rows, experts, top_k, skew=1.0):
    p = torch.softmax(torch.randn(rows, experts, device=dev) * skew, -1)
    v, ids = p.topk(top_k, -1)
    return ids.int().contiguous(), (v / v.sum(-1, keepdim=True)).float().contiguous()


def new_plan(rows, top_k, experts):
    return torch.full((lib.dllm_moe_plan_bytes(rows * top_k, experts) // 4,), -1, dtype=torch.int32, device=dev)


def check_moe(tg, td, h, ff, experts, top_k, rows, tile, skew=1.0, overlap=0):
    raw_g = [make_raw(tg, 2 * ff, h) for _ in range(experts)]
    raw_d = [make_raw(td, h, ff) for _ in range(experts)]
    wg = torch.cat([repack(tg, r, h, True) for r in raw_g])
    wd = torch.cat([repack(td, r, ff) for r in raw_d])
    ids, wt = routing(rows, experts, top_k, skew)
    x = torch.randn(rows, h, device=dev)
    plan = new_plan(rows, top_k, experts)
    act = torch.full((rows * top_k, ff), float("nan"), dtype=torch.float16, device=dev)
    part = torch.full((rows * top_k, h), float("nan"), device=dev)
    out = torch.full((rows, h), float("nan"), device=dev)
    xh = x.half()
    ok(lib.dllm_moe_route(stream(), P(ids), rows * top_k, experts, P(plan)))
    ok(lib.dllm_moe_gate_up(stream(), tg, P(wg), P(xh), I64(h), P(plan), rows, top_k, experts, h, ff, P(act), overlap, tile))
    ok(lib.dllm_moe_down(stream(), td, P(wd), P(act), P(plan), P(wt), rows, top_k, experts, ff, h, P(part), 0, overlap, tile, h, tile))
    ok(lib.dllm_moe_sum(stream(), P(part), rows, top_k, h, P(out)))
    flat = ids.flatten().long()
    order = torch.sort(flat, stable=True).indices.int()
    counts = torch.bincount(flat, minlength=experts)
    good = torch.equal(plan[experts + 1:experts + 1 + len(order)], order) and torch.equal(plan[1:experts + 1].long(), counts.cumsum(0))
    ref = torch.zeros(rows, h, dtype=torch.float64, device=dev)
    ref_act = torch.zeros(rows * top_k, ff, dtype=torch.float64, device=dev)
    xd = x.double()
    for e in range(experts):
        at = (flat == e).nonzero().flatten()
        if len(at) == 0:
            continue
        gu = xd[at // top_k] @ dequant(tg, raw_g[e]).T
        a = gelu(gu[:, :ff]) * gu[:, ff:]
        ref_act[at] = a * GELU_SCALE
        ref.index_add_(0, at // top_k, wt.flatten()[at].double().unsqueeze(1) * (a @ dequant(td, raw_d[e]).T))
    return f"plan {good} act {rel(act, ref_act):.2e} out {rel(out, ref):.2e} max tokens {int(counts.max())}"


def repeated(overlap):
    L = Layers(Q4_K, Q5_0, 1, 256, 2.0)
    first = None
    for i in range(20):
        L.act.fill_(float("nan")); L.part.fill_(float("nan"))
        L.chain(0, overlap)
        if first is None:
            first = (L.act.clone(), L.out.clone())
        elif not (torch.equal(first[0], L.act) and torch.equal(first[1], L.out)):
            return "DIFFERS"
    return "ok"


def report(name, f):
    try:
        print(f"{name:58s}", f(), flush=True)
    except Exception as e:
        print(f"{name:58s} FAILED {e}", flush=True)
        if "cuda error" not in str(e):
            traceback.print_exc()


def correct(small=False):
    types = [Q4_K, Q5_0, Q8_0, Q6_K] if small else list(NAMES)
    for t in types:
        report(f"dense {NAMES[t]} 208x512 rows 37", lambda: f"{check_dense(t, 208, 512, 37, 0, 1, 2):.2e}")
    for tile in range(1, 4):
        report(f"dense Q4_K tile {tile}: 1, 130 rows, f16, gelu, splits 3", lambda: " ".join(
            f"{v:.2e}" for v in (check_dense(Q4_K, 320, 768, 1, 0, 1, tile), check_dense(Q4_K, 320, 768, 130, 1, 1, tile),
                                 check_dense(Q4_K, 320, 768, 130, 2, 1, tile), check_dense(Q4_K, 320, 768, 130, 0, 3, tile))))
    for overlap in (0, 1):
        for tile in (1, 2, 3):
            report(f"moe Q4_K/Q5_0 tile {tile} overlap {overlap}, 8 experts, 77 rows",
                   lambda: check_moe(Q4_K, Q5_0, 256, 192, 8, 3, 77, tile, 1.0, overlap))
        report(f"moe Q4_K/Q8_0 skewed overlap {overlap}", lambda: check_moe(Q4_K, Q8_0, 256, 192, 8, 2, 50, 1, 4.0, overlap))
    if small:
        return
    for t in NAMES:
        report(f"moe {NAMES[t]}/{NAMES[t]}", lambda: check_moe(t, t, 512, 256, 4, 2, 40, 0))
    report("dequant to half, worst type", lambda: f"{max(check_dequant(t) for t in NAMES):.2e}")
    for overlap in (0, 1):
        for t, rows in ((Q5_0, 256), (Q8_0, 1), (Q8_0, 1024)):
            report(f"moe real shape Q4_K/{NAMES[t]} {rows} rows overlap {overlap}",
                   lambda: check_moe(Q4_K, t, 2816, 704, 128, 8, rows, 0, 1.0, overlap))
        report(f"moe repeated: 20 runs identical, overlap {overlap}", lambda: repeated(overlap))


def check_dequant(t):
    raw = make_raw(t, 48, 768)
    out = torch.full((48, 768), float("nan"), device=dev, dtype=torch.float16)
    ok(lib.dllm_dequant_f16(stream(), t, P(raw), I64(48), I64(768), P(out)))
    return rel(out, dequant(t, raw))


class Layers:
    """Several layers of random experts, so that timing finds the cache cold."""

    def __init__(self, tg, td, layers, rows, skew=1.0, h=2816, ff=704, experts=128, top_k=8):
        self.__dict__.update(tg=tg, td=td, layers=layers, rows=rows, h=h, ff=ff, experts=experts, top_k=top_k)
        gb = lib.dllm_repack_bytes(tg, I64(2 * ff), I64(h)); db = lib.dllm_repack_bytes(td, I64(h), I64(ff))
        self.wg, self.wd, self.ids, self.wt, self.plan = [], [], [], [], []
        self.repack_us = 0
        for _ in range(layers):
            wg = torch.empty(experts * gb, dtype=torch.uint8, device=dev); wd = torch.empty(experts * db, dtype=torch.uint8, device=dev)
            # experts share raw blocks in groups of 16 to save set-up time; the packed copies are distinct memory
            raw_g = [make_raw(tg, 2 * ff, h) for _ in range(4)]; raw_d = [make_raw(td, h, ff) for _ in range(4)]
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for e in range(experts):
                repack_into(tg, raw_g[e % 4], h, wg[e * gb:(e + 1) * gb], True)
                repack_into(td, raw_d[e % 4], ff, wd[e * db:(e + 1) * db], False)
            b.record(); b.synchronize(); self.repack_us = a.elapsed_time(b) * 1000
            ids, wt = routing(rows, experts, top_k, skew)
            plan = new_plan(rows, top_k, experts)
            ok(lib.dllm_moe_route(stream(), P(ids), rows * top_k, experts, P(plan)))
            self.wg.append(wg); self.wd.append(wd); self.ids.append(ids); self.wt.append(wt); self.plan.append(plan)
        self.x = torch.randn(rows, h, device=dev).half()
        self.act = torch.randn(rows * top_k, ff, device=dev).half() * 0.1
        self.part = torch.empty(rows * top_k, h, device=dev); self.out = torch.zeros(rows, h, device=dev)
        self.bytes_g, self.bytes_d = experts * gb, experts * db
        src = lambda t, n: n * BLOCK[t][1] // BLOCK[t][0]
        self.src_g, self.src_d = src(tg, experts * 2 * ff * h), src(td, experts * h * ff)

    def route(self, i):
        ok(lib.dllm_moe_route(stream(), P(self.ids[i]), self.rows * self.top_k, self.experts, P(self.plan[i])))

    def gate_up(self, i, tile=0, overlap=0):
        ok(lib.dllm_moe_gate_up(stream(), self.tg, P(self.wg[i]), P(self.x), I64(self.h), P(self.plan[i]), self.rows,
                                self.top_k, self.experts, self.h, self.ff, P(self.act), overlap, tile))

    def down(self, i, tile=0, overlap=0):
        ok(lib.dllm_moe_down(stream(), self.td, P(self.wd[i]), P(self.act), P(self.plan[i]), P(self.wt[i]), self.rows,
                             self.top_k, self.experts, self.ff, self.h, P(self.part), 0, overlap, 0, self.h, tile))

    def sum(self):
        ok(lib.dllm_moe_sum(stream(), P(self.part), self.rows, self.top_k, self.h, P(self.out)))

    def chain(self, i, overlap=0):
        self.route(i); self.gate_up(i, 0, overlap); self.down(i, 0, overlap); self.sum()


BW = 4.1e6  # bytes per microsecond


def time_moe(tg, td, rows, skew=1.0, tiles=(1, 2, 3), layers=5, experts=128):
    L = Layers(tg, td, layers, rows, skew, experts=experts)
    each = lambda f: graph_time([lambda i=i: f(i) for i in range(layers)])
    c = torch.bincount(L.ids[0].flatten().long(), minlength=experts)
    print(f"-- moe {NAMES[tg]}/{NAMES[td]} experts {experts} rows {rows} skew {skew}: tokens per expert {int(c.min())}..{int(c.max())}; "
          f"MB packed (source) gate_up {L.bytes_g/1e6:.0f} ({L.src_g/1e6:.0f}) down {L.bytes_d/1e6:.0f} ({L.src_d/1e6:.0f}); "
          f"floor us {L.bytes_g/BW:.0f} + {L.bytes_d/BW:.0f}; repack of a layer {L.repack_us:.0f} us", flush=True)
    for tile in tiles:
        report(f"   tile {tile} gate_up, down us (GB/s)", lambda: "%.1f (%.0f)  %.1f (%.0f)" % (
            (a := each(lambda i: L.gate_up(i, tile))), L.bytes_g / a / 1e3, (b := each(lambda i: L.down(i, tile))), L.bytes_d / b / 1e3))
    report("   route, sum us", lambda: "%.1f %.1f" % (each(L.route), each(lambda i: L.sum())))
    for overlap in (0, 1):
        report(f"   chain us; x 30 layers ms, overlap {overlap}",
               lambda: "%.1f; %.2f" % ((a := each(lambda i: L.chain(i, overlap))), a * 30 / 1e3))


def time_dense(t, n, k, rows, name, epi=0, tiles=(1, 2), splits=(1,), sets=0):
    bytes_ = lib.dllm_repack_bytes(t, I64(n), I64(k))
    sets = sets or max(4, int(3e8 / bytes_))
    raw = make_raw(t, n, k)
    w = [repack(t, raw, k, epi == 2) for _ in range(sets)]
    x = torch.randn(rows, k, device=dev).half()
    out = torch.empty(rows, n // 2 if epi == 2 else n, device=dev, dtype=torch.float32 if epi == 0 else torch.float16)
    flop = 2.0 * rows * n * k
    line = []
    for tile in tiles:
        for s in splits:
            try:
                scratch = torch.zeros(max(1, lib.dllm_qmm_scratch_bytes(rows, n, s)), dtype=torch.uint8, device=dev)
                us = graph_time([lambda v=v: qmm(t, v, x, n, k, epi, 1.0, s, tile, out, scratch) for v in w])
                line.append(f"t{tile}/s{s} {us:.1f} ({flop/us/1e6:.0f})")
            except Exception as e:
                line.append(f"t{tile}/s{s} {e}")
    try:
        wh = [torch.randn(n, k, device=dev).half() for _ in range(2 if n > 100000 else 6)]
        us = graph_time([lambda v=v: torch.matmul(x, v.T) for v in wh])
        line.append(f"| cublas f16 {us:.1f} ({flop/us/1e6:.0f})")
    except Exception as e:
        line.append(str(e))
    print(f"-- {name} {NAMES[t]} {k}->{n} rows {rows}, floor {bytes_/BW:.1f} us; us (TFLOP/s):", "  ".join(line), flush=True)


def bandwidth():
    a = torch.empty(1 << 31, dtype=torch.uint8, device=dev).random_(); b = torch.empty_like(a)
    us = graph_time([lambda: b.copy_(a)])
    v = a.view(torch.float32)
    us2 = graph_time([lambda: torch.amax(v)])
    print(f"copy {2 * a.numel() / us / 1e6:.2f} TB/s, read only (amax) {a.numel() / us2 / 1e6:.2f} TB/s", flush=True)


if __name__ == "__main__":
    mode = sys.argv[1]
    torch.manual_seed(int.from_bytes(__import__("os").urandom(3), "little"))
    if mode == "correct":
        correct()
    elif mode == "small":
        correct(True)
    elif mode == "bandwidth":
        bandwidth()
    elif mode == "moe":
        time_moe(Q4_K, Q5_0, 256)
        time_moe(Q4_K, Q8_0, 256, 2.0, tiles=(1, 2))
        time_moe(Q4_K, Q5_0, 2048, 1.0, tiles=(3,), layers=3)
    elif mode == "moe_many":  # four times the experts in one launch: what start and end of a launch cost
        time_moe(Q4_K, Q5_0, 1024, 1.0, tiles=(1, 2), layers=2, experts=512)
    elif mode == "dense":
        time_dense(Q4_K, 8192, 2816, 256, "qkv", 1)
        time_dense(Q4_K, 2816, 4096, 256, "o")
        time_dense(Q4_K, 4224, 2816, 256, "gate_up", 2)
        time_dense(Q5_0, 2816, 2112, 256, "down")
        time_dense(Q8_0, 2816, 2112, 256, "down")
        time_dense(Q4_K, 9216, 2816, 256, "qk full", 1)
        time_dense(Q4_K, 2816, 8192, 256, "o full")
        time_dense(Q4_K, 8192, 2816, 2048, "qkv prefill", 1)
        time_dense(Q4_K, 2816, 4096, 1, "o, one row", 0, tiles=(3,), splits=(1, 4, 8))
        time_dense(Q6_K, 262144, 2816, 256, "head", 0, sets=2)
    elif mode == "ncu_moe":
        L = Layers(Q4_K, Q5_0, 1, 256)
        for tile in (1, 2):
            L.gate_up(0, tile); L.down(0, tile)
        torch.cuda.synchronize()
    elif mode == "ncu_dense":
        raw = make_raw(Q4_K, 8192, 2816)
        w = repack(Q4_K, raw, 2816)
        x = torch.randn(256, 2816, device=dev).half()
        for tile in (1, 2):
            qmm(Q4_K, w, x, 8192, 2816, 1, 1.0, 1, tile)
        torch.cuda.synchronize()
