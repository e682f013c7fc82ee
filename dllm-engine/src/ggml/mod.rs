//! Safe wrappers over ggml's C API: the only user of `llama-sys` besides `kernels`. A wrapper's doc names the C function.
//!
//! Ownership: `Backend`, `Buffer`, `Context`, `Graph` and `Allocator` own their C object and free it on drop. A `Tensor<'c>`
//! borrows the `Context` it was made in. ggml asserts (and so aborts) on wrong shapes: callers check shapes first, and the
//! wrappers check what is cheap.
#![allow(unsafe_code)]

mod backend;
mod buffer;
mod context;
mod graph;
mod hook;
pub mod log;
pub(crate) mod mmap;
mod scheduler;
mod store;
mod tensor;
pub mod types;
pub(crate) mod vocab;

pub(crate) use backend::{Backend, Device, DeviceKind, MAX_THREADS, devices};
pub(crate) use buffer::Buffer;
pub(crate) use context::{Context, Rope};
pub(crate) use graph::{Allocator, Graph, NodeOp, OpKey};
pub(crate) use hook::enqueued;
pub(crate) use scheduler::Scheduler;
pub(crate) use store::Store;
pub(crate) use tensor::{Handle, Tensor, dequantize, row_bytes};
pub use types::GgmlType;
