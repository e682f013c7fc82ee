//! Randomness of the denoising loop: counter-based, so that a number depends on nothing but its address.
//!
//! Every number is `Philox4x32-10(key = seed, counter = address)` (Salmon, Moraes, Dror, Shaw: "Parallel random numbers:
//! as easy as 1, 2, 3", SC 2011). There is no state: lanes beside a request, the order of calls and the device change
//! nothing (decision D7).

use crate::error::{Error, Result};

/// What a number is for. Part of its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The random canvas before the first step.
    Init = 0,
    /// The uniform number that draws a position's token.
    Draw = 1,
    /// The fresh token of a position that was not accepted.
    Renoise = 2,
}

/// Positions of a canvas must be below this: 16 bits of the address.
pub const MAX_POSITIONS: usize = 1 << 16;
/// Denoising steps must be below this: 14 bits of the address.
pub const MAX_STEPS: u32 = 1 << 14;

/// Ten rounds of Philox4x32: four random words from a 128-bit counter and a 64-bit key.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// The 64 random bits at an address. `position` counts below [`MAX_POSITIONS`], `step` below [`MAX_STEPS`] (higher bits are
/// ignored); `candidate` tells requests with the same seed apart.
pub fn draw(seed: u64, candidate: u64, canvas: u32, step: u32, position: u32, purpose: Purpose) -> u64 {
    let place = (position & 0xFFFF) | (step & 0x3FFF) << 16 | (purpose as u32) << 30;
    let word =
        philox4x32([place, canvas, candidate as u32, (candidate >> 32) as u32], [seed as u32, (seed >> 32) as u32]);
    u64::from(word[1]) << 32 | u64::from(word[0])
}

/// A uniform number in [0, 1) from the upper 24 bits: all values are exact in f32 and 1 is never reached.
pub fn unit(bits: u64) -> f32 {
    (bits >> 40) as f32 * (1.0 / 16_777_216.0)
}

/// A uniform token in 0..vocab: the upper half of a 64 by 64 bit product. The bias is below vocab / 2^64.
pub fn token(bits: u64, vocab: u32) -> u32 {
    ((u128::from(bits) * u128::from(vocab)) >> 64) as u32
}

/// Where the loop's random numbers come from. Canvases count from 0, steps from 1; every call fills all of `out`.
pub trait Noise: Send {
    /// The canvas before its first step.
    ///
    /// # Errors
    /// `BadArgument` where recorded numbers run out or have another length than `out`. So for the other two.
    fn init(&mut self, canvas: u32, out: &mut [u32]) -> Result<()>;

    /// The uniform numbers in [0, 1) that draw the tokens of a step.
    ///
    /// # Errors
    /// As `init`.
    fn uniform(&mut self, canvas: u32, step: u32, out: &mut [f32]) -> Result<()>;

    /// The fresh tokens of a step, for all positions; used where a position is not accepted.
    ///
    /// # Errors
    /// As `init`.
    fn renoise(&mut self, canvas: u32, step: u32, out: &mut [u32]) -> Result<()>;
}

/// Uniform noise over the whole vocabulary, from a seed.
#[derive(Debug, Clone, Copy)]
pub struct SeededNoise {
    seed: u64,
    candidate: u64,
    vocab: u32,
}

impl SeededNoise {
    /// Noise of candidate number `candidate` of a seed, over `vocab` tokens.
    pub fn new(seed: u64, candidate: u64, vocab: u32) -> Self {
        Self { seed, candidate, vocab }
    }

    fn tokens(&self, canvas: u32, step: u32, purpose: Purpose, out: &mut [u32]) {
        for (position, out) in (0u32..).zip(out) {
            *out = token(draw(self.seed, self.candidate, canvas, step, position, purpose), self.vocab);
        }
    }
}

impl Noise for SeededNoise {
    fn init(&mut self, canvas: u32, out: &mut [u32]) -> Result<()> {
        self.tokens(canvas, 0, Purpose::Init, out);
        Ok(())
    }

    fn uniform(&mut self, canvas: u32, step: u32, out: &mut [f32]) -> Result<()> {
        for (position, out) in (0u32..).zip(out) {
            *out = unit(draw(self.seed, self.candidate, canvas, step, position, Purpose::Draw));
        }
        Ok(())
    }

    fn renoise(&mut self, canvas: u32, step: u32, out: &mut [u32]) -> Result<()> {
        self.tokens(canvas, step, Purpose::Renoise, out);
        Ok(())
    }
}

/// Noise of mask tokens: only the draws are random.
#[derive(Debug, Clone, Copy)]
pub struct MaskNoise {
    mask: u32,
    draws: SeededNoise,
}

impl MaskNoise {
    /// Noise of candidate number `candidate` of a seed, with `mask` for every fresh token.
    pub fn new(mask: u32, seed: u64, candidate: u64, vocab: u32) -> Self {
        Self { mask, draws: SeededNoise::new(seed, candidate, vocab) }
    }
}

impl Noise for MaskNoise {
    fn init(&mut self, _: u32, out: &mut [u32]) -> Result<()> {
        out.fill(self.mask);
        Ok(())
    }

    fn uniform(&mut self, canvas: u32, step: u32, out: &mut [f32]) -> Result<()> {
        self.draws.uniform(canvas, step, out)
    }

    fn renoise(&mut self, _: u32, _: u32, out: &mut [u32]) -> Result<()> {
        out.fill(self.mask);
        Ok(())
    }
}

/// The random numbers of one recorded canvas: one row per step, one entry per position.
#[derive(Debug, Clone, Default)]
pub struct RecordedCanvas {
    /// The canvas before the first step.
    pub init: Vec<u32>,
    /// Uniform numbers.
    pub uniform: Vec<Vec<f32>>,
    /// Fresh tokens.
    pub renoise: Vec<Vec<u32>>,
}

