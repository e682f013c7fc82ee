//! position_stats.cu, likeliest.cu, soft_embed.cu, and the dense soft embedding of dense.cu.

use half::f16;

use super::super::gpu::{Gpu, Memory, launch};
use super::super::input::{Input, Matrix};
use super::super::tokens::{REFUSED, dense_soft_embed, embed_rows, likeliest, probabilities, soft_embed, stats};
use super::{EXACT, F16, F32, Floats, close, gpu};
use crate::ggml::GgmlType;

/// Exponentials with an error of two in the last place, of arguments up to some tens: probabilities are off by 1e-4 of
/// themselves at most (measured: 2e-5).
const CHANCES: f64 = 1e-4;
/// Words of a row of the statistics.
const WORDS: usize = 8;

/// Logits of every kind: bell-shaped, nearly flat, nearly certain, the last token, all equal, two equal largest, deep in the
/// softcap, beyond it. Without a softcap the last stay below some hundreds: a probability is off by the rounding of its exponent,
/// which is 3e-4 where that is 10,000 (measured on an H200), and no model has such logits.
fn logits(input: &mut Input, [rows, vocab]: [usize; 2], cap: f32) -> Vec<f32> {
    let beyond = if cap > 0.0 { 500.0 } else { 20.0 };
    let mut x = input.values(rows * vocab, 4.0);
    for (i, row) in x.chunks_exact_mut(vocab).enumerate() {
        match i % 8 {
            1 => row.iter_mut().for_each(|x| *x *= 0.01),
            2 => row[vocab / 3] = 60.0,
            3 => row[vocab - 1] = 25.0,
            4 => row.fill(1.25),
            5 => (row[7], row[vocab / 2]) = (24.5, 24.5),
            6 => row.iter_mut().for_each(|x| *x *= 6.0),
            7 => row.iter_mut().for_each(|x| *x *= beyond),
            _ => {}
        }
    }
    x
}

/// Logits on the device with what the statistics need and make.
struct Rows {
    rows: usize,
    vocab: usize,
    cap: f32,
    ty: i32,
    values: Vec<f32>,
    at: Floats,
    temperature: Vec<f32>,
    temperature_at: Memory<f32>,
    u: Vec<f32>,
    stats: Memory<u32>,
    scratch: Memory<u8>,
}

impl Rows {
    fn new(gpu: &Gpu, [rows, vocab]: [usize; 2], cap: f32, ty: i32, values: &[f32], input: &mut Input) -> Self {
        let (at, values) = Floats::put(gpu, ty, values);
        let temperature: Vec<f32> = (0..rows).map(|_| 0.4 + 0.4 * input.unit()).collect();
        let mut u: Vec<f32> = (0..rows).map(|_| input.unit()).collect();
        (u[0], u[rows - 1]) = (0.0, 1.0 - f32::EPSILON / 2.0);
        let (temperature_at, u_at) = (gpu.put(&temperature), gpu.put(&u));
        let (stats, scratch) =
            (gpu.poisoned::<u32>(rows * WORDS), gpu.poisoned::<u8>(gpu.kernels.stats_scratch(rows, vocab)));
        let (t, s) = (temperature_at.input(), stats.out());
        gpu.ran(launch!(
            gpu,
            dllm_position_stats(at.input(), ty, rows as i32, vocab as i32, t, u_at.input(), cap, s, scratch.out())
        ));
        Self { rows, vocab, cap, ty, values, at, temperature, temperature_at, u, stats, scratch }
    }

    fn row(&self, i: usize) -> &[f32] {
        &self.values[i * self.vocab..][..self.vocab]
    }

    fn chances(&self, i: usize) -> Vec<f64> {
        probabilities(self.row(i), self.cap, self.temperature[i])
    }
}

/// Vocabularies: less than a chunk, a little more than one, some, and the model's.
const SHAPES: [[usize; 2]; 5] = [[5, 8], [40, 1024], [16, 4104], [8, 12_344], [8, 262_144]];

