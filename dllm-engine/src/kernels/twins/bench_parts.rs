//! The kernels of the bench with their inputs. Weights are larger than any cache, or there are several copies in turn.

use half::f16;

use super::bench::Timer;
use super::gpu::{Memory, NONE, launch};
use super::input::{Input, Matrix};
use crate::error::Result;
use crate::ggml::GgmlType;

const HIDDEN: usize = 2816;
const FF: usize = 2112;
const VOCAB: usize = 262_144;
const HEADS: usize = 16;
const EXPERTS: usize = 128;
const USED: usize = 8;
const WIDTH: usize = 704;
const LIKELIEST: usize = 64;
const CAP: f32 = 30.0;
const EPS: f32 = 1e-6;
/// ggml's numbers of F32, F16 and the types that a Q4_K_M file has for most, for the experts' down product and for the table.
const F32: i32 = 0;
const F16: i32 = 1;
const Q4_K: u32 = 12;
const Q5_0: u32 = 6;
const Q6_K: u32 = 14;
/// Bytes that no cache holds: copies of a weight together have at least so many.
const BEYOND_CACHE: usize = 160 << 20;
/// Room of the vendor's library (`DLLM_GEMM_SCRATCH_BYTES`).
const GEMM_SCRATCH: usize = 32 << 20;

fn ty(id: u32) -> GgmlType {
    GgmlType::from_id(id).unwrap_or_else(|| panic!("ggml has no type {id}"))
}

/// How many copies of so many bytes are taken in turn.
fn copies(bytes: usize) -> usize {
    BEYOND_CACHE.div_ceil(bytes).clamp(1, 16)
}

/// Of a product.
fn operations(rows: usize, k: usize, n: usize) -> f64 {
    2.0 * rows as f64 * k as f64 * n as f64
}

pub(super) fn norms(t: &mut Timer<'_>) -> Result<()> {
    let (g, rows, r, h) = (t.gpu, t.rows, t.rows_i32(), HIDDEN as i32);
    let n = rows * HIDDEN;
    let mut input = Input::new(1);
    let some = input.values(1 << 16, 1.0);
    let (x, y) = (g.repeated(&some, n), g.repeated(&some, n));
    let parts = g.repeated(&input.halves(1 << 16, 1.0), n * USED);
    let (w, one, flag) = (g.put(&input.norm(HIDDEN)), g.put(&[1.0_f32]), g.put(&vec![1.0_f32; rows]));
    let (a, b) = (g.poisoned::<f32>(n), g.poisoned::<f32>(n));
    let (c, d) = (g.poisoned::<f16>(n), g.poisoned::<f16>(n));
    let shape = || format!("{rows} x {HIDDEN}");
    let (x, y, m, w, s, f) = (x.input(), y.input(), parts.input(), w.input(), one.input(), flag.input());
    let (a, b, c, d) = (a.out(), b.out(), c.out(), d.out());
    t.time("rms_norm", shape(), 6 * n, 0.0, |_| launch!(g, dllm_rms_norm(x, F32, w, 1.0, EPS, c, F16, r, h)))?;
    t.time("norm_input", shape(), 14 * n, 0.0, |_| {
        launch!(g, dllm_norm_input(x, 1.0, y, f, NONE, w, EPS, a, c, F16, r, h))
    })?;
    t.time("norm_attn_out", shape(), 20 * n, 0.0, |_| {
        launch!(g, dllm_norm_attn_out(x, y, F32, w, w, w, w, EPS, a, c, d, F16, b, r, h))
    })?;
    let (row, part) = ((USED * HIDDEN) as i64, HIDDEN as i64);
    t.time("norm_layer_out", format!("{}, {USED} parts", shape()), (14 + 2 * USED) * n, 0.0, |_| {
        launch!(
            g,
            dllm_norm_layer_out(
                x,
                y,
                F32,
                m,
                F16,
                USED as i32,
                row,
                part,
                w,
                w,
                w,
                s,
                s,
                NONE,
                w,
                EPS,
                a,
                c,
                F16,
                r,
                h
            )
        )
    })
}

