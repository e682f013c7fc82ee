//! A network that follows a script, for tests and benches of the loop. It keeps the books of a real one and reports every
//! breach of the protocol of `Forward` as an error.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::model::{Counters, DenoiseLane, Forward, Position, PrefillLane, Shape};
use crate::rng::{Purpose, draw, token, unit};

/// One lane's denoising step, as the script sees it.
#[derive(Debug)]
pub struct Seen<'a> {
    /// The lane. A script that depends on it is no network.
    pub lane: usize,
    /// The tokens in the lane's cache.
    pub cached: &'a [u32],
    /// The canvas.
    pub canvas: &'a [u32],
    /// Temperature of the step.
    pub temperature: f32,
    /// One uniform number per position.
    pub uniform: &'a [f32],
    /// Number of the step in its canvas, from 1.
    pub step: u32,
}

/// Fills in the positions of one lane's step.
pub type Script = Box<dyn FnMut(&Seen<'_>, &mut [Position]) -> Result<()> + Send>;

/// A pass that was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pass {
    /// Lanes and their numbers of tokens.
    Prefill(Vec<(usize, usize)>),
    /// Lanes.
    Denoise(Vec<usize>),
}

#[derive(Default)]
struct Lane {
    cached: Vec<u32>,
    /// Steps since the canvas started; 0 after a change of the cache.
    steps: u32,
}

/// See the module.
pub struct Scripted {
    shape: Shape,
    script: Script,
    lanes: Vec<Lane>,
    passes: u64,
    /// Passes asked for, if they are to be kept.
    pub log: Option<Vec<Pass>>,
    /// How long each pass takes.
    pub slow: Duration,
    /// Number of the pass, from 1, that fails.
    pub fail_at: Option<u64>,
    /// As a ring that holds this many tokens behind the kept ones: a longer cut forgets all.
    pub ring: Option<usize>,
}

impl Scripted {
    /// A network of the given sizes that answers as `script` says.
    pub fn new(shape: Shape, script: Script) -> Self {
        let lanes = (0..shape.lanes).map(|_| Lane::default()).collect();
        Self { shape, script, lanes, passes: 0, log: None, slow: Duration::ZERO, fail_at: None, ring: None }
    }

    /// A made-up model. Each position has a token that depends on the whole cache and shows up, with little entropy, after one to
    /// five steps; before that the position follows the canvas and the drawn number. So one wrong input changes the result.
    pub fn made_up(shape: Shape) -> Self {
        let script = move |seen: &Seen<'_>, out: &mut [Position]| {
            made_up(&shape, seen, out);
            Ok(())
        };
        Self::new(shape, Box::new(script))
    }

    /// Keeps a log of the passes.
    pub fn logged(mut self) -> Self {
        self.log = Some(Vec::new());
        self
    }

    fn pass(&mut self, pass: impl FnOnce() -> Pass) -> Result<()> {
        self.passes += 1;
        if let Some(log) = &mut self.log {
            log.push(pass());
        }
        if !self.slow.is_zero() {
            std::thread::sleep(self.slow);
        }
        if self.fail_at == Some(self.passes) {
            return Err(Error::Backend(format!("pass {} fails as told", self.passes)));
        }
        Ok(())
    }

    fn check_lanes(&self, lanes: impl Iterator<Item = usize> + Clone) -> Result<()> {
        let ascending = lanes.clone().zip(lanes.clone().skip(1)).all(|(a, b)| a < b);
        let list: Vec<_> = lanes.collect();
        let known = list.iter().all(|lane| *lane < self.shape.lanes);
        keep(!list.is_empty() && ascending && known, || format!("lanes {list:?} of {}", self.shape.lanes))
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let bad = tokens.iter().find(|token| **token as usize >= self.shape.vocab);
        keep(bad.is_none(), || format!("token {bad:?} of {}", self.shape.vocab))
    }

    fn check_denoise(&self, part: &DenoiseLane<'_>) -> Result<()> {
        let (lane, len) = (&self.lanes[part.lane], self.shape.canvas);
        keep(part.canvas.len() == len && part.uniform.len() == len, || "canvas length".into())?;
        self.check_tokens(part.canvas)?;
        keep(part.uniform.iter().all(|u| (0.0..1.0).contains(u)), || "uniform numbers".into())?;
        keep(part.temperature > 0.0 && part.temperature.is_finite(), || format!("temperature {}", part.temperature))?;
        keep(!lane.cached.is_empty(), || "a canvas without a prompt".into())?;
        keep(lane.cached.len() + len <= self.shape.context, || "the canvas leaves the context".into())?;
        keep(!part.self_condition || lane.steps > 0, || "self-conditioning without a step before".into())
    }
}

