//! Custom graph ops (decision D4): a noun, one file; here the CPU twins, and in `device` the CUDA nodes. Each has a shape
//! contract in its doc.
//!
//! This is one of the three rooms that may use `unsafe`: ops read and write tensors through raw pointers.
#![allow(unsafe_code)]

mod contract;
pub(crate) mod device;
mod geglu;
pub(crate) mod library;
pub mod position_stats;
mod soft_embed;
mod stats_op;
#[cfg(any(test, feature = "kernel-tests"))]
#[doc(hidden)]
pub mod twins;

pub(crate) use geglu::ExactGeglu;
pub(crate) use soft_embed::SoftEmbed;
pub(crate) use stats_op::{PositionStats, WORDS};

use std::ops::Range;

use llama_sys::ggml_tensor;

/// The part of `n` items that thread `ith` of `nth` does.
fn share(n: usize, ith: usize, nth: usize) -> Range<usize> {
    n * ith / nth..n * (ith + 1) / nth
}

/// Source `i` of a node.
///
/// # Safety
/// The node was made with more than `i` sources.
unsafe fn source(dst: &ggml_tensor, i: usize) -> &ggml_tensor {
    // SAFETY: sources of a live node are live tensors.
    unsafe { &*dst.src[i] }
}

/// Row `(i1, i2, i3)` of a tensor with contiguous rows.
///
/// # Safety
/// The tensor is allocated on the host, its element type is `T` and the index is in range.
unsafe fn row<T>(t: &ggml_tensor, i1: usize, i2: usize, i3: usize) -> &[T] {
    debug_assert_eq!(t.nb[0], size_of::<T>());
    let offset = i1 * t.nb[1] + i2 * t.nb[2] + i3 * t.nb[3];
    // SAFETY: in range by contract; rows are contiguous.
    unsafe { std::slice::from_raw_parts(t.data.cast::<u8>().add(offset).cast(), t.ne[0] as usize) }
}

/// As `row`, for writing.
///
/// # Safety
/// As `row`; no other thread touches this row.
#[allow(clippy::mut_from_ref)]
unsafe fn row_mut<T>(t: &ggml_tensor, i1: usize, i2: usize, i3: usize) -> &mut [T] {
    debug_assert_eq!(t.nb[0], size_of::<T>());
    let offset = i1 * t.nb[1] + i2 * t.nb[2] + i3 * t.nb[3];
    // SAFETY: in range and exclusive by contract.
    unsafe { std::slice::from_raw_parts_mut(t.data.cast::<u8>().add(offset).cast(), t.ne[0] as usize) }
}
