//! Sizes that a kernel cannot do: it returns cudaErrorInvalidValue and enqueues nothing, and the contract in Rust refuses the
//! same ones. Each kernel is called with good and bad sizes around the limits; both must agree on every one.

use std::ffi::c_void;

use super::super::gpu::{Gpu, Memory, launch};
use super::gpu;
use crate::kernels::contract::{self, BLOCK_TYPES, Contract, ExpertSizes, HeadSizes};

/// cudaErrorInvalidValue.
const INVALID: i32 = 1;

/// Memory that is large enough for every call here: zeros to read, poison to write to.
struct Room {
    gpu: Gpu,
    zeros: Memory<u8>,
    scratch: Memory<u8>,
    outs: [Memory<u8>; 4],
    refused: usize,
    taken: usize,
}

impl Room {
    fn new() -> Option<Self> {
        let gpu = gpu()?;
        let zeros = gpu.repeated(&[0_u8], 32 << 20);
        let scratch = gpu.repeated(&[0_u8], 64 << 20);
        let outs = std::array::from_fn(|_| gpu.poisoned(OUT));
        Some(Self { gpu, zeros, scratch, outs, refused: 0, taken: 0 })
    }

    fn zeros(&self) -> *const c_void {
        self.zeros.input()
    }

    fn scratch(&self) -> *mut c_void {
        self.scratch.out()
    }

    fn out(&self, i: usize) -> *mut c_void {
        self.outs[i].out()
    }

    /// What the contract says of these sizes, and what the kernel did.
    fn agrees(&mut self, what: &str, contract: Contract, code: i32) {
        self.gpu.wait().unwrap_or_else(|e| panic!("{what}: {e}"));
        match contract {
            Ok(()) => {
                assert_eq!(code, 0, "{what}: the contract allows what the kernel does not do");
                self.outs = std::array::from_fn(|_| self.gpu.poisoned(OUT));
                self.taken += 1;
            }
            Err(why) => {
                assert_eq!(code, INVALID, "{what}: the contract refuses what the kernel does: {why}");
                assert!(self.outs.iter().all(|out| self.gpu.untouched(out)), "{what}: refused, but something ran");
                self.refused += 1;
            }
        }
    }

    /// Both sides were seen.
    fn done(&self) {
        assert!(self.refused > 0 && self.taken > 0, "{} refused, {} taken", self.refused, self.taken);
    }
}

/// Bytes of an output.
const OUT: usize = 4 << 20;

#[test]
fn norms_refuse_what_they_cannot_do() {
    let Some(mut r) = Room::new() else { return };
    for (rows, hidden) in
        [(1, 4), (2, 8192), (3, 2816), (0, 4), (-1, 4), (1, 0), (1, 2), (1, -4), (1, 6), (1, 2817), (1, 8196)]
    {
        let (z, o) = (r.zeros(), [r.out(0), r.out(1), r.out(2), r.out(3)]);
        let g = &r.gpu;
        let codes = [
            ("rms_norm", launch!(g, dllm_rms_norm(z, 0, z, 1.0, 1e-6, o[0], 1, rows, hidden))),
            ("norm_input", launch!(g, dllm_norm_input(z, 1.0, z, z, z, z, 1e-6, o[0], o[1], 1, rows, hidden))),
            (
                "norm_attn_out",
                launch!(g, dllm_norm_attn_out(z, z, 0, z, z, z, z, 1e-6, o[0], o[1], o[2], 1, o[3], rows, hidden)),
            ),
            (
                "norm_layer_out",
                launch!(
                    g,
                    dllm_norm_layer_out(
                        z, z, 0, z, 1, 2, 16, 8, z, z, z, z, z, z, z, 1e-6, o[0], o[1], 1, rows, hidden
                    )
                ),
            ),
        ];
        let refused = contract::norm("rms_norm", rows, hidden).is_err();
        assert!(codes.iter().all(|(_, code)| (*code == INVALID) == refused), "{rows} x {hidden}: {codes:?}");
        r.agrees(&format!("norms of {rows} x {hidden}"), contract::norm("rms_norm", rows, hidden), codes[0].1);
    }
    r.done();
    // Types that are no floats, no parts, and parts that are not aligned.
    let (z, o) = (r.zeros(), [r.out(0), r.out(1)]);
    let layer_out = |d_type, parts, row, part| {
        launch!(
            r.gpu,
            dllm_norm_layer_out(z, z, d_type, z, 1, parts, row, part, z, z, z, z, z, z, z, 1e-6, o[0], o[1], 1, 1, 8)
        )
    };
    let codes = [
        launch!(r.gpu, dllm_rms_norm(z, 8, z, 1.0, 1e-6, o[0], 1, 1, 8)),
        launch!(r.gpu, dllm_rms_norm(z, 0, z, 1.0, 1e-6, o[0], 30, 1, 8)),
        layer_out(8, 1, 8, 8),
        layer_out(0, 0, 8, 8),
        layer_out(0, 1, 6, 8),
        layer_out(0, 2, 16, 6),
    ];
    assert_eq!(codes, [INVALID; 6]);
    assert!(r.outs.iter().all(|out| r.gpu.untouched(out)));
}