/// Rotation and cache, then attention: sliding heads after a short prompt and with a full window, and whole-context heads
/// after a short prompt and one of 4096 tokens.
pub(super) fn attention(t: &mut Timer<'_>) -> Result<()> {
    let (g, rows, lanes, r) = (t.gpu, t.rows, t.lanes, t.rows_i32());
    let mut input = Input::new(2);
    let some = input.halves(1 << 16, 1.0);
    for (kv, head, has_v, key_counts) in [(8, 256, 1, [384, 1279]), (2, 512, 0, [384, 4352])] {
        let (kv_width, width) = (kv * head, (HEADS + kv * (1 + has_v as usize)) * head);
        let [q_heads, kv_heads, head_i32] = [HEADS, kv, head].map(|n| n as i32);
        let shape = format!("{rows} rows, {HEADS}/{kv} heads of {head}");
        let positions = g.put(&(0..r).collect::<Vec<_>>());
        let table = g.poisoned::<f32>(rows * head);
        let (p, table_out) = (positions.input(), table.out());
        t.time("rope_table", format!("{rows} x {head}"), 4 * rows * head, 0.0, |_| {
            launch!(g, dllm_rope_table(p, r, head_i32, 1e4, NONE, table_out))
        })?;
        let qkv = g.repeated(&input.values(1 << 16, 1.0), rows * width);
        let (norm, slots) = (g.put(&input.norm(head)), g.put(&(0..rows as i64).collect::<Vec<_>>()));
        let q = g.poisoned::<f16>(rows * HEADS * head);
        for keys in key_counts {
            let cache = [(); 2].map(|()| g.repeated(&some, lanes * keys * kv_width));
            let [k, v] = cache.each_ref().map(Memory::out);
            let stride = kv_width as i64;
            let (x, n, tab, s, q_out) = (qkv.input(), norm.input(), table.input(), slots.input(), q.out());
            if keys == key_counts[0] {
                let bytes = rows * (4 * width + 2 * HEADS * head + 4 * kv_width);
                t.time("rope_kv", shape.clone(), bytes, 0.0, |_| {
                    launch!(
                        g,
                        dllm_rope_kv(
                            x,
                            F32,
                            r,
                            lanes as i32,
                            q_heads,
                            kv_heads,
                            head_i32,
                            has_v,
                            n,
                            n,
                            EPS,
                            tab,
                            s,
                            q_out,
                            F16,
                            k,
                            v,
                            stride
                        )
                    )
                })?;
            }
            let spans: Vec<i64> = (0..lanes).flat_map(|lane| [(lane * keys) as i64, keys as i64, 0, 0]).collect();
            let (splits, room) = g.kernels.attention_splits([rows, lanes], [HEADS, kv, head], keys);
            let (spans, scratch) = (g.put(&spans), g.poisoned::<u8>(room.max(16)));
            let out = g.poisoned::<f16>(rows * HEADS * head);
            let (sp, sc, o) = (spans.input(), scratch.out(), out.out());
            let operations = 4.0 * (rows * HEADS) as f64 * (keys * head) as f64;
            let bytes = 4 * lanes * keys * kv_width + 4 * rows * HEADS * head;
            let shape = format!("{shape}, {keys} keys, {splits} parts");
            t.time("canvas_attention", shape, bytes, operations, |_| {
                launch!(
                    g,
                    dllm_canvas_attention(
                        q_out.cast_const(),
                        r,
                        lanes as i32,
                        q_heads,
                        kv_heads,
                        head_i32,
                        k.cast_const(),
                        v.cast_const(),
                        stride,
                        sp,
                        splits,
                        o,
                        F16,
                        sc
                    )
                )
            })?;
        }
    }
    Ok(())
}