fn each(mut check: impl FnMut(&Gpu, &Rows, &str)) {
    let Some(gpu) = gpu() else { return };
    for [rows, vocab] in SHAPES {
        for (ty, cap) in [(F32, 30.0), (F32, 0.0), (F16, 30.0), (F16, 0.0)] {
            let mut input = Input::new(vocab as u64);
            let values = logits(&mut input, [rows, vocab], cap);
            let r = Rows::new(&gpu, [rows, vocab], cap, ty, &values, &mut input);
            check(&gpu, &r, &format!("{rows} x {vocab}, type {ty}, cap {cap}"));
        }
    }
}

#[test]
fn statistics_are_their_twin() {
    each(|gpu, r, what| {
        let words = gpu.get(&r.stats);
        for i in 0..r.rows {
            let want = stats(r.row(i), r.cap, r.temperature[i], r.u[i]);
            let got = &words[i * WORDS..][..WORDS];
            let float = |word: usize| f64::from(f32::from_bits(got[word]));
            let p = r.chances(i);
            assert_eq!(got[0], want.argmax, "{what}, row {i}: argmax");
            assert!(
                (float(2) - want.entropy).abs() < CHANCES,
                "{what}, row {i}: entropy {} {}",
                float(2),
                want.entropy
            );
            assert!(
                (float(3) / want.p_argmax - 1.0).abs() < CHANCES,
                "{what}, row {i}: {} {}",
                float(3),
                want.p_argmax
            );
            // The draw's interval holds u, up to the rounding of sums; the twin's may be its neighbour.
            let drawn = got[1] as usize;
            let before: f64 = p[..drawn].iter().sum();
            let u = f64::from(r.u[i]);
            assert!(before - 3e-6 <= u && u < before + p[drawn] + 3e-6, "{what}, row {i}: {drawn}, not {}", want.drawn);
            assert!((float(4) / p[drawn] - 1.0).abs() < CHANCES, "{what}, row {i}: {} {}", float(4), p[drawn]);
            // Both up to the rounding of z, whose size is up to 75.
            let (log_sum, want_sum) = (float(5) + float(6).ln(), want.max_z + want.sum_exp.ln());
            assert!(
                (log_sum - want_sum).abs() < 3e-6 * (1.0 + want_sum.abs()),
                "{what}, row {i}: {log_sum} {want_sum}"
            );
            assert_eq!(f32::from_bits(got[7]), want.max_logit, "{what}, row {i}: largest logit");
        }
    });
}

#[test]
fn rows_with_what_is_no_number_are_refused() {
    let Some(gpu) = gpu() else { return };
    let (rows, vocab, k) = (8, 4104, 4);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 2e30, -2e30] {
        for cap in [30.0, 0.0] {
            let mut input = Input::new(5);
            let mut values = input.values(rows * vocab, 4.0);
            (0..rows - 1).for_each(|i| values[i * vocab + i * 586] = bad); // the last row stays whole
            let r = Rows::new(&gpu, [rows, vocab], cap, F32, &values, &mut input);
            let words = gpu.get(&r.stats);
            let (ids, weights, dropped) = picked(&gpu, &r, k, 0.0, false);
            for i in 0..rows {
                let refused = i < rows - 1;
                assert_eq!(words[i * WORDS] == REFUSED, refused, "{bad}, cap {cap}, row {i}");
                assert_eq!(stats(r.row(i), cap, r.temperature[i], r.u[i]).argmax == REFUSED, refused, "twin, row {i}");
                if refused {
                    assert_eq!(ids[i * k..][..k], [0; 4], "row {i}");
                    assert_eq!((weights[i * k..][..k].iter().sum::<f32>(), dropped[i]), (0.0, 1.0), "row {i}");
                }
            }
        }
    }
}

