//! The twins against ggml's stock operations on the CPU, so that a wrong twin is found without a GPU.
//!
//! Limits: weights and keys are F32 here, so that only ggml's F32 sums part the two.

use half::f16;

use super::super::attention::{Heads, RopeKv, Spans, canvas_attention, rope_table};
use super::super::experts::{Experts, down, gate_up, pick, route, router_logits};
use super::super::input::{Input, Matrix, block_types, single};
use super::super::norms::{NormAttnOut, NormInput, NormLayerOut, rms_norm};
use super::super::products::{geglu, gelu, matmul};
use super::super::tokens::{dense_soft_embed, embed_rows, likeliest, probabilities, soft_embed, stats};
use super::super::wide;
use super::{EPS, EXACT, close};
use crate::ggml::{Allocator, Backend, Buffer, Context, Device, GgmlType, Graph, Rope, Tensor};
use crate::kernels::{ExactGeglu, PositionStats, SoftEmbed, WORDS};

/// An input of a graph: values, its type and its shape, the row length first.
struct Leaf {
    ty: GgmlType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn floats(values: &[f32], shape: &[usize]) -> Leaf {
    Leaf { ty: GgmlType::F32, shape: shape.to_vec(), bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect() }
}

fn integers(values: &[i32], shape: &[usize]) -> Leaf {
    Leaf { ty: GgmlType::I32, shape: shape.to_vec(), bytes: values.iter().flat_map(|v| v.to_le_bytes()).collect() }
}

fn halves(values: &[f32], shape: &[usize]) -> Leaf {
    let bytes = values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
    Leaf { ty: GgmlType::F16, shape: shape.to_vec(), bytes }
}

fn blocks(matrix: &Matrix) -> Leaf {
    Leaf { ty: matrix.ty, shape: vec![matrix.k, matrix.rows], bytes: matrix.bytes.clone() }
}

/// Computes what `build` makes of the inputs, on the CPU; the result is read as `T`, of 4 bytes.
fn stock<T: Copy + Default, const N: usize>(
    leaves: [Leaf; N],
    build: impl for<'c> FnOnce(&'c Graph, [Tensor<'c>; N]) -> Tensor<'c>,
) -> Vec<T> {
    let device = Device::cpu().expect("a CPU");
    let context = Context::new(N, 0).unwrap();
    let inputs = leaves.each_ref().map(|leaf| context.new_tensor(leaf.ty, &leaf.shape));
    let _buffer = Buffer::for_context(&context, device, "inputs").unwrap();
    inputs.iter().zip(&leaves).for_each(|(tensor, leaf)| {
        assert_eq!(tensor.bytes(), leaf.bytes.len());
        tensor.write(&leaf.bytes);
    });
    let mut graph = Graph::new(256).unwrap();
    let out = build(&graph, inputs).mark_output();
    graph.expand(out);
    let out = out.handle();
    let mut allocator = Allocator::new(device).unwrap();
    allocator.allocate(&mut graph).unwrap();
    Backend::open(device, 1).unwrap().compute(&mut graph).unwrap();
    let out = graph.context().tensor(out);
    out.read_at(0, out.elements())
}

const ROWS: usize = 5;
const HIDDEN: usize = 64;

#[test]
fn norms() {
    let mut input = Input::new(1);
    let n = ROWS * HIDDEN;
    let (e, signal, w) = (input.values(n, 1.0), input.values(n, 30.0), input.norm(HIDDEN));
    let shape = [HIDDEN, ROWS];
    let weight = || floats(&w, &[HIDDEN]);
    let got = stock([floats(&e, &shape), weight()], |g, [x, w]| {
        let cx = g.context();
        cx.mul(cx.rms_norm(cx.scale(x, 2.0), EPS), w)
    });
    close("rms_norm", &got, &rms_norm(&e, Some(&w), 2.0, EPS, HIDDEN), EXACT);

    let flag = [0.0, 1.0, 0.5, 1.0, 0.0];
    let causal = [0, 0, 0, 0, 0];
    let twin = NormInput {
        e: &e,
        e_scale: 53.0,
        signal: Some(&signal),
        flag: Some(&flag),
        causal: Some(&causal),
        attn_norm: &w,
        eps: EPS,
    };
    let chain = |with_norm: bool| {
        let leaves = [floats(&e, &shape), floats(&signal, &shape), floats(&flag, &[1, ROWS]), weight()];
        stock::<f32, 4>(leaves, move |g, [e, signal, flag, w]| {
            let cx = g.context();
            let h = cx.rms_norm(cx.add(cx.scale(e, 53.0), cx.mul(signal, flag)), EPS);
            if with_norm { cx.mul(cx.rms_norm(h, EPS), w) } else { h }
        })
    };
    let (want_h, want_x1) = twin.compute();
    close("norm_input: h", &chain(false), &want_h, EXACT);
    close("norm_input: x1", &chain(true), &want_x1, EXACT);
    // Causal rows are not normed before the layer's own norm, which makes the first norm invisible there.
    let causal = NormInput { causal: Some(&[1; ROWS]), ..twin }.compute();
    let mixed: Vec<f64> = (0..n).map(|i| f64::from(e[i]) * 53.0 + f64::from(flag[i / HIDDEN] * signal[i])).collect();
    close("causal: h", &causal.0.iter().map(|v| *v as f32).collect::<Vec<_>>(), &mixed, EXACT);
    close("causal: x1", &causal.1.iter().map(|v| *v as f32).collect::<Vec<_>>(), &want_x1, EXACT);
}

#[test]
fn norms_around_the_residual() {
    let mut input = Input::new(2);
    let n = ROWS * HIDDEN;
    let (h, a) = (input.values(n, 2.0), input.values(n, 5.0));
    let w: [Vec<f32>; 4] = std::array::from_fn(|_| input.norm(HIDDEN));
    let shape = [HIDDEN, ROWS];
    let twin = NormAttnOut {
        h: &h,
        a: &a,
        post_attention_norm: &w[0],
        ffn_norm: &w[1],
        pre_ffw_norm_2: &w[2],
        router_scale: &w[3],
        eps: EPS,
    };
    for (i, want) in twin.compute().iter().enumerate() {
        let leaves =
            [floats(&h, &shape), floats(&a, &shape), floats(&w[0], &[HIDDEN]), floats(&w[i.max(1)], &[HIDDEN])];
        let got = stock(leaves, |g, [h, a, post, w]| {
            let cx = g.context();
            let r = cx.add(h, cx.mul(cx.rms_norm(a, EPS), post));
            let normed = || cx.mul(cx.rms_norm(r, EPS), w);
            match i {
                0 => r,
                1 | 2 => normed(),
                _ => cx.scale(normed(), 1.0 / (HIDDEN as f32).sqrt()),
            }
        });
        close(&format!("norm_attn_out: {i}"), &got, want, EXACT);
    }

    let (r, d, m) = (input.values(n, 2.0), input.values(n, 4.0), input.values(3 * n, 1.0));
    for (causal, scale) in [([0; ROWS], 0.37), ([1; ROWS], 1.9)] {
        let twin = NormLayerOut {
            r: &r,
            d: &d,
            m: &m,
            parts: 3,
            strides: [3 * HIDDEN, HIDDEN],
            post_ffw_norm_1: &w[0],
            post_ffw_norm_2: &w[1],
            post_ffw_norm: &w[2],
            scales: [0.37, 1.9],
            causal: Some(&causal),
            next_norm: &w[3],
            eps: EPS,
        };
        let (want_h, want_x) = twin.compute();
        for (next, want) in [(false, want_h), (true, want_x)] {
            let weight = |i: usize| floats(&w[i], &[HIDDEN]);
            let leaves = [
                floats(&r, &shape),
                floats(&d, &shape),
                floats(&m, &[HIDDEN, 3, ROWS]),
                weight(0),
                weight(1),
                weight(2),
                weight(3),
            ];
            let got = stock(leaves, |g, [r, d, m, w1, w2, w3, w4]| {
                let cx = g.context();
                let part = |p: usize| {
                    let s = m.strides();
                    cx.view(m, [HIDDEN, ROWS, 1, 1], [s[2], s[3], s[3]], p * s[1])
                };
                let m = cx.add(cx.add(part(0), part(1)), part(2));
                let both = cx.add(cx.mul(cx.rms_norm(d, EPS), w1), cx.mul(cx.rms_norm(m, EPS), w2));
                let h = cx.scale(cx.add(r, cx.mul(cx.rms_norm(both, EPS), w3)), scale);
                if next { cx.mul(cx.rms_norm(h, EPS), w4) } else { h }
            });
            close(&format!("norm_layer_out, next {next}, scale {scale}"), &got, &want, 2.0 * EXACT);
        }
    }
}

#[test]
fn products_and_gelu() {
    let mut input = Input::new(3);
    let (w, x) = (input.values(37 * HIDDEN, 0.1), input.values(ROWS * HIDDEN, 1.0));
    let got = stock([floats(&w, &[HIDDEN, 37]), floats(&x, &[HIDDEN, ROWS])], |g, [w, x]| g.context().mul_mat(w, x));
    close("matmul", &got, &matmul(&w, &x, HIDDEN), EXACT);

    // ggml's own GELU reads a table of halves; the exact one does not.
    let both = input.values(ROWS * 2 * HIDDEN, 2.0);
    let want = geglu(&wide(&both), HIDDEN);
    for exact in [false, true] {
        let got = stock([floats(&both, &[2 * HIDDEN, ROWS])], |g, [both]| {
            let cx = g.context();
            let half = |at: usize| {
                let s = both.strides();
                cx.view(both, [HIDDEN, ROWS, 1, 1], [s[1], s[2], s[3]], at * HIDDEN * 4)
            };
            match exact {
                true => g.own(ExactGeglu).node(cx, GgmlType::F32, [HIDDEN, ROWS, 1, 1], &[half(0), half(1)]),
                false => cx.geglu_split(half(0), half(1)),
            }
        });
        close(&format!("geglu, exact {exact}"), &got, &want, if exact { EXACT } else { 1e-3 });
    }
    assert_eq!((gelu(0.0), gelu(300.0), gelu(-300.0)), (0.0, 300.0, 0.0));
}

/// ggml's product of blocks rounds the activations; those of F16 and BF16 are not rounded to less than that.
#[test]
fn quantized_matrices_multiply_as_their_values_do() {
    for ty in block_types() {
        let mut input = Input::new(40 + u64::from(ty.id()));
        let matrix = Matrix::random(ty, 16, 512, 0.02, &mut input);
        let x = single(&input.halves(ROWS * 512, 1.0));
        let got = stock([blocks(&matrix), floats(&x, &[512, ROWS])], |g, [w, x]| g.context().mul_mat(w, x));
        close(&ty.name(), &got, &matmul(&matrix.values(), &x, 512), 1.5e-2);
    }
}

#[test]
fn the_router_and_the_experts() {
    const EXPERTS: usize = 8;
    const USED: usize = 3;
    const WIDTH: usize = 32;
    let mut input = Input::new(5);
    let (zr, wr) = (input.values(ROWS * HIDDEN, 0.3), input.values(EXPERTS * HIDDEN, 0.3));
    let scale: Vec<f32> = (0..EXPERTS).map(|_| 0.5 + input.unit()).collect();
    let logits = router_logits(&zr, &wr, HIDDEN);
    let (ids, weights) = pick(&logits, EXPERTS, USED, Some(&scale));
    let leaves = || [floats(&zr, &[HIDDEN, ROWS]), floats(&wr, &[HIDDEN, EXPERTS]), floats(&scale, &[EXPERTS])];
    let stock_ids: Vec<i32> = stock(leaves(), |g, [zr, wr, _]| {
        let cx = g.context();
        cx.cont(cx.top_k(cx.soft_max(cx.mul_mat(wr, zr)), USED))
    });
    assert_eq!(stock_ids, ids);
    let stock_weights = stock(leaves(), |g, [zr, wr, scale]| {
        let cx = g.context();
        let probs = cx.soft_max(cx.mul_mat(wr, zr));
        let ids = cx.top_k(probs, USED);
        let pick = |p| {
            let rows = cx.get_rows(cx.reshape(p, [1, EXPERTS, ROWS, 1]), ids);
            cx.reshape(rows, [USED, ROWS, 1, 1])
        };
        cx.div(pick(cx.mul(probs, scale)), cx.sum_rows(pick(probs)))
    });
    close("router: weights", &stock_weights, &weights, EXACT);

    let x = input.values(ROWS * HIDDEN, 1.0);
    let matrices = |input: &mut Input, n: usize| -> Experts { (0..EXPERTS).map(|_| input.values(n, 0.2)).collect() };
    let [gates, ups, downs] = std::array::from_fn(|_| matrices(&mut input, WIDTH * HIDDEN));
    let act = gate_up(&x, &ids, USED, &gates, &ups, HIDDEN);
    let act: Vec<f32> = act.iter().map(|v| *v as f32).collect();
    let w: Vec<f32> = weights.iter().map(|w| *w as f32).collect();
    let want = down(&act, &ids, &w, &downs, WIDTH);
    let got = stock(
        [
            floats(&x, &[HIDDEN, 1, ROWS]),
            integers(&ids, &[USED, ROWS]),
            floats(&w, &[1, USED, ROWS]),
            floats(&gates.concat(), &[HIDDEN, WIDTH, EXPERTS]),
            floats(&ups.concat(), &[HIDDEN, WIDTH, EXPERTS]),
            floats(&downs.concat(), &[WIDTH, HIDDEN, EXPERTS]),
        ],
        |g, [x, ids, w, gates, ups, downs]| {
            let cx = g.context();
            let both = [cx.mul_mat_id(gates, x, ids), cx.mul_mat_id(ups, x, ids)];
            let act = g.own(ExactGeglu).node(cx, GgmlType::F32, [WIDTH, USED, ROWS, 1], &both);
            cx.mul(cx.mul_mat_id(downs, act, ids), w)
        },
    );
    close("experts", &got, &want, 2.0 * EXACT);
}

#[test]
fn the_plan_lists_the_ids_of_each_expert() {
    let (offsets, order) = route(&[2, 0, 2, -1, 1, 4, 0], 4);
    assert_eq!((offsets, order), (vec![0, 2, 3, 5, 5], vec![1, 6, 4, 0, 2]));
    let (ids, weights) = pick(&[1.0, 3.0, 3.0, 0.0], 4, 3, None);
    assert_eq!(ids, [1, 2, 0], "of equal logits the lowest id comes first");
    assert!((weights[0] - weights[1]).abs() < 1e-12 && (weights.iter().sum::<f64>() - 1.0).abs() < 1e-12);
}

/// Head norms and rotation of queries and keys; of the values only the norm.
#[test]
fn rotation() {
    let s = Heads { rows: ROWS, lanes: 1, q: 4, kv: 2, head: 16, has_v: true };
    let mut input = Input::new(6);
    let qkv = input.values(ROWS * s.width(), 2.0);
    let (q_norm, k_norm) = (input.norm(s.head), input.norm(s.head));
    let positions: Vec<i32> = (0..ROWS as i32).map(|i| 900 + 7 * i).collect();
    let factors: Vec<f32> = (0..s.head / 2).map(|i| if i < 5 { 1.0 } else { 1e30 }).collect();
    for turned in [None, Some(&factors[..])] {
        let table: Vec<f32> = rope_table(&positions, s.head, 1e4, turned).iter().map(|v| *v as f32).collect();
        let twin = RopeKv { qkv: &qkv, q_norm: &q_norm, k_norm: &k_norm, eps: EPS, table: &table };
        let want = twin.compute(&s);
        let part = |first: usize, heads: usize, norm: Option<&[f32]>| -> Vec<f32> {
            let ones = vec![1.0; s.head];
            let leaves = [
                floats(&qkv, &[s.head, s.q + 2 * s.kv, ROWS]),
                integers(&positions, &[ROWS]),
                floats(norm.unwrap_or(&ones), &[s.head]),
                floats(turned.unwrap_or(&vec![1.0; s.head / 2]), &[s.head / 2]),
            ];
            let rotate = norm.is_some();
            stock(leaves, move |g, [qkv, positions, norm, factors]| {
                let cx = g.context();
                let strides = qkv.strides();
                let x = cx.view(qkv, [16, heads, ROWS, 1], [strides[1], strides[2], strides[3]], first * strides[1]);
                let x = cx.mul(cx.rms_norm(x, EPS), norm);
                if rotate { cx.rope(x, positions, Some(factors), Rope { dims: 16, base: 1e4 }) } else { x }
            })
        };
        // ggml lays queries out by row, the twin by head.
        let by_row: Vec<f64> = (0..ROWS)
            .flat_map(|r| (0..s.q).map(move |h| (h * ROWS + r) * 16))
            .flat_map(|at| want.q[at..at + 16].to_vec())
            .collect();
        // ggml makes the powers of the frequency by repeated products; at position 900 the angles differ by some 1e-4.
        close("queries", &part(0, s.q, Some(&q_norm)), &by_row, 1e-4);
        close("keys", &part(s.q, s.kv, Some(&k_norm)), &want.k, 1e-4);
        close("values", &part(s.q + s.kv, s.kv, None), &want.v, EXACT);
    }
    // Without a projection of their own the values are the raw keys.
    let bare = Heads { kv: 4, has_v: false, ..s };
    let table: Vec<f32> = rope_table(&positions, s.head, 1e4, None).iter().map(|v| *v as f32).collect();
    let raw = RopeKv { qkv: &qkv, q_norm: &q_norm, k_norm: &k_norm, eps: EPS, table: &table }.compute(&bare);
    let with: Vec<f64> = rms_norm(&qkv, None, 1.0, EPS, s.head);
    let first_row = &with[4 * 16..8 * 16];
    assert!(raw.v[..4 * 16].iter().zip(first_row).all(|(a, b)| (a - b).abs() < 1e-12));
}

/// Two lanes, keys in two runs, as a mask shows them.
#[test]
fn attention() {
    let s = Heads { rows: 6, lanes: 2, q: 4, kv: 2, head: 32, has_v: true };
    const KEYS: usize = 24;
    let mut input = Input::new(7);
    let q = input.values(s.rows * s.q * s.head, 0.5);
    let (k, v) = (input.values(2 * KEYS * s.row(), 1.0), input.values(2 * KEYS * s.row(), 1.0));
    let spans: [Spans; 2] = [[3, 5, 10, 7], [24 + 20, 4, 24, 2]];
    let want = canvas_attention(&q, &s, &k, &v, s.row(), &spans);
    let (n, heads) = (s.rows / s.lanes, [s.q, s.kv]);
    let visible = |lane: usize, key: usize| {
        let row = (lane * KEYS + key) as i64;
        spans[lane].chunks_exact(2).any(|run| (run[0]..run[0] + run[1]).contains(&row))
    };
    let mask: Vec<f32> =
        (0..2 * n * KEYS).map(|i| if visible(i / (n * KEYS), i % KEYS) { 0.0 } else { f32::NEG_INFINITY }).collect();
    let leaves = [
        floats(&q, &[32, n, heads[0], 2]),
        floats(&k, &[32, heads[1], KEYS, 2]),
        floats(&v, &[32, heads[1], KEYS, 2]),
        halves(&mask, &[KEYS, n, 1, 2]),
    ];
    let got = stock(leaves, |g, [q, k, v, mask]| {
        let cx = g.context();
        let by_head = |t| cx.cont(cx.permute(t, [0, 2, 1, 3]));
        cx.attention(q, by_head(k), by_head(v), mask, 1.0)
    });
    close("attention", &got, &want, 2e-5);

    let empty = canvas_attention(&q, &s, &k, &v, s.row(), &[[0, 0, 0, 0], spans[1]]);
    assert!(empty[..want.len() / 2].iter().all(|v| *v == 0.0), "a lane without keys gives zeros");
    assert_eq!(empty[want.len() / 2..], want[want.len() / 2..]);
}

#[test]
fn tokens() {
    const VOCAB: usize = 300;
    const CAP: f32 = 30.0;
    let mut input = Input::new(8);
    let logits = input.values(ROWS * VOCAB, 8.0);
    let temperature: Vec<f32> = (0..ROWS).map(|_| 0.4 + input.unit()).collect();
    let uniform: Vec<f32> = (0..ROWS).map(|_| input.unit()).collect();
    let scaled: Vec<f32> = (0..ROWS * VOCAB).map(|i| CAP * (logits[i] / CAP).tanh() / temperature[i / VOCAB]).collect();
    let chances: Vec<Vec<f64>> =
        (0..ROWS).map(|i| probabilities(&logits[i * VOCAB..][..VOCAB], CAP, temperature[i])).collect();
    let got = stock([floats(&scaled, &[VOCAB, ROWS])], |g, [z]| g.context().soft_max(z));
    close("probabilities", &got, &chances.concat(), 1e-5);

    let best: Vec<i32> = stock([floats(&logits, &[VOCAB, ROWS])], |g, [x]| {
        let cx = g.context();
        cx.cont(cx.top_k(x, 20))
    });
    let words: Vec<u32> = stock(
        [floats(&logits, &[VOCAB, ROWS]), floats(&temperature, &[ROWS]), floats(&uniform, &[ROWS])],
        |g, [x, t, u]| {
            let op = g.own(PositionStats { softcap: Some(CAP) });
            op.node(g.context(), GgmlType::I32, [WORDS, ROWS, 1, 1], &[x, t, u])
        },
    );
    for i in 0..ROWS {
        let row = &logits[i * VOCAB..][..VOCAB];
        let (ids, weights, dropped) = likeliest(row, &chances[i], 20, 0.0, false);
        assert_eq!(ids, best[i * 20..][..20], "row {i}");
        let by_id: Vec<f64> = ids.iter().map(|id| chances[i][*id as usize]).collect();
        assert_eq!(weights, by_id);
        assert!((dropped + weights.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        let (_, scaled, _) = likeliest(row, &chances[i], 20, 1e-3, true);
        assert!((scaled.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        assert!(scaled.iter().zip(&weights).all(|(s, w)| (*s == 0.0) == (*w < f64::from(1e-3_f32))), "row {i}");

        let twin = stats(row, CAP, temperature[i], uniform[i]);
        let word = |at: usize| words[i * WORDS + at];
        assert_eq!((word(0), word(1)), (twin.argmax, twin.drawn), "row {i}");
        for (at, want) in [(2, twin.entropy), (3, twin.p_argmax), (4, twin.p_drawn), (5, twin.max_z), (6, twin.sum_exp)]
        {
            let got = f64::from(f32::from_bits(word(at)));
            assert!((got - want).abs() <= 1e-5 * (1.0 + want.abs()), "row {i}, word {at}: {got} {want}");
        }
        assert!((twin.p_argmax - chances[i][twin.argmax as usize]).abs() < 1e-5, "row {i}");
        assert_eq!(twin.max_logit, row[twin.argmax as usize]);
    }
    let (tied, ..) = likeliest(&[1.0, 2.0, 2.0, -0.0, 0.0], &[0.1, 0.3, 0.3, 0.1, 0.1], 5, 0.0, false);
    assert_eq!(tied, [1, 2, 0, 3, 4], "of equal logits the lowest id comes first, and zeros are equal");
}

#[test]
fn soft_embeddings() {
    const VOCAB: usize = 64;
    let mut input = Input::new(9);
    let logits = input.values(ROWS * VOCAB, 4.0);
    let temperature = [0.5, 0.6, 0.7, 0.8, 0.9];
    let uniform = [0.5; ROWS];
    for id in [0, 1, 8, 12, 14] {
        let Some(ty) = GgmlType::from_id(id) else { panic!("type {id}") };
        let table = Matrix::random(ty, VOCAB, 256, 1.0, &mut input);
        let values = table.values();
        let got: Vec<f32> = stock(
            [blocks(&table), floats(&logits, &[VOCAB, ROWS]), floats(&temperature, &[ROWS]), floats(&uniform, &[ROWS])],
            |g, [table, x, t, u]| {
                let cx = g.context();
                let words = g.own(PositionStats { softcap: Some(30.0) });
                let words = words.node(cx, GgmlType::I32, [WORDS, ROWS, 1, 1], &[x, t, u]);
                let soft = g.own(SoftEmbed { softcap: Some(30.0) });
                soft.node(cx, GgmlType::F32, [256, ROWS, 1, 1], &[table, x, t, words])
            },
        );
        let ids: Vec<i32> = (0..VOCAB as i32).collect();
        for i in 0..ROWS {
            let p = probabilities(&logits[i * VOCAB..][..VOCAB], 30.0, temperature[i]);
            let dense = dense_soft_embed(&values, 256, &p, 1.0);
            close(&format!("{ty}, row {i}"), &got[i * 256..][..256], &dense, 1e-5);
            let weights: Vec<f32> = p.iter().map(|p| *p as f32).collect();
            let mixed = soft_embed(&values, 256, &ids, &weights, VOCAB, 1.0);
            close(&format!("{ty}, row {i}, as a list"), &got[i * 256..][..256], &mixed, 1e-5);
        }
        let chosen = [63, 0, 7];
        let got: Vec<f32> =
            stock([blocks(&table), integers(&chosen, &[3])], |g, [table, ids]| g.context().get_rows(table, ids));
        close(&format!("{ty}, rows"), &got, &embed_rows(&values, 256, &chosen, 1.0), EXACT);
    }
}
