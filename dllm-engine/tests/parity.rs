//! Parity with the transformers reference, on the fixtures in tests/data and on the larger one where it lies beside the
//! project. `dllm parity DIR` runs the same checks.
#![cfg(feature = "cli")]

use std::path::{Path, PathBuf};

use dllm_engine::Level;
use dllm_engine::parity::{self, Check, ParityParams};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/oracle").join(name)
}

fn run(dir: &Path, level: Level, file: Option<&str>) -> Vec<Check> {
    let mut params = ParityParams::default();
    params.level = level;
    params.file = file.map(str::to_owned);
    let checks = parity::run(dir, &params, &mut |_| {}).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let missed: Vec<_> = checks.iter().filter(|c| !c.passed()).map(ToString::to_string).collect();
    assert!(missed.is_empty(), "{} of {} checks missed:\n{}", missed.len(), checks.len(), missed.join("\n"));
    checks
}

/// A run must have looked at everything it claims to.
fn covers(checks: &[Check], parts: &[&str]) {
    for part in parts {
        assert!(checks.iter().any(|c| c.name.contains(part)), "no check named {part}");
    }
}

const ALL: &[&str] = &[
    "tokens of",
    "cache, pieces 1, lanes 1 k",
    "cache, pieces all, lanes 5 v",
    "dec0, pieces 7",
    "dec1, pieces all, lanes 2 logits",
    "routing",
    "routing weights",
    "input",
    "teacher-forced",
    "sampler entropy",
    "sampler accepted",
    "alone argmax, lanes 1",
    "alone accepted, lanes 5",
    "final tokens, lanes 2",
    "dec1.h.",
    "pieces 64",
];

#[test]
fn nano_reference() {
    covers(&run(&data("nano"), Level::Reference, None), ALL);
}

#[test]
fn tiny_reference() {
    covers(&run(&data("tiny"), Level::Reference, None), ALL);
}

#[test]
fn nano_fused() {
    run(&data("nano"), Level::Fused, None);
}

#[test]
fn tiny_fused() {
    run(&data("tiny"), Level::Fused, None);
}

#[test]
fn half_precision_files_at_level_reference() {
    run(&data("nano"), Level::Reference, Some("model-f16.gguf"));
}

/// A larger fixture folder that may lie beside the project.
fn beside(name: &str) -> Option<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/oracle").join(name);
    if !dir.is_dir() {
        eprintln!("skipped: {} is not there", dir.display());
        return None;
    }
    Some(dir)
}

#[test]
fn small_where_it_is_there() {
    if let Some(dir) = beside("small") {
        run(&dir, Level::Reference, None);
    }
}

#[test]
fn issue_2_small_at_level_fused_where_it_is_there() {
    if let Some(dir) = beside("small") {
        covers(&run(&dir, Level::Fused, None), &["teacher-forced"]);
    }
}

#[test]
fn bf16_where_it_is_there() {
    if let Some(dir) = beside("nano") {
        run(&dir, Level::Reference, Some("model-bf16.gguf"));
    }
}
