//! Safe wrappers over ggml. The engine's only user of the foreign functions, and one of its two rooms with `unsafe`.

#![allow(unsafe_code)]

pub(crate) mod mmap;
pub mod types;

pub use types::GgmlType;