/// Injected numbers, for parity with a recorded run.
#[derive(Debug, Clone, Default)]
pub struct RecordedNoise {
    canvases: Vec<RecordedCanvas>,
}

impl RecordedNoise {
    /// Replays the given canvases, the first for canvas 0.
    pub fn new(canvases: Vec<RecordedCanvas>) -> Self {
        Self { canvases }
    }

    fn canvas(&self, canvas: u32) -> Result<&RecordedCanvas> {
        self.canvases.get(canvas as usize).ok_or_else(|| {
            Error::argument("noise", format!("canvas {canvas} is not recorded, only {} are", self.canvases.len()))
        })
    }
}

impl Noise for RecordedNoise {
    fn init(&mut self, canvas: u32, out: &mut [u32]) -> Result<()> {
        replay(Some(&self.canvas(canvas)?.init), out, canvas, 0)
    }

    fn uniform(&mut self, canvas: u32, step: u32, out: &mut [f32]) -> Result<()> {
        replay(row(&self.canvas(canvas)?.uniform, step), out, canvas, step)
    }

    fn renoise(&mut self, canvas: u32, step: u32, out: &mut [u32]) -> Result<()> {
        replay(row(&self.canvas(canvas)?.renoise, step), out, canvas, step)
    }
}

fn row<T>(rows: &[Vec<T>], step: u32) -> Option<&Vec<T>> {
    rows.get((step as usize).checked_sub(1)?)
}

fn replay<T: Copy>(row: Option<&Vec<T>>, out: &mut [T], canvas: u32, step: u32) -> Result<()> {
    match row {
        Some(row) if row.len() == out.len() => {
            out.copy_from_slice(row);
            Ok(())
        }
        Some(row) => Err(Error::argument(
            "noise",
            format!("canvas {canvas}, step {step} has {} numbers recorded, not {}", row.len(), out.len()),
        )),
        None => Err(Error::argument("noise", format!("step {step} of canvas {canvas} is not recorded"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_vectors() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox4x32([!0; 4], [!0; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        let pi = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
        assert_eq!(philox4x32(pi, [0xa4093822, 0x299f31d0]), [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]);
    }

    #[test]
    fn every_part_of_the_address_counts() {
        let base = draw(1, 2, 3, 4, 5, Purpose::Draw);
        let others = [
            draw(9, 2, 3, 4, 5, Purpose::Draw),
            draw(1 | 1 << 63, 2, 3, 4, 5, Purpose::Draw),
            draw(1, 9, 3, 4, 5, Purpose::Draw),
            draw(1, 2 | 1 << 63, 3, 4, 5, Purpose::Draw),
            draw(1, 2, 9, 4, 5, Purpose::Draw),
            draw(1, 2, 3, 9, 5, Purpose::Draw),
            draw(1, 2, 3, 4, 9, Purpose::Draw),
            draw(1, 2, 3, 4, 5, Purpose::Renoise),
        ];
        for (i, other) in others.iter().enumerate() {
            assert_ne!(base, *other, "part {i}");
        }
    }

    #[test]
    fn unit_stays_below_one_and_token_below_the_vocabulary() {
        assert_eq!(unit(0), 0.0);
        assert!(unit(u64::MAX) < 1.0);
        assert_eq!(unit(u64::MAX), 1.0 - 1.0 / 16_777_216.0);
        for vocab in [1, 2, 1024, 262_144, u32::MAX] {
            assert_eq!(token(0, vocab), 0);
            assert_eq!(token(u64::MAX, vocab), vocab - 1);
        }
    }

    #[test]
    fn seeded_noise_is_flat() {
        let mut noise = SeededNoise::new(7, 0, 10);
        let mut tokens = vec![0; 50_000];
        noise.init(0, &mut tokens).unwrap();
        let mut count = [0usize; 10];
        tokens.iter().for_each(|t| count[*t as usize] += 1);
        // Standard deviation of one count: sqrt(50000 * 0.1 * 0.9) = 67.
        assert!(count.iter().all(|n| n.abs_diff(5000) < 335), "{count:?}");

        let mut u = vec![0.0; 50_000];
        noise.uniform(0, 1, &mut u).unwrap();
        let mean = u.iter().map(|x| f64::from(*x)).sum::<f64>() / 50_000.0;
        assert!((mean - 0.5).abs() < 0.0065, "{mean}"); // five standard deviations
    }

    #[test]
    fn recorded_noise_replays_and_then_refuses() {
        let canvas = RecordedCanvas { init: vec![1, 2], uniform: vec![vec![0.5, 0.25]], renoise: vec![vec![3, 4]] };
        let mut noise = RecordedNoise::new(vec![canvas]);
        let (mut tokens, mut u) = ([0; 2], [0.0; 2]);
        noise.init(0, &mut tokens).unwrap();
        assert_eq!(tokens, [1, 2]);
        noise.renoise(0, 1, &mut tokens).unwrap();
        assert_eq!(tokens, [3, 4]);
        noise.uniform(0, 1, &mut u).unwrap();
        assert_eq!(u, [0.5, 0.25]);
        for error in [
            noise.init(1, &mut tokens),
            noise.init(0, &mut [0; 3]),
            noise.renoise(0, 0, &mut tokens),
            noise.renoise(0, 2, &mut tokens),
            noise.uniform(0, 2, &mut u),
        ] {
            assert!(matches!(error, Err(Error::BadArgument { name: "noise", .. })), "{error:?}");
        }
    }
}
