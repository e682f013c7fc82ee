//! norms.cu. In F32 all sums are F32 over at most 8192 terms; an F16 output is rounded once.

use super::super::gpu::{Gpu, NONE, launch};
use super::super::input::Input;
use super::super::norms::{NormAttnOut, NormInput, NormLayerOut, rms_norm};
use super::{EPS, EXACT, F16, F32, Floats, close, gpu, limit};

/// Rows and row lengths: odd rows, the model's length, the longest, the shortest, one that ends in a part of a warp.
const SHAPES: [(usize, usize); 6] = [(1, 2816), (5, 256), (16, 2816), (256, 1024), (300, 36), (3, 8192)];
const TYPES: [(i32, i32); 4] = [(F32, F32), (F32, F16), (F16, F32), (F16, F16)];

fn each(mut check: impl FnMut(&Gpu, &mut Input, (usize, usize), (i32, i32))) {
    let Some(gpu) = gpu() else { return };
    for (i, shape) in SHAPES.into_iter().enumerate() {
        for types in TYPES {
            check(&gpu, &mut Input::new(10 + i as u64), shape, types);
        }
    }
}

#[test]
fn rms_norm_is_its_twin() {
    each(|gpu, input, (rows, hidden), (from, to)| {
        let (x, values) = Floats::put(gpu, from, &input.values(rows * hidden, 3.0));
        let weight = input.norm(hidden);
        let on_device = gpu.put(&weight);
        for (w, at, scale) in [(Some(&weight[..]), on_device.input(), 2.0), (None, NONE, 1.0)] {
            let out = Floats::poisoned(gpu, to, rows * hidden);
            let (r, h) = (rows as i32, hidden as i32);
            gpu.ran(launch!(gpu, dllm_rms_norm(x.input(), from, at, scale, EPS, out.out(), to, r, h)));
            let what = format!("rms_norm {rows} x {hidden}, {from} to {to}, weight {}", w.is_some());
            close(&what, &out.get(gpu), &rms_norm(&values, w, scale, EPS, hidden), limit(to));
        }
    });
}

/// An outlier is clamped to the range of F16, since an infinity would poison the next product.
#[test]
fn rms_norm_clamps_to_the_range_of_halves() {
    let Some(gpu) = gpu() else { return };
    let (x, weight) = (gpu.put(&[1.0_f32, -1.0, 1.0, -1.0]), gpu.put(&[1e6_f32, 1e6, 2.0, 2.0]));
    let out = gpu.poisoned::<half::f16>(4);
    gpu.ran(launch!(gpu, dllm_rms_norm(x.input(), F32, weight.input(), 1.0, 0.0, out.out(), F16, 1, 4)));
    assert_eq!(super::single(&gpu.get(&out)), [65_504.0, -65_504.0, 2.0, -2.0]);
}

#[test]
fn norm_input_is_its_twin() {
    each(|gpu, input, (rows, hidden), (from, to)| {
        if from == F16 {
            return; // its inputs are F32 always
        }
        let (n, r, h) = (rows * hidden, rows as i32, hidden as i32);
        let (e, mut signal, attn_norm) = (input.values(n, 1.0), input.values(n, 30.0), input.norm(hidden));
        let flag: Vec<f32> = (0..rows).map(|i| [0.0, 1.0, 0.5][i % 3]).collect();
        let causal: Vec<i32> = (0..rows).map(|i| i32::from(i % 4 == 1)).collect();
        // A row without a signal must not look at it: 0 * NaN.
        signal.chunks_exact_mut(hidden).step_by(3).for_each(|row| row.fill(f32::NAN));
        let (e_at, signal_at, norm_at) = (gpu.put(&e), gpu.put(&signal), gpu.put(&attn_norm));
        let (flag_at, causal_at) = (gpu.put(&flag), gpu.put(&causal));
        let whole = NormInput {
            e: &e,
            e_scale: 53.0,
            signal: Some(&signal),
            flag: Some(&flag),
            causal: Some(&causal),
            attn_norm: &attn_norm,
            eps: EPS,
        };
        let bare = NormInput { signal: None, flag: None, causal: None, ..whole };
        for (twin, [signal, flag, causal]) in
            [(whole, [signal_at.input(), flag_at.input(), causal_at.input()]), (bare, [NONE; 3])]
        {
            let (h_out, x1) = (gpu.poisoned::<f32>(n), Floats::poisoned(gpu, to, n));
            let code = launch!(
                gpu,
                dllm_norm_input(
                    e_at.input(),
                    53.0,
                    signal,
                    flag,
                    causal,
                    norm_at.input(),
                    EPS,
                    h_out.out(),
                    x1.out(),
                    to,
                    r,
                    h
                )
            );
            gpu.ran(code);
            let (want_h, want_x1) = twin.compute();
            let what = format!("norm_input {rows} x {hidden} to {to}, signal {}", twin.signal.is_some());
            close(&format!("{what}: h"), &gpu.get(&h_out), &want_h, EXACT);
            close(&format!("{what}: x1"), &x1.get(gpu), &want_x1, limit(to));
        }
    });
}