/// Dense products in halves and on blocks, and what lies between.
pub(super) fn dense(t: &mut Timer<'_>) -> Result<()> {
    let (g, rows, r) = (t.gpu, t.rows, t.rows_i32());
    let mut input = Input::new(3);
    let some = input.halves(1 << 16, 0.02);
    let scratch = g.poisoned::<u8>(GEMM_SCRATCH);
    let room = scratch.out();
    let blocks = |k: usize| if k.is_multiple_of(256) { ty(Q4_K) } else { ty(Q5_0) };
    for (name, k, n) in [
        ("q, k, v, sliding", HIDDEN, 8192),
        ("q, k, whole context", HIDDEN, 9216),
        ("output, sliding", 4096, HIDDEN),
        ("output, whole context", 8192, HIDDEN),
        ("gate, up", HIDDEN, 2 * FF),
        ("down", FF, HIDDEN),
        ("LM head", HIDDEN, VOCAB),
    ] {
        let x = g.repeated(&some, rows * k);
        let out = g.poisoned::<f32>(rows * n);
        let (k_, n_, x, o) = (k as i32, n as i32, x.input(), out.out());
        let bytes = 2 * n * k;
        let sets = copies(bytes);
        let w = g.repeated(&some, sets * n * k);
        let shape = format!("{name}: {rows} x {k} x {n}");
        t.time("gemm", format!("{shape}, F16"), bytes, operations(rows, k, n), |i| {
            launch!(g, dllm_gemm(w.from(i % sets * n * k), x, r, k_, n_, o, F32, room))
        })?;
        drop(w);

        let ty = blocks(k);
        // A few rows again and again: making blocks of all takes long.
        let few = Matrix::random(ty, 256, k, 0.02, &mut input);
        let repeats = n.div_ceil(256);
        let matrix = Matrix { ty, rows: n, k, bytes: few.bytes.repeat(repeats)[..few.bytes.len() / 256 * n].to_vec() };
        let bytes = g.kernels.repack_bytes(ty.id() as i32, n, k);
        let sets = copies(bytes);
        let w = g.repacked(&matrix, None, sets);
        let (id, ldx, ldo) = (ty.id() as i32, k as i64, n as i64);
        t.time("qmm", format!("{shape}, {ty}"), bytes, operations(rows, k, n), |i| {
            let w = w.from(i % sets * bytes);
            launch!(g, dllm_qmm(id, w, x, ldx, r, k_, n_, o, ldo, 0, 1.0, 1, std::ptr::null_mut(), 0))
        })?;
    }
    let both = g.repeated(&input.values(1 << 16, 1.0), rows * 2 * FF);
    let out = g.poisoned::<f16>(rows * 4096);
    let (x, o) = (both.input(), out.out());
    t.time("geglu", format!("{rows} x {FF}"), 10 * rows * FF, 0.0, |_| launch!(g, dllm_geglu(x, r, FF as i32, o)))?;
    let count = rows * 4096;
    t.time("to_half", format!("{rows} x 4096"), 6 * count, 0.0, |_| launch!(g, dllm_to_half(x, count as i64, o)))?;
    let source = Matrix::random(ty(Q4_K), 1024, HIDDEN, 0.02, &mut input);
    let (source_at, halves) = (g.put(&source.bytes), g.poisoned::<f16>(1024 * HIDDEN));
    let (from, to) = (source_at.input(), halves.out());
    t.time("dequant_f16", format!("1024 x {HIDDEN}, Q4_K"), source.bytes.len() + 2 * 1024 * HIDDEN, 0.0, |_| {
        launch!(g, dllm_dequant_f16(Q4_K as i32, from, 1024, HIDDEN as i64, to))
    })?;
    let packed = g.poisoned::<u8>(g.kernels.repack_bytes(Q4_K as i32, 1024, HIDDEN));
    let to = packed.out();
    t.time("repack", format!("1024 x {HIDDEN}, Q4_K"), source.bytes.len() + packed.len(), 0.0, |_| {
        launch!(g, dllm_repack(Q4_K as i32, from, NONE, 1024, HIDDEN as i64, to, 0))
    })
}

