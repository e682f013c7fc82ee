//! The only reader of environment variables. Each variable is described in docs/build.md.

use std::env;
use std::path::PathBuf;

use crate::Result;

/// Everything the build takes from outside.
pub struct Vars {
    /// Where Cargo wants this build's own products.
    pub out_dir: PathBuf,
    /// Where llama.cpp is built: one folder of the target directory for all profiles, since it is always optimised.
    pub shared_dir: PathBuf,
    /// This crate's folder.
    pub manifest_dir: PathBuf,
    /// `LLAMA_CPP_DIR`: another llama.cpp checkout to build instead of the pin.
    pub llama_cpp_dir: Option<PathBuf>,
    /// `DLLM_CUDA_ARCHITECTURES`: CMake list of compute capabilities, default `89;120`.
    pub cuda_architectures: String,
    /// `DLLM_CPU_NATIVE=1`: compile for exactly this processor instead of any x86-64 with AVX2 (or any ARMv8).
    pub cpu_native: bool,
    /// `DLLM_BUILD_JOBS`: parallel compiler processes, default Cargo's own number.
    pub jobs: Option<String>,
    /// The target triple's operating system, as Cargo names it (`linux`, `windows`, `macos`).
    pub target_os: String,
    /// The target triple's environment (`gnu`, `msvc`, empty).
    pub target_env: String,
    /// The target triple's processor (`x86_64`, `aarch64`).
    pub target_arch: String,
    /// Cargo features.
    pub cuda: bool,
    pub vulkan: bool,
    pub metal: bool,
    pub dynamic: bool,
    pub bindgen: bool,
}

impl Vars {
    pub fn read() -> Result<Self> {
        let out_dir = PathBuf::from(required("OUT_DIR")?);
        if flag("DLLM_CPU_NATIVE")? && feature("DYNAMIC_BACKENDS") {
            return Err(
                "DLLM_CPU_NATIVE=1 does not go with the feature dynamic-backends, whose libraries are made for any \
                        machine: leave one of them out"
                    .into(),
            );
        }
        // target/debug/build/llama-sys-0123/out
        let target_dir = out_dir.ancestors().nth(4).unwrap_or(&out_dir).to_owned();
        Ok(Self {
            shared_dir: target_dir.join("llama.cpp"),
            out_dir,
            manifest_dir: required("CARGO_MANIFEST_DIR")?.into(),
            llama_cpp_dir: watched("LLAMA_CPP_DIR").map(PathBuf::from),
            cuda_architectures: watched("DLLM_CUDA_ARCHITECTURES").unwrap_or_else(|| "89;120".into()),
            cpu_native: flag("DLLM_CPU_NATIVE")?,
            jobs: watched("DLLM_BUILD_JOBS").or_else(|| env::var("NUM_JOBS").ok()),
            target_os: required("CARGO_CFG_TARGET_OS")?,
            target_env: env::var("CARGO_CFG_TARGET_ENV").unwrap_or_default(),
            target_arch: required("CARGO_CFG_TARGET_ARCH")?,
            cuda: feature("CUDA"),
            vulkan: feature("VULKAN"),
            metal: feature("METAL"),
            dynamic: feature("DYNAMIC_BACKENDS"),
            bindgen: feature("BINDGEN"),
        })
    }

    /// What changes the compiled libraries, as text: builds that differ here have folders of their own.
    pub fn options(&self) -> String {
        let compiler = ["CC", "CXX", "CFLAGS", "CXXFLAGS", "CMAKE_GENERATOR", "CMAKE_TOOLCHAIN_FILE"]
            .map(|name| format!("{name}={}", watched(name).unwrap_or_default()));
        format!(
            "{} {} {} native={} cuda={} {} vulkan={} metal={} dynamic={} {}",
            self.target_os,
            self.target_env,
            self.target_arch,
            self.cpu_native,
            self.cuda,
            self.cuda_architectures,
            self.vulkan,
            self.metal,
            self.dynamic,
            compiler.join(" ")
        )
    }

    /// The tools that CMake and this script call; overridable by the usual names.
    pub fn cmake() -> String {
        watched("CMAKE").unwrap_or_else(|| "cmake".into())
    }

    /// `CUDACXX`, else `nvcc` under `CUDA_PATH`, else `nvcc` from PATH.
    pub fn nvcc() -> String {
        watched("CUDACXX")
            .or_else(|| watched("CUDA_PATH").map(|p| PathBuf::from(p).join("bin").join("nvcc").display().to_string()))
            .unwrap_or_else(|| "nvcc".into())
    }

    /// `VULKAN_SDK`, where the Vulkan loader's import library lies on Windows.
    pub fn vulkan_sdk() -> Option<PathBuf> {
        watched("VULKAN_SDK").map(PathBuf::from)
    }

    /// The folder that holds the CUDA toolkit's libraries, for static linking.
    pub fn cuda_lib_dirs() -> Vec<PathBuf> {
        let roots = [watched("CUDA_PATH"), watched("CUDA_HOME"), Some("/usr/local/cuda".into())];
        roots
            .into_iter()
            .flatten()
            .flat_map(|root| {
                ["lib64", "lib64/stubs", "lib/x64", "targets/x86_64-linux/lib"]
                    .map(|sub| PathBuf::from(&root).join(sub))
            })
            .filter(|dir| dir.is_dir())
            .collect()
    }

    /// The cargo that runs this build.
    pub fn cargo() -> String {
        env::var("CARGO").unwrap_or_else(|_| "cargo".into())
    }
}

fn required(name: &str) -> Result<String> {
    env::var(name).map_err(|_| format!("{name} is not set: this script runs under cargo only"))
}

/// Reads a variable of the user's and tells Cargo to run again when it changes.
fn watched(name: &str) -> Option<String> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn flag(name: &str) -> Result<bool> {
    match watched(name).as_deref() {
        None | Some("0") => Ok(false),
        Some("1") => Ok(true),
        Some(other) => Err(format!("{name} is {other:?}; set it to 0 or 1")),
    }
}

fn feature(name: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{name}")).is_some()
}