#[test]
fn router_and_experts_refuse_what_they_cannot_do() {
    let Some(mut r) = Room::new() else { return };
    for [rows, experts, hidden, used] in [
        [1, 4, 16, 1],
        [2, 256, 32, 16],
        [0, 8, 16, 1],
        [1, 2, 16, 1],
        [1, 6, 16, 1],
        [1, 260, 16, 1],
        [1, 8, 8, 1],
        [1, 8, 24, 1],
        [1, 8, 16, 0],
        [1, 8, 16, 9],
        [1, 32, 16, 17],
    ] {
        let (z, i, w) = (r.zeros(), r.out(0), r.out(1));
        let (none, s) = (std::ptr::null_mut(), r.scratch());
        let code = launch!(r.gpu, dllm_router(z, z, z, rows, experts, hidden, used, i, w, none, s));
        let what = format!("router {rows} x {experts} x {hidden}, {used}");
        r.agrees(&what, contract::router(rows, experts, hidden, used), code);
    }
    for (ids, experts) in [(1, 1), (16, 8), (0, 1), (1, 0), (-1, 4)] {
        let code = launch!(r.gpu, dllm_moe_route(r.zeros(), ids, experts, r.out(0)));
        r.agrees(&format!("plan of {ids} ids, {experts} experts"), contract::moe_route(ids, experts), code);
    }
    let good = ExpertSizes { rows: 2, used: 2, experts: 4, k: 256, n: 64 };
    let mut cases: Vec<(i32, i64, ExpertSizes)> = BLOCK_TYPES.iter().map(|ty| (*ty, 256, good)).collect();
    cases.extend([
        (10, 256, good),
        (0, 256, good),
        (8, 260, good),
        (8, 256, ExpertSizes { rows: 0, ..good }),
        (8, 256, ExpertSizes { used: 0, ..good }),
        (8, 256, ExpertSizes { experts: 0, ..good }),
        (8, 256, ExpertSizes { n: 60, ..good }),
        (8, 256, ExpertSizes { n: 0, ..good }),
        (8, 256, ExpertSizes { k: 96, ..good }),
        (8, 256, ExpertSizes { k: 0, ..good }),
        (12, 256, ExpertSizes { k: 128, ..good }),
    ]);
    for (ty, ldx, s) in cases {
        let (z, plan) = (r.zeros(), r.scratch());
        let ExpertSizes { rows, used, experts, k, n } = s;
        let code = launch!(r.gpu, dllm_moe_gate_up(ty, z, z, ldx, plan, rows, used, experts, k, n, r.out(0), 0, 0));
        let what = format!("experts of type {ty}: {rows} x {used} of {experts}, {k} to {n}, rows {ldx} apart");
        r.agrees(&format!("gate and up, {what}"), contract::moe_gate_up(ty, ldx, s), code);
        if ldx == 256 && n != 60 {
            let code =
                launch!(r.gpu, dllm_moe_down(ty, z, z, plan, z, rows, used, experts, k, n, r.out(0), 1, 0, 0, k, 0));
            r.agrees(&format!("down, {what}"), contract::moe_down(ty, s), code);
        }
    }
    r.done();
    let (z, plan) = (r.zeros(), r.scratch());
    let codes = [
        launch!(r.gpu, dllm_moe_gate_up(8, z, z, 256, plan, 2, 2, 4, 256, 64, r.out(0), 0, 4)), // no such tile
        launch!(r.gpu, dllm_moe_down(8, z, z, plan, z, 2, 2, 4, 256, 64, r.out(0), 1, 0, 0, 256, 4)),
        launch!(r.gpu, dllm_moe_down(8, z, z, plan, z, 2, 2, 4, 256, 64, r.out(0), 2, 0, 0, 256, 0)), // no such output
    ];
    assert_eq!(codes, [INVALID; 3]);
    assert!(r.outs.iter().all(|out| r.gpu.untouched(out)));
}

