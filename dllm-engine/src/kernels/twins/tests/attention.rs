//! rope_kv.cu and attention.cu. Heads of the model: 16 on 8 of 256 with values, 16 on 2 of 512 without.

use half::f16;

use super::super::attention::{Heads, RopeKv, Spans, canvas_attention, keys_of, rope_table};
use super::super::gpu::{Gpu, NONE, launch};
use super::super::input::{Input, single};
use super::{EPS, F16, F32, Floats, ROUNDED, close, gpu};

/// Weights of the keys and the queries' products go through F16 once; measured with bell-shaped scores: below 6e-4.
const ATTENDED: f64 = 8e-4;

#[test]
fn the_rope_table_is_its_twin() {
    let Some(gpu) = gpu() else { return };
    for (rows, head, base) in [(1, 256, 1e4), (5, 8, 1e4), (16, 512, 1e6), (300, 256, 1e4), (256, 512, 1e6)] {
        let mut positions: Vec<i32> = (0..rows as i32).map(|i| 7000 + 3 * i).collect();
        positions[0] = 250_000;
        // Of whole-context layers: a quarter of the pairs turns, the others stand still.
        let factors: Vec<f32> = (0..head / 2).map(|i| if i < head / 8 { 1.0 } else { 1e30 }).collect();
        let (positions_at, factors_at) = (gpu.put(&positions), gpu.put(&factors));
        for (list, at) in [(None, NONE), (Some(&factors[..]), factors_at.input())] {
            let table = gpu.poisoned::<f32>(rows * head);
            gpu.ran(launch!(
                gpu,
                dllm_rope_table(positions_at.input(), rows as i32, head as i32, base, at, table.out())
            ));
            let want = rope_table(&positions, head, base, list);
            for (i, (got, want)) in gpu.get(&table).iter().zip(&want).enumerate() {
                // The frequency may be the neighbouring F32 (of a power by another way), which turns the angle a little.
                let position = f64::from(positions[i / head]);
                let frequency = f64::from(base).powf(-((i % head / 2) as f64) / (head / 2) as f64);
                let frequency = list.map_or(frequency, |list| frequency / f64::from(list[i % head / 2]));
                let slack = 2e-7 * (1.0 + position * frequency);
                assert!((f64::from(*got) - want).abs() <= slack, "{rows} x {head}: value {i} is {got}, not {want}");
            }
        }
    }
}

fn heads(rows: usize, lanes: usize, [q, kv, head]: [usize; 3], has_v: bool) -> Heads {
    Heads { rows, lanes, q, kv, head, has_v }
}

#[test]
fn rotation_and_cache_are_their_twin() {
    let Some(gpu) = gpu() else { return };
    let shapes = [
        heads(1, 1, [16, 8, 256], true),
        heads(256, 1, [16, 8, 256], true),
        heads(300, 1, [16, 2, 512], false),
        heads(10, 2, [16, 2, 512], false),
        heads(80, 5, [16, 8, 256], true),
        heads(15, 5, [8, 4, 32], true),
        heads(16, 1, [4, 4, 8], false),
        heads(9, 3, [2, 1, 264], true),
    ];
    for (i, s) in shapes.iter().enumerate() {
        for (from, to) in [(F32, F16), (F32, F32), (F16, F16)] {
            rotated(&gpu, s, i as u64, from, to);
        }
    }
}

