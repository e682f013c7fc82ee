//! The bindings: checked in for the pin, regenerated with feature `bindgen` or for another checkout.

use std::fs;

use crate::Result;
use crate::source::Tree;
use crate::vars::Vars;

/// Writes OUT_DIR/bindings.rs, which src/lib.rs includes.
pub fn generate(vars: &Vars, tree: &Tree) -> Result<()> {
    let target = vars.out_dir.join("bindings.rs");
    println!("cargo::rerun-if-changed=src/bindings.rs");
    if vars.bindgen {
        return with_bindgen(vars, tree);
    }
    if vars.llama_cpp_dir.is_some() {
        return Err(
            "LLAMA_CPP_DIR needs bindings of its own headers: add the feature `bindgen` (which needs libclang, \
                    `apt-get install libclang-dev`)"
                .into(),
        );
    }
    let checked_in = vars.manifest_dir.join("src/bindings.rs");
    fs::copy(&checked_in, &target).map_err(|e| format!("cannot copy {}: {e}", checked_in.display()))?;
    let _ = tree;
    Ok(())
}

#[cfg(not(feature = "bindgen"))]
fn with_bindgen(_: &Vars, _: &Tree) -> Result<()> {
    unreachable!("vars.bindgen mirrors the feature")
}

#[cfg(feature = "bindgen")]
fn with_bindgen(vars: &Vars, tree: &Tree) -> Result<()> {
    let bindings = bindgen::Builder::default()
        .header(vars.manifest_dir.join("wrapper.h").display().to_string())
        .clang_arg(format!("-I{}", tree.root.join("ggml/include").display()))
        .clang_arg(format!("-I{}", tree.root.join("include").display()))
        .allowlist_function("(ggml|llama)_.*")
        .allowlist_type("(ggml|llama)_.*")
        .allowlist_var("(GGML|LLAMA)_.*")
        // FILE and va_list differ between platforms and nothing here needs them.
        .blocklist_function(".*(_fptr|valist|_dump_to_file|_print_backtrace|_fopen).*")
        .blocklist_type("FILE|_IO_.*|.*va_list.*")
        .raw_line("/// Only ever behind a pointer here.\npub type FILE = ::std::ffi::c_void;")
        .layout_tests(false) // tests/abi.rs compares with the C compiler instead
        .generate_comments(false)
        .merge_extern_blocks(true)
        .wrap_unsafe_ops(true)
        .rust_edition(bindgen::RustEdition::Edition2024)
        .formatter(bindgen::Formatter::Prettyplease)
        .generate()
        .map_err(|e| format!("bindgen failed: {e}"))?;
    // Under two names: the second is there only after a regeneration, so that it can be compared with the checked-in ones.
    for name in ["bindings.rs", "bindings.generated.rs"] {
        let target = vars.out_dir.join(name);
        bindings.write_to_file(&target).map_err(|e| format!("cannot write {}: {e}", target.display()))?;
    }
    Ok(())
}