#[test]
fn products_refuse_what_they_cannot_do() {
    let Some(mut r) = Room::new() else { return };
    let mut cases: Vec<[i32; 5]> = BLOCK_TYPES.iter().map(|ty| [*ty, 256, 2, 256, 16]).collect();
    cases.extend([
        [0, 256, 2, 256, 16],
        [10, 256, 2, 256, 16],
        [8, 252, 2, 256, 16],
        [8, 256, 0, 256, 16],
        [8, 256, 2, 96, 16],
        [8, 256, 2, 0, 16],
        [8, 256, 2, 256, 0],
        [14, 256, 2, 64, 16],
        [1, 256, 2, 192, 16],
    ]);
    for [ty, ldx, rows, k, n] in cases {
        let (z, o, none) = (r.zeros(), r.out(0), std::ptr::null_mut());
        let (x, y) = (i64::from(ldx), i64::from(n));
        let code = launch!(r.gpu, dllm_qmm(ty, z, z, x, rows, k, n, o, y, 0, 1.0, 1, none, 0));
        let what = format!("type {ty}: {rows} x {k} x {n}, rows {ldx} apart");
        r.agrees(&what, contract::qmm(ty, i64::from(ldx), rows, k, n), code);
        let code = launch!(r.gpu, dllm_dequant_f16(ty, z, y, i64::from(k), r.out(0)));
        r.agrees(&format!("expanding {what}"), contract::qmm(ty, 0, 1, k, n), code);
        let code = launch!(r.gpu, dllm_repack(ty, z, std::ptr::null(), y, i64::from(k), r.out(0), 0));
        r.agrees(&format!("repacking {what}"), contract::qmm(ty, 0, 1, k, n), code);
        let bytes = r.gpu.kernels.repack_bytes(ty, n as usize, k as usize);
        assert_eq!(bytes == 0, contract::qmm(ty, 0, 1, k, n).is_err(), "{what}: {bytes} bytes");
    }
    for [rows, k, n] in [[1, 8, 1], [5, 64, 37], [0, 8, 1], [1, 4, 1], [1, 12, 1], [1, 8, 0]] {
        let code = launch!(r.gpu, dllm_gemm(r.zeros(), r.zeros(), rows, k, n, r.out(0), 0, r.scratch()));
        r.agrees(&format!("gemm {rows} x {k} x {n}"), contract::gemm(rows, k, n), code);
    }
    for (rows, n) in [(1, 4), (3, 36), (0, 4), (1, 0), (1, 2), (1, 6)] {
        let code = launch!(r.gpu, dllm_geglu(r.zeros(), rows, n, r.out(0)));
        r.agrees(&format!("geglu {rows} x {n}"), contract::geglu(rows, n), code);
    }
    for count in [4, 4096, 0, 2, -4, 6] {
        let code = launch!(r.gpu, dllm_to_half(r.zeros(), count, r.out(0)));
        r.agrees(&format!("to_half {count}"), contract::to_half(count), code);
    }
    r.done();
    // What the engine does not use: parts without room, more parts than the inner dimension has, gate and up that fill no
    // tile, unknown outputs and tiles, products without the library's room.
    let (z, o, none) = (r.zeros(), r.out(0), std::ptr::null_mut());
    let qmm = |n, epilogue, splits, scratch, tile| {
        launch!(r.gpu, dllm_qmm(8, z, z, 256, 2, 256, n, o, 16, epilogue, 1.0, splits, scratch, tile))
    };
    let codes = [
        qmm(16, 0, 0, none, 0),
        qmm(16, 0, 2, none, 0),
        qmm(16, 0, 5, r.scratch(), 0),
        qmm(24, 2, 1, none, 0),
        qmm(16, 3, 1, none, 0),
        qmm(16, 0, 1, none, 4),
        launch!(r.gpu, dllm_gemm(z, z, 1, 8, 1, o, 8, r.scratch())),
        launch!(r.gpu, dllm_gemm(z, z, 1, 8, 1, o, 0, none)),
        launch!(r.gpu, dllm_repack(8, z, std::ptr::null(), 16, 64, o, -1)),
    ];
    assert_eq!(codes, [INVALID; 9]);
    assert!(r.outs.iter().all(|out| r.gpu.untouched(out)));
}

