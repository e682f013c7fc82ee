#!/usr/bin/env python3
"""Checks and times the small kernels of a denoising step on a GPU (development tool; needs torch).

    nvcc -shared -Xcompiler -fPIC -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 \
        dllm-engine/kernels/*.cu -o libdllm_kernels.so
    test_step.py LIB [--small] [--no-time] [--only stats,likeliest,...] [--json FILE]

Reference: torch float64 on the same inputs. Outputs are poisoned first. Each section runs in a child process that a
crash cannot take the others along with. --small: small sizes with the reference on the CPU, for compute-sanitizer.
"""
import argparse
import ctypes as C
import json
import math
import os
import statistics
import subprocess
import sys

import torch

F32, F16, Q8_0, Q4_K, Q6_K, BF16 = 0, 1, 8, 12, 14, 30
COPY_TBS = 4.1  # device-to-device copy on the H200, read plus written
EPS = 1e-6
dev = "cuda"
rows_out, args, lib = [], None, None


# ---------------------------------------------------------------- plumbing

def ptr(t):
    return None if t is None else C.c_void_p(t.data_ptr())


def call(name, *a):
    """Enqueue on torch's current stream. Tensors go as pointers, floats as C floats."""
    conv = [C.c_void_p(torch.cuda.current_stream().cuda_stream)]
    for x in a:
        if x is None or torch.is_tensor(x):
            conv.append(ptr(x))
        elif isinstance(x, float):
            conv.append(C.c_float(x))
        elif isinstance(x, I64):
            conv.append(C.c_int64(x))
        else:
            conv.append(C.c_int(x))
    rc = getattr(lib, "dllm_" + name)(*conv)
    if rc:
        raise RuntimeError(f"dllm_{name} returned {rc}")


class I64(int):
    pass


def scratch(name, *a):
    f = getattr(lib, f"dllm_{name}_scratch_bytes")
    f.restype = C.c_size_t
    return torch.zeros(max(f(*a), 16), dtype=torch.uint8, device=dev)


def poison(*shape, dtype=torch.float32):
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype, device=dev)
    return torch.full(shape, -7, dtype=dtype, device=dev)


def rand(*shape, scale=1.0, dtype=torch.float32):
    # drawn on the CPU for small sizes, so that the sanitizer sees few kernels but ours
    if args.small:
        return (torch.randn(*shape) * scale).to(dtype).to(dev)
    return (torch.randn(*shape, device=dev) * scale).to(dtype)


def host(t):
    """Where the reference is computed."""
    return t.cpu() if args.small else t


def rel(out, ref):
    out, ref = host(out).double(), host(ref).double()
    if not torch.isfinite(out).all():
        return float("nan")
    return ((out - ref).norm() / ref.norm().clamp_min(1e-300)).item()


def note(section, what, value, ok=None):
    mark = "" if ok is None else (" ok" if ok else " FAIL")
    rows_out.append([section, what, value, mark])
    print(f"{section:10s} {what:58s} {value}{mark}", flush=True)


def check(section, what, err, limit):
    note(section, what, f"{err:.2e} (limit {limit:.0e})", err <= limit)


def timed(section, what, fn, n_sets, nbytes=None, per_graph=None, extra=""):
    """Median time of fn(i), i = index of the buffer set, inside a captured graph."""
    if args.no_time or args.small:
        return None
    per_graph = per_graph or max(n_sets, 12)
    for i in range(n_sets):
        fn(i)
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for i in range(per_graph):
            fn(i % n_sets)
    for _ in range(3):
        g.replay()
    ts = []
    for _ in range(15):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        g.replay()
        b.record()
        b.synchronize()
        ts.append(a.elapsed_time(b) / per_graph * 1e3)
    us = statistics.median(ts)
    floor = f", floor {nbytes / COPY_TBS / 1e6:.2f} us" if nbytes else ""
    note(section, "time: " + what, f"{us:.2f} us (min {min(ts):.2f}){floor}{extra}")
    return us


# ---------------------------------------------------------------- position statistics, likeliest tokens

def z_of(x, temp, cap):
    x = host(x).double()
    t = host(temp).double()[:, None]
    return cap * torch.tanh(x / cap) / t if cap else x / t


