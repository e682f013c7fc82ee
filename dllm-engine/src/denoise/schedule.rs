//! The temperature schedule: linear in the steps that remain.

use super::DenoiseSettings;

/// Temperature of a step, `t_min + (t_max - t_min) * left / max_steps`, in f32 throughout as the reference computes it.
/// `left` counts the remaining steps, this one included: the first step runs at `t_max`, and none at `t_min`.
pub fn temperature(settings: &DenoiseSettings, left: u32) -> f32 {
    settings.t_min + (settings.t_max - settings.t_min) * (left as f32 / settings.max_steps as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_from_t_max_to_just_above_t_min() {
        let settings = DenoiseSettings { max_steps: 48, t_min: 0.4, t_max: 0.8, ..DenoiseSettings::default() };
        assert_eq!(temperature(&settings, 48), 0.8);
        assert_eq!(temperature(&settings, 24), 0.6);
        let last = temperature(&settings, 1);
        assert!(last > 0.4 && last < 0.41, "{last}");
        let flat = DenoiseSettings { t_min: 0.7, t_max: 0.7, ..settings };
        assert!((1..=48).all(|left| temperature(&flat, left) == 0.7));
    }
}
