//! The tiny trained model answers its held-out prompts as the reference did, and replays its recorded traces.

use std::path::{Path, PathBuf};

use dllm_engine::{Control, Engine, EngineParams, Level, ModelSource, Request};

/// The test data: beside the sources, or where DLLM_TEST_DATA says, on a machine without these.
fn shared(name: &str) -> PathBuf {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    std::env::var_os("DLLM_TEST_DATA").map_or_else(beside, PathBuf::from).join("tiny").join(name)
}

/// The CPU, whose answers these numbers are, or the device that DLLM_TEST_DEVICE names.
fn device() -> Option<String> {
    Some(std::env::var("DLLM_TEST_DEVICE").unwrap_or_else(|_| "CPU".into()))
}

#[derive(serde::Deserialize)]
struct Eval {
    prompts: Vec<Held>,
}

#[derive(serde::Deserialize)]
struct Held {
    prompt: String,
    expected: String,
}

/// Level `fused`, or `topk` where DLLM_TEST_LEVEL says so (on a CUDA device).
fn level() -> Level {
    match std::env::var("DLLM_TEST_LEVEL").as_deref() {
        Ok("topk") => Level::TopK,
        Ok(other) => panic!("DLLM_TEST_LEVEL is {other:?}: only topk is known"),
        Err(_) => Level::Fused,
    }
}

/// Exact answers among the 200 held-out prompts.
fn exact(model: ModelSource, level: Level) -> usize {
    let eval: Eval = serde_json::from_slice(&std::fs::read(shared("eval.json")).unwrap()).unwrap();
    let mut params = EngineParams::default();
    (params.model, params.level, params.lanes, params.context, params.threads) = (model, level, 4, 1024, 1);
    params.device = device();
    let mut engine = Engine::load(params).unwrap();
    let requests: Vec<_> = eval
        .prompts
        .iter()
        .enumerate()
        .map(|(i, p)| Request::new(p.prompt.as_str()).max_tokens(256).seed(i as u64))
        .collect();
    assert_eq!(requests.len(), 200);
    let answers = engine.generate_all(&requests, &mut |_, _| Control::Continue);
    let mut wrong = Vec::new();
    for (held, answer) in eval.prompts.iter().zip(&answers) {
        let answer = answer.as_ref().unwrap();
        if answer.text.trim() != held.expected.trim() {
            wrong.push(format!("{:?}: {:?}, expected {:?}", held.prompt, answer.text, held.expected));
        }
    }
    eprintln!("{} of 200 exact; wrong:\n{}", 200 - wrong.len(), wrong.join("\n"));
    200 - wrong.len()
}

#[test]
fn the_embedded_q8_0_file_answers_196_of_200() {
    assert!(exact(ModelSource::Embedded, level()) >= 196);
}

#[test]
fn the_f16_file_answers_197_of_200() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/tiny/dllm-tiny-f16.gguf");
    if !file.is_file() {
        eprintln!("skipped: {} is not there", file.display());
        return;
    }
    assert!(exact(ModelSource::Path(file), level()) >= 197);
}

#[cfg(feature = "cli")]
#[test]
fn the_f16_file_replays_its_traces_at_level_reference() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/tiny/dllm-tiny-f16.gguf");
    if !file.is_file() {
        eprintln!("skipped: {} is not there", file.display());
        return;
    }
    let mut params = EngineParams::default();
    (params.model, params.level, params.context, params.threads) = (ModelSource::Path(file), Level::Reference, 1024, 1);
    params.device = Some("CPU".into());
    let checks = dllm_engine::parity::run_traces(&shared("traces.json"), &params, &mut |_| {}).unwrap();
    let missed: Vec<_> = checks.iter().filter(|c| !c.passed()).map(ToString::to_string).collect();
    assert!(missed.is_empty(), "{}", missed.join("\n"));
    assert!(checks.len() > 12 * 8, "only {} checks", checks.len());
}
