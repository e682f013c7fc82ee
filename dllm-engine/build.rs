//! Builds the CUDA kernels (feature `cuda`), tells the linker where the shared libraries of a `dynamic-backends` build lie, and
//! the program where to look for backends while it runs from the target directory. Static builds without `cuda` need none.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(dynamic_backends, linked_kernels)");
    let dynamic = env::var("DEP_DLLM_LLAMA_DYNAMIC").is_ok_and(|d| d == "1");
    let lib_dir = env::var("DEP_DLLM_LLAMA_LIB_DIR").ok();
    if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        let built = match (dynamic, &lib_dir) {
            (true, Some(dir)) => shared_kernels(Path::new(dir)),
            _ => linked_kernels(),
        };
        if let Err(why) = built {
            println!("cargo::error={why}");
            return;
        }
    }
    let (true, Some(lib_dir)) = (dynamic, lib_dir) else { return };
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

/// The CUDA sources.
fn sources() -> Result<Vec<PathBuf>, String> {
    println!("cargo::rerun-if-changed=kernels");
    let folder = std::fs::read_dir("kernels").map_err(|e| format!("cannot read dllm-engine/kernels: {e}"))?;
    let mut files: Vec<_> = folder.filter_map(|f| f.ok().map(|f| f.path())).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "cu"));
    files.sort();
    Ok(files)
}

/// `-gencode` for each architecture that llama.cpp is built for (`89`, `90a`, `120-real`).
fn code_flags() -> Vec<String> {
    let list = env::var("DEP_DLLM_LLAMA_CUDA_ARCHITECTURES").unwrap_or_else(|_| "89;120".into());
    let number = |a: &str| a.split('-').next().unwrap_or(a).to_owned();
    list.split(';')
        .filter(|a| !a.is_empty())
        .map(number)
        .flat_map(|a| ["-gencode".to_owned(), format!("arch=compute_{a},code=sm_{a}")])
        .collect()
}

/// Into this program. llama-sys links the CUDA runtime and cuBLAS.
fn linked_kernels() -> Result<(), String> {
    let mut build = cc::Build::new();
    build.cuda(true).cudart("none").flag("-std=c++17").flag("-O3").files(sources()?);
    if let Ok(nvcc) = env::var("DEP_DLLM_LLAMA_NVCC") {
        build.compiler(nvcc);
    }
    for flag in code_flags() {
        build.flag(&flag);
    }
    build.try_compile("dllm_kernels").map_err(|e| format!("cannot compile the CUDA kernels: {e}"))?;
    println!("cargo::rustc-cfg=linked_kernels");
    Ok(())
}

/// As a library beside the backends, loaded when a CUDA device is used.
fn shared_kernels(lib_dir: &Path) -> Result<(), String> {
    let windows = env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "windows");
    let name = if windows { "dllm_kernels.dll" } else { "libdllm_kernels.so" };
    let nvcc = env::var("DEP_DLLM_LLAMA_NVCC").unwrap_or_else(|_| "nvcc".into());
    let mut run = Command::new(&nvcc);
    run.args(["-shared", "-O3", "-std=c++17", "-threads", "0"]).args(code_flags());
    if !windows {
        run.args(["-Xcompiler", "-fPIC,-fvisibility=hidden"]);
    }
    run.arg("-o").arg(lib_dir.join(name)).args(sources()?).arg("-lcublas");
    let status = run.status().map_err(|e| format!("cannot run {nvcc}: {e}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{nvcc} could not compile the CUDA kernels; its message stands above"))
    }
}
