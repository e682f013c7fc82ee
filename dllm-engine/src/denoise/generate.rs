//! One request's life on a lane (docs/model-diffusion-gemma.md section 8):
//!
//! ```text
//!     sequence = prompt
//!     repeat:
//!         prefill what of the sequence is not cached
//!         canvas = noise
//!         until the stop rule holds or max_steps are done:
//!             forward, accept, renoise
//!         answer += argmax canvas, cut at end of generation and at max_tokens
//!         ended? else sequence += argmax canvas
//! ```
//!
//! `lanes` calls these steps, so that many requests share each forward pass.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::DenoiseSettings;
use super::canvas::Canvas;
use super::cost::{Cost, Meter};
use crate::error::{Error, Result};
use crate::event::{Event, FinishReason};
use crate::model::{Counters, DenoiseLane, Position, Shape};
use crate::params::Pin;
use crate::rng::Noise;
use crate::sampler::Sampler;

/// Turns the tokens of finished canvases into text.
pub trait Settle: Send {
    /// Takes the answer's next tokens (one canvas, cut at end of generation and `max_tokens`) and appends what is settled to
    /// `text`. With `last` nothing follows, so what was held back is settled too. If a stop text ends the answer here,
    /// returns how many tokens the whole answer keeps, which may be fewer than before this canvas: a stop text may begin in
    /// an earlier one. Then nothing follows either.
    fn settle(&mut self, tokens: &[u32], last: bool, text: &mut String) -> Option<usize>;

    /// Thought text so far, if the model thought. Asked for once, at the end.
    fn reasoning(&mut self) -> Option<String> {
        None
    }
}

/// For callers that want tokens only.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoText;

impl Settle for NoText {
    fn settle(&mut self, _: &[u32], _: bool, _: &mut String) -> Option<usize> {
        None
    }
}

/// A request, ready for the loop: everything is tokens.
pub struct Work {
    /// The prompt, at least one token.
    pub prompt: Vec<u32>,
    /// Most tokens of the answer, at least 1.
    pub max_tokens: usize,
    /// Settings of the loop.
    pub settings: DenoiseSettings,
    /// Where random numbers come from.
    pub noise: Box<dyn Noise>,
    /// What chooses the positions to accept.
    pub sampler: Box<dyn Sampler>,
    /// What makes text of tokens.
    pub text: Box<dyn Settle>,
    /// Given positions of the answer, in any order, each at most once.
    pub pins: Vec<Pin>,
    /// End-of-generation tokens.
    pub eog: Arc<[u32]>,
}

/// What a request produced.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Tokens of the answer, without the end-of-generation token.
    pub tokens: Vec<u32>,
    /// Its text.
    pub text: String,
    /// Thought text.
    pub reasoning: Option<String>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Whether the stop rule ended every canvas.
    pub converged: bool,
    /// What it cost.
    pub cost: Cost,
}

/// A request on a lane.
pub(super) struct Run {
    work: Work,
    shape: Shape,
    /// What must be cached before the next canvas: the prompt and the committed canvases.
    sequence: Vec<u32>,
    canvas: Canvas,
    /// Number of the next canvas.
    next: u32,
    denoising: bool,
    cancelled: bool,
    converged: bool,
    tokens: Vec<u32>,
    text: String,
    pub meter: Meter,
}

impl Run {
    /// Refuses work that this network cannot do, and brings the pins into order.
    pub fn check(work: &mut Work, shape: &Shape) -> Result<()> {
        work.settings.check()?;
        if work.max_tokens == 0 {
            return Err(Error::argument("max_tokens", "0 tokens cannot be generated; ask for at least 1"));
        }
        if work.prompt.is_empty() {
            return Err(Error::argument("prompt", "it has no tokens; give at least one"));
        }
        if let Some(token) = work.prompt.iter().find(|token| **token as usize >= shape.vocab) {
            return Err(Error::argument(
                "prompt",
                format!("token {token} is not below the vocabulary's {}", shape.vocab),
            ));
        }
        shape.check_room(work.prompt.len())?;
        work.pins.sort_unstable_by_key(|pin| pin.position);
        for pin in &work.pins {
            if pin.position >= work.max_tokens || pin.token as usize >= shape.vocab {
                let why = "its position must be below max_tokens and its token below the vocabulary's";
                return Err(Error::argument("pins", format!("{pin:?}: {why} {}", shape.vocab)));
            }
        }
        match work.pins.windows(2).find(|pair| pair[0].position == pair[1].position) {
            Some(pair) => Err(Error::argument("pins", format!("position {} is given twice", pair[0].position))),
            None => Ok(()),
        }
    }

    /// Work that has passed `check`, on a lane that holds the prompt's first `cached` tokens.
    pub fn new(work: Work, shape: Shape, cached: usize, counters: Counters) -> Self {
        Self {
            sequence: work.prompt.clone(),
            canvas: Canvas::new(shape.canvas),
            next: 0,
            denoising: false,
            cancelled: false,
            converged: true,
            tokens: Vec::new(),
            text: String::new(),
            meter: Meter::start(work.prompt.len(), cached, counters),
            work,
            shape,
        }
    }

    /// Ends the run at the next step boundary.
    pub fn cancel(&mut self) {
        self.cancelled = true;
    }

