//! Runs diffusion language models in process.

pub mod denoise;
pub mod error;
pub mod event;
pub mod kernels;
pub mod model;
pub mod params;
pub mod receipt;
pub mod rng;
pub mod sampler;

pub use error::{Error, Result};
