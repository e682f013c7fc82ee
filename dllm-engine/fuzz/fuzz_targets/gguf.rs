//! Any bytes as a GGUF header: an answer or an error, never a panic.

#![no_main]

use std::path::Path;

use dllm_engine::gguf::Header;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(header) = Header::read(data, data.len() as u64, Path::new("fuzz.gguf")) {
        for tensor in &header.tensors {
            assert!(tensor.offset + tensor.bytes <= data.len() as u64);
        }
        for (_, value) in header.meta.iter() {
            std::hint::black_box(value.to_string());
        }
    }
});
