//! The denoising loop: prompt to canvases to tokens.
//!
//! - `generate`: one request's life, from its prompt to its last canvas;
//! - `lanes`: the scheduler that advances many requests one denoising step at a time;
//! - `canvas`: the block of positions being denoised: accept, renoise, pins;
//! - `schedule`, `stop`: the temperature schedule and the stop rule.
//!
//! The loop owns what is random and what is accepted, the network (`model::Forward`) what is computed.

mod canvas;
mod cost;
mod generate;
mod lanes;
pub mod schedule;
#[doc(hidden)]
pub mod scripted;
pub mod stop;

pub use cost::Cost;
pub use generate::{Generation, NoText, Settle, Work};
pub use lanes::{Finished, Lanes};

use crate::error::{Error, Result};
use crate::params::DenoiseOverrides;
use crate::rng::MAX_STEPS;

/// Settings of the loop, complete and in range (see `check`).
#[derive(Debug, Clone, PartialEq)]
pub struct DenoiseSettings {
    /// Most denoising steps per canvas, 1 to 4096.
    pub max_steps: u32,
    /// Temperature towards the last step, above 0, at most 10.
    pub t_min: f32,
    /// Temperature at the first step, at least `t_min`, at most 10.
    pub t_max: f32,
    /// Entropy in nats that one step may accept, 0 or more.
    pub entropy_bound: f32,
    /// Steps that the argmax canvas must have stayed the same before an early stop; `None`: no early stop.
    pub stability_threshold: Option<u32>,
    /// Mean entropy in nats below which a stable canvas is finished; `None`: no early stop.
    pub confidence_threshold: Option<f32>,
}

impl Default for DenoiseSettings {
    /// The reference's own defaults for DiffusionGemma (docs/model-diffusion-gemma.md section 1).
    fn default() -> Self {
        Self {
            max_steps: 48,
            t_min: 0.4,
            t_max: 0.8,
            entropy_bound: 0.1,
            stability_threshold: Some(1),
            confidence_threshold: Some(0.005),
        }
    }
}

impl DenoiseSettings {
    /// Most steps that may be asked for.
    pub const MAX_STEPS: u32 = 4096;
    /// Highest temperature that may be asked for.
    pub const MAX_TEMPERATURE: f32 = 10.0;

    /// These settings with the given overrides.
    ///
    /// # Errors
    /// `BadArgument` as `check`; one that names an override, never a value that was not given.
    pub fn with(&self, overrides: &DenoiseOverrides) -> Result<Self> {
        if let (Some(t_min), None) = (overrides.t_min, overrides.t_max)
            && warm(t_min)
            && t_min > self.t_max
        {
            let why = format!(
                "{t_min} is above t_max, which is {} where it is not given: lower t_min or give t_max",
                self.t_max
            );
            return Err(Error::argument("t_min", why));
        }
        if let (None, Some(t_max)) = (overrides.t_min, overrides.t_max)
            && warm(t_max)
            && t_max < self.t_min
        {
            let why = format!(
                "{t_max} is below t_min, which is {} where it is not given: raise t_max or give t_min",
                self.t_min
            );
            return Err(Error::argument("t_max", why));
        }
        let settings = Self {
            max_steps: overrides.max_steps.unwrap_or(self.max_steps),
            t_min: overrides.t_min.unwrap_or(self.t_min),
            t_max: overrides.t_max.unwrap_or(self.t_max),
            entropy_bound: overrides.entropy_bound.unwrap_or(self.entropy_bound),
            stability_threshold: overrides.stability_threshold.or(self.stability_threshold),
            confidence_threshold: overrides.confidence_threshold.or(self.confidence_threshold),
        };
        settings.check()?;
        Ok(settings)
    }

