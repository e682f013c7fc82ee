//! What must hold for any bytes: for the fuzz target, and for `tests/corpus.rs` with every file of the corpus.

use std::path::Path;

use dllm_engine::gguf::Header;

/// Bytes as a GGUF header: an answer whose tensors lie in the file, or an error; never a panic.
pub fn check(data: &[u8]) {
    let Ok(header) = Header::read(data, data.len() as u64, Path::new("fuzz.gguf")) else { return };
    for tensor in &header.tensors {
        assert!(tensor.offset + tensor.bytes <= data.len() as u64, "{tensor:?}");
    }
    for (key, value) in header.meta.iter() {
        assert!(!key.is_empty() && value.to_string().len() < 1 << 20);
    }
}
