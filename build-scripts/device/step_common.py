"""What the tests of the step's kernels share: calling them, poisoned outputs, errors, timing."""
import argparse
import ctypes as C
import statistics

import torch

F32, F16, Q8_0, Q4_K, Q6_K, BF16 = 0, 1, 8, 12, 14, 30
COPY_TBS = 4.1  # device-to-device copy on the H200, read plus written
EPS = 1e-6
dev = "cuda"
rows_out = []
args = argparse.Namespace(small=False, no_time=False, handle=None)  # filled in by test_step.py


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
    rc = getattr(args.handle, "dllm_" + name)(*conv)
    if rc:
        raise RuntimeError(f"dllm_{name} returned {rc}")


class I64(int):
    pass


def scratch(name, *a):
    f = getattr(args.handle, f"dllm_{name}_scratch_bytes")
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
