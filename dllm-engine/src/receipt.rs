//! The receipt that goes with every result: what ran, with which settings, and what it cost.

use serde::Serialize;

use crate::params::{Dense, KvType, Level};

/// What ran and what it cost. Times in milliseconds, memory in bytes.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Receipt {
    /// The model's name, as its file says.
    pub model: String,
    /// Family of the model (`diffusion-gemma`).
    pub family: String,
    /// The weights' main type (`Q4_K_M`, `F16`).
    pub quantization: String,
    /// Device that computed (`CPU`, `CUDA0`).
    pub device: String,
    /// The seed, given or drawn: with the candidate's number it reproduces the result.
    pub seed: u64,
    /// Which of several candidates with this seed it is.
    pub candidate: u64,
    /// Exactness that ran.
    pub level: Level,
    /// Storage of keys and values that ran.
    pub kv: KvType,
    /// How the dense matrices lay in a CUDA device's memory; `None` elsewhere.
    pub dense: Option<Dense>,
    /// Which part of the model lay where, in words; `None` where it was whole on `device`.
    pub placement: Option<String>,
    /// Name of the sampler (`entropy-bound`).
    pub sampler: String,
    /// Most steps per canvas that were allowed.
    pub max_steps: u32,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens found in the cache, so not read again.
    pub cached_tokens: usize,
    /// Tokens of the answer before end of generation, thought text included.
    pub tokens: usize,
    /// Denoising steps of each canvas.
    pub steps_per_canvas: Vec<u32>,
    /// Answer tokens per forward pass of the decoder.
    pub tokens_per_forward: f64,
    /// Time to read the prompt.
    pub prefill_ms: f64,
    /// Median time of a denoising step.
    pub step_ms: f64,
    /// Time of the commit passes.
    pub commit_ms: f64,
    /// Host work of the loop outside the forward passes.
    pub host_ms: f64,
    /// Wall time from the request to its end, the making of tokens of its prompt included.
    pub total_ms: f64,
    /// Answer tokens per second of wall time, prefill included.
    pub tokens_per_second: f64,
    /// Lanes that ran beside this one at most, itself included.
    pub lanes: usize,
    /// Graphs built for this request; a graph is built once per (lanes, padded keys).
    pub graphs_built: u64,
    /// Graphs replayed for this request.
    pub graphs_replayed: u64,
    /// Passes of this request that a CUDA device ran as one captured graph.
    pub captured_replays: u64,
    /// Most device memory in use: weights, cache, compute buffers.
    pub device_bytes: u64,
}
