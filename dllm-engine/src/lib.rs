//! Runs diffusion language models in process, on ggml.

pub mod chat;
pub mod error;
pub mod event;
pub mod ggml;
pub mod params;
pub mod prompt;
pub mod receipt;
pub mod text;
pub mod vocab;

pub use error::{Error, Result};
