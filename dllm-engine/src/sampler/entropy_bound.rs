//! The entropy-bound sampler (docs/model-diffusion-gemma.md section 8): a step accepts its most certain positions for as long as the entropies
//! accepted before stay within a budget. Nothing is remembered: an accepted position can be renoised in a later step.

use super::{Sampler, StepView};
use crate::denoise::DenoiseSettings;

/// The name in receipts and on the command line.
pub const NAME: &str = "entropy-bound";

/// See the module.
#[derive(Debug)]
pub struct EntropyBound {
    bound: f32,
    /// Positions by entropy; kept for its memory.
    order: Vec<usize>,
}

impl EntropyBound {
    /// A sampler that accepts up to `bound` nats before the last accepted position.
    pub fn new(bound: f32) -> Self {
        Self { bound, order: Vec::new() }
    }
}

pub(super) fn make(settings: &DenoiseSettings) -> Box<dyn Sampler> {
    Box::new(EntropyBound::new(settings.entropy_bound))
}

impl Sampler for EntropyBound {
    fn name(&self) -> &'static str {
        NAME
    }

    fn accept(&mut self, view: &StepView<'_>, accepted: &mut [bool]) {
        let entropy = |i: usize| view.positions[i].entropy;
        self.order.clear();
        self.order.extend((0..view.positions.len()).filter(|i| !view.fixed[*i]));
        self.order.sort_unstable_by(|a, b| entropy(*a).total_cmp(&entropy(*b)).then(a.cmp(b)));
        // As the reference has it: a running sum in f32, and of each position the sum less its own entropy.
        let mut sum = 0f32;
        for i in &self.order {
            sum += entropy(*i);
            accepted[*i] = sum - entropy(*i) <= self.bound;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Position;

    fn accepted(bound: f32, entropies: &[f32], fixed: &[bool]) -> Vec<bool> {
        let positions: Vec<_> = entropies.iter().map(|e| Position { entropy: *e, ..Position::default() }).collect();
        let canvas = vec![0; positions.len()];
        let view = StepView { steps_left: 1, max_steps: 1, canvas: &canvas, positions: &positions, fixed };
        let mut accepted = vec![false; positions.len()];
        EntropyBound::new(bound).accept(&view, &mut accepted);
        accepted
    }

    #[test]
    fn sums_the_strictly_earlier_entropies() {
        // Sorted: 0.25, 0.25, 0.5, 2; sums before each: 0, 0.25, 0.5, 1.
        let e = [2.0, 0.25, 0.5, 0.25];
        assert_eq!(accepted(0.0, &e, &[false; 4]), [false, true, false, false]);
        assert_eq!(accepted(0.25, &e, &[false; 4]), [false, true, false, true]);
        assert_eq!(accepted(0.5, &e, &[false; 4]), [false, true, true, true]);
        assert_eq!(accepted(0.99, &e, &[false; 4]), [false, true, true, true]);
        assert_eq!(accepted(1.0, &e, &[false; 4]), [true; 4]);
    }

    #[test]
    fn the_most_certain_position_always_goes() {
        assert_eq!(accepted(0.0, &[5.0, 4.0], &[false; 2]), [false, true]);
        assert_eq!(accepted(0.0, &[0.0, 0.0, 1.0], &[false; 3]), [true; 3]);
    }

    #[test]
    fn fixed_positions_cost_nothing() {
        assert_eq!(accepted(0.0, &[0.5, 0.1, 0.7], &[false, true, false]), [true, false, false]);
        assert_eq!(accepted(0.0, &[0.5], &[true]), [false]);
    }
}
