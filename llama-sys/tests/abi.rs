//! The bindings' sizes and offsets equal the C compiler's (abi/abi.c).
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::mem::{offset_of, size_of};

use llama_sys::*;

#[repr(C)]
struct Row {
    type_: *const c_char,
    field: *const c_char,
    value: u64,
}

unsafe extern "C" {
    fn dllm_abi_table(n: *mut usize) -> *const Row;
}

fn c_table() -> HashMap<String, u64> {
    let mut n = 0;
    // SAFETY: the function writes n and returns n rows of static data with NUL-terminated texts.
    let rows = unsafe { std::slice::from_raw_parts(dllm_abi_table(&mut n), n) };
    let text = |p| {
        // SAFETY: see above.
        unsafe { CStr::from_ptr(p) }.to_str().unwrap().to_owned()
    };
    rows.iter().map(|r| (format!("{}.{}", text(r.type_), text(r.field)), r.value)).collect()
}

macro_rules! rust_table {
    ($($ty:ident { $($field:ident = $c:literal),* })*) => {
        vec![$( (format!("{}.", stringify!($ty)), size_of::<$ty>() as u64),
            $( (format!("{}.{}", stringify!($ty), $c), offset_of!($ty, $field) as u64), )* )*]
    };
}

#[test]
fn layouts_equal_the_c_compilers() {
    let c = c_table();
    let rust = rust_table! {
        ggml_tensor { type_ = "type", buffer = "buffer", ne = "ne", nb = "nb", op = "op", op_params = "op_params",
            flags = "flags", src = "src", view_src = "view_src", view_offs = "view_offs", data = "data", name = "name",
            extra = "extra" }
        ggml_init_params { mem_buffer = "mem_buffer", no_alloc = "no_alloc" }
        ggml_type_traits { blck_size = "blck_size", type_size = "type_size", to_float = "to_float" }
        ggml_backend_dev_props { memory_free = "memory_free", caps = "caps" }
        ggml_backend_dev_caps { }
        ggml_threadpool_params { n_threads = "n_threads", poll = "poll" }
        llama_model_params { n_gpu_layers = "n_gpu_layers", kv_overrides = "kv_overrides", vocab_only = "vocab_only",
            check_tensors = "check_tensors" }
        llama_model_kv_override { key = "key" }
    };
    for (name, value) in &rust {
        assert_eq!(c.get(name), Some(value), "{name}: C and Rust disagree");
    }
    // `val_str` sits in an anonymous union, which Rust names differently: it is the one row not covered above.
    assert_eq!(rust.len() + 1, c.len(), "abi.c and this test must list the same fields");
}
