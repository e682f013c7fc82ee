//! The tiny trained model inside the program.

use crate::error::Result;
use crate::gguf::Gguf;

/// Aligned, because ggml computes on the bytes where they lie.
#[repr(align(64))]
struct Aligned<T: ?Sized>(T);

static MODEL: &Aligned<[u8]> = &Aligned(*include_bytes!("../assets/dllm-tiny-q8_0.gguf"));

/// Opens it.
///
/// # Errors
/// None in a program that was built from an intact tree.
pub fn model() -> Result<Gguf> {
    Gguf::from_static(&MODEL.0, "embedded model dllm-tiny")
}
