//! What a caller sees while a request runs, and what it gets in the end.

use serde::Serialize;

use crate::receipt::Receipt;

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// An end-of-generation token or a stop text.
    Stop,
    /// `max_tokens` or the context is used up.
    Length,
    /// The caller said so.
    Cancelled,
}

/// The caller's answer to an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// Go on.
    Continue,
    /// Stop this lane at once; what is finished is kept.
    Cancel,
}

/// Progress of one lane. Borrowed data is valid during the call only.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A piece of the prompt was read.
    Prefill {
        /// Prompt tokens in the cache now.
        done: usize,
        /// Prompt tokens in all.
        total: usize,
    },
    /// A denoising step is done.
    Step(Step<'a>),
    /// A canvas is finished; `text` is what it added to the answer (thought text left out).
    Canvas {
        /// Number of the canvas, from 0.
        index: usize,
        /// Denoising steps it took.
        steps: u32,
        /// Whether the stop rule ended it (else `max_steps` did).
        converged: bool,
        /// New settled text of the answer.
        text: &'a str,
    },
}

/// One denoising step, as the loop saw it. All slices have one entry per canvas position.
#[derive(Debug)]
#[non_exhaustive]
pub struct Step<'a> {
    /// Number of the canvas, from 0.
    pub canvas: usize,
    /// Number of the step, from 1.
    pub step: u32,
    /// Most steps of this canvas.
    pub max_steps: u32,
    /// Temperature of the step.
    pub temperature: f32,
    /// The canvas that went in.
    pub input: &'a [u32],
    /// The likeliest token: the draft that a live view shows.
    pub argmax: &'a [u32],
    /// The drawn token.
    pub drawn: &'a [u32],
    /// Entropy in nats.
    pub entropy: &'a [f32],
    /// Whether the drawn token was accepted.
    pub accepted: &'a [bool],
    /// The canvas of the next step.
    pub output: &'a [u32],
    /// Mean entropy in nats.
    pub mean_entropy: f32,
    /// Whether the argmax canvas is stable.
    pub stable: bool,
    /// Whether the canvas ends with this step.
    pub stop: bool,
}

/// An answer.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Completion {
    /// The answer, without thought text, end tokens and stop texts.
    pub text: String,
    /// Thought text, if the model thought.
    pub reasoning: Option<String>,
    /// Token ids of the answer, thought text included, up to and without the end-of-generation token.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Whether every canvas was ended by the stop rule. `false`: `max_steps` cut at least one.
    pub converged: bool,
    /// What it cost, and with which settings.
    pub receipt: Receipt,
}