fn rotated(gpu: &Gpu, s: &Heads, seed: u64, from: i32, to: i32) {
    let mut input = Input::new(seed);
    let slots_n = 2 * s.rows + 3;
    let stride = s.row() + 4; // the kernel wants a multiple of 4; what lies between rows is nobody's
    let (qkv_at, qkv) = Floats::put(gpu, from, &input.values(s.rows * s.width(), 2.0));
    let (q_norm, k_norm) = (input.norm(s.head), input.norm(s.head));
    let positions: Vec<i32> = (0..s.rows as i32).map(|i| 100 + i).collect();
    let table: Vec<f32> = rope_table(&positions, s.head, 1e4, None).iter().map(|v| *v as f32).collect();
    let mut slots: Vec<i64> = input.order(slots_n)[..s.rows].iter().map(|slot| *slot as i64).collect();
    slots[s.rows - 1] = -1; // nowhere
    let (q_norm_at, k_norm_at, table_at) = (gpu.put(&q_norm), gpu.put(&k_norm), gpu.put(&table));
    let slots_at = gpu.put(&slots);
    let q = Floats::poisoned(gpu, to, s.rows * s.q * s.head);
    let (k_cache, v_cache) = (gpu.poisoned::<f16>(slots_n * stride), gpu.poisoned::<f16>(slots_n * stride));
    let [rows, lanes, q_heads, kv_heads, head] = [s.rows, s.lanes, s.q, s.kv, s.head].map(|n| n as i32);
    let code = launch!(
        gpu,
        dllm_rope_kv(
            qkv_at.input(),
            from,
            rows,
            lanes,
            q_heads,
            kv_heads,
            head,
            i32::from(s.has_v),
            q_norm_at.input(),
            k_norm_at.input(),
            EPS,
            table_at.input(),
            slots_at.input(),
            q.out(),
            to,
            k_cache.out(),
            v_cache.out(),
            stride as i64
        )
    );
    gpu.ran(code);
    let want = RopeKv { qkv: &qkv, q_norm: &q_norm, k_norm: &k_norm, eps: EPS, table: &table }.compute(s);
    let what = format!("{s:?}, {from} to {to}");
    close(&format!("{what}: queries"), &q.get(gpu), &want.q, super::limit(to));
    for (name, cache, want) in [("keys", &k_cache, &want.k), ("values", &v_cache, &want.v)] {
        let mut cache = gpu.get(cache);
        let (mut got, mut written) = (Vec::new(), Vec::new());
        for (slot, want) in slots.iter().zip(want.chunks_exact(s.row())) {
            if let Ok(slot) = usize::try_from(*slot) {
                let row = &mut cache[slot * stride..][..s.row()];
                got.extend(single(row));
                written.extend_from_slice(want);
                row.fill(f16::NAN);
            }
        }
        if !got.is_empty() {
            close(&format!("{what}: {name}"), &got, &written, ROUNDED);
        }
        assert!(cache.iter().all(|v| v.is_nan()), "{what}: {name} were written beside their slots");
    }
}

/// What the attention of a canvas sees: cache rows of all lanes, all that are no key of any lane poisoned.
struct Canvas {
    q: Vec<f16>,
    k: Vec<f16>,
    v: Vec<f16>,
    stride: usize,
    spans: Vec<Spans>,
}

/// `keys`: the two runs of each lane in turn.
fn canvas(s: &Heads, keys: &[(usize, usize)], input: &mut Input) -> Canvas {
    let stride = s.row() + 8;
    let longest = keys.iter().map(|(a, b)| a + b).max().unwrap_or(0);
    let per_lane = longest + 40;
    let spans: Vec<Spans> = (0..s.lanes)
        .map(|lane| {
            let (a, b) = keys[lane % keys.len()];
            let first = lane * per_lane + 3;
            // A gap between the runs, and the later rows first, as in a ring that wraps.
            [(first + b + 20) as i64, a as i64, first as i64, b as i64]
        })
        .collect();
    let mut is_key = vec![false; s.lanes * per_lane];
    spans.iter().flat_map(keys_of).for_each(|row| is_key[row] = true);
    let rows = |input: &mut Input| -> Vec<f16> {
        let all = is_key.iter().flat_map(|is_key| {
            let mut row = input.halves(stride, 1.0);
            row[if *is_key { s.row() } else { 0 }..].fill(f16::NAN);
            row
        });
        all.collect()
    };
    // Scores of bell-shaped heads have the variance of the head size; the norms of a model keep them about there.
    let q = input.halves(s.rows * s.q * s.head, 1.0);
    let (k, v) = (rows(input), rows(input));
    Canvas { q, k, v, stride, spans }
}

