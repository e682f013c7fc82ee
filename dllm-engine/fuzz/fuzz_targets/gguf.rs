#![no_main]

#[path = "../check/gguf.rs"]
mod gguf;

libfuzzer_sys::fuzz_target!(|data: &[u8]| gguf::check(data));
