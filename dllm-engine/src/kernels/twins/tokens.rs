//! Twins of position_stats.cu, likeliest.cu, soft_embed.cu and the dense soft embedding of dense.cu. A softcap of 0 is none.

use super::wide;
use crate::kernels::position_stats::position_stats;

/// What `u32::MAX` marks: a row with a logit that is no number.
pub const REFUSED: u32 = u32::MAX;

/// softcap * tanh(x / softcap) / temperature of one row.
fn scaled(logits: &[f32], cap: f32, temperature: f32) -> Vec<f64> {
    let (cap, t) = (f64::from(cap), f64::from(temperature));
    logits.iter().map(|x| f64::from(*x)).map(|x| if cap > 0.0 { cap * (x / cap).tanh() / t } else { x / t }).collect()
}

/// softmax of the scaled logits of one row.
pub fn probabilities(logits: &[f32], cap: f32, temperature: f32) -> Vec<f64> {
    let z = scaled(logits, cap, temperature);
    let top = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = z.iter().map(|z| (z - top).exp()).sum();
    z.iter().map(|z| (z - top).exp() / total).collect()
}

/// The statistics of one row; floats are not rounded, but for those that the CPU path makes.
#[derive(Debug, Clone, Copy)]
pub struct Stats {
    pub argmax: u32,
    pub drawn: u32,
    pub entropy: f64,
    pub p_argmax: f64,
    pub p_drawn: f64,
    /// Largest scaled logit, and the sum of exp(z - that).
    pub max_z: f64,
    pub sum_exp: f64,
    pub max_logit: f32,
}

/// The statistics of one row: ids and chances by the CPU path (`position_stats`), the rest from the definition.
pub fn stats(logits: &[f32], cap: f32, temperature: f32, u: f32) -> Stats {
    let cpu = position_stats(logits, (cap > 0.0).then_some(cap), temperature, u);
    let z = scaled(logits, cap, temperature);
    let max_z = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    Stats {
        argmax: cpu.argmax,
        drawn: cpu.drawn,
        entropy: f64::from(cpu.entropy),
        p_argmax: f64::from(cpu.argmax_prob),
        p_drawn: f64::from(cpu.drawn_prob),
        max_z,
        sum_exp: z.iter().map(|z| (z - max_z).exp()).sum(),
        max_logit: logits.get(cpu.argmax as usize).copied().unwrap_or(f32::NAN),
    }
}

/// The `k` largest logits of a row (of equal ones the lowest id first), their probabilities, 0 below `tau` and with `renorm`
/// divided by the sum of those kept; and the mass that was not kept.
pub fn likeliest(logits: &[f32], p: &[f64], k: usize, tau: f32, renorm: bool) -> (Vec<i32>, Vec<f64>, f64) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let before = |a: &usize, b: &usize| (logits[*b] + 0.0).total_cmp(&(logits[*a] + 0.0)).then(a.cmp(b));
    order.select_nth_unstable_by(k - 1, before);
    order.truncate(k);
    order.sort_by(before);
    let kept: Vec<f64> = order.iter().map(|id| if p[*id] < f64::from(tau) { 0.0 } else { p[*id] }).collect();
    let all: f64 = kept.iter().sum();
    let weights = kept.iter().map(|w| if renorm && all > 0.0 { w / all } else { *w }).collect();
    (order.iter().map(|id| *id as i32).collect(), weights, (1.0 - all).max(0.0))
}

/// scale * sum over j of weights[j] * table[ids[j]] for each row's list of `k`.
pub fn soft_embed(table: &[f32], hidden: usize, ids: &[i32], weights: &[f32], k: usize, scale: f32) -> Vec<f64> {
    let mut out = Vec::with_capacity(ids.len() / k * hidden);
    for (ids, weights) in ids.chunks_exact(k).zip(weights.chunks_exact(k)) {
        let mut row = vec![0.0; hidden];
        for (id, w) in ids.iter().zip(weights) {
            let e = &table[*id as usize * hidden..][..hidden];
            row.iter_mut().zip(e).for_each(|(out, e)| *out += f64::from(scale) * f64::from(*w) * f64::from(*e));
        }
        out.extend(row);
    }
    out
}

/// scale * table[ids[row]].
pub fn embed_rows(table: &[f32], hidden: usize, ids: &[i32], scale: f32) -> Vec<f64> {
    let row = |id: &i32| wide(&table[*id as usize * hidden..][..hidden]);
    ids.iter().flat_map(row).map(|e| f64::from(scale) * e).collect()
}

/// scale * sum over the vocabulary of softmax(z) * table, of one row.
pub fn dense_soft_embed(table: &[f32], hidden: usize, p: &[f64], scale: f32) -> Vec<f64> {
    let mut row = vec![0.0; hidden];
    for (p, e) in p.iter().zip(table.chunks_exact(hidden)) {
        row.iter_mut().zip(e).for_each(|(out, e)| *out += f64::from(scale) * p * f64::from(*e));
    }
    row
}
