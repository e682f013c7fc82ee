//! Raw FFI to the pinned llama.cpp: `ggml.h`, `ggml-alloc.h`, `ggml-backend.h`, `ggml-cpu.h`, `llama.h`.
//!
//! Nothing here is safe or documented beyond the C headers; `dllm-engine` holds the safe wrappers. GGUF files are read by
//! the engine in Rust, so `gguf.h` is not bound.

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals, clippy::all)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
