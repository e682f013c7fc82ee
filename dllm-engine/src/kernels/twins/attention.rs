//! Twins of rope_kv.cu and attention.cu.

use super::norms::{rms, rms_weighted};
use super::wide;

/// cos and sin of pos * base^(-2 i / head) / factors[i], [rows][head / 2][2]. Frequency and angle are rounded to F32, as the
/// reference does.
pub fn rope_table(pos: &[i32], head: usize, base: f32, factors: Option<&[f32]>) -> Vec<f64> {
    let half = head / 2;
    let mut out = Vec::with_capacity(pos.len() * head);
    for p in pos {
        for i in 0..half {
            let frequency = f64::from(base).powf(-(i as f64) / half as f64) as f32;
            let angle = f64::from(*p as f32 * factors.map_or(frequency, |factors| frequency / factors[i]));
            out.extend([angle.cos(), angle.sin()]);
        }
    }
    out
}

/// Sizes of an attention block.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    pub rows: usize,
    pub lanes: usize,
    pub q: usize,
    pub kv: usize,
    pub head: usize,
    /// Whether values have a projection of their own; else they are the raw keys.
    pub has_v: bool,
}

impl Heads {
    /// Values of a row of q, k, v.
    pub fn width(&self) -> usize {
        (self.q + self.kv * (1 + usize::from(self.has_v))) * self.head
    }

    /// Values of a cache row.
    pub fn row(&self) -> usize {
        self.kv * self.head
    }
}

/// From the fused projection to what attention reads.
#[derive(Debug, Clone, Copy)]
pub struct RopeKv<'a> {
    pub qkv: &'a [f32],
    pub q_norm: &'a [f32],
    pub k_norm: &'a [f32],
    pub eps: f32,
    /// `rope_table`'s, rounded.
    pub table: &'a [f32],
}

/// Queries [lanes][heads][rows per lane][head], keys and values [rows][kv heads * head].
#[derive(Debug, Default)]
pub struct Roped {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
}

impl RopeKv<'_> {
    pub fn compute(&self, s: &Heads) -> Roped {
        let (head, per_lane) = (s.head, s.rows / s.lanes);
        let source = |row: usize, h: usize| wide(&self.qkv[row * s.width() + h * head..][..head]);
        let rotated = |row: usize, h: usize, norm: &[f32]| {
            let x = rms_weighted(&source(row, h), norm, self.eps);
            let half = head / 2;
            let turn = |i: usize| {
                let at = (row * half + i % half) * 2;
                let (cos, sin) = (f64::from(self.table[at]), f64::from(self.table[at + 1]));
                if i < half { x[i] * cos - x[i + half] * sin } else { x[i] * cos + x[i - half] * sin }
            };
            (0..head).map(turn).collect::<Vec<_>>()
        };
        let mut out = Roped::default();
        for lane in 0..s.lanes {
            for h in 0..s.q {
                (0..per_lane).for_each(|r| out.q.extend(rotated(lane * per_lane + r, h, self.q_norm)));
            }
        }
        for row in 0..s.rows {
            for h in 0..s.kv {
                out.k.extend(rotated(row, s.q + h, self.k_norm));
                out.v.extend(rms(&source(row, s.q + h + if s.has_v { s.kv } else { 0 }), self.eps));
            }
        }
        out
    }
}

/// Keys of a lane: two runs of cache rows, each a first row and a count.
pub type Spans = [i64; 4];

/// The rows of a lane's keys.
pub fn keys_of(spans: &Spans) -> Vec<usize> {
    let run = |at: usize| spans[at] as usize..(spans[at] + spans[at + 1]) as usize;
    run(0).chain(run(2)).collect()
}

/// softmax(q k^T) v per head, [rows][heads * head]; q as `RopeKv` leaves it, cache rows `stride` elements apart. A lane without
/// keys gives zeros.
pub fn canvas_attention(q: &[f32], s: &Heads, k: &[f32], v: &[f32], stride: usize, spans: &[Spans]) -> Vec<f64> {
    let (head, per_lane) = (s.head, s.rows / s.lanes);
    let mut out = vec![0.0; s.rows * s.q * head];
    for (lane, spans) in spans.iter().enumerate() {
        let keys = keys_of(spans);
        for h in 0..s.q {
            let column = h / (s.q / s.kv) * head;
            for r in 0..per_lane {
                let q = &q[((lane * s.q + h) * per_lane + r) * head..][..head];
                let score = |key: &usize| -> f64 {
                    let k = &k[key * stride + column..][..head];
                    q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum()
                };
                let scores: Vec<f64> = keys.iter().map(score).collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let total: f64 = weights.iter().sum();
                let out = &mut out[((lane * per_lane + r) * s.q + h) * head..][..head];
                for (key, weight) in keys.iter().zip(&weights) {
                    let v = &v[key * stride + column..][..head];
                    out.iter_mut().zip(v).for_each(|(out, v)| *out += weight / total * f64::from(*v));
                }
            }
        }
    }
    out
}
