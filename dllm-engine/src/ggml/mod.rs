//! Safe wrappers over the C libraries. With `kernels` the only place that may say `unsafe`.
#![allow(unsafe_code)]

pub mod log;
pub mod vocab;