/// The protocol's referee.
fn keep(held: bool, breach: impl FnOnce() -> String) -> Result<()> {
    if held { Ok(()) } else { Err(Error::Backend(format!("protocol: {}", breach()))) }
}

impl Forward for Scripted {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn filled(&self, lane: usize) -> usize {
        self.lanes.get(lane).map_or(0, |lane| lane.cached.len())
    }

    fn truncate(&mut self, lane: usize, len: usize) -> usize {
        let Some(lane) = self.lanes.get_mut(lane) else { return 0 };
        let cut = lane.cached.len().saturating_sub(len);
        let kept = if self.ring.is_some_and(|ring| cut > ring) { 0 } else { len };
        lane.cached.truncate(kept);
        lane.steps = 0;
        lane.cached.len()
    }

    fn copy_prefix(&mut self, from: usize, to: usize, len: usize) -> usize {
        let Some(prefix) = self.lanes.get(from).and_then(|lane| lane.cached.get(..len)).map(<[u32]>::to_vec) else {
            return self.filled(to);
        };
        let Some(lane) = self.lanes.get_mut(to) else { return 0 };
        *lane = Lane { cached: prefix, steps: 0 };
        len
    }

    fn prefill(&mut self, lanes: &[PrefillLane<'_>]) -> Result<()> {
        self.pass(|| Pass::Prefill(lanes.iter().map(|part| (part.lane, part.tokens.len())).collect()))?;
        self.check_lanes(lanes.iter().map(|part| part.lane))?;
        for part in lanes {
            self.check_tokens(part.tokens)?;
            keep(!part.tokens.is_empty(), || "a prefill of nothing".into())?;
            let lane = &mut self.lanes[part.lane];
            let fits = self.shape.context.saturating_sub(self.shape.canvas);
            keep(lane.cached.len() + part.tokens.len() <= fits, || "the prefill leaves the context".into())?;
            lane.cached.extend_from_slice(part.tokens);
            lane.steps = 0;
        }
        Ok(())
    }

    fn denoise(&mut self, lanes: &[DenoiseLane<'_>], out: &mut Vec<Position>) -> Result<()> {
        self.pass(|| Pass::Denoise(lanes.iter().map(|part| part.lane).collect()))?;
        self.check_lanes(lanes.iter().map(|part| part.lane))?;
        let len = self.shape.canvas;
        out.resize(lanes.len() * len, Position::default());
        for (part, out) in lanes.iter().zip(out.chunks_exact_mut(len)) {
            self.check_denoise(part)?;
            let lane = &mut self.lanes[part.lane];
            lane.steps = if part.self_condition { lane.steps + 1 } else { 1 };
            let DenoiseLane { lane: number, canvas, temperature, uniform, .. } = *part;
            let seen = Seen { lane: number, cached: &lane.cached, canvas, temperature, uniform, step: lane.steps };
            (self.script)(&seen, out)?;
        }
        Ok(())
    }

    fn counters(&self) -> Counters {
        Counters {
            graphs_built: self.passes.min(1),
            graphs_replayed: self.passes.saturating_sub(1),
            ..Counters::default()
        }
    }
}

fn made_up(shape: &Shape, seen: &Seen<'_>, out: &mut [Position]) {
    let vocab = u32::try_from(shape.vocab).unwrap_or(u32::MAX);
    let mix = |hash: u64, word: u32| draw(hash, u64::from(word), 0, 0, 0, Purpose::Draw);
    let prompt = seen.cached.iter().fold(1, |hash, token| mix(hash, *token));
    for (i, p) in (0u32..).zip(out) {
        let (Some(given), Some(u)) = (seen.canvas.get(i as usize), seen.uniform.get(i as usize)) else { return };
        let own = draw(prompt, 0, 0, 0, i, Purpose::Init);
        *p = if seen.step > (own % 5) as u32 {
            let id = token(own, vocab);
            Position { argmax: id, drawn: id, entropy: 1e-4, argmax_prob: 1.0, drawn_prob: 1.0 }
        } else {
            let here = mix(mix(own, *given), u.to_bits() ^ seen.temperature.to_bits());
            let (argmax, drawn) = (token(here, vocab), token(mix(here, 1), vocab));
            Position { argmax, drawn, entropy: 0.05 + unit(here), argmax_prob: 0.6, drawn_prob: 0.3 }
        };
    }
}