    /// Checks every range.
    ///
    /// # Errors
    /// `BadArgument` with the field, its value and its range.
    pub fn check(&self) -> Result<()> {
        const { assert!(Self::MAX_STEPS < MAX_STEPS) }
        let steps = 1..=Self::MAX_STEPS;
        if !steps.contains(&self.max_steps) {
            return Err(Error::argument("max_steps", format!("{} is not in 1..={}", self.max_steps, Self::MAX_STEPS)));
        }
        let most = Self::MAX_TEMPERATURE;
        if !warm(self.t_min) {
            return Err(Error::argument("t_min", format!("{} is not above 0 and at most {most}", self.t_min)));
        }
        if !warm(self.t_max) || self.t_max < self.t_min {
            return Err(Error::argument(
                "t_max",
                format!("{} is not in {}..={most}, from t_min up", self.t_max, self.t_min),
            ));
        }
        not_negative("entropy_bound", self.entropy_bound)?;
        not_negative("confidence_threshold", self.confidence_threshold.unwrap_or(0.0))?;
        match self.stability_threshold {
            Some(k) if k > Self::MAX_STEPS => {
                Err(Error::argument("stability_threshold", format!("{k} is not in 0..={}", Self::MAX_STEPS)))
            }
            _ => Ok(()),
        }
    }
}

/// Whether it can be a temperature.
fn warm(t: f32) -> bool {
    t > 0.0 && t <= DenoiseSettings::MAX_TEMPERATURE
}

fn not_negative(name: &'static str, nats: f32) -> Result<()> {
    if nats >= 0.0 && nats.is_finite() {
        return Ok(());
    }
    Err(Error::argument(name, format!("{nats} is not a finite number of nats, 0 or more")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(overrides: DenoiseOverrides) -> String {
        DenoiseSettings::default().with(&overrides).unwrap_err().to_string()
    }

    #[test]
    fn overrides_win_over_defaults() {
        let given = DenoiseOverrides { max_steps: Some(7), stability_threshold: Some(0), ..Default::default() };
        let want = DenoiseSettings { max_steps: 7, stability_threshold: Some(0), ..Default::default() };
        assert_eq!(DenoiseSettings::default().with(&given).unwrap(), want);
    }

    #[test]
    fn what_is_out_of_range_is_named_with_its_value() {
        let none = DenoiseOverrides::default;
        for n in [0, 4097, u32::MAX] {
            assert!(refused(DenoiseOverrides { max_steps: Some(n), ..none() }).contains(&format!("max_steps: {n} ")));
        }
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.5] {
            assert!(refused(DenoiseOverrides { t_min: Some(x), ..none() }).contains(&format!("t_min: {x} ")));
            assert!(refused(DenoiseOverrides { t_max: Some(x), ..none() }).contains(&format!("t_max: {x} ")));
            let bound = refused(DenoiseOverrides { entropy_bound: Some(x), ..none() });
            assert!(bound.contains(&format!("entropy_bound: {x} ")), "{bound}");
            let limit = refused(DenoiseOverrides { confidence_threshold: Some(x), ..none() });
            assert!(limit.contains(&format!("confidence_threshold: {x} ")), "{limit}");
        }
        assert!(refused(DenoiseOverrides { t_min: Some(0.0), ..none() }).contains("t_min: 0 "));
        let crossed = DenoiseOverrides { t_min: Some(0.9), t_max: Some(0.8), ..none() };
        assert!(refused(crossed).contains("t_max: 0.8 is not in 0.9..=10"));
        assert!(refused(DenoiseOverrides { t_max: Some(10.5), ..none() }).contains("t_max: 10.5 "));
        assert!(refused(DenoiseOverrides { stability_threshold: Some(5000), ..none() }).contains("5000"));
    }

    #[test]
    fn issue_2_a_setting_that_was_not_given_is_not_blamed() {
        let hot = refused(DenoiseOverrides { t_min: Some(0.9), ..DenoiseOverrides::default() });
        assert!(hot.contains("bad t_min: 0.9 is above t_max, which is 0.8"), "{hot}");
        let cold = refused(DenoiseOverrides { t_max: Some(0.3), ..DenoiseOverrides::default() });
        assert!(cold.contains("bad t_max: 0.3 is below t_min, which is 0.4"), "{cold}");
    }
}