    pub fn cancelled(&self) -> bool {
        self.cancelled
    }

    pub fn denoising(&self) -> bool {
        self.denoising
    }

    /// Tokens that must still be cached before the next canvas, given how many are.
    pub fn uncached(&self, cached: usize) -> &[u32] {
        self.sequence.get(cached..).unwrap_or(&[])
    }

    /// Everything to cache before the next canvas: the prompt and what is finished.
    pub fn sequence(&self) -> &[u32] {
        &self.sequence
    }

    /// Counts tokens of the prompt that another lane had in its cache.
    pub fn shared(&mut self, tokens: usize) {
        if self.next == 0 {
            self.meter.cost.cached_tokens += tokens;
        }
    }

    /// Counts a prefill pass, after which `cached` tokens are cached. While the prompt is read this is an event.
    pub fn prefilled(&mut self, time: Duration, cached: usize) -> Option<Event<'static>> {
        if self.next > 0 {
            self.meter.cost.commit += time;
            return None;
        }
        self.meter.cost.prefill += time;
        Some(Event::Prefill { done: cached, total: self.sequence.len() })
    }

    /// Starts the next canvas: its noise, with this canvas's pins in it.
    pub fn start_canvas(&mut self) -> Result<()> {
        let since = Instant::now();
        let len = self.shape.canvas;
        let first = (self.next as usize).saturating_mul(len);
        let here = self.work.pins.partition_point(|pin| pin.position < first);
        let pins = self.work.pins[here..].iter().map(|pin| Pin { position: pin.position - first, token: pin.token });
        self.canvas.start(self.next, pins.take_while(|pin| pin.position < len), &mut *self.work.noise)?;
        self.next += 1;
        self.denoising = true;
        self.meter.host(since, Ok(()))
    }

    /// Prepares the next step's input.
    pub fn prepare(&mut self) -> Result<()> {
        let since = Instant::now();
        let done = self.canvas.prepare(&self.work.settings, &mut *self.work.noise);
        self.meter.host(since, done)
    }

    /// The prepared input.
    pub fn lane(&self, lane: usize) -> DenoiseLane<'_> {
        self.canvas.lane(lane)
    }

    /// Takes the network's numbers: accept, renoise, stop rule.
    pub fn advance(&mut self, positions: &[Position]) -> Result<()> {
        let since = Instant::now();
        let Work { settings, sampler, noise, .. } = &mut self.work;
        let done = self.canvas.advance(positions, self.shape.vocab, settings, &mut **sampler, &mut **noise);
        self.meter.host(since, done)
    }

    /// The step just done.
    pub fn step_event(&self) -> Event<'_> {
        Event::Step(self.canvas.event(&self.work.settings))
    }

    /// If the canvas is finished: makes it answer and text. Returns the event, and the reason if the answer ends with it.
    pub fn settle(&mut self) -> Option<(Event<'_>, Option<FinishReason>)> {
        if !self.canvas.done(&self.work.settings) {
            return None;
        }
        let since = Instant::now();
        self.denoising = false;
        self.converged &= self.canvas.converged();
        self.meter.cost.steps_per_canvas.push(self.canvas.steps);

        let argmax = self.canvas.argmax();
        // Before the last given position an end token ends nothing: what is given belongs to the answer.
        let given = self.work.pins.last().map_or(0, |pin| pin.position + 1).saturating_sub(self.tokens.len());
        let end = argmax.iter().skip(given).position(|token| self.work.eog.contains(token)).map(|at| at + given);
        let left = self.work.max_tokens - self.tokens.len();
        let keep = end.unwrap_or(argmax.len()).min(left);
        // After this canvas is committed the next one needs room behind it.
        let full = self.sequence.len() + 2 * argmax.len() > self.shape.context;
        let mut reason = match end {
            Some(end) if end <= left => Some(FinishReason::Stop),
            _ if keep == left || full => Some(FinishReason::Length),
            _ => None,
        };
        let settled = self.text.len();
        self.tokens.extend_from_slice(&argmax[..keep]);
        if let Some(kept) = self.work.text.settle(&argmax[..keep], reason.is_some(), &mut self.text) {
            self.tokens.truncate(kept);
            reason = Some(FinishReason::Stop);
        }
        if reason.is_none() {
            self.sequence.extend_from_slice(argmax);
        }
        self.meter.host(since, ());
        let event = Event::Canvas {
            index: self.canvas.index as usize,
            steps: self.canvas.steps,
            converged: self.canvas.converged(),
            text: self.text.get(settled..).unwrap_or(""),
        };
        Some((event, reason))
    }

    /// Ends the run. What is finished is kept; a canvas in progress counts its steps and is dropped.
    pub fn finish(mut self, reason: FinishReason, counters: Counters) -> Generation {
        if self.denoising && self.canvas.steps > 0 {
            self.meter.cost.steps_per_canvas.push(self.canvas.steps);
        }
        if reason == FinishReason::Cancelled {
            self.converged &= !self.denoising && !self.meter.cost.steps_per_canvas.is_empty();
            self.work.text.settle(&[], true, &mut self.text);
        }
        Generation {
            reasoning: self.work.text.reasoning(),
            tokens: self.tokens,
            text: self.text,
            finish_reason: reason,
            converged: self.converged,
            cost: self.meter.finish(counters),
        }
    }
}
