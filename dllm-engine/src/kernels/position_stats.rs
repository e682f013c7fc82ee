//! What the sampler needs to know about one position, from its row of logits: the CPU twin of `position_stats.cu`.
//!
//! The row is read from memory once. It is cut into chunks that stay in the first-level cache; of each chunk the largest
//! logit and, relative to it, the sums of `e = exp(z - max)` and `(z - max) e` are kept, with
//! `z = softcap * tanh(x / softcap) / temperature`. Joined over the chunks these give
//! `H = ln S - sum((z - M) e) / S` (entropy of softmax(z) in nats) and the cumulative sums; only the chunk in which the draw
//! falls is read again. Sums are f32 over the 128 elements that share an accumulator and f64 above that.
#![allow(unsafe_code)] // to call code compiled for AVX2 after asking the processor

use std::f32::consts::LOG2_E;
use std::f64::consts::LN_2;

use crate::model::Position;

/// Elements of a chunk: 8 KiB, a quarter of the smallest first-level cache in use.
const CHUNK: usize = 2048;
/// Independent accumulators: two AVX2 registers, four of SSE2 or NEON.
const WIDTH: usize = 16;
/// Logits beyond this in size count as infinite, so that nothing computed from them overflows.
const LARGEST: f32 = 1e30;

/// What a row gets that holds a NaN or an infinity: the loop refuses the lane.
pub const NOT_FINITE: Position =
    Position { argmax: u32::MAX, drawn: u32::MAX, entropy: f32::NAN, argmax_prob: f32::NAN, drawn_prob: f32::NAN };

