//! A canvas: the block of positions being denoised, from its random start to its last argmax.

use super::DenoiseSettings;
use super::schedule::temperature;
use super::stop::{StopRule, Verdict};
use crate::error::{Error, Result};
use crate::event::Step;
use crate::model::{DenoiseLane, Position};
use crate::params::Pin;
use crate::rng::Noise;
use crate::sampler::{Sampler, StepView};

/// State of one canvas. All vectors have one entry per position and are reused from canvas to canvas.
#[derive(Debug)]
pub(super) struct Canvas {
    /// Number of the canvas, from 0.
    pub index: u32,
    /// Denoising steps done.
    pub steps: u32,
    /// Positions that are given.
    fixed: Vec<bool>,
    input: Vec<u32>,
    uniform: Vec<f32>,
    argmax: Vec<u32>,
    drawn: Vec<u32>,
    entropy: Vec<f32>,
    accepted: Vec<bool>,
    output: Vec<u32>,
    rule: StopRule,
    temperature: f32,
    mean_entropy: f32,
    verdict: Verdict,
}

impl Canvas {
    pub fn new(len: usize) -> Self {
        Self {
            index: 0,
            steps: 0,
            fixed: vec![false; len],
            input: vec![0; len],
            uniform: vec![0.0; len],
            argmax: vec![0; len],
            drawn: vec![0; len],
            entropy: vec![0.0; len],
            accepted: vec![false; len],
            output: vec![0; len],
            rule: StopRule::default(),
            temperature: 0.0,
            mean_entropy: 0.0,
            verdict: Verdict { stable: false, stop: false },
        }
    }

    /// Starts canvas number `index` from noise. `pins` are those of this canvas, positions counted from its start.
    pub fn start(&mut self, index: u32, pins: impl Iterator<Item = Pin>, noise: &mut dyn Noise) -> Result<()> {
        self.index = index;
        self.steps = 0;
        self.rule.reset();
        noise.init(index, &mut self.output)?;
        self.fixed.fill(false);
        for pin in pins {
            if let (Some(fixed), Some(token)) = (self.fixed.get_mut(pin.position), self.output.get_mut(pin.position)) {
                (*fixed, *token) = (true, pin.token);
            }
        }
        Ok(())
    }

    /// Makes the next step's input: the last step's output and fresh uniform numbers.
    pub fn prepare(&mut self, settings: &DenoiseSettings, noise: &mut dyn Noise) -> Result<()> {
        self.input.copy_from_slice(&self.output);
        self.temperature = temperature(settings, settings.max_steps.saturating_sub(self.steps));
        noise.uniform(self.index, self.steps + 1, &mut self.uniform)
    }

    /// The prepared input, for the forward pass.
    pub fn lane(&self, lane: usize) -> DenoiseLane<'_> {
        DenoiseLane {
            lane,
            canvas: &self.input,
            temperature: self.temperature,
            uniform: &self.uniform,
            self_condition: self.steps > 0,
        }
    }

    /// Takes the network's numbers of the prepared step: accept, renoise, stop rule.
    pub fn advance(
        &mut self,
        positions: &[Position],
        vocab: usize,
        settings: &DenoiseSettings,
        sampler: &mut dyn Sampler,
        noise: &mut dyn Noise,
    ) -> Result<()> {
        check(positions, vocab, self.steps + 1)?;
        self.accepted.fill(false);
        let view = StepView {
            steps_left: settings.max_steps.saturating_sub(self.steps),
            max_steps: settings.max_steps,
            canvas: &self.input,
            positions,
            fixed: &self.fixed,
        };
        sampler.accept(&view, &mut self.accepted);
        self.steps += 1;
        noise.renoise(self.index, self.steps, &mut self.output)?;
        for (i, p) in positions.iter().enumerate() {
            // A given position counts as certain: it is accepted and adds nothing to the mean entropy.
            let given = self.input[i];
            (self.argmax[i], self.drawn[i], self.entropy[i]) =
                if self.fixed[i] { (given, given, 0.0) } else { (p.argmax, p.drawn, p.entropy) };
            self.accepted[i] |= self.fixed[i];
            if self.accepted[i] {
                self.output[i] = self.drawn[i];
            }
        }
        let open = self.fixed.iter().filter(|fixed| !**fixed).count().max(1);
        let sum: f64 = self.entropy.iter().map(|h| f64::from(*h)).sum();
        self.mean_entropy = (sum / open as f64) as f32;
        self.verdict = self.rule.judge(settings, &self.argmax, self.mean_entropy);
        Ok(())
    }

    /// Whether the stop rule ended the canvas with its last step.
    pub fn converged(&self) -> bool {
        self.verdict.stop
    }

    /// Whether the canvas ends with its last step.
    pub fn done(&self, settings: &DenoiseSettings) -> bool {
        self.verdict.stop || self.steps >= settings.max_steps
    }

    /// The likeliest tokens of the last step: at the end, the finished canvas.
    pub fn argmax(&self) -> &[u32] {
        &self.argmax
    }

    /// The last step, for the caller.
    pub fn event(&self, settings: &DenoiseSettings) -> Step<'_> {
        Step {
            canvas: self.index as usize,
            step: self.steps,
            max_steps: settings.max_steps,
            temperature: self.temperature,
            input: &self.input,
            argmax: &self.argmax,
            drawn: &self.drawn,
            entropy: &self.entropy,
            accepted: &self.accepted,
            output: &self.output,
            mean_entropy: self.mean_entropy,
            stable: self.verdict.stable,
            stop: self.done(settings),
        }
    }
}

/// Refuses numbers that would spoil the canvas.
fn check(positions: &[Position], vocab: usize, step: u32) -> Result<()> {
    let known = |id: u32| (id as usize) < vocab;
    for (position, p) in positions.iter().enumerate() {
        if !p.entropy.is_finite() {
            return Err(Error::NotFinite { what: "logits", step, position });
        }
        if !known(p.argmax) || !known(p.drawn) {
            let (argmax, drawn) = (p.argmax, p.drawn);
            return Err(Error::Backend(format!(
                "step {step}, position {position}: tokens {argmax} and {drawn} are not both below {vocab}: try another device"
            )));
        }
    }
    Ok(())
}
