"""A layer's side of a step: norms, router, rope and cache, attention."""
import ctypes as C
import math

import torch

from step_common import EPS, F16, F32, I64, args, call, check, dev, host, note, poison, rand, rel, scratch, timed


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
            need = args.handle.dllm_canvas_attention_scratch_bytes
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
        pick = args.handle.dllm_canvas_attention_splits(rows, lanes, nq, nk, D, keys)
        flop = 4.0 * rows * nq * keys * D
        for splits in tries:
            sc = torch.zeros(args.handle.dllm_canvas_attention_scratch_bytes(rows, nq, D, splits) + 16, dtype=torch.uint8, device=dev)
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
