//! What the worker needs of an engine. Implemented for `dllm_engine::Engine` in `host`, and by scripted engines in tests.

use dllm_engine::Request;
use serde::Serialize;
use serde_json::Value;

use crate::answer::Answer;
use crate::error::Result;

/// A request to the engine.
#[derive(Debug, Clone)]
pub struct Ask {
    /// Prompt and settings.
    pub request: Request,
    /// For infill: the answer's given texts and its gaps, in order. Empty for plain generation.
    pub pieces: Vec<Piece>,
    /// Whether the caller wants to see each denoising step.
    pub trace: bool,
}

impl Ask {
    /// Plain generation without a trace.
    pub fn new(request: Request) -> Self {
        Self { request, pieces: Vec::new(), trace: false }
    }
}

/// A part of an answer with given text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Stays as it is.
    Text(String),
    /// So many tokens to fill.
    Gap(usize),
}

/// A canvas after one denoising step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Frame {
    /// Number of the canvas, from 0.
    pub canvas: usize,
    /// Number of the step, from 1.
    pub step: u32,
    /// The likeliest tokens, as text: the draft.
    pub text: String,
    /// Positions whose drawn token was accepted.
    pub accepted: usize,
    /// Positions of the canvas.
    pub positions: usize,
    /// Mean entropy in nats.
    pub mean_entropy: f32,
    /// Temperature of the step.
    pub temperature: f32,
    /// Whether the canvas ended with this step.
    pub stop: bool,
}

/// Progress of one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Tick {
    /// Denoising steps done; a canvas that stopped early counts as all its steps.
    pub steps: u64,
    /// Most steps of the request.
    pub total: u64,
    /// The step, where it was asked for.
    pub frame: Option<Frame>,
}

/// What is loaded.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Loaded {
    /// The model's id, as in `dllm_models`.
    pub id: String,
    /// Its name, as its file says.
    pub model: String,
    /// Its family.
    pub family: String,
    /// Type of its weights.
    pub quantization: String,
    /// Device that computes.
    pub device: String,
    /// Requests side by side.
    pub lanes: usize,
    /// Tokens of prompt and answer together.
    pub context: usize,
    /// Bytes that it takes.
    pub bytes: u64,
    /// Everything else that the engine tells.
    pub details: Value,
}

/// A model that callers may load.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelCard {
    /// The name to load it by.
    pub id: String,
    /// Its file; empty for the model inside the program.
    pub path: String,
    /// Its family.
    pub family: String,
    /// Type of its weights.
    pub quantization: String,
    /// Size of its file.
    pub bytes: u64,
    /// Whether it would fit into the device's memory now.
    pub fits: bool,
    /// Why it cannot be loaded; empty where it can.
    pub problem: String,
}

/// Memory of the device, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Held by the loaded model.
    pub used: u64,
    /// Free.
    pub free: u64,
    /// In all.
    pub total: u64,
}

/// An engine, on the one thread that owns it.
pub trait Backend {
    /// Loads a model in place of the one that is loaded. `progress` is told bytes done and in all.
    ///
    /// # Errors
    /// `LoadFailed`, `OutOfVram`, `GpuBusy`. Nothing is loaded then.
    fn load(&mut self, id: &str, progress: &mut dyn FnMut(u64, u64)) -> Result<Loaded>;
    /// Gives back the model's memory and the device.
    fn unload(&mut self);
    /// Starts a request on a free lane and returns the lane.
    ///
    /// # Errors
    /// `BadArgument`.
    fn admit(&mut self, ask: &Ask) -> Result<usize>;
    /// Advances all lanes by at most one denoising step; returns the lanes that ended.
    fn step(&mut self, on_tick: &mut dyn FnMut(usize, Tick)) -> Vec<(usize, Result<Answer>)>;
    /// Ends a lane's request at the next step.
    fn cancel(&mut self, lane: usize);
    /// Lanes that can take a request.
    fn free(&self) -> usize;
}

/// Makes engines and knows the models.
pub trait Host: Send + Sync + 'static {
    /// An engine with nothing loaded. Called on the engine's thread, again after a panic.
    fn backend(&self) -> Box<dyn Backend>;
    /// The id of the model to load when none was asked for.
    fn default_model(&self) -> String;
    /// The models that callers may load. Reads metadata only.
    fn models(&self) -> Vec<ModelCard>;
    /// What the operator set and cannot work, in words; found without a load.
    fn problems(&self) -> Vec<String> {
        Vec::new()
    }
    /// Memory of the device; `None` while nothing is loaded.
    fn memory(&self) -> Option<Memory>;
}
