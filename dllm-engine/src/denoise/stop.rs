//! The stop rule of a canvas: stable and confident.

use super::DenoiseSettings;

/// What the stop rule says after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// The argmax canvas has not changed for `stability_threshold` steps.
    pub stable: bool,
    /// Stable, and the mean entropy is below the confidence threshold.
    pub stop: bool,
}

/// Follows the argmax canvases of one canvas. The last `k` canvases before the current one are equal to it exactly if it
/// repeats its predecessor for at least the `k`-th time in a row, so one canvas and a counter stand for the history.
#[derive(Debug, Default)]
pub struct StopRule {
    previous: Vec<u32>,
    repeats: u32,
}

impl StopRule {
    /// Forgets the history, at the start of a canvas.
    pub fn reset(&mut self) {
        self.previous.clear();
        self.repeats = 0;
    }

    /// Judges a step by its argmax canvas and mean entropy in nats. Without either threshold there is no early stop.
    pub fn judge(&mut self, settings: &DenoiseSettings, argmax: &[u32], mean_entropy: f32) -> Verdict {
        self.repeats = if self.previous == argmax { self.repeats.saturating_add(1) } else { 0 };
        self.previous.clear();
        self.previous.extend_from_slice(argmax);
        let stable = settings.stability_threshold.is_some_and(|steps| self.repeats >= steps);
        Verdict { stable, stop: stable && settings.confidence_threshold.is_some_and(|limit| mean_entropy < limit) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdicts(stability: Option<u32>, confidence: Option<f32>, steps: &[(u32, f32)]) -> Vec<(bool, bool)> {
        let settings = DenoiseSettings {
            stability_threshold: stability,
            confidence_threshold: confidence,
            ..DenoiseSettings::default()
        };
        let mut rule = StopRule::default();
        let judge = |(token, entropy): &(u32, f32)| rule.judge(&settings, &[7, *token], *entropy);
        steps.iter().map(judge).map(|v| (v.stable, v.stop)).collect()
    }

    #[test]
    fn needs_the_previous_canvases_to_be_equal() {
        let steps = [(1, 0.0), (1, 0.0), (2, 0.0), (2, 0.0), (2, 0.0)];
        let stable = |k| verdicts(Some(k), Some(0.1), &steps).into_iter().map(|v| v.1).collect::<Vec<_>>();
        assert_eq!(stable(0), [true; 5]);
        assert_eq!(stable(1), [false, true, false, true, true]);
        assert_eq!(stable(2), [false, false, false, false, true]);
        assert_eq!(stable(3), [false; 5]);
    }

    #[test]
    fn confidence_is_strict_and_both_thresholds_are_needed() {
        let steps = [(1, 0.25), (1, 0.25), (1, 0.2)];
        assert_eq!(verdicts(Some(1), Some(0.25), &steps), [(false, false), (true, false), (true, true)]);
        assert_eq!(verdicts(Some(1), Some(0.0), &[(1, 0.0); 3]), [(false, false), (true, false), (true, false)]);
        assert_eq!(verdicts(Some(1), None, &steps), [(false, false), (true, false), (true, false)]);
        assert_eq!(verdicts(None, Some(9.0), &steps), [(false, false); 3]);
    }

    #[test]
    fn a_new_canvas_starts_without_history() {
        let settings = DenoiseSettings::default();
        let mut rule = StopRule::default();
        rule.judge(&settings, &[1], 0.0);
        rule.reset();
        assert!(!rule.judge(&settings, &[1], 0.0).stable);
        assert!(rule.judge(&settings, &[1], 0.0).stable);
    }
}
