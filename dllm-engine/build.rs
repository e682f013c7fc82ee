//! Tells the linker where the shared libraries of a `dynamic-backends` build lie, and the program where to look for
//! backends while it runs from the target directory. Static builds need neither.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(dynamic_backends, linked_kernels)");
    let dynamic = env::var("DEP_DLLM_LLAMA_DYNAMIC").is_ok_and(|d| d == "1");
    let Ok(lib_dir) = env::var("DEP_DLLM_LLAMA_LIB_DIR") else { return };
    if !dynamic {
        return;
    }
    println!("cargo::rustc-env=DLLM_BACKEND_DIR={lib_dir}");
    println!("cargo::rustc-cfg=dynamic_backends");
    // Beside the program first, so that a folder with both can be carried elsewhere.
    match env::var("CARGO_CFG_TARGET_OS").as_deref() {
        Ok("windows") => {}
        Ok("macos") => rpath(&["@loader_path", &lib_dir]),
        _ => rpath(&["$ORIGIN", &lib_dir]),
    }
}

fn rpath(folders: &[&str]) {
    for folder in folders {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{folder}");
    }
}
