#![no_main]

#[path = "../check/request.rs"]
mod request;

libfuzzer_sys::fuzz_target!(|data: &[u8]| request::check(data));
