//! Runs diffusion language models in process, on ggml.

mod bounded;
pub mod chat;
pub mod denoise;
mod embedded;
mod engine;
pub mod error;
pub mod event;
pub mod family;
pub mod ggml;
pub mod gguf;
pub mod kernels;
pub mod model;
mod namespace;
pub mod params;
#[cfg(feature = "cli")]
pub mod parity;
pub mod prompt;
pub mod receipt;
pub mod rng;
pub mod sampler;
pub mod text;
mod tokenizer;
pub mod vocab;

pub use engine::{Chat, Engine, ModelInfo};
pub use error::{Error, Result};
pub use event::{Completion, Control, Event, FinishReason, Step};
pub use model::{DevicePlan, MemoryPlan, PartTime};
pub use params::{
    DenoiseOverrides, Dense, EngineParams, KvType, Level, Message, ModelSource, Offload, Pin, Prompt, Request, Role,
};
pub use receipt::Receipt;
pub use tokenizer::Tokenizer;
