"""Helpers for the matmul tests: random ggml blocks, their values, and the library's functions through ctypes."""
import ctypes, os, statistics
import torch

F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16 = 1, 2, 3, 6, 7, 8, 12, 13, 14, 30
NAMES = {F16: "F16", Q4_0: "Q4_0", Q4_1: "Q4_1", Q5_0: "Q5_0", Q5_1: "Q5_1", Q8_0: "Q8_0", Q4_K: "Q4_K", Q5_K: "Q5_K",
         Q6_K: "Q6_K", BF16: "BF16"}
BLOCK = {F16: (1, 2), BF16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q5_0: (32, 22), Q5_1: (32, 24), Q8_0: (32, 34),
         Q4_K: (256, 144), Q5_K: (256, 176), Q6_K: (256, 210)}
dev = "cuda"

lib = ctypes.CDLL(os.environ.get("DLLM_LIB", "/tmp/libdllm_mm.so"))
for name in ("dllm_repack_bytes", "dllm_qmm_scratch_bytes", "dllm_moe_plan_bytes"):
    getattr(lib, name).restype = ctypes.c_int64


def P(t):
    return ctypes.c_void_p(0 if t is None else t.data_ptr())


def I64(v):
    return ctypes.c_int64(v)


def stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def ok(rc):
    if rc != 0:
        raise RuntimeError(f"cuda error {rc}")


def put_half(raw, at, value):
    raw[..., at:at + 2] = value.half().unsqueeze(-1).contiguous().view(torch.uint8)


def make_raw(t, rows, k, gen=None):
    """Random blocks [rows][k / block][bytes], values of about 0.02."""
    cols, size = BLOCK[t]
    if t in (F16, BF16):
        w = torch.randn(rows, k, device=dev) * 0.02
        return (w.half() if t == F16 else w.bfloat16()).view(torch.uint8).view(rows, k, 2)
    raw = torch.randint(0, 256, (rows, k // cols, size), dtype=torch.uint8, device=dev)
    r = lambda: 0.5 + torch.rand(rows, k // cols, device=dev)
    if t in (Q4_K, Q5_K):
        q = 1.0 if t == Q4_K else 0.5
        put_half(raw, 0, r() * 1.2e-4 * q); put_half(raw, 2, r() * 9e-4)
    elif t == Q6_K:
        put_half(raw, 208, r() * 1.5e-5)
    elif t in (Q4_1, Q5_1):
        d = r() * (4e-3 if t == Q4_1 else 2e-3)
        put_half(raw, 0, d); put_half(raw, 2, -d * (7.5 if t == Q4_1 else 15.5) * r())
    else:
        put_half(raw, 0, r() * {Q4_0: 4e-3, Q5_0: 2e-3, Q8_0: 2.5e-4}[t] * torch.sign(torch.rand_like(r()) - 0.5))
    return raw


def half_at(raw, at):
    return raw[..., at:at + 2].contiguous().view(torch.float16).squeeze(-1).double().unsqueeze(-1)


def dequant(t, raw):
    """Values as float64 [rows][k]."""
    rows = raw.shape[0]
    if t == F16:
        return raw.contiguous().view(torch.float16).view(rows, -1).double()
    if t == BF16:
        return raw.contiguous().view(torch.bfloat16).view(rows, -1).double()
    b = raw.int()
    if t in (Q4_0, Q4_1, Q5_0, Q5_1):
        at = {Q4_0: 2, Q4_1: 4, Q5_0: 6, Q5_1: 8}[t]
        qs = b[..., at:at + 16]
        q = torch.cat([qs & 15, qs >> 4], -1)
        if t in (Q5_0, Q5_1):
            h = b[..., at - 4:at]
            bits = torch.stack([(h[..., i // 8] >> (i % 8)) & 1 for i in range(32)], -1)
            q = q | bits << 4
        d = half_at(raw, 0)
        w = d * (q - {Q4_0: 8, Q5_0: 16}[t]) if t in (Q4_0, Q5_0) else d * q + half_at(raw, 2)
    elif t == Q8_0:
        w = half_at(raw, 0) * raw[..., 2:].contiguous().view(torch.int8).double()
    elif t in (Q4_K, Q5_K):
        s = b[..., 4:16]
        sc = torch.cat([s[..., 0:4] & 63, (s[..., 8:12] & 15) | (s[..., 0:4] >> 6) << 4], -1)
        mn = torch.cat([s[..., 4:8] & 63, (s[..., 8:12] >> 4) | (s[..., 4:8] >> 6) << 4], -1)
        qs = b[..., -128:].view(*b.shape[:2], 4, 32)
        q = torch.stack([qs & 15, qs >> 4], -2).view(*b.shape[:2], 8, 32)
        if t == Q5_K:
            h = b[..., 16:48]
            q = q | torch.stack([(h >> j) & 1 for j in range(8)], -2) << 4
        w = half_at(raw, 0).unsqueeze(-1) * sc.unsqueeze(-1) * q - half_at(raw, 2).unsqueeze(-1) * mn.unsqueeze(-1)
    else:
        ql = b[..., 0:128].view(*b.shape[:2], 2, 2, 32)
        qh = b[..., 128:192].view(*b.shape[:2], 2, 32)
        parts = []
        for part in range(4):
            low = (ql[..., part % 2, :] >> (part // 2 * 4)) & 15
            parts.append(low | ((qh >> (2 * part)) & 3) << 4)
        q = torch.stack(parts, -2).reshape(*b.shape[:2], 16, 16)
        sc = raw[..., 192:208].contiguous().view(torch.int8).double()
        w = half_at(raw, 208).unsqueeze(-1) * sc.unsqueeze(-1) * (q - 32)
    return w.reshape(rows, -1)


def repack(t, raw, k, interleave=False):
    """Repacked bytes of one matrix; interleave: the first half of the rows are gates, the second ups."""
    rows = raw.shape[0]
    dst = torch.full((lib.dllm_repack_bytes(t, I64(rows), I64(k)),), 0xEE, dtype=torch.uint8, device=dev)
    repack_into(t, raw, k, dst, interleave)
    return dst


def repack_into(t, raw, k, dst, interleave):
    rows = raw.shape[0]
    if interleave:
        ok(lib.dllm_repack(stream(), t, P(raw[:rows // 2]), P(raw[rows // 2:]), I64(rows // 2), I64(k), P(dst), I64(0)))
    else:
        ok(lib.dllm_repack(stream(), t, P(raw), P(None), I64(rows), I64(k), P(dst), I64(0)))


def rel(out, ref):
    out = out.double()
    if not torch.isfinite(out).all():
        return float("nan")
    return float((out - ref).norm() / ref.norm())


def graph_time(fns, repeats=10):
    """Median microseconds of one call; fns use different weights, so that the cache stays cold."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for f in fns:
            f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for f in fns:
            f()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); b.synchronize()
        times.append(a.elapsed_time(b) * 1000 / len(fns))
    return statistics.median(times[2:])
