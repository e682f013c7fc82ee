#!/usr/bin/env python3
"""Checks and times the small kernels of a denoising step on a GPU (development tool; needs torch).

    nvcc -shared -Xcompiler -fPIC -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 \
        dllm-engine/kernels/*.cu -o libdllm_kernels.so
    test_step.py LIB [--small] [--no-time] [--only stats,likeliest,...]

Reference: torch float64 on the same inputs. Outputs are poisoned first. Each section runs in a child process that a
crash cannot take the others along with. --small: small sizes with the reference on the CPU, for compute-sanitizer.
"""
import argparse
import ctypes as C
import os
import subprocess
import sys

import torch

from step_common import EPS, F16, F32, I64, Q6_K, args, call, dev, note, poison, rand, rows_out, scratch
from step_heads import embed, likeliest, make_table, run_stats, stats
from step_layer import attention, attention_case, norms, rope, router


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


SECTIONS = {f.__name__: f for f in (stats, likeliest, embed, norms, router, rope, attention, profile)}


def child(names, status):
    args.handle = C.CDLL(os.path.abspath(args.lib))
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
    ap = argparse.ArgumentParser()
    ap.add_argument("lib")
    ap.add_argument("--small", action="store_true")
    ap.add_argument("--no-time", action="store_true")
    ap.add_argument("--only", default="")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--child", default="")
    ap.parse_args(namespace=args)
    names = args.only.split(",") if args.only else list(SECTIONS)[:-1]  # profile only when asked for
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
