//! Drives CMake. Only ggml, its backends and libllama are built.

use std::path::PathBuf;

use crate::Result;
use crate::source::Tree;
use crate::vars::Vars;

/// Where the libraries lie after the build.
pub struct Built {
    pub lib_dirs: Vec<PathBuf>,
}

/// What a static or dynamic build switches off in llama.cpp's own CMake files.
const OFF: &[&str] = &[
    "LLAMA_BUILD_COMMON",
    "LLAMA_BUILD_TOOLS",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_SERVER",
    "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_APP",
    "LLAMA_BUILD_MTMD",
    "LLAMA_OPENSSL",
    "LLAMA_SUBPROCESS",
    "LLAMA_BUILD_IS_DEV",
    "GGML_OPENMP",
    "GGML_CCACHE_WARNING",
    "GGML_CUDA_NCCL",
    "GGML_ALL_WARNINGS",
    "LLAMA_ALL_WARNINGS",
];

pub fn build(vars: &Vars, tree: &Tree) -> Result<Built> {
    let lib_dir = tree.work_dir.join("lib");
    // Multi-configuration generators (Visual Studio) add a folder named after the configuration.
    // llama.cpp's own CMake file sends shared libraries to `bin` whatever it is told; that folder is the last one listed.
    let shared_dir = tree.work_dir.join("build/bin");
    let found = || {
        let folders = [lib_dir.clone(), lib_dir.join("Release"), shared_dir.clone(), shared_dir.join("Release")];
        folders.into_iter().filter(|d| d.read_dir().is_ok_and(|mut files| files.next().is_some())).collect()
    };
    let done = tree.work_dir.join("built.stamp");
    if tree.fixed && done.is_file() {
        return Ok(Built { lib_dirs: found() });
    }
    let mut config = cmake::Config::new(&tree.root);
    // Always optimised: an unoptimised ggml is a hundred times slower and nobody debugs it from here.
    config.profile("Release").very_verbose(false).out_dir(&tree.work_dir);
    for name in OFF {
        config.define(name, "OFF");
    }
    let on = |yes: bool| if yes { "ON" } else { "OFF" };
    config
        .define("GGML_NATIVE", on(vars.cpu_native))
        .define("BUILD_SHARED_LIBS", on(vars.dynamic))
        .define("GGML_BACKEND_DL", on(vars.dynamic))
        .define("GGML_CUDA", on(vars.cuda))
        .define("GGML_VULKAN", on(vars.vulkan))
        .define("GGML_METAL", on(vars.metal))
        .define("GGML_ACCELERATE", on(vars.target_os == "macos"))
        .define("GGML_BLAS", "OFF")
        .define("CMAKE_POSITION_INDEPENDENT_CODE", "ON")
        .define("CMAKE_BUILD_WITH_INSTALL_RPATH", "ON")
        .define("CMAKE_INSTALL_RPATH", if vars.target_os == "macos" { "@loader_path" } else { "$ORIGIN" });
    if vars.target_arch == "x86_64" && !vars.cpu_native {
        // llama.cpp switches these off by itself when it is cross-compiled, without a word.
        for name in ["GGML_SSE42", "GGML_AVX", "GGML_AVX2", "GGML_BMI2", "GGML_FMA", "GGML_F16C"] {
            config.define(name, "ON");
        }
    }
    for kind in ["ARCHIVE", "LIBRARY", "RUNTIME"] {
        config.define(format!("CMAKE_{kind}_OUTPUT_DIRECTORY"), &lib_dir);
    }
    if vars.cuda {
        config.define("CMAKE_CUDA_ARCHITECTURES", &vars.cuda_architectures).define("CMAKE_CUDA_COMPILER", Vars::nvcc());
    }
    if let Some(jobs) = &vars.jobs {
        // The cmake crate hands NUM_JOBS on by itself; a number of the user's goes through CMake's own variable.
        config.env("CMAKE_BUILD_PARALLEL_LEVEL", jobs);
    }
    for target in targets(vars) {
        // The cmake crate panics where CMake fails; what the compiler said stands above.
        let run = std::panic::AssertUnwindSafe(|| config.build_target(target).build());
        std::panic::catch_unwind(run).map_err(|_| {
            format!(
                "CMake could not build llama.cpp's target {target}; the compiler's own message stands above. A full disk, too \
                 little memory (set DLLM_BUILD_JOBS=1) and an old compiler (C++17 is needed) are the usual reasons"
            )
        })?;
    }
    std::fs::write(&done, "").map_err(|e| format!("cannot write {}: {e}", done.display()))?;
    Ok(Built { lib_dirs: found() })
}

/// With dynamic backends nothing links against a backend, so each is a target of its own.
fn targets(vars: &Vars) -> Vec<&'static str> {
    let mut list = vec!["llama"];
    if vars.dynamic {
        list.push("ggml-cpu");
        list.extend(
            [(vars.cuda, "ggml-cuda"), (vars.vulkan, "ggml-vulkan"), (vars.metal, "ggml-metal")]
                .iter()
                .filter(|(on, _)| *on)
                .map(|(_, name)| *name),
        );
    }
    list
}

/// Sizes and offsets as the C compiler sees them, for tests/abi.rs.
pub fn abi_table(tree: &Tree) -> Result<()> {
    cc::Build::new()
        .file("abi/abi.c")
        .include(tree.root.join("ggml/include"))
        .include(tree.root.join("include"))
        .warnings(false)
        .try_compile("dllm_abi")
        .map_err(|e| format!("cannot compile llama-sys/abi/abi.c: {e}"))
}