/// Statistics of softmax(z), `z = softcap * tanh(x / softcap) / temperature` (`None`: `z = x / temperature`).
///
/// `logits` is one row, one entry per token; `temperature` is above 0; `u` in [0, 1) draws the first token whose
/// cumulative probability exceeds it. Of equal logits the lowest id is the argmax. [`NOT_FINITE`] where the row is empty or
/// holds a NaN, an infinity or a size beyond 1e30, or where the other arguments are out of range.
pub fn position_stats(logits: &[f32], softcap: Option<f32>, temperature: f32, u: f32) -> Position {
    let cap = softcap.unwrap_or(1.0);
    let positive = |x: f32| x > 0.0 && x.is_finite();
    if logits.is_empty() || !positive(temperature) || !positive(cap) || !(0.0..1.0).contains(&u) {
        return NOT_FINITE;
    }
    let scale = Scale::new(softcap, temperature);
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has just said that it has AVX2 and FMA; the function has no other condition.
        return unsafe { row_avx2(logits, &scale, u) };
    }
    // A fused multiply-add is one instruction on every aarch64; elsewhere it would be a library call.
    if cfg!(target_arch = "aarch64") { row::<true>(logits, &scale, u) } else { row::<false>(logits, &scale, u) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn row_avx2(logits: &[f32], scale: &Scale, u: f32) -> Position {
    row::<true>(logits, scale, u)
}

#[inline(always)]
fn row<const FMA: bool>(logits: &[f32], scale: &Scale, u: f32) -> Position {
    if scale.capped { joined::<true, FMA>(logits, scale, u) } else { joined::<false, FMA>(logits, scale, u) }
}

/// Logits to exponents of two: `(z(x) - z(top)) * log2(e)`.
struct Scale {
    capped: bool,
    /// Of the final product.
    outer: f32,
    /// Of a logit inside the hyperbolic tangent.
    inner: f32,
}

impl Scale {
    fn new(softcap: Option<f32>, temperature: f32) -> Self {
        match softcap {
            None => Self { capped: false, outer: LOG2_E / temperature, inner: 0.0 },
            Some(cap) => Self { capped: true, outer: -2.0 * cap * LOG2_E / temperature, inner: 2.0 * LOG2_E / cap },
        }
    }

    /// A monotone image of a logit, such that `(image(x) - image(top)) * outer` is the exponent. With the softcap it is
    /// `q = 1 / (1 + exp(2 x / cap))`: tanh(x / cap) = 1 - 2 q, and differences of q lose less than differences of tanh.
    #[inline(always)]
    fn image<const CAP: bool, const FMA: bool>(&self, x: f32) -> f32 {
        if CAP { 1.0 / (1.0 + exp2::<FMA>(x * self.inner)) } else { x }
    }
}

/// 2^t for t up to 126, 0 below -126; relative error below 2e-7. 2^t = 2^n 2^r with n the nearest integer; the polynomial
/// interpolates (2^r - 1) / r at the six Chebyshev nodes of [-1/2, 1/2] (its own error is 5e-9).
#[inline(always)]
fn exp2<const FMA: bool>(t: f32) -> f32 {
    /// Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let t = if t < 126.0 { t } else { 126.0 };
    let at = if t > -126.0 { t } else { -126.0 };
    let n = at + ROUND;
    let r = at - (n - ROUND);
    let mut p = 1.545_316_3e-4;
    for c in [1.339_086_3e-3, 9.618_083e-3, 5.550_357e-2, 2.402_265e-1, LN_2 as f32, 1.0] {
        p = mul_add::<FMA>(p, r, c);
    }
    let power = f32::from_bits(p.to_bits().wrapping_add(n.to_bits() << 23));
    if t < -126.0 { 0.0 } else { power }
}

#[inline(always)]
fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Sums of one chunk, relative to its own largest logit; `moment` in units of log2.
#[derive(Clone, Copy)]
struct Chunk {
    top: f32,
    sum: f64,
    moment: f64,
}

#[inline(always)]
fn joined<const CAP: bool, const FMA: bool>(logits: &[f32], scale: &Scale, u: f32) -> Position {
    let mut chunks = Vec::with_capacity(logits.len().div_ceil(CHUNK));
    for part in logits.chunks(CHUNK) {
        match scan::<CAP, FMA>(part, scale) {
            Some(chunk) => chunks.push(chunk),
            None => return NOT_FINITE,
        }
    }
    let top = chunks.iter().fold(-LARGEST, |top, c| if c.top > top { c.top } else { top });
    let base = f64::from(scale.image::<CAP, FMA>(top));
    let shift = |c: &Chunk| (f64::from(scale.image::<CAP, FMA>(c.top)) - base) * f64::from(scale.outer);
    let (mut total, mut moment) = (0.0, 0.0);
    for c in &chunks {
        let (d, f) = (shift(c), shift(c).exp2());
        total += f * c.sum;
        moment += f * (c.moment + d * c.sum);
    }

    let (id, e) = drawn::<CAP, FMA>(logits, scale, top, u, chunks.iter().map(|c| shift(c).exp2() * c.sum), total);
    Position {
        argmax: argmax(logits, &chunks, top),
        drawn: id as u32,
        entropy: (total.ln() - LN_2 * moment / total).max(0.0) as f32,
        argmax_prob: (1.0 / total) as f32,
        drawn_prob: (f64::from(e) / total) as f32,
    }
}

/// The largest logit and the sums of a chunk, or `None` where an element is not finite.
#[inline(always)]
fn scan<const CAP: bool, const FMA: bool>(part: &[f32], scale: &Scale) -> Option<Chunk> {
    let (body, rest) = part.as_chunks::<WIDTH>();
    let mut tops = [-LARGEST; WIDTH];
    let mut sizes = [0i32; WIDTH]; // of the absolute values' bit patterns, which order like the values, infinity and NaN last
    let mut look = |i: usize, x: f32| {
        let size = (x.to_bits() & 0x7FFF_FFFF) as i32;
        tops[i] = if x > tops[i] { x } else { tops[i] };
        sizes[i] = if size > sizes[i] { size } else { sizes[i] };
    };
    body.iter().for_each(|x| (0..WIDTH).for_each(|i| look(i, x[i])));
    rest.iter().enumerate().for_each(|(i, x)| look(i, *x));
    if sizes.iter().any(|s| *s > LARGEST.to_bits() as i32) {
        return None;
    }
    let top = tops.iter().fold(-LARGEST, |top, x| if *x > top { *x } else { top });

    let base = scale.image::<CAP, FMA>(top);
    let (mut sums, mut moments) = ([0f32; WIDTH], [0f32; WIDTH]);
    let mut add = |i: usize, x: f32| {
        let d = (scale.image::<CAP, FMA>(x) - base) * scale.outer;
        let e = exp2::<FMA>(d);
        sums[i] += e;
        moments[i] = mul_add::<FMA>(d, e, moments[i]);
    };
    body.iter().for_each(|x| (0..WIDTH).for_each(|i| add(i, x[i])));
    rest.iter().enumerate().for_each(|(i, x)| add(i, *x));
    let wide = |v: [f32; WIDTH]| v.iter().map(|x| f64::from(*x)).sum::<f64>();
    Some(Chunk { top, sum: wide(sums), moment: wide(moments) })
}

/// The lowest id of the largest logit.
fn argmax(logits: &[f32], chunks: &[Chunk], top: f32) -> u32 {
    let first = chunks.iter().position(|c| c.top == top).unwrap_or(0) * CHUNK;
    let inside = logits[first..].iter().position(|x| *x == top).unwrap_or(0);
    (first + inside) as u32
}

/// The first id whose cumulative sum exceeds `u * total`, and its exponential. Where rounding leaves no such id it is the
/// last one with any weight.
#[inline(always)]
fn drawn<const CAP: bool, const FMA: bool>(
    logits: &[f32],
    scale: &Scale,
    top: f32,
    u: f32,
    weights: impl Iterator<Item = f64>,
    total: f64,
) -> (usize, f32) {
    let target = f64::from(u) * total;
    let (mut run, mut chosen) = (0.0, (0, 0.0)); // chosen: chunk, sum before it
    for (i, weight) in weights.enumerate().filter(|(_, weight)| *weight > 0.0) {
        chosen = (i, run);
        run += weight;
        if run > target {
            break;
        }
    }
    let first = chosen.0 * CHUNK;
    let base = scale.image::<CAP, FMA>(top);
    let mut run = chosen.1;
    let mut last = (first, 0.0);
    for (i, x) in logits[first..].iter().take(CHUNK).enumerate() {
        let e = exp2::<FMA>((scale.image::<CAP, FMA>(*x) - base) * scale.outer);
        if e > 0.0 {
            last = (first + i, e);
            run += f64::from(e);
            if run > target {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Purpose, draw, unit};

    /// The definition in f64.
    fn exact(logits: &[f32], softcap: Option<f32>, temperature: f32, u: f32) -> (usize, f64, Vec<f64>) {
        let z: Vec<f64> = logits
            .iter()
            .map(|x| {
                let x = f64::from(*x);
                softcap.map_or(x, |c| f64::from(c) * (x / f64::from(c)).tanh()) / f64::from(temperature)
            })
            .collect();
        let m = z.iter().copied().fold(f64::MIN, f64::max);
        let s: f64 = z.iter().map(|z| (z - m).exp()).sum();
        let p: Vec<f64> = z.iter().map(|z| (z - m).exp() / s).collect();
        let h = -p.iter().filter(|p| **p > 0.0).map(|p| p * p.ln()).sum::<f64>();
        let mut run = 0.0;
        let id = p.iter().position(|p| {
            run += p;
            run > f64::from(u)
        });
        (id.unwrap_or(p.len() - 1), h, p)
    }

    fn noise(n: usize, size: f32, seed: u64) -> Vec<f32> {
        // Sums of four uniforms: bell-shaped with tails of up to 2 * size.
        let at =
            |i: usize| (0..4).map(|k| unit(draw(seed, k, (i >> 16) as u32, 0, i as u32, Purpose::Draw))).sum::<f32>();
        (0..n).map(|i| (at(i) - 2.0) * size).collect()
    }

    type Path = fn(&[f32], Option<f32>, f32, f32) -> Position;
    fn portable(logits: &[f32], softcap: Option<f32>, temperature: f32, u: f32) -> Position {
        row::<false>(logits, &Scale::new(softcap, temperature), u)
    }
    const PATHS: [(&str, Path); 2] = [("dispatched", position_stats), ("portable", portable)];

    #[test]
    fn exp2_is_close_over_its_whole_range() {
        for i in -12_600..=12_600 {
            let t = i as f32 * 0.01;
            let (want, got) = (f64::from(t).exp2(), f64::from(exp2::<false>(t)));
            assert!((got / want - 1.0).abs() < 2e-7, "2^{t}: {got} for {want}");
        }
        assert_eq!(exp2::<false>(0.0), 1.0);
        assert_eq!(exp2::<false>(-127.0), 0.0);
        assert_eq!(exp2::<false>(-1e30), 0.0);
    }

    #[test]
    fn agrees_with_f64() {
        for (name, stats) in PATHS {
            for n in [1, 2, 15, 16, 17, 1024, 2047, 2049, 50_000] {
                for size in [0.0, 0.5, 5.0, 40.0] {
                    for cap in [None, Some(30.0)] {
                        for (k, t) in [0.4, 0.8, 3.0].into_iter().enumerate() {
                            let logits = noise(n, size, n as u64);
                            let u = unit(draw(3, k as u64, 0, 0, n as u32, Purpose::Draw));
                            let (id, h, p) = exact(&logits, cap, t, u);
                            let got = stats(&logits, cap, t, u);
                            let case = format!("{name}: n {n}, size {size}, cap {cap:?}, T {t}: {got:?}, H {h}");
                            assert!((f64::from(got.entropy) - h).abs() < 2e-5, "{case}");
                            let top = logits.iter().copied().fold(f32::MIN, f32::max);
                            assert_eq!(Some(got.argmax as usize), logits.iter().position(|x| *x == top), "{case}");
                            assert!((f64::from(got.argmax_prob) - p[got.argmax as usize]).abs() < 1e-5, "{case}");
                            assert!((f64::from(got.drawn_prob) - p[got.drawn as usize]).abs() < 1e-5, "{case}");
                            // The drawn token's interval holds u, up to the rounding of the sums.
                            let before: f64 = p[..got.drawn as usize].iter().sum();
                            let after = before + p[got.drawn as usize];
                            let u = f64::from(u);
                            assert!(before - 1e-5 <= u && u < after + 1e-5, "{case}: {before} {u} {after}, id {id}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_token_can_be_drawn_by_its_interval() {
        let logits: Vec<f32> = [0.1f32, 0.2, 0.3, 0.4].iter().map(|p| p.ln()).collect();
        for (name, stats) in PATHS {
            for (u, id) in
                [(0.0, 0), (0.09, 0), (0.11, 1), (0.29, 1), (0.31, 2), (0.59, 2), (0.61, 3), (0.999_999_9, 3)]
            {
                assert_eq!(stats(&logits, None, 1.0, u).drawn, id, "{name}: u {u}");
            }
        }
    }

    #[test]
    fn tokens_without_weight_are_never_drawn() {
        let mut logits = vec![-1e4; 3 * CHUNK];
        logits[CHUNK + 5] = 0.0;
        for (name, stats) in PATHS {
            for u in [0.0, 0.5, 1.0 - f32::EPSILON] {
                let got = stats(&logits, None, 1.0, u);
                assert_eq!((got.drawn, got.argmax), (CHUNK as u32 + 5, CHUNK as u32 + 5), "{name}: u {u}");
                assert_eq!((got.entropy, got.argmax_prob, got.drawn_prob), (0.0, 1.0, 1.0), "{name}");
            }
        }
    }

    #[test]
    fn of_equal_logits_the_lowest_id_wins() {
        let mut logits = vec![0.0; 5000];
        for i in [4999, 4100, 2500, 2049] {
            logits[i] = 1.0;
            for (name, stats) in PATHS {
                assert_eq!(stats(&logits, Some(30.0), 0.5, 0.5).argmax, i as u32, "{name}");
            }
        }
    }

    #[test]
    fn what_is_no_number_is_found_wherever_it_stands() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 2e30, -2e30] {
            for n in [1, 17, 2049, 5000] {
                for at in [0, n / 2, n - 1] {
                    let mut logits = vec![0.5; n];
                    logits[at] = bad;
                    for (name, stats) in PATHS {
                        let got = stats(&logits, Some(30.0), 0.5, 0.5);
                        assert!(
                            got.entropy.is_nan() && got.argmax == u32::MAX,
                            "{name}: {bad} at {at} of {n}: {got:?}"
                        );
                    }
                }
            }
        }
        for (cap, t, u) in
            [(None, 0.0, 0.5), (None, f32::NAN, 0.5), (None, 1.0, 1.0), (None, 1.0, -0.1), (Some(0.0), 1.0, 0.5)]
        {
            assert!(position_stats(&[1.0, 2.0], cap, t, u).entropy.is_nan(), "{cap:?} {t} {u}");
        }
        assert!(position_stats(&[], None, 1.0, 0.5).entropy.is_nan());
    }
}
