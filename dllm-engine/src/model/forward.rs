//! The seam between the denoising loop and a network.

use crate::error::{Error, Result};

/// Sizes that the loop needs to know of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Vocabulary size.
    pub vocab: usize,
    /// Canvas length in tokens.
    pub canvas: usize,
    /// Context length in tokens: prompt, answer and canvas together, per lane.
    pub context: usize,
    /// Lanes that one pass can advance.
    pub lanes: usize,
}

impl Shape {
    /// Refuses more cached tokens than leave room for one canvas behind them.
    ///
    /// # Errors
    /// `PromptTooLong`, which says how many fit.
    pub(crate) fn check_room(&self, tokens: usize) -> Result<()> {
        let Self { context, canvas, .. } = *self;
        let fits = context.saturating_sub(canvas);
        if tokens > fits { Err(Error::PromptTooLong { tokens, fits, context, canvas }) } else { Ok(()) }
    }
}

/// Numbers of one canvas position after a denoising step, all of softmax(logits / temperature). Made on the device.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Position {
    /// The likeliest token; of equals the lowest id.
    pub argmax: u32,
    /// The token that the position's uniform number draws: the first whose cumulative probability exceeds it.
    pub drawn: u32,
    /// Entropy in nats.
    pub entropy: f32,
    /// Probability of `argmax`.
    pub argmax_prob: f32,
    /// Probability of `drawn`.
    pub drawn_prob: f32,
}

/// Tokens to append to one lane's cache.
#[derive(Debug, Clone, Copy)]
pub struct PrefillLane<'a> {
    /// The lane, below `Shape::lanes`.
    pub lane: usize,
    /// Tokens that follow the `filled(lane)` cached ones.
    pub tokens: &'a [u32],
}

/// One lane's part of a denoising step.
#[derive(Debug, Clone, Copy)]
pub struct DenoiseLane<'a> {
    /// The lane, below `Shape::lanes`; each lane at most once a step.
    pub lane: usize,
    /// The canvas, `Shape::canvas` tokens.
    pub canvas: &'a [u32],
    /// Temperature of this step, above 0.
    pub temperature: f32,
    /// One uniform number in [0, 1) per position, for the draw.
    pub uniform: &'a [f32],
    /// Whether the previous step of the same canvas conditions this one. `false` at a canvas's first step.
    pub self_condition: bool,
}

/// Work counters of a network, for receipts. They only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Graphs built.
    pub graphs_built: u64,
    /// Graphs computed that had been built before.
    pub graphs_replayed: u64,
    /// Passes that a CUDA device ran as one captured graph: no node was enqueued by the host.
    pub captured_replays: u64,
}

/// A network with per-lane state, as the loop sees it. The loop owns what is random and what is accepted; the network owns
/// the keys and values and the self-conditioning signal of the previous step.
pub trait Forward {
    /// Sizes.
    fn shape(&self) -> Shape;

    /// Tokens in a lane's cache.
    fn filled(&self, lane: usize) -> usize;

    /// Forgets a lane's cache behind its first `len` tokens. Returns how many are left: `len`, or less (0 at worst) where a
    /// ring has overwritten what a continuation there would need.
    fn truncate(&mut self, lane: usize, len: usize) -> usize;

    /// Makes the first `len` cached tokens of lane `from` those of lane `to`, which forgets what it had. Returns how many are in
    /// `to` now: `len`, or what it had before where that cannot be done. A network without this keeps lanes apart.
    fn copy_prefix(&mut self, from: usize, to: usize, len: usize) -> usize {
        let _ = (from, len);
        self.filled(to)
    }

    /// Appends tokens to the caches of the given lanes (causal for block diffusion). Any split into calls gives the same
    /// cache. Long inputs are cut into passes inside.
    ///
    /// # Errors
    /// `PromptTooLong` where a lane would outgrow the context less one canvas, `Backend` where the device fails.
    fn prefill(&mut self, lanes: &[PrefillLane<'_>]) -> Result<()>;

    /// One denoising step of the given lanes. `out` receives `Shape::canvas` positions per given lane, in their order.
    ///
    /// # Errors
    /// `Backend` where the device fails, which ends all given lanes. Where a logit is no number the position comes back with
    /// entropy NaN: the loop ends that lane with `NotFinite` and its neighbours go on.
    fn denoise(&mut self, lanes: &[DenoiseLane<'_>], out: &mut Vec<Position>) -> Result<()>;

    /// Work counters so far.
    fn counters(&self) -> Counters {
        Counters::default()
    }

    /// Most device memory in use so far, bytes.
    fn device_bytes(&self) -> u64 {
        0
    }
}