/// Router, plan and the two products of the experts, alone and as a pass runs them.
pub(super) fn experts(t: &mut Timer<'_>) -> Result<()> {
    let (g, rows, r) = (t.gpu, t.rows, t.rows_i32());
    let mut input = Input::new(4);
    let (h, e, u, f) = (HIDDEN as i32, EXPERTS as i32, USED as i32, WIDTH as i32);
    let zr = g.repeated(&input.values(1 << 16, 0.3), rows * HIDDEN);
    let sets = copies(4 * EXPERTS * HIDDEN);
    let wr = g.repeated(&input.values(1 << 16, 0.3), sets * EXPERTS * HIDDEN);
    let room = g.poisoned::<u8>(g.kernels.router_scratch(rows, EXPERTS, HIDDEN));
    let (ids, weights) = (g.poisoned::<i32>(rows * USED), g.poisoned::<f32>(rows * USED));
    let (z, s, i_out, w_out) = (zr.input(), room.out(), ids.out(), weights.out());
    let (bytes, work) = (4 * EXPERTS * HIDDEN, operations(rows, HIDDEN, EXPERTS));
    t.time("router", format!("{rows} x {HIDDEN}, {USED} of {EXPERTS}"), bytes, work, |i| {
        let w = wr.from(i % sets * EXPERTS * HIDDEN);
        launch!(g, dllm_router(z, w, NONE, r, e, h, u, i_out, w_out, std::ptr::null_mut(), s))
    })?;

    // Every row's choices spread over all experts.
    let ids: Vec<i32> =
        (0..rows).flat_map(|_| input.order(EXPERTS)[..USED].to_vec()).map(|expert| expert as i32).collect();
    let (ids_at, weights) = (g.put(&ids), g.put(&vec![0.125_f32; rows * USED]));
    let plan = g.poisoned::<u8>(g.kernels.plan_bytes(ids.len(), EXPERTS));
    let (at, p, weight) = (ids_at.input(), plan.out(), weights.input());
    let shape = format!("{rows} rows, {USED} of {EXPERTS}");
    let n_ids = ids.len() as i32;
    t.time("moe_route", shape.clone(), 4 * ids.len(), 0.0, |_| launch!(g, dllm_moe_route(at, n_ids, e, p)))?;

    let (up, down) = (ty(Q4_K), ty(Q5_0));
    let [gate_matrix, up_matrix] = std::array::from_fn(|_| Matrix::random(up, WIDTH, HIDDEN, 0.02, &mut input));
    let down_matrix = Matrix::random(down, HIDDEN, WIDTH, 0.02, &mut input);
    let (w_up, w_down) = (g.repacked(&gate_matrix, Some(&up_matrix), EXPERTS), g.repacked(&down_matrix, None, EXPERTS));
    let x = g.repeated(&input.halves(1 << 16, 1.0), rows * HIDDEN);
    let (act, part) = (g.poisoned::<f16>(ids.len() * WIDTH), g.poisoned::<f16>(ids.len() * HIDDEN));
    let (wu, wd, x, a, o) = (w_up.input(), w_down.input(), x.input(), act.out(), part.out());
    let (up, down, ldx) = (up.id() as i32, down.id() as i32, HIDDEN as i64);
    let gate_up = |overlap: i32| launch!(g, dllm_moe_gate_up(up, wu, x, ldx, p, r, u, e, h, f, a, overlap, 0));
    let down_product = |overlap: i32| {
        launch!(g, dllm_moe_down(down, wd, a.cast_const(), p, weight, r, u, e, f, h, o, 1, overlap, 0, h, 0))
    };
    let (work_up, work_down) = (operations(ids.len(), HIDDEN, 2 * WIDTH), operations(ids.len(), WIDTH, HIDDEN));
    t.time("moe_gate_up", format!("{shape}, Q4_K"), w_up.len(), work_up, |_| gate_up(0))?;
    t.time("moe_down", format!("{shape}, Q5_0"), w_down.len(), work_down, |_| down_product(0))?;
    let overlap = i32::from(rows <= 512);
    let all = w_up.len() + w_down.len();
    t.time("moe, all three", format!("{shape}, overlap {overlap}"), all, work_up + work_down, |_| {
        let codes = [launch!(g, dllm_moe_route(at, n_ids, e, p)), gate_up(overlap), down_product(overlap)];
        codes.into_iter().find(|code| *code != 0).unwrap_or(0)
    })
}