/// Ids, weights and dropped mass.
fn picked(gpu: &Gpu, r: &Rows, k: usize, tau: f32, renorm: bool) -> (Vec<i32>, Vec<f32>, Vec<f32>) {
    let (ids, weights) = (gpu.poisoned::<i32>(r.rows * k), gpu.poisoned::<f32>(r.rows * k));
    let dropped = gpu.poisoned::<f32>(r.rows);
    let code = launch!(
        gpu,
        dllm_likeliest(
            r.at.input(),
            r.ty,
            r.rows as i32,
            r.vocab as i32,
            r.temperature_at.input(),
            r.cap,
            r.stats.input(),
            r.scratch.input(),
            k as i32,
            tau,
            i32::from(renorm),
            ids.out(),
            weights.out(),
            dropped.out()
        )
    );
    gpu.ran(code);
    (gpu.get(&ids), gpu.get(&weights), gpu.get(&dropped))
}

#[test]
fn the_likeliest_tokens_are_their_twin() {
    each(|gpu, r, what| {
        for k in [1, 8, 64, 256].into_iter().filter(|k| *k <= r.vocab) {
            for (tau, renorm) in [(0.0, false), (1e-4, false), (0.0, true)] {
                let (ids, weights, dropped) = picked(gpu, r, k, tau, renorm);
                for i in 0..r.rows {
                    let p = r.chances(i);
                    let (want_ids, want, want_dropped) = likeliest(r.row(i), &p, k, tau, renorm);
                    let what = format!("{what}, {k} tokens, tau {tau}, renorm {renorm}, row {i}");
                    assert_eq!(ids[i * k..][..k], want_ids, "{what}");
                    let mut near = 0.0; // mass of tokens so near to tau that either side is right
                    for ((id, got), want) in want_ids.iter().zip(&weights[i * k..]).zip(&want) {
                        let chance = p[*id as usize];
                        if tau > 0.0 && (chance / f64::from(tau) - 1.0).abs() < CHANCES {
                            near += chance;
                            continue;
                        }
                        let error = (f64::from(*got) - want).abs();
                        // Below 1e-9 the exponential flushes to 0 some day.
                        assert!(error <= 2.0 * CHANCES * want.max(1e-9), "{what}: token {id} has {got}, not {want}");
                    }
                    let error = (f64::from(dropped[i]) - want_dropped).abs();
                    assert!(error <= CHANCES + near, "{what}: dropped {} for {want_dropped}", dropped[i]);
                }
            }
        }
    });
}

fn table(id: u32, rows: usize, hidden: usize) -> (Matrix, Vec<f32>) {
    let Some(ty) = GgmlType::from_id(id) else { panic!("ggml has no type {id}") };
    let table = Matrix::random(ty, rows, hidden, 1.0, &mut Input::new(u64::from(id)));
    let values = table.values();
    (table, values)
}

/// F32 products and sums of what the blocks stand for.
#[test]
fn table_rows_and_their_mixtures_are_their_twin_in_every_type() {
    let Some(gpu) = gpu() else { return };
    const VOCAB: usize = 1000;
    for id in [0, 1, 8, 12, 14, 30] {
        for (rows, hidden, k) in [(256, 2816, 64), (1, 256, 1), (5, 512, 7), (300, 256, 16), (16, 1280, 512)] {
            let (table, values) = table(id, VOCAB, hidden);
            let mut input = Input::new(rows as u64);
            let ids: Vec<i32> = (0..rows * k).map(|_| input.below(VOCAB) as i32).collect();
            // Weights of 0 among the others and at the end; a row of none.
            let mut weights: Vec<f32> =
                (0..rows * k).map(|i| if i % k > 0 && i % 3 == 0 { 0.0 } else { input.unit() }).collect();
            if rows > 2 {
                weights[2 * k..3 * k].fill(0.0);
            }
            let (at, ids_at, weights_at) = (gpu.put(&table.bytes), gpu.put(&ids), gpu.put(&weights));
            let [v, h, r, n] = [VOCAB, hidden, rows, k].map(|n| n as i32);
            let what = format!("{}, {rows} x {hidden}, {k} tokens", table.ty);

            let out = gpu.poisoned::<f32>(rows * hidden);
            gpu.ran(launch!(
                gpu,
                dllm_soft_embed(at.input(), id as i32, v, h, ids_at.input(), weights_at.input(), r, n, 53.0, out.out())
            ));
            let want = soft_embed(&values, hidden, &ids, &weights, k, 53.0);
            close(&format!("{what}: mixture"), &gpu.get(&out), &want, EXACT);

            let first: Vec<i32> = ids.iter().copied().step_by(k).collect();
            let (first_at, out) = (gpu.put(&first), gpu.poisoned::<f32>(rows * hidden));
            let i = first_at.input();
            gpu.ran(launch!(gpu, dllm_embed_rows(at.input(), id as i32, v, h, i, r, 2.0, out.out())));
            close(&format!("{what}: rows"), &gpu.get(&out), &embed_rows(&values, hidden, &first, 2.0), EXACT);
        }
    }
}

