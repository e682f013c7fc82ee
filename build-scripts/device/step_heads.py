"""Sampler's side of a step: position statistics, likeliest tokens, embedding table."""
import torch

from step_common import BF16, F16, F32, Q4_K, Q6_K, Q8_0, args, call, check, dev, host, note, poison, rand, rel, scratch, timed


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
        tab = None
