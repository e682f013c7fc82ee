//! Runs diffusion language models in process, on ggml.

pub mod denoise;
pub mod error;
pub mod event;
pub mod family;
pub mod ggml;
pub mod gguf;
mod kernels;
pub mod model;
pub mod params;
#[cfg(feature = "cli")]
pub mod parity;
pub mod receipt;
pub mod sampler;

pub use error::{Error, Result};
