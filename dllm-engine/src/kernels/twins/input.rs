//! Inputs of tests and bench: counter-based random numbers, so that a value depends on its seed and place alone, and matrices
//! in ggml's block types.

// C enums are `u32` here and `i32` with MSVC: the casts are needed on one of them only.
#![allow(clippy::unnecessary_cast)]

use half::f16;
use llama_sys as sys;

use crate::ggml::{GgmlType, dequantize, row_bytes};
use crate::rng::philox4x32;

/// A stream of random numbers.
#[derive(Debug)]
pub struct Input {
    key: [u32; 2],
    count: u64,
}

impl Input {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32], count: 0 }
    }

    /// Four uniform numbers in [0, 1).
    fn four(&mut self) -> [f32; 4] {
        self.count += 1;
        philox4x32([self.count as u32, (self.count >> 32) as u32, 0, 0], self.key)
            .map(|word| (word >> 8) as f32 * (1.0 / 16_777_216.0))
    }

    /// A uniform number in [0, 1).
    pub fn unit(&mut self) -> f32 {
        self.four()[0]
    }

    /// A bell-shaped number of mean 0 and variance 1, at most 2 sqrt(3) in size: the sum of four uniform ones.
    pub fn bell(&mut self) -> f32 {
        (self.four().iter().sum::<f32>() - 2.0) * 3.0_f32.sqrt()
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.unit() * n as f32) as usize).min(n - 1)
    }

    /// `n` bell-shaped numbers times `scale`.
    pub fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.bell() * scale).collect()
    }

    /// As `values`, in half precision.
    pub fn halves(&mut self, n: usize, scale: f32) -> Vec<f16> {
        (0..n).map(|_| f16::from_f32(self.bell() * scale)).collect()
    }

    /// Weights of a norm: around 1.
    pub fn norm(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| 1.0 + 0.3 * self.bell()).collect()
    }

    /// The numbers below `n` in random order.
    pub fn order(&mut self, n: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..n).collect();
        (1..n).rev().for_each(|i| all.swap(i, self.below(i + 1)));
        all
    }
}

/// Halves as F32.
pub fn single(halves: &[f16]) -> Vec<f32> {
    halves.iter().map(|h| h.to_f32()).collect()
}

/// The block types that the matrix kernels take: F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16.
pub fn block_types() -> Vec<GgmlType> {
    crate::kernels::contract::BLOCK_TYPES.iter().filter_map(|id| GgmlType::from_id(*id as u32)).collect()
}

/// A matrix [rows][k] in blocks as they lie in a file.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Type of the blocks.
    pub ty: GgmlType,
    /// Rows.
    pub rows: usize,
    /// Row length, a multiple of the type's block.
    pub k: usize,
    /// The blocks.
    pub bytes: Vec<u8>,
}

impl Matrix {
    /// Values as `ty` holds them (`ggml_quantize_chunk`).
    pub fn of(ty: GgmlType, values: &[f32], k: usize) -> Self {
        assert!(values.len().is_multiple_of(k) && (k as u64).is_multiple_of(ty.block_size()), "{ty} rows of {k}");
        let rows = values.len() / k;
        let mut bytes = vec![0_u8; row_bytes(ty, k) * rows];
        // SAFETY: `values` holds rows x k floats, `bytes` as many in blocks of `ty`; the types used here need no importance
        // matrix, so that it may be null.
        let written = unsafe {
            sys::ggml_quantize_chunk(
                ty.id() as sys::ggml_type,
                values.as_ptr(),
                bytes.as_mut_ptr().cast(),
                0,
                rows as i64,
                k as i64,
                std::ptr::null(),
            )
        };
        assert_eq!(written, bytes.len(), "{ty}");
        Self { ty, rows, k, bytes }
    }

    /// Bell-shaped values of a typical size of `scale`.
    pub fn random(ty: GgmlType, rows: usize, k: usize, scale: f32, input: &mut Input) -> Self {
        Self::of(ty, &input.values(rows * k, scale), k)
    }

    /// What the blocks stand for, by ggml's own conversion.
    pub fn values(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.k];
        dequantize(self.ty, &self.bytes, &mut out).unwrap_or_else(|e| panic!("{e}"));
        out
    }
}
