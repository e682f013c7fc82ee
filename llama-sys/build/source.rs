//! Finds the llama.cpp tree, copies what is needed to OUT_DIR and applies the patch queue there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::vars::Vars;
use crate::{Result, patch};

const PIN: &str = "llama-cpp-sys-2";

/// The parts of the tree that ggml and libllama need. Everything else (tools, tests, server) stays behind.
const PARTS: &[&str] = &["CMakeLists.txt", "LICENSE", "cmake", "ggml", "include", "src", "vendor"];

/// A patched copy of llama.cpp, ready to build.
pub struct Tree {
    /// The sources.
    pub root: PathBuf,
    /// Where they are built; holds `root`.
    pub work_dir: PathBuf,
    /// A checkout of the user's may change under us, so its build is never taken as done.
    pub fixed: bool,
    /// False when another checkout was given and the patch queue does not fit it: the stock-op composition is used then.
    pub patched: bool,
}

/// Waits until no other build uses the shared folder. The lock ends with the returned file.
pub fn lock(vars: &Vars) -> Result<fs::File> {
    fs::create_dir_all(&vars.shared_dir).map_err(|e| format!("cannot create {}: {e}", vars.shared_dir.display()))?;
    let path = vars.shared_dir.join("lock");
    let fail = |e: std::io::Error| format!("cannot lock {}: {e}", path.display());
    let file = fs::File::create(&path).map_err(fail)?;
    file.lock().map_err(fail)?;
    Ok(file)
}

/// `compilers` says who compiles: other compilers, other libraries.
pub fn prepare(vars: &Vars, compilers: &str) -> Result<Tree> {
    let patch_dir = vars.manifest_dir.join("../vendor/patches");
    println!("cargo::rerun-if-changed={}", patch_dir.display());
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-changed=abi");
    println!("cargo::rerun-if-changed=wrapper.h");
    let patches = read_patches(&patch_dir)?;

    let (origin, label) = match &vars.llama_cpp_dir {
        Some(dir) => {
            println!("cargo::rerun-if-changed={}", dir.join("ggml/include/ggml.h").display());
            (dir.clone(), format!("checkout {}", dir.display()))
        }
        None => pinned_tree(vars)?,
    };
    if !origin.join("ggml/include/ggml.h").is_file() {
        return Err(format!(
            "{} holds no ggml/include/ggml.h: LLAMA_CPP_DIR must name the root of a llama.cpp checkout",
            origin.display()
        ));
    }

    let stamp = stamp(&label, &patches, &format!("{}\n{compilers}", vars.options()));
    let work_dir = vars.shared_dir.join(format!("{:016x}", fnv(stamp.as_bytes())));
    let root = work_dir.join("source");
    let stamp_file = work_dir.join("source.stamp");
    fs::create_dir_all(&work_dir).map_err(|e| format!("cannot create {}: {e}", work_dir.display()))?;
    let fixed = vars.llama_cpp_dir.is_none();
    let done = fs::read_to_string(&stamp_file).unwrap_or_default();
    if let Some(state) = done.strip_prefix(&stamp).filter(|_| fixed) {
        return Ok(Tree { root, work_dir, fixed, patched: state.trim() == "patched" });
    }
    for part in PARTS {
        copy(&origin.join(part), &root.join(part))?;
    }
    let patched = match apply_all(&root, &patches) {
        Ok(()) => true,
        Err(why) if !fixed => {
            println!("cargo::warning=the patch queue does not fit this checkout ({why}); custom CUDA ops are off");
            false
        }
        Err(why) => return Err(why),
    };
    fs::write(&stamp_file, format!("{stamp}{}", if patched { "patched" } else { "plain" }))
        .map_err(|e| format!("cannot write {}: {e}", stamp_file.display()))?;
    Ok(Tree { root, work_dir, fixed, patched })
}

/// Asks Cargo where the pinned crate lies; Cargo downloads it first if it must, and has checked its checksum.
fn pinned_tree(vars: &Vars) -> Result<(PathBuf, String)> {
    let run = |offline: bool| {
        let mut command = Command::new(Vars::cargo());
        command.args(["metadata", "--locked", "--format-version", "1", "--manifest-path"]);
        command.arg(vars.manifest_dir.join("Cargo.toml"));
        if offline {
            command.arg("--offline");
        }
        command.output().map_err(|e| format!("cannot run cargo metadata: {e}"))
    };
    // Offline first: the crate is usually there, and a build without a network must not wait for one.
    let mut output = run(true)?;
    if !output.status.success() {
        output = run(false)?;
    }
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(format!("cargo metadata could not fetch {PIN} (run `cargo fetch --locked` once): {}", text.trim()));
    }
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).map_err(|e| format!("cargo metadata printed no JSON: {e}"))?;
    let package = metadata["packages"]
        .as_array()
        .and_then(|list| list.iter().find(|p| p["name"] == PIN))
        .ok_or_else(|| format!("Cargo.lock does not pin {PIN}: restore the project's Cargo.lock"))?;
    let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
    let root = manifest.parent().unwrap_or(Path::new("")).join("llama.cpp");
    Ok((root, format!("{PIN} {}", package["version"])))
}

fn read_patches(dir: &Path) -> Result<Vec<(String, String)>> {
    let mut list = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| format!("cannot read {}: {e}", dir.display()))? {
        let path = entry.map_err(|e| e.to_string())?.path();
        if path.extension().is_some_and(|e| e == "patch") {
            let text = fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
            list.push((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), text));
        }
    }
    list.sort();
    Ok(list)
}

fn apply_all(root: &Path, patches: &[(String, String)]) -> Result<()> {
    for (name, text) in patches {
        patch::apply(root, text).map_err(|why| format!("{name}: {why}"))?;
    }
    Ok(())
}

/// Everything that a build depends on, as text.
fn stamp(label: &str, patches: &[(String, String)], options: &str) -> String {
    let mut text = format!("{label}\n{options}\n");
    for (name, body) in patches {
        text += &format!("{name} {:016x}\n", fnv(body.as_bytes()));
    }
    text
}

/// FNV-1a: only has to tell builds apart.
fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

/// Copies a file or folder; a file whose content is the same is left alone, so that CMake does not build it again.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let fail = |e: std::io::Error| format!("cannot copy {} to {}: {e}", from.display(), to.display());
    if from.is_dir() {
        fs::create_dir_all(to).map_err(fail)?;
        for entry in fs::read_dir(from).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            if entry.file_name() != ".git" {
                copy(&entry.path(), &to.join(entry.file_name()))?;
            }
        }
    } else if from.is_file() {
        let bytes = fs::read(from).map_err(fail)?;
        if fs::read(to).ok().as_deref() != Some(&bytes[..]) {
            if let Some(parent) = to.parent() {
                fs::create_dir_all(parent).map_err(fail)?;
            }
            fs::write(to, bytes).map_err(fail)?;
        }
    }
    Ok(())
}