#[test]
fn norm_attn_out_is_its_twin() {
    each(|gpu, input, (rows, hidden), (from, to)| {
        let (n, rows_, hidden_) = (rows * hidden, rows as i32, hidden as i32);
        let h = input.values(n, 2.0);
        let (a_at, a) = Floats::put(gpu, from, &input.values(n, 5.0));
        let norms: [Vec<f32>; 4] = std::array::from_fn(|_| input.norm(hidden));
        let at = norms.each_ref().map(|w| gpu.put(w));
        let h_at = gpu.put(&h);
        let (r, zr) = (gpu.poisoned::<f32>(n), gpu.poisoned::<f32>(n));
        let (x, y) = (Floats::poisoned(gpu, to, n), Floats::poisoned(gpu, to, n));
        let code = launch!(
            gpu,
            dllm_norm_attn_out(
                h_at.input(),
                a_at.input(),
                from,
                at[0].input(),
                at[1].input(),
                at[2].input(),
                at[3].input(),
                EPS,
                r.out(),
                x.out(),
                y.out(),
                to,
                zr.out(),
                rows_,
                hidden_
            )
        );
        gpu.ran(code);
        let twin = NormAttnOut {
            h: &h,
            a: &a,
            post_attention_norm: &norms[0],
            ffn_norm: &norms[1],
            pre_ffw_norm_2: &norms[2],
            router_scale: &norms[3],
            eps: EPS,
        };
        let [want_r, want_x, want_y, want_zr] = twin.compute();
        let what = format!("norm_attn_out {rows} x {hidden}, {from} to {to}");
        close(&format!("{what}: r"), &gpu.get(&r), &want_r, EXACT);
        close(&format!("{what}: x"), &x.get(gpu), &want_x, limit(to));
        close(&format!("{what}: y"), &y.get(gpu), &want_y, limit(to));
        close(&format!("{what}: zr"), &gpu.get(&zr), &want_zr, EXACT);
    });
}

/// Two norms and a sum of parts behind each other: twice the error of one.
#[test]
fn norm_layer_out_is_its_twin() {
    each(|gpu, input, (rows, hidden), (from, to)| {
        let (n, rows_, hidden_) = (rows * hidden, rows as i32, hidden as i32);
        let norms: [Vec<f32>; 4] = std::array::from_fn(|_| input.norm(hidden));
        let at = norms.each_ref().map(|w| gpu.put(w));
        let scales = [0.37, 1.9];
        let scales_at = scales.map(|s| gpu.put(&[s]));
        let causal: Vec<i32> = (0..rows).map(|i| i32::from(i % 3 == 1)).collect();
        let causal_at = gpu.put(&causal);
        let r = input.values(n, 2.0);
        let (d_at, d) = Floats::put(gpu, from, &input.values(n, 4.0));
        // Parts one after the other in a row, as the experts leave them, and part by part.
        for (parts, strides) in [(1, [hidden, hidden]), (8, [8 * hidden, hidden]), (8, [hidden, n]), (5, [hidden, n])] {
            let (m_at, m) = Floats::put(gpu, from, &input.values(n * parts, 1.0));
            let (h_next, x_next) = (gpu.put(&r), Floats::poisoned(gpu, to, n));
            let code = launch!(
                gpu,
                dllm_norm_layer_out(
                    h_next.input(), // in place
                    d_at.input(),
                    from,
                    m_at.input(),
                    from,
                    parts as i32,
                    strides[0] as i64,
                    strides[1] as i64,
                    at[0].input(),
                    at[1].input(),
                    at[2].input(),
                    scales_at[0].input(),
                    scales_at[1].input(),
                    causal_at.input(),
                    at[3].input(),
                    EPS,
                    h_next.out(),
                    x_next.out(),
                    to,
                    rows_,
                    hidden_
                )
            );
            gpu.ran(code);
            let twin = NormLayerOut {
                r: &r,
                d: &d,
                m: &m,
                parts,
                strides,
                post_ffw_norm_1: &norms[0],
                post_ffw_norm_2: &norms[1],
                post_ffw_norm: &norms[2],
                scales,
                causal: Some(&causal),
                next_norm: &norms[3],
                eps: EPS,
            };
            let (want_h, want_x) = twin.compute();
            let what = format!("norm_layer_out {rows} x {hidden}, {from} to {to}, {parts} parts at {strides:?}");
            close(&format!("{what}: h"), &gpu.get(&h_next), &want_h, 2.0 * EXACT);
            close(&format!("{what}: x"), &x_next.get(gpu), &want_x, limit(to).max(2.0 * EXACT));
        }
    });
}
