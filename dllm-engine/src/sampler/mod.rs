//! Samplers: each sees numbers per position and chooses what to accept. A sampler is one file and one line in `REGISTRY`.

use crate::denoise::DenoiseSettings;
use crate::error::{Error, Result};
use crate::model::Position;

pub mod entropy_bound;

/// What a sampler may look at. All slices have one entry per canvas position.
#[derive(Debug, Clone, Copy)]
pub struct StepView<'a> {
    /// Denoising steps that remain, this one included: `max_steps` at a canvas's first step, 1 at its last.
    pub steps_left: u32,
    /// Most steps of this canvas.
    pub max_steps: u32,
    /// The canvas that went into the step.
    pub canvas: &'a [u32],
    /// The network's numbers.
    pub positions: &'a [Position],
    /// Positions the sampler may not touch: they are given, or (mask-noise families) placed in an earlier step.
    pub fixed: &'a [bool],
}

/// Chooses, in every step, which positions take their token.
pub trait Sampler: Send {
    /// The name in receipts and on the command line (`entropy-bound`).
    fn name(&self) -> &'static str;

    /// Sets `accepted[i]` for every position that takes its drawn token in this step; entries come in `false`. Fixed
    /// positions are ignored whatever is said of them.
    fn accept(&mut self, view: &StepView<'_>, accepted: &mut [bool]);
}

/// A sampler that a request can ask for. A caller's own needs no place in the registry.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// The name on the command line; receipts have the sampler's own.
    pub name: &'static str,
    /// Makes one for a request; each request has its own, and with it its own state.
    pub make: fn(&DenoiseSettings) -> Box<dyn Sampler>,
}

/// All samplers.
pub const REGISTRY: &[Entry] = &[Entry { name: entropy_bound::NAME, make: entropy_bound::make }];

/// The sampler of that name.
///
/// # Errors
/// `BadArgument`, which lists the known names.
pub fn by_name(name: &str) -> Result<Entry> {
    REGISTRY.iter().find(|entry| entry.name == name).copied().ok_or_else(|| {
        let known: Vec<_> = REGISTRY.iter().map(|entry| entry.name).collect();
        Error::argument("sampler", format!("{name:?} is not known; the samplers are: {}", known.join(", ")))
    })
}