#[test]
fn attention_refuses_what_it_cannot_do() {
    let Some(mut r) = Room::new() else { return };
    for (rows, head) in [(1, 8), (3, 512), (0, 8), (1, 0), (1, 4), (1, 12), (1, 520)] {
        let code = launch!(r.gpu, dllm_rope_table(r.zeros(), rows, head, 1e4, r.zeros(), r.out(0)));
        r.agrees(&format!("rope_table {rows} x {head}"), contract::rope_table(rows, head), code);
    }
    let good = HeadSizes { rows: 4, lanes: 2, heads: 4, kv_heads: 2, head: 64 };
    let cases = [
        (good, 128, 1),
        (HeadSizes { head: 512, ..good }, 1024, 16),
        (HeadSizes { rows: 0, ..good }, 128, 1),
        (HeadSizes { lanes: 0, ..good }, 128, 1),
        (HeadSizes { rows: 5, ..good }, 128, 1),
        (HeadSizes { heads: 0, ..good }, 128, 1),
        (HeadSizes { kv_heads: 0, ..good }, 128, 1),
        (HeadSizes { head: 0, ..good }, 128, 1),
        (HeadSizes { head: 36, ..good }, 128, 1),
        (HeadSizes { head: 1024, ..good }, 2048, 1),
        (HeadSizes { heads: 3, ..good }, 128, 1),
        (HeadSizes { head: 96, ..good }, 192, 1),
        (good, 130, 1),
        (good, 132, 1),
        (good, 128, 0),
        (good, 128, 17),
    ];
    for (s, stride, splits) in cases {
        let (z, o) = (r.zeros(), [r.out(0), r.out(1), r.out(2)]);
        let HeadSizes { rows, lanes, heads, kv_heads, head } = s;
        let what =
            format!("{rows} rows, {lanes} lanes, {heads}/{kv_heads} heads of {head}, stride {stride}, {splits} parts");
        let code = launch!(
            r.gpu,
            dllm_rope_kv(z, 0, rows, lanes, heads, kv_heads, head, 1, z, z, 1e-6, z, z, o[0], 1, o[1], o[2], stride)
        );
        r.agrees(&format!("rope_kv: {what}"), contract::rope_kv(s, stride), code);
        let (z, scratch) = (r.zeros(), r.scratch());
        let code = launch!(
            r.gpu,
            dllm_canvas_attention(z, rows, lanes, heads, kv_heads, head, z, z, stride, z, splits, r.out(0), 1, scratch)
        );
        r.agrees(&format!("canvas_attention: {what}"), contract::canvas_attention(s, stride, splits), code);
    }
    r.done();
    let (z, o, none) = (r.zeros(), r.out(0), std::ptr::null_mut());
    let codes = [
        launch!(r.gpu, dllm_canvas_attention(z, 4, 2, 4, 2, 64, z, z, 128, z, 2, o, 1, none)),
        launch!(r.gpu, dllm_canvas_attention(z, 4, 2, 4, 2, 64, z, z, 128, z, 1, o, 8, none)),
        launch!(r.gpu, dllm_rope_kv(z, 8, 4, 2, 4, 2, 64, 1, z, z, 1e-6, z, z, o, 1, o, o, 128)),
        launch!(r.gpu, dllm_rope_kv(z, 0, 4, 2, 4, 2, 64, 1, z, z, 1e-6, z, z, o, 8, o, o, 128)),
    ];
    assert_eq!(codes, [INVALID; 4]);
    assert!(r.outs.iter().all(|out| r.gpu.untouched(out)));
}

