//! Runs diffusion language models in process, on ggml.

pub mod error;
pub mod event;
pub mod ggml;
pub mod gguf;
pub mod model;
pub mod params;
pub mod receipt;
pub mod sampler;

pub use error::{Error, Result};
