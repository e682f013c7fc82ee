//! Raw FFI to the pinned llama.cpp: `ggml.h`, `ggml-alloc.h`, `ggml-backend.h`, `ggml-cpu.h`, `llama.h`.
//!
//! Nothing here is safe or documented beyond the C headers; `dllm-engine` holds the safe wrappers. GGUF files are read by
//! the engine in Rust, so of `gguf.h` only the functions that build metadata in memory are bound, by hand.

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals, clippy::all)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));

/// `GGUF_TYPE_INT32` and `GGUF_TYPE_FLOAT32` of gguf.h: part of the file format, so they never change.
pub const GGUF_TYPE_INT32: ::std::os::raw::c_uint = 5;
pub const GGUF_TYPE_FLOAT32: ::std::os::raw::c_uint = 6;

unsafe extern "C" {
    pub fn gguf_init_empty() -> *mut gguf_context;
    pub fn gguf_free(ctx: *mut gguf_context);
    pub fn gguf_set_val_u32(ctx: *mut gguf_context, key: *const ::std::os::raw::c_char, val: u32);
    pub fn gguf_set_val_bool(ctx: *mut gguf_context, key: *const ::std::os::raw::c_char, val: bool);
    pub fn gguf_set_val_str(
        ctx: *mut gguf_context,
        key: *const ::std::os::raw::c_char,
        val: *const ::std::os::raw::c_char,
    );
    pub fn gguf_set_arr_data(
        ctx: *mut gguf_context,
        key: *const ::std::os::raw::c_char,
        type_: ::std::os::raw::c_uint,
        data: *const ::std::os::raw::c_void,
        n: usize,
    );
    pub fn gguf_set_arr_str(
        ctx: *mut gguf_context,
        key: *const ::std::os::raw::c_char,
        data: *mut *const ::std::os::raw::c_char,
        n: usize,
    );
}