#[test]
fn token_kernels_refuse_what_they_cannot_do() {
    let Some(mut r) = Room::new() else { return };
    for (ty, rows, vocab, cap) in [
        (0, 1, 8, 30.0),
        (1, 2, 1024, 0.0),
        (0, 65_535, 8, 30.0),
        (0, 65_536, 8, 30.0),
        (0, 0, 8, 30.0),
        (0, 1, 0, 30.0),
        (0, 1, 4, 30.0),
        (0, 1, 12, 30.0),
        (0, 1, 8, -1.0),
        (8, 1, 8, 30.0),
    ] {
        let (z, s) = (r.zeros(), r.scratch());
        let code = launch!(r.gpu, dllm_position_stats(z, ty, rows, vocab, z, z, cap, r.out(0), s));
        let what = format!("statistics of {rows} x {vocab}, type {ty}, cap {cap}");
        r.agrees(&what, contract::position_stats(ty, rows, vocab, cap), code);
    }
    for (ty, rows, vocab, cap, k) in [
        (0, 1, 8, 30.0, 8),
        (1, 2, 1024, 0.0, 256),
        (0, 1, 524_288, 30.0, 1),
        (0, 1, 524_296, 30.0, 1),
        (0, 0, 8, 30.0, 1),
        (0, 1, 12, 30.0, 1),
        (0, 1, 8, -1.0, 1),
        (8, 1, 8, 30.0, 1),
        (0, 1, 8, 30.0, 9),
        (0, 1, 8, 30.0, 0),
        (0, 1, 1024, 30.0, 257),
    ] {
        let (z, o) = (r.zeros(), [r.out(0), r.out(1), r.out(2)]);
        let code = launch!(r.gpu, dllm_likeliest(z, ty, rows, vocab, z, cap, z, z, k, 0.0, 0, o[0], o[1], o[2]));
        let what = format!("likeliest {k} of {rows} x {vocab}, type {ty}, cap {cap}");
        r.agrees(&what, contract::likeliest(ty, rows, vocab, cap, k), code);
    }
    let mut cases: Vec<[i32; 4]> = [0, 1, 8, 12, 14, 30].iter().map(|ty| [*ty, 256, 2, 3]).collect();
    cases.extend([
        [2, 256, 1, 1],
        [13, 256, 1, 1],
        [0, 8, 65_535, 1],
        [0, 8, 65_536, 1],
        [0, 8, 0, 1],
        [0, 4, 1, 1],
        [0, 12, 1, 1],
        [0, 0, 1, 1],
        [8, 48, 1, 1],
        [12, 128, 1, 1],
        [14, 384, 1, 1],
        [1, 8, 1, 512],
        [1, 8, 1, 513],
        [1, 8, 1, 0],
    ]);
    for [ty, hidden, rows, k] in cases {
        let z = r.zeros();
        let what = format!("{k} of table type {ty}, {rows} rows of {hidden}");
        let code = launch!(r.gpu, dllm_soft_embed(z, ty, 16, hidden, z, z, rows, k, 1.0, r.out(0)));
        r.agrees(&format!("mixture: {what}"), contract::soft_embed(ty, hidden, rows, k), code);
        if k == 1 {
            let code = launch!(r.gpu, dllm_embed_rows(z, ty, 16, hidden, z, rows, 1.0, r.out(0)));
            r.agrees(&format!("rows: {what}"), contract::soft_embed(ty, hidden, rows, 1), code);
        }
    }
    for [ty, rows, vocab, hidden] in [
        [1, 2, 16, 64],
        [12, 2, 16, 256],
        [8, 1, 8, 64],
        [1, 0, 16, 64],
        [1, 65_536, 16, 64],
        [1, 1, 12, 64],
        [1, 1, 4, 64],
        [1, 1, 16, 4],
        [0, 1, 16, 64],
        [10, 1, 16, 256],
        [12, 1, 16, 128],
        [8, 1, 16, 96],
    ] {
        let (z, s) = (r.zeros(), r.scratch());
        let o = [r.out(0), r.out(1), r.out(2)];
        let code =
            launch!(r.gpu, dllm_dense_soft_embed(z, ty, z, z, 30.0, z, rows, vocab, hidden, 1.0, o[0], o[1], o[2], s));
        let what = format!("dense mixture of table type {ty}, {rows} x {vocab} x {hidden}");
        r.agrees(&what, contract::dense_soft_embed(ty, rows, vocab, hidden), code);
    }
    r.done();
    let (z, o, none) = (r.zeros(), r.out(0), std::ptr::null());
    let codes = [
        launch!(r.gpu, dllm_soft_embed(z, 0, 16, 8, z, none, 1, 1, 1.0, o)),
        launch!(r.gpu, dllm_dense_soft_embed(z, 1, z, z, 30.0, z, 1, 16, 64, 1.0, o, o, o, std::ptr::null_mut())),
    ];
    assert_eq!(codes, [INVALID; 2]);
    assert!(r.outs.iter().all(|out| r.gpu.untouched(out)));
}