/// The table at the start of a step, and what follows its logits.
pub(super) fn tokens(t: &mut Timer<'_>) -> Result<()> {
    let (g, rows, r, h, v) = (t.gpu, t.rows, t.rows_i32(), HIDDEN as i32, VOCAB as i32);
    let mut input = Input::new(5);
    let few = Matrix::random(ty(Q6_K), 256, HIDDEN, 1.0, &mut input);
    let row_bytes = few.bytes.len() / 256;
    let table = g.repeated(&few.bytes, VOCAB * row_bytes);
    let n = rows * LIKELIEST;
    let random: Vec<i32> = (0..n).map(|_| input.below(VOCAB) as i32).collect();
    let (ids, weights) = (g.put(&random), g.put(&vec![1.0 / LIKELIEST as f32; n]));
    let out = g.poisoned::<f32>(rows * HIDDEN);
    let (tab, i, w, o) = (table.input(), ids.input(), weights.input(), out.out());
    let result = 4 * HIDDEN;
    t.time("embed_rows", format!("{rows} x {HIDDEN}, Q6_K"), rows * (row_bytes + result), 0.0, |_| {
        launch!(g, dllm_embed_rows(tab, Q6_K as i32, v, h, i, r, 53.0, o))
    })?;
    let bytes = rows * (LIKELIEST * row_bytes + result);
    t.time("soft_embed", format!("{rows} x {LIKELIEST} of {VOCAB}, Q6_K"), bytes, 0.0, |_| {
        launch!(g, dllm_soft_embed(tab, Q6_K as i32, v, h, i, w, r, LIKELIEST as i32, 1.0, o))
    })?;
    drop(table);

    let logits = g.repeated(&input.values(4 * VOCAB, 4.0), rows * VOCAB);
    let (temperature, uniform) = (g.put(&vec![0.6_f32; rows]), g.put(&vec![0.5_f32; rows]));
    let stats = g.poisoned::<u32>(rows * 8);
    let room = g.poisoned::<u8>(g.kernels.stats_scratch(rows, VOCAB));
    let (x, temp, uni, st, s) = (logits.input(), temperature.input(), uniform.input(), stats.out(), room.out());
    t.time("position_stats", format!("{rows} x {VOCAB}"), 4 * rows * VOCAB, 0.0, |_| {
        launch!(g, dllm_position_stats(x, F32, r, v, temp, uni, CAP, st, s))
    })?;
    let dropped = g.poisoned::<f32>(rows);
    let (i, w, d) = (ids.out(), weights.out(), dropped.out());
    t.time("likeliest", format!("{LIKELIEST} of {rows} x {VOCAB}"), 0, 0.0, |_| {
        let (stats, scratch) = (st.cast_const(), s.cast_const());
        launch!(g, dllm_likeliest(x, F32, r, v, temp, CAP, stats, scratch, LIKELIEST as i32, 0.0, 1, i, w, d))
    })?;

    let table = g.repeated(&input.halves(1 << 16, 1.0), VOCAB * HIDDEN);
    let probs = g.poisoned::<f16>(rows * VOCAB);
    let piece = g.poisoned::<u8>(g.kernels.soft_piece_bytes(F16, HIDDEN));
    let scratch = g.poisoned::<u8>(GEMM_SCRATCH);
    let (tab, p, piece, room) = (table.input(), probs.out(), piece.out(), scratch.out());
    let (bytes, work) = (2 * VOCAB * HIDDEN, operations(rows, VOCAB, HIDDEN));
    t.time("dense_soft_embed", format!("{rows} x {VOCAB} x {HIDDEN}, F16"), bytes, work, |_| {
        launch!(g, dllm_dense_soft_embed(tab, F16, x, temp, CAP, st.cast_const(), r, v, h, 1.0, p, piece, o, room))
    })
}