fn attended(gpu: &Gpu, s: &Heads, keys: &[(usize, usize)], splits: &[i32]) {
    let c = canvas(s, keys, &mut Input::new((s.rows * s.head) as u64));
    let want = canvas_attention(&single(&c.q), s, &single(&c.k), &single(&c.v), c.stride, &c.spans);
    let (q, k, v) = (gpu.put(&c.q), gpu.put(&c.k), gpu.put(&c.v));
    let spans = gpu.put(&c.spans.concat());
    let [rows, lanes, q_heads, kv_heads, head] = [s.rows, s.lanes, s.q, s.kv, s.head].map(|n| n as i32);
    for splits in splits {
        // SAFETY: pure arithmetic.
        let room = unsafe { (gpu.kernels.dllm_canvas_attention_scratch_bytes)(rows, q_heads, head, *splits) };
        let scratch = gpu.poisoned::<u8>(room.max(16));
        for ty in [F16, F32] {
            let out = Floats::poisoned(gpu, ty, s.rows * s.q * s.head);
            let code = launch!(
                gpu,
                dllm_canvas_attention(
                    q.input(),
                    rows,
                    lanes,
                    q_heads,
                    kv_heads,
                    head,
                    k.input(),
                    v.input(),
                    c.stride as i64,
                    spans.input(),
                    *splits,
                    out.out(),
                    ty,
                    scratch.out()
                )
            );
            gpu.ran(code);
            close(&format!("{s:?}, keys {keys:?}, {splits} splits, to {ty}"), &out.get(gpu), &want, ATTENDED);
        }
    }
}

#[test]
fn attention_of_sliding_heads_is_its_twin() {
    let Some(gpu) = gpu() else { return };
    for rows in [1, 5, 16] {
        attended(&gpu, &heads(rows, 1, [16, 8, 256], true), &[(100, rows)], &[1, 2, 3]);
    }
    // A whole window and its canvas, fewer heads: the twin is slow.
    attended(&gpu, &heads(256, 1, [2, 1, 256], true), &[(1023, 256)], &[1, 4]);
    attended(&gpu, &heads(300, 1, [4, 2, 256], true), &[(0, 300)], &[1, 2]);
}

#[test]
fn attention_of_whole_context_heads_is_its_twin() {
    let Some(gpu) = gpu() else { return };
    for rows in [1, 5, 16] {
        attended(&gpu, &heads(rows, 1, [16, 2, 512], false), &[(150, rows)], &[1, 2, 3]);
    }
    attended(&gpu, &heads(256, 1, [2, 1, 512], false), &[(400, 256)], &[1, 5]);
    attended(&gpu, &heads(16, 1, [2, 1, 512], false), &[(3000, 16)], &[1, 7, 16]);
}

#[test]
fn attention_of_several_lanes_is_its_twin() {
    let Some(gpu) = gpu() else { return };
    // Lanes with one run, two, one key, and none at all.
    let keys = [(70, 16), (16, 0), (1, 0), (0, 0), (0, 129)];
    for (lanes, rows) in [(2, 5), (2, 32), (5, 16)] {
        for (shape, has_v) in [([16, 8, 256], true), ([16, 2, 512], false)] {
            attended(&gpu, &heads(lanes * rows, lanes, shape, has_v), &keys, &[1, 2, 3]);
        }
    }
}

#[test]
fn attention_of_small_heads_is_its_twin() {
    let Some(gpu) = gpu() else { return };
    for head in [32, 64, 128] {
        attended(&gpu, &heads(30, 2, [8, 4, head], true), &[(33, 15), (200, 0)], &[1, 2, 3]);
        attended(&gpu, &heads(7, 1, [6, 2, head], true), &[(64, 64)], &[1, 16]);
    }
}
