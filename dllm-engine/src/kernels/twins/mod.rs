//! What the CUDA kernels compute, in plain Rust: F64 sums, no speed. The tests hold these twins to ggml's stock operations on
//! the CPU, and the kernels to the twins where there is a CUDA device. The bench takes its inputs from here, too.
//!
//! Built for tests and with feature `kernel-tests` only; no part of the library's interface.

pub mod attention;
pub mod bench;
mod bench_parts;
pub mod experts;
pub(crate) mod gpu;
pub mod input;
pub mod norms;
pub mod products;
pub mod tokens;

#[cfg(test)]
mod tests;

/// F32 values as F64.
pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|x| f64::from(*x)).collect()
}