/// No stray read, and loud: a row of NaN.
#[test]
fn ids_outside_the_table_give_no_number() {
    let Some(gpu) = gpu() else { return };
    let (table, _) = table(14, 10, 256);
    let (at, ids, ones) = (gpu.put(&table.bytes), gpu.put(&[9_i32, 10, -1]), gpu.put(&[1.0_f32; 3]));
    let out = [gpu.poisoned::<f32>(3 * 256), gpu.poisoned::<f32>(3 * 256)];
    let (t, i, o) = (at.input(), ids.input(), [out[0].out(), out[1].out()]);
    gpu.ran(launch!(gpu, dllm_embed_rows(t, 14, 10, 256, i, 3, 1.0, o[0])));
    gpu.ran(launch!(gpu, dllm_soft_embed(t, 14, 10, 256, i, ones.input(), 3, 1, 1.0, o[1])));
    for out in out {
        let rows = gpu.get(&out);
        assert!(rows[..256].iter().all(|v| v.is_finite()) && rows[256..].iter().all(|v| v.is_nan()));
    }
}

/// Chances times 2^15 as halves, a table of halves (blocks are expanded to halves), F32 sums: each term is off by 2^-11 twice
/// at most, and chances below 2^-15 / 2048 of the row by more, but these are small.
#[test]
fn the_dense_soft_embedding_is_its_twin() {
    let Some(gpu) = gpu() else { return };
    // The second vocabulary is longer than a piece that is expanded at a time.
    for (id, rows, vocab, hidden) in
        [(1, 5, 1024, 2816), (1, 300, 1000, 64), (12, 5, 16_384 + 72, 256), (14, 16, 1024, 256), (8, 1, 1024, 320)]
    {
        let (table, values) = table(id, vocab, hidden);
        for cap in [30.0, 0.0] {
            let mut input = Input::new(vocab as u64);
            let mut logits = logits(&mut input, [rows, vocab], cap);
            if rows > 2 {
                logits[2 * vocab] = f32::NAN; // refused: zeros
            }
            let r = Rows::new(&gpu, [rows, vocab], cap, F32, &logits, &mut input);
            let at = gpu.put(&table.bytes);
            let probs = gpu.poisoned::<f16>(rows * vocab);
            let piece = gpu.poisoned::<u8>(gpu.kernels.soft_piece_bytes(id as i32, hidden));
            let (out, scratch) = (gpu.poisoned::<f32>(rows * hidden), gpu.poisoned::<u8>(32 << 20));
            let [rows_, v, h] = [rows, vocab, hidden].map(|n| n as i32);
            let code = launch!(
                gpu,
                dllm_dense_soft_embed(
                    at.input(),
                    id as i32,
                    r.at.input(),
                    r.temperature_at.input(),
                    cap,
                    r.stats.input(),
                    rows_,
                    v,
                    h,
                    53.0,
                    probs.out(),
                    piece.out(),
                    out.out(),
                    scratch.out()
                )
            );
            gpu.ran(code);
            let got = gpu.get(&out);
            for (i, got) in got.chunks_exact(hidden).enumerate() {
                let what = format!("{}, {vocab} x {hidden}, cap {cap}, row {i} of {rows}", table.ty);
                if rows > 2 && i == 2 {
                    assert!(got.iter().all(|v| *v == 0.0), "{what}");
                } else {
                    close(&what, got, &dense_soft_embed(&values, hidden, &r.chances(i), 53.0), 8e-4);
                }
            }
        }
    }
}