def make_logits(rows, V, dtype=torch.float32, cap=30.0):
    x = rand(rows, V, scale=4.0)
    if rows >= 8:
        x[1] *= 0.01                      # nearly flat
        x[2, V // 3] = 60.0               # nearly certain
        x[3, V - 1] = 25.0                # the last token
        x[4] = 1.25                       # all equal
        x[5, 7] = x[5, V // 2] = 24.5     # two equal maxima
        x[6] *= 6                         # deep in the softcap
        if cap:
            x[7] *= 500                   # saturates it
    return x.to(dtype)


def run_stats(x, temp, u, cap):
    rows, V = x.shape
    sc = scratch("position_stats", rows, V)
    sc.fill_(0xff)
    out = poison(rows, 8, dtype=torch.int32)
    call("position_stats", x, F16 if x.dtype == torch.float16 else F32, rows, V, temp, u, cap, out, sc)
    return out, sc


def stats():
    shapes = [(16, 1024), (9, 4104), (3, 12344)] if args.small else [(256, 262144), (40, 1024), (9, 4104), (64, 32768)]
    for rows, V in shapes:
        for dtype in (torch.float32, torch.float16):
            for cap in (30.0, 0.0):
                x = make_logits(rows, V, dtype, cap)
                temp = (torch.rand(rows) * 0.4 + 0.4).to(dev)
                u = torch.rand(rows)
                u[0], u[-1] = 0.0, 0.99999994
                u = u.to(dev)
                out, _ = run_stats(x, temp, u, cap)
                again, _ = run_stats(x, temp, u, cap)
                tag = f"{rows}x{V} {'f16' if dtype == torch.float16 else 'f32'} cap {cap:g}"
                o, f = host(out), host(out.view(torch.float32)).double()
                z = z_of(x, temp, cap)
                xs = host(x)
                top = xs.max(1, keepdim=True).values
                ids = torch.arange(V, device=z.device)
                amax = torch.where(xs == top, ids, V).min(1).values
                p = torch.softmax(z, 1)
                H = -(p * p.clamp_min(1e-300).log()).sum(1)
                cum = p.cumsum(1)
                uu = host(u).double()
                d = o[:, 1].long()
                at = torch.arange(rows, device=z.device)
                ok_range = bool(((d >= 0) & (d < V)).all())
                d = d.clamp(0, V - 1)
                exact = torch.searchsorted(cum, uu[:, None], right=True)[:, 0].clamp_max(V - 1)
                before = cum[at, d] - p[at, d]
                slack = torch.maximum(before - uu, uu - cum[at, d]).clamp_min(0).max().item()
                note("stats", tag + " argmax", f"{int((o[:, 0] != amax).sum())} of {rows} differ",
                     bool((o[:, 0] == amax).all()))
                note("stats", tag + " drawn", f"{int((d != exact).sum())} of {rows} differ, slack {slack:.1e}",
                     slack < 3e-6 and ok_range)
                check("stats", tag + " entropy, max abs", (f[:, 2] - H).abs().max().item(), 1e-4)
                check("stats", tag + " p argmax, max rel", (f[:, 3] / p[at, amax] - 1).abs().max().item(), 1e-4)
                check("stats", tag + " p drawn, max rel", (f[:, 4] / p[at, d] - 1).abs().max().item(), 1e-4)
                lse = f[:, 5] + f[:, 6].log()
                ref = torch.logsumexp(z, 1)
                check("stats", tag + " log-sum-exp, over 1 + its size", ((lse - ref).abs() / (1 + ref.abs())).max().item(),
                      3e-6)
                note("stats", tag + " repeatable", "", bool((out == again).all()))
                del z, p, cum
    rows, V = (8, 1024) if args.small else (8, 262144)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for cap in (30.0, 0.0):
            x = make_logits(rows, V, cap=cap)
            for r in range(rows - 1):
                x[r, (V // 8) * r + 5] = bad
            ones = torch.full((rows,), 0.5, device=dev)
            out, sc = run_stats(x, ones, ones, cap)
            a = out[:, 0].cpu()
            good = bool((a[:-1] == -1).all() and a[-1] != -1)
            ids, w, dr = poison(rows, 8, dtype=torch.int32), poison(rows, 8), poison(rows)
            call("likeliest", x, F32, rows, V, ones, cap, out, sc, 8, 0.0, 0, ids, w, dr)
            good = good and bool((w[:-1] == 0).all() and (dr[:-1] == 1).all() and (w[-1] > 0).all())
            note("stats", f"refuses {bad} cap {cap:g}", "", good)
    if args.small:
        return
    rows, V, sets = 256, 262144, 3
    temp, u = torch.full((rows,), 0.6, device=dev), torch.rand(rows, device=dev)
    for dtype in (torch.float32, torch.float16):
        xs = [make_logits(rows, V, dtype, 0) for _ in range(sets)]
        ty = F16 if dtype == torch.float16 else F32
        sc = scratch("position_stats", rows, V)
        out = poison(rows, 8, dtype=torch.int32)
        for cap in (30.0, 0.0):
            timed("stats", f"256x262144 {dtype} cap {cap:g}",
                  lambda i: call("position_stats", xs[i], ty, rows, V, temp, u, cap, out, sc), sets,
                  xs[0].numel() * xs[0].element_size())
        if dtype == torch.float32:
            y = torch.empty_like(xs[0])
            timed("stats", "copy of the same size, by torch (read and written)", lambda i: y.copy_(xs[i]), sets,
                  2 * y.numel() * 4)
            timed("stats", "torch.max over the rows", lambda i: xs[i].max(1), sets, y.numel() * 4)


def likeliest():
    shapes = [(16, 1024, 64), (8, 4104, 8), (8, 12344, 256)] if args.small else \
        [(256, 262144, 64), (256, 262144, 256), (40, 1024, 64), (40, 262144, 1), (64, 32768, 16)]
    for rows, V, k in shapes:
        for dtype in (torch.float32, torch.float16):
            x = make_logits(rows, V, dtype)
            temp = (torch.rand(rows) * 0.4 + 0.4).to(dev)
            u = torch.rand(rows).to(dev)
            st, sc = run_stats(x, temp, u, 30.0)
            p = torch.softmax(z_of(x, temp, 30.0), 1)
            order = torch.sort(host(x), dim=1, descending=True, stable=True).indices[:, :k]
            ref_p = torch.gather(p, 1, order)
            for tau, renorm in ((0.0, 0), (1e-4, 0), (0.0, 1)):
                ids, w, dr = poison(rows, k, dtype=torch.int32), poison(rows, k), poison(rows)
                call("likeliest", x, F16 if dtype == torch.float16 else F32, rows, V, temp, 30.0, st, sc, k, tau,
                     renorm, ids, w, dr)
                tag = f"{rows}x{V} {'f16' if dtype == torch.float16 else 'f32'} k {k} tau {tau:g} renorm {renorm}"
                kept = torch.where(ref_p >= tau, ref_p, 0.0)
                total = kept.sum(1, keepdim=True)
                want = kept / total.clamp_min(1e-30) if renorm else kept
                near = (ref_p / tau - 1).abs() < 1e-4 if tau else torch.zeros_like(ref_p, dtype=torch.bool)
                note("likeliest", tag + " ids", f"{int((host(ids) != order).sum())} differ",
                     bool((host(ids) == order).all()))
                err = ((host(w).double() - want).abs() / want.clamp_min(1e-9)).masked_fill(near, 0).max().item()
                check("likeliest", tag + " weights, max rel", err, 2e-4)
                check("likeliest", tag + " dropped, max abs", (host(dr).double() - (1 - total[:, 0])).abs().max().item(),
                      1e-4 if not tau else 1e-3)
    if args.small:
        return
    rows, V, sets = 256, 262144, 3
    xs = [rand(rows, V, scale=4.0) for _ in range(sets)]
    temp, u = torch.full((rows,), 0.6, device=dev), torch.rand(rows, device=dev)
    st = [run_stats(x, temp, u, 30.0) for x in xs]
    for k in (16, 64, 256):
        ids, w, dr = poison(rows, k, dtype=torch.int32), poison(rows, k), poison(rows)
        timed("likeliest", f"k {k}, after the statistics, logits not in L2",
              lambda i: call("likeliest", xs[i], F32, rows, V, temp, 30.0, st[i][0], st[i][1], k, 0.0, 0, ids, w, dr),
              sets, rows * (8192 + k * 128 * 8))
    flat = torch.full((rows, V), 1.25, device=dev)
    s0, c0 = run_stats(flat, temp, u, 30.0)
    ids, w, dr = poison(rows, 64, dtype=torch.int32), poison(rows, 64), poison(rows)
    timed("likeliest", "k 64, all logits equal (slow way)",
          lambda i: call("likeliest", flat, F32, rows, V, temp, 30.0, s0, c0, 64, 0.0, 0, ids, w, dr), 1, per_graph=2)
    timed("likeliest", "torch.topk k 64", lambda i: torch.topk(xs[i], 64, 1), sets, per_graph=3)


# ---------------------------------------------------------------- embedding table

def f16_bytes(n, lo, hi):
    v = (torch.rand(n, device=dev) * (hi - lo) + lo).half()
    return v.view(torch.uint8).view(n, 2)


def make_table(ty, V, H):
    """Random valid blocks, as bytes [V, row bytes]."""
    if ty in (F32, F16, BF16):
        t = torch.randn(V, H, device=dev).to({F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[ty])
        return t.view(torch.uint8).view(V, -1)
    size, width, at = {Q8_0: (34, 32, [0]), Q4_K: (144, 256, [0, 2]), Q6_K: (210, 256, [208])}[ty]
    n = V * (H // width)
    t = torch.randint(0, 256, (n, size), dtype=torch.uint8, device=dev)
    for a in at:
        t[:, a:a + 2] = f16_bytes(n, 0.001, 0.01)
    return t.view(V, -1)


def dequant(ty, raw, H):
    """bytes [n, row bytes] -> f32 [n, H], from the block formats."""
    n = raw.shape[0]
    if ty in (F32, F16, BF16):
        return raw.contiguous().view({F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[ty]).float()
    size = {Q8_0: 34, Q4_K: 144, Q6_K: 210}[ty]
    b = raw.reshape(-1, size)
    half = lambda a: b[:, a:a + 2].contiguous().view(torch.float16).float()
    if ty == Q8_0:
        return (half(0) * b[:, 2:].contiguous().view(torch.int8).float()).view(n, H)
    if ty == Q4_K:
        s = b[:, 4:16].int()
        out = torch.empty(b.shape[0], 256, device=b.device)
        for j in range(8):
            if j < 4:
                sc, mn = s[:, j] & 63, s[:, j + 4] & 63
            else:
                sc, mn = (s[:, j + 4] & 15) | (s[:, j - 4] >> 6) << 4, s[:, j + 4] >> 4 | (s[:, j] >> 6) << 4
            q = b[:, 16 + 32 * (j // 2):48 + 32 * (j // 2)].int()
            q = q >> 4 if j & 1 else q & 15
            out[:, 32 * j:32 * j + 32] = half(0) * sc[:, None] * q - half(2) * mn[:, None]
        return out.view(n, H)
    sc = b[:, 192:208].contiguous().view(torch.int8).float()
    out = torch.empty(b.shape[0], 256, device=b.device)
    for h in range(2):
        ql, qh = b[:, 64 * h:64 * h + 64].int(), b[:, 128 + 32 * h:160 + 32 * h].int()
        for c in range(4):
            low = ql[:, 32 * (c & 1):32 * (c & 1) + 32]
            low = low >> 4 if c > 1 else low & 15
            q = (low | (qh >> 2 * c & 3) << 4) - 32
            scale = sc[:, 8 * h + 2 * c:8 * h + 2 * c + 2].repeat_interleave(16, 1)
            out[:, 128 * h + 32 * c:128 * h + 32 * c + 32] = half(208) * scale * q
    return out.view(n, H)


NAMES = {F32: "F32", F16: "F16", BF16: "BF16", Q8_0: "Q8_0", Q4_K: "Q4_K", Q6_K: "Q6_K"}


def embed():
    shapes = [(5, 256, 7), (3, 512, 64)] if args.small else [(256, 2816, 64), (33, 256, 5), (256, 2816, 1)]
    for rows, H, k in shapes:
        for ty in NAMES:
            V = 64 if args.small else 2048
            tab = make_table(ty, V, H)
            full = host(dequant(ty, tab, H)).double()
            ids = torch.randint(0, V, (rows, k), dtype=torch.int32)
            w = torch.rand(rows, k)
            w = w / w.sum(1, keepdim=True)
            w[:, ::3] = 0
            w[:, 0] = 0.25
            ids, w = ids.to(dev), w.to(dev)
            out = poison(rows, H)
            call("soft_embed", tab, ty, V, H, ids, w, rows, k, 53.0, out)
            ref = 53.0 * (host(w).double()[:, :, None] * full[host(ids).long()]).sum(1)
            check("embed", f"soft {NAMES[ty]} {rows}x{H} k {k}", rel(out, ref), 1e-6)
            out = poison(rows, H)
            one = ids[:, 0].contiguous()
            call("embed_rows", tab, ty, V, H, one, rows, 2.0, out)
            check("embed", f"rows {NAMES[ty]} {rows}x{H}", rel(out, 2.0 * full[host(one).long()]), 1e-6)
    one = torch.tensor([0, 64 if args.small else 2048, -1], dtype=torch.int32, device=dev)
    out = poison(3, H)
    call("embed_rows", tab, ty, V, H, one, 3, 1.0, out)
    nan = torch.isnan(out.cpu())
    note("embed", "ids outside the table give NaN", "", bool(nan[1:].all() and not nan[0].any()))
    if args.small or args.no_time:
        return
    rows, H, V, sets = 256, 2816, 262144, 4
    for ty in (Q6_K, Q8_0, Q4_K, F16):
        tab = make_table(ty, V, H)
        out = poison(rows, H)
        for k in (16, 64, 256):
            ids = [torch.randint(0, V, (rows, k), dtype=torch.int32, device=dev) for _ in range(sets)]
            w = torch.rand(rows, k, device=dev)
            timed("embed", f"soft {NAMES[ty]} k {k}, ids random over the table",
                  lambda i: call("soft_embed", tab, ty, V, H, ids[i], w, rows, k, 1.0, out), sets,
                  rows * (k * tab.shape[1] + H * 4))
        one = [i[:, 0].contiguous() for i in ids]
        timed("embed", f"rows {NAMES[ty]}", lambda i: call("embed_rows", tab, ty, V, H, one[i], rows, 1.0, out), sets,
              rows * (tab.shape[1] + H * 4))
        if ty == Q6_K:  # what real rows look like: neighbours share their likeliest tokens
            pool = torch.randint(0, V, (2000,), dtype=torch.int32, device=dev)
            ids = [pool[torch.randint(0, 2000, (rows, 64), device=dev)].contiguous() for _ in range(sets)]
            w = torch.rand(rows, 64, device=dev)
            timed("embed", "soft Q6_K k 64, ids from 2000 tokens",
                  lambda i: call("soft_embed", tab, ty, V, H, ids[i], w, rows, 64, 1.0, out), sets)
        del tab


# ---------------------------------------------------------------- norms

def rms(x, w=None):
    x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)
    return x if w is None else x * w


def norms():
    shapes = [(3, 256), (2, 2816), (2, 8192)] if args.small else [(256, 2816), (7, 256), (5, 5120), (33, 8192), (3, 4)]
    D = lambda t: host(t).double()
    for rows, H in shapes:
        g = lambda s=1.0: rand(rows, H, scale=s)
        wt = lambda: (1 + 0.3 * torch.randn(H)).to(dev)
        for ity in (torch.float32, torch.float16):
            for oty in (torch.float32, torch.float16):
                ti, to = F16 if ity == torch.float16 else F32, F16 if oty == torch.float16 else F32
                lim = 4e-4 if oty == torch.float16 else 1e-6
                tag = f"{rows}x{H} in {'f16' if ti else 'f32'} out {'f16' if to else 'f32'}"
                x, w, out = g(3).to(ity), wt(), poison(rows, H, dtype=oty)
                call("rms_norm", x, ti, w, 2.0, EPS, out, to, rows, H)
                check("norms", "rms " + tag, rel(out, rms(2 * D(x), D(w))), lim)
                out = poison(rows, H, dtype=oty)
                call("rms_norm", x, ti, None, 1.0, EPS, out, to, rows, H)
                check("norms", "rms no weight " + tag, rel(out, rms(D(x))), lim)
                # input
                e, sc, flag = g(), g(30), (torch.arange(rows) % 2).float().to(dev)
                sc[::2] = float("nan")  # rows without a signal must not look at it
                causal = (torch.arange(rows) % 3 == 0).int().to(dev)
                h, x1 = poison(rows, H), poison(rows, H, dtype=oty)
                call("norm_input", e, 53.0, sc, flag, causal, w, EPS, h, x1, to, rows, H)
                mix = D(e) * 53.0 + torch.where(D(flag)[:, None] > 0, D(sc), 0.0)
                hr = torch.where(D(causal)[:, None] > 0, mix, rms(mix))
                check("norms", "input h " + tag, rel(h, hr), 1e-6)
                check("norms", "input x1 " + tag, rel(x1, rms(hr, D(w))), lim)
                # after attention
                h, a, w1, w2, w3, ws = g(2), g(5).to(ity), wt(), wt(), wt(), wt()
                r, x, y, zr = poison(rows, H), poison(rows, H, dtype=oty), poison(rows, H, dtype=oty), poison(rows, H)
                call("norm_attn_out", h, a, ti, w1, w2, w3, ws, EPS, r, x, y, to, zr, rows, H)
                rr = D(h) + rms(D(a), D(w1))
                check("norms", "attn_out r " + tag, rel(r, rr), 1e-6)
                check("norms", "attn_out x " + tag, rel(x, rms(rr, D(w2))), lim)
                check("norms", "attn_out y " + tag, rel(y, rms(rr, D(w3))), lim)
                check("norms", "attn_out zr " + tag, rel(zr, rms(rr) * D(ws) / math.sqrt(H)), 1e-6)
                # end of the layer, parts both as [rows][parts] and as [parts][rows]
                for parts, row_major in ((1, True), (8, True), (8, False)):
                    r, d = g(2), g(4).to(ity)
                    m = (rand(rows, parts, H) if row_major else rand(parts, rows, H)).to(ity)
                    strides = (I64(parts * H), I64(H)) if row_major else (I64(H), I64(rows * H))
                    w4, s0, s1 = wt(), torch.tensor([0.37], device=dev), torch.tensor([1.9], device=dev)
                    hn, xn = poison(rows, H), poison(rows, H, dtype=oty)
                    call("norm_layer_out", r, d, ti, m, ti, parts, *strides, w1, w2, w3, s0, s1, causal, w4, EPS, hn, xn,
                         to, rows, H)
                    ms = D(m).sum(1 if row_major else 0)
                    f = rms(rms(D(d), D(w1)) + rms(ms, D(w2)), D(w3))
                    s = torch.where(D(causal)[:, None] > 0, D(s1), D(s0))
                    hr = (D(r) + f) * s
                    t2 = f"{tag} parts {parts}{'' if row_major else ' part-major'}"
                    check("norms", "layer_out h " + t2, rel(hn, hr), 2e-6)
                    check("norms", "layer_out x " + t2, rel(xn, rms(hr, D(w4))), lim)
                hn2 = r.clone()  # in place, no next norm
                call("norm_layer_out", hn2, d, ti, m, ti, parts, *strides, w1, w2, w3, s0, s1, causal, None, EPS, hn2, None,
                     0, rows, H)
                note("norms", "layer_out in place, no x " + tag, "", bool((hn2 == hn).all()))
    if args.small:
        return
    rows, H, sets = 256, 2816, 4
    w = (1 + 0.3 * torch.randn(H)).to(dev)
    s0 = torch.tensor([0.5], device=dev)
    A = [rand(rows, H) for _ in range(sets)]
    B = [rand(rows, H) for _ in range(sets)]
    M = {t: [rand(8, rows, H).to(t) for _ in range(sets)] for t in (torch.float32, torch.float16)}
    M16 = [b.half() for b in B]
    o32, o32b = poison(rows, H), poison(rows, H)
    oh, oh2 = poison(rows, H, dtype=torch.float16), poison(rows, H, dtype=torch.float16)
    n = rows * H
    timed("norms", "rms f32 -> f16 256x2816",
          lambda i: call("rms_norm", A[i], F32, w, 1.0, EPS, oh, F16, rows, H), sets, n * 6)
    timed("norms", "input", lambda i: call("norm_input", A[i], 53.0, B[i], None, None, w, EPS, o32, oh, F16, rows, H), sets,
          n * 14)
    timed("norms", "attn_out, a f32",
          lambda i: call("norm_attn_out", A[i], B[i], F32, w, w, w, w, EPS, o32, oh, oh2, F16, o32b, rows, H), sets, n * 20)
    timed("norms", "attn_out, a f16",
          lambda i: call("norm_attn_out", A[i], M16[i], F16, w, w, w, w, EPS, o32, oh, oh2, F16, o32b, rows, H), sets,
          n * 18)
    timed("norms", "layer_out, 1 part f32",
          lambda i: call("norm_layer_out", A[i], B[i], F32, B[i], F32, 1, I64(H), I64(H), w, w, w, s0, None, None, w, EPS,
                         o32, oh, F16, rows, H), sets, n * 18)
    for t, ty, sz in ((torch.float32, F32, 4), (torch.float16, F16, 2)):
        timed("norms", f"layer_out, 8 parts {t}, part-major",
              lambda i: call("norm_layer_out", A[i], B[i], F32, M[t][i], ty, 8, I64(H), I64(n), w, w, w, s0, None, None, w,
                             EPS, o32, oh, F16, rows, H), sets, n * (14 + 8 * sz))
    timed("norms", "layer_out, 8 parts f16, row-major",
          lambda i: call("norm_layer_out", A[i], B[i], F32, M[torch.float16][i], F16, 8, I64(8 * H), I64(H), w, w, w, s0,
                         None, None, w, EPS, o32, oh, F16, rows, H), sets, n * 30)
    x = torch.empty(1, device=dev)
    timed("norms", "smallest kernel of torch, for the launch alone", lambda i: x.fill_(1.0), 1, per_graph=50)


# ---------------------------------------------------------------- router

def router():
    shapes = [(3, 8, 256, 2), (40, 128, 272, 8), (33, 160, 256, 4)] if args.small else \
        [(256, 128, 2816, 8), (37, 8, 256, 2), (2048, 128, 2816, 8), (1, 128, 2816, 8), (64, 256, 1024, 16)]
    for rows, E, H, used in shapes:
        z, w = rand(rows, H, scale=0.3), rand(E, H, scale=0.3)
        if E >= 16:
            w[9] = w[3]  # equal logits: the lower id wins
        es = (0.5 + torch.rand(E)).to(dev)
        sc = scratch("router", rows, E, H)
        for rep in range(2):  # the second call finds the scratch as the first left it
            ids, wt, lg = poison(rows, used, dtype=torch.int32), poison(rows, used), poison(rows, E)
            call("router", z, w, es, rows, E, H, used, ids, wt, lg, sc)
        ref = host(z).double() @ host(w).double().T
        tag = f"{rows}x{E}x{H} top {used}"
        check("router", tag + " logits", rel(lg, ref), 1e-6)
        lgh = host(lg)
        order = torch.sort(lgh, dim=1, descending=True, stable=True).indices[:, :used]
        note("router", tag + " ids against own logits", "", bool((host(ids) == order).all()))
        ro = torch.sort(ref.float(), dim=1, descending=True, stable=True).indices[:, :used]
        diff = (ro.sort(1).values != host(ids).long().sort(1).values).any(1)
        note("router", tag + " sets that differ from f64", f"{int(diff.sum())} of {rows}", int(diff.sum()) <= rows // 100)
        p = torch.softmax(ref, 1)
        pj = torch.gather(p, 1, host(ids).long())
        want = pj / pj.sum(1, keepdim=True) * host(es).double()[host(ids).long()]
        check("router", tag + " weights", rel(wt, want), 1e-5)
    if args.small:
        return
    H, E, sets = 2816, 128, 30
    W = [rand(E, H) for _ in range(sets)]
    es = torch.rand(E, device=dev)
    for rows in (256, 512, 2048):
        z = [rand(rows, H) for _ in range(4)]
        sc = scratch("router", rows, E, H)
        ids, wt = poison(rows, 8, dtype=torch.int32), poison(rows, 8)
        timed("router", f"{rows} rows, 30 layers' weights in turn",
              lambda i: call("router", z[i % 4], W[i], es, rows, E, H, 8, ids, wt, None, sc), sets,
              E * H * 4 + rows * H * 4)
        timed("router", f"torch.matmul f32 alone, {rows} rows", lambda i: torch.matmul(z[i % 4], W[i].T), sets)


# ---------------------------------------------------------------- rope and the cache

def rope():
    # rows, lanes, q heads, kv heads, head, has_v
    shapes = [(6, 2, 8, 4, 32, 1), (4, 1, 8, 2, 64, 0), (3, 1, 4, 2, 256, 1), (2, 1, 4, 1, 512, 0)] if args.small else \
        [(256, 1, 16, 8, 256, 1), (256, 1, 16, 2, 512, 0), (512, 2, 16, 8, 256, 1), (128, 2, 8, 4, 32, 1),
         (64, 1, 8, 2, 64, 0)]
    for rows, lanes, nq, nk, D, has_v in shapes:
        width = (nq + nk * (2 if has_v else 1)) * D
        full = not has_v
        theta = 1e6 if full else 1e4
        fac = torch.ones(D // 2)
        if full:
            fac[D // 8:] = 1e30
        fac = fac.to(dev)
        pos = (torch.arange(rows) + 7000).int()
        pos[0] = 250000
        pos = pos.to(dev)
        qn, kn = (1 + 0.3 * torch.randn(D)).to(dev), (1 + 0.3 * torch.randn(D)).to(dev)
        table = poison(rows, D // 2, 2)
        call("rope_table", pos, rows, D, theta, fac if full else None, table)
        i = torch.arange(D // 2).double()
        f = (theta ** (-2 * i / D)).float() / fac.cpu()
        ang = (pos.cpu().float()[:, None] * f[None]).double()
        tag = f"{rows} rows {nq}/{nk} heads of {D}"
        ref = torch.stack([ang.cos(), ang.sin()], -1)
        err = (table.cpu().double() - ref).abs()
        # one f32 rounding of the frequency moves the angle by pos * 6e-8; count it out
        check("rope", tag + " table, max abs over (1 + angle)", (err / (1 + ang.abs()[..., None])).max().item(), 2e-7)
        slots = torch.randperm(4 * rows)[:rows]
        slots[-1] = -1
        for ity in (torch.float32, torch.float16):
            for oty in (torch.float16, torch.float32):
                x = rand(rows, width, scale=2.0).to(ity)
                q = poison(lanes, nq, rows // lanes, D, dtype=oty)
                kc, vc = poison(4 * rows, nk * D + 8, dtype=torch.float16), poison(4 * rows, nk * D + 8, dtype=torch.float16)
                call("rope_kv", x, F16 if ity == torch.float16 else F32, rows, lanes, nq, nk, D, has_v, qn, kn, EPS, table,
                     slots.to(dev), q, F16 if oty == torch.float16 else F32, kc, vc, I64(nk * D + 8))
                X = host(x).double()
                Q = X[:, :nq * D].view(rows, nq, D)
                K = X[:, nq * D:(nq + nk) * D].view(rows, nk, D)
                V = X[:, (nq + nk) * D:].view(rows, nk, D) if has_v else K
                cs = host(table).double()[:, None]

                def rot(t):
                    a, b = t[..., :D // 2], t[..., D // 2:]
                    return torch.cat([a * cs[..., 0] - b * cs[..., 1], b * cs[..., 0] + a * cs[..., 1]], -1)
                Q, K, V = rot(rms(Q, host(qn).double())), rot(rms(K, host(kn).double())), rms(V)
                Q = Q.view(lanes, rows // lanes, nq, D).permute(0, 2, 1, 3)
                t2 = f"{tag} in {'f16' if ity == torch.float16 else 'f32'} q {'f16' if oty == torch.float16 else 'f32'}"
                check("rope", t2 + " q", rel(q, Q), 3e-4 if oty == torch.float16 else 1e-6)
                s = slots[:-1].to(host(kc).device)
                check("rope", t2 + " k", rel(host(kc)[s, :nk * D], K[:-1].reshape(rows - 1, -1)), 3e-4)
                check("rope", t2 + " v", rel(host(vc)[s, :nk * D], V[:-1].reshape(rows - 1, -1)), 3e-4)
                rest = torch.ones(4 * rows, dtype=torch.bool)
                rest[slots[:-1]] = False
                untouched = torch.isnan(kc.cpu()[rest]).all() and torch.isnan(vc.cpu()[rest]).all() and \
                    torch.isnan(kc.cpu()[:, nk * D:]).all()
                note("rope", t2 + " nothing else written", "", bool(untouched))
    if args.small:
        return
    rows, sets = 256, 4
    slots = torch.arange(rows, device=dev) + 1000
    for nq, nk, D, has_v in ((16, 8, 256, 1), (16, 2, 512, 0)):
        width = (nq + nk * (2 if has_v else 1)) * D
        pos = torch.arange(rows, dtype=torch.int32, device=dev)
        table, n = poison(rows, D // 2, 2), torch.ones(D, device=dev)
        timed("rope", f"table, head {D}", lambda i: call("rope_table", pos, rows, D, 1e4, None, table), 1)
        for ity in (torch.float32, torch.float16):
            x = [rand(rows, width).to(ity) for _ in range(sets)]
            q = poison(1, nq, rows, D, dtype=torch.float16)
            kc, vc = poison(2048, nk * D, dtype=torch.float16), poison(2048, nk * D, dtype=torch.float16)
            timed("rope", f"{nq}/{nk} heads of {D}, in {ity}",
                  lambda i: call("rope_kv", x[i], F16 if ity == torch.float16 else F32, rows, 1, nq, nk, D, has_v, n, n,
                                 EPS, table, slots, q, F16, kc, vc, I64(nk * D)), sets,
                  rows * (width * x[0].element_size() + nq * D * 2 + 2 * nk * D * 2))


# ---------------------------------------------------------------- attention

def attention_case(lanes, R, nq, nk, D, keys):
    """Random cache of `slots` rows per lane; keys = list of (count0, count1) per lane, spans placed apart."""
    need = max(a + b for a, b in keys) + 40
    k = rand(lanes * need, nk * D + 8, dtype=torch.float16)
    v = rand(lanes * need, nk * D + 8, dtype=torch.float16)
    spans = []
    for i, (a, b) in enumerate(keys):
        spans.append([i * need + 3, a, i * need + a + 20, b])  # a gap between the runs
    q = rand(lanes, nq, R, D, dtype=torch.float16)
    return q, k, v, torch.tensor(spans, dtype=torch.int64, device=dev)


def attention():
    # lanes, rows per lane, q heads, kv heads, head, keys
    if args.small:
        shapes = [(2, 16, 4, 2, 32, [(9, 5), (0, 80)]), (1, 40, 8, 2, 64, [(100, 33)]), (1, 33, 2, 1, 256, [(70, 3)]),
                  (1, 33, 2, 1, 512, [(40, 10)]), (2, 8, 2, 1, 128, [(0, 0), (64, 64)])]
    else:
        shapes = [(1, 256, 16, 8, 256, [(100, 256)]), (1, 256, 16, 2, 512, [(100, 256)]), (1, 256, 16, 8, 256, [(1023, 256)]),
                  (2, 256, 16, 2, 512, [(3000, 256), (7, 256)]), (3, 64, 8, 4, 32, [(31, 64), (0, 64), (64, 0)]),
                  (2, 64, 8, 2, 64, [(200, 64), (0, 0)]), (1, 77, 4, 2, 128, [(1, 0)])]
    for lanes, R, nq, nk, D, keys in shapes:
        q, k, v, spans = attention_case(lanes, R, nq, nk, D, keys)
        rows = lanes * R
        ref = torch.zeros(rows, nq, D, dtype=torch.float64, device="cpu" if args.small else dev)
        for i in range(lanes):
            f0, c0, f1, c1 = spans[i].tolist()
            idx = torch.tensor(list(range(f0, f0 + c0)) + list(range(f1, f1 + c1)), dtype=torch.long)
            K = host(k)[idx.to(host(k).device)].double()[:, :nk * D].view(-1, nk, D).repeat_interleave(nq // nk, 1)
            V = host(v)[idx.to(host(v).device)].double()[:, :nk * D].view(-1, nk, D).repeat_interleave(nq // nk, 1)
            if len(idx):
                S = torch.einsum("hrd,khd->hrk", host(q[i]).double(), K)
                ref[i * R:(i + 1) * R] = torch.einsum("hrk,khd->rhd", torch.softmax(S, -1), V)
        # what is not a key must not be read as one
        mask = torch.ones(k.shape[0], dtype=torch.bool)
        for f0, c0, f1, c1 in spans.tolist():
            mask[f0:f0 + c0] = False
            mask[f1:f1 + c1] = False
        k[mask.to(dev)] = float("nan")
        v[mask.to(dev)] = float("nan")
        for splits in (1, 2, 3, 7):
            need = lib.dllm_canvas_attention_scratch_bytes
            need.restype = C.c_size_t
            sc = torch.full((max(need(rows, nq, D, splits), 16),), 0xff, dtype=torch.uint8, device=dev)
            for oty in (torch.float16, torch.float32):
                out = poison(rows, nq * D, dtype=oty)
                call("canvas_attention", q, rows, lanes, nq, nk, D, k, v, I64(nk * D + 8), spans, splits, out,
                     F16 if oty == torch.float16 else F32, sc)
                check("attention", f"{lanes}x{R} rows {nq}/{nk} heads of {D}, {splits} splits, keys {keys} "
                      f"{'f16' if oty == torch.float16 else 'f32'}", rel(out.view(rows, nq, D), ref), 6e-4)
    if args.small:
        return
    nq, R = 16, 256
    for lanes, nk, D, keys, tries in ((1, 8, 256, 384, (1, 2, 3, 4)), (1, 8, 256, 1279, (1, 2, 4)), (8, 8, 256, 1279, (1,)),
                                      (1, 2, 512, 384, (1, 2, 4)), (1, 2, 512, 4352, (1, 2, 4)), (1, 2, 512, 8192, (2, 4)),
                                      (8, 2, 512, 4352, (1,))):
        sets = 4 if lanes == 1 else 2
        data = [attention_case(lanes, R, nq, nk, D, [(keys - 256, 256)] * lanes) for _ in range(sets)]
        rows = lanes * R
        out = poison(rows, nq * D, dtype=torch.float16)
        pick = lib.dllm_canvas_attention_splits(rows, lanes, nq, nk, D, keys)
        flop = 4.0 * rows * nq * keys * D
        for splits in tries:
            sc = torch.zeros(lib.dllm_canvas_attention_scratch_bytes(rows, nq, D, splits) + 16, dtype=torch.uint8, device=dev)
            us = timed("attention", f"{lanes} lanes, 16/{nk} heads of {D}, {keys} keys, {splits} splits",
                       lambda i: call("canvas_attention", data[i][0], rows, lanes, nq, nk, D, data[i][1], data[i][2],
                                      I64(nk * D + 8), data[i][3], splits, out, F16, sc), sets,
                       extra=f", automatic: {pick}")
            if us:
                note("attention", "   TFLOP/s", f"{flop / us / 1e6:.0f}")
        K = data[0][1][:lanes * keys, :nk * D].reshape(lanes, keys, nk, D).permute(0, 2, 1, 3).contiguous()
        V = data[0][2][:lanes * keys, :nk * D].reshape(lanes, keys, nk, D).permute(0, 2, 1, 3).contiguous()
        try:
            timed("attention", f"torch's attention, {lanes} lanes, heads of {D}, {keys} keys",
                  lambda i: torch.nn.functional.scaled_dot_product_attention(data[i][0], K, V, scale=1.0, enable_gqa=True),
                  sets)
        except Exception as e:  # noqa: BLE001
            note("attention", "torch's attention", f"failed: {str(e)[:80]}")


# ---------------------------------------------------------------- main

def profile():
    """Each kernel twice at full size, plain launches, for ncu."""
    R, V, H, k = 256, 262144, 2816, 64
    x, temp, u = rand(R, V, scale=4.0), torch.full((R,), 0.6, device=dev), torch.rand(R, device=dev)
    ids, w, dr = poison(R, k, dtype=torch.int32), poison(R, k), poison(R)
    tab, soft = make_table(Q6_K, V, H), poison(R, H)
    n, s0, a, b = torch.ones(H, device=dev), torch.ones(1, device=dev), rand(R, H), rand(R, H)
    m, h16, g16 = rand(8, R, H).half(), poison(R, H, dtype=torch.float16), poison(R, H, dtype=torch.float16)
    wr, rsc = rand(128, H), scratch("router", R, 128, H)
    i8, w8 = poison(R, 8, dtype=torch.int32), poison(R, 8)
    qkv, q = rand(R, 8192), poison(1, 16, R, 256, dtype=torch.float16)
    kc, vc = poison(R, 2048, dtype=torch.float16), poison(R, 2048, dtype=torch.float16)
    table, slots = torch.zeros(R, 128, 2, device=dev), torch.arange(R, device=dev)
    att = [attention_case(1, R, 16, nk, D, [(keys - 256, 256)]) for nk, D, keys in ((8, 256, 384), (8, 256, 1279), (2, 512, 4352))]
    att_out, att_sc = poison(R, 16 * 512, dtype=torch.float16), torch.zeros(2 * R * 16 * 520, device=dev)
    for _ in range(2):
        for (aq, ak, av, sp), nk, D in zip(att, (8, 8, 2), (256, 256, 512)):
            call("canvas_attention", aq, R, 1, 16, nk, D, ak, av, I64(nk * D + 8), sp, 2, att_out, F16, att_sc)
        st, sc = run_stats(x, temp, u, 30.0)
        call("likeliest", x, F32, R, V, temp, 30.0, st, sc, k, 0.0, 0, ids, w, dr)
        call("soft_embed", tab, Q6_K, V, H, ids, w, R, k, 1.0, soft)
        call("norm_attn_out", a, b, F32, n, n, n, n, EPS, soft, h16, g16, F16, soft, R, H)
        call("norm_layer_out", a, b, F32, m, F16, 8, I64(H), I64(R * H), n, n, n, s0, None, None, n, EPS, soft, h16, F16, R,
             H)
        call("router", a, wr, None, R, 128, H, 8, i8, w8, None, rsc)
        call("rope_kv", qkv, F32, R, 1, 16, 8, 256, 1, n, n, EPS, table, slots, q, F16, kc, vc, I64(2048))


SECTIONS = {f.__name__: f for f in (stats, likeliest, embed, norms, router, rope, attention)}


def child(names, status):
    global lib
    lib = C.CDLL(os.path.abspath(args.lib))
    torch.manual_seed(args.seed)
    for name in names:
        with open(status, "a") as f:
            f.write(name + "\n")
        try:
            with torch.no_grad():
                SECTIONS[name]()
            torch.cuda.synchronize()
        except Exception as e:  # noqa: BLE001 - a section's failure must not lose the others
            note(name, "EXCEPTION", f"{type(e).__name__}: {str(e)[:200]}", False)
            if "CUDA" in str(e) or "cuda" in str(e):
                os._exit(3)  # the context may be gone: the parent goes on in a new process
        torch.cuda.empty_cache()


def main():
    global args
    ap = argparse.ArgumentParser()
    ap.add_argument("lib")
    ap.add_argument("--small", action="store_true")
    ap.add_argument("--no-time", action="store_true")
    ap.add_argument("--only", default="")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--child", default="")
    args = ap.parse_args()
    names = args.only.split(",") if args.only else list(SECTIONS)
    SECTIONS["profile"] = profile
    if args.child or args.small:
        child(names, args.child or os.devnull)
        bad = [r for r in rows_out if r[3] == " FAIL"]
        if args.small:
            print(f"{len(rows_out) - len(bad)} ok, {len(bad)} failed")
        return 1 if bad else 0
    text = ""
    while names:
        status = f"/tmp/test_step.{os.getpid()}.status"
        open(status, "w").close()
        flags = ["--no-time"] if args.no_time else []
        p = subprocess.run([sys.executable, os.path.abspath(__file__), args.lib, "--only", ",".join(names), "--child",
                            status, "--seed", str(args.seed)] + flags, stdout=subprocess.PIPE, text=True)
        print(p.stdout, end="", flush=True)
        text += p.stdout
        begun = open(status).read().split()
        names = names[len(begun):] if begun and p.returncode not in (0, 1) else []
    lines = text.splitlines()
    print("\n=== failures")
    print("\n".join(li for li in lines if li.endswith("FAIL")) or "none")
    print("=== times")
    print("\n".join(li for li in lines if " time: " in li))
    return 0


if __name__ == "__main__":
    sys.exit(main())
