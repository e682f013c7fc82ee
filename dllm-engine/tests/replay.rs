//! Every recorded generation of the transformers reference through the real loop: recorded logits and random numbers in; the
//! reference's choices, canvases and sequences out, exactly.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use dllm_engine::denoise::scripted::{Scripted, Seen};
use dllm_engine::denoise::{DenoiseSettings, Generation, Lanes, NoText, Work};
use dllm_engine::event::{Control, Event, FinishReason};
use dllm_engine::kernels::position_stats::position_stats;
use dllm_engine::model::{Position, Shape};
use dllm_engine::rng::{RecordedCanvas, RecordedNoise};
use dllm_engine::sampler::by_name;
use safetensors::SafeTensors;
use serde_json::Value;

/// One recorded step: what goes in (positions come from it) and what must come out.
#[derive(Clone)]
struct Step {
    temperature: f32,
    mean_entropy: f32,
    stable: bool,
    stop: bool,
    input: Vec<u32>,
    drawn: Vec<u32>,
    argmax: Vec<u32>,
    entropy: Vec<f32>,
    accepted: Vec<bool>,
    output: Vec<u32>,
    /// `canvas x vocab`, softcapped; empty where none were recorded.
    logits: Vec<f32>,
}

struct Case {
    name: String,
    shape: Shape,
    settings: DenoiseSettings,
    max_tokens: usize,
    eog: Vec<u32>,
    prompt: Vec<u32>,
    sequence: Vec<u32>,
    noise: Vec<RecordedCanvas>,
    steps: Vec<Vec<Step>>,
}

fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

fn json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap()
}

fn number(v: &Value) -> u32 {
    u32::try_from(v.as_u64().unwrap()).unwrap()
}

fn float(v: &Value) -> f32 {
    v.as_f64().unwrap() as f32
}

fn list<T>(v: &Value, item: impl Fn(&Value) -> T) -> Vec<T> {
    v.as_array().unwrap().iter().map(item).collect()
}

fn settings(config: &Value) -> DenoiseSettings {
    DenoiseSettings {
        max_steps: number(&config["max_denoising_steps"]),
        t_min: float(&config["t_min"]),
        t_max: float(&config["t_max"]),
        entropy_bound: float(&config["entropy_bound"]),
        stability_threshold: Some(number(&config["stability_threshold"])),
        confidence_threshold: Some(float(&config["confidence_threshold"])),
    }
}

/// An array's rows of `width` numbers.
fn rows<T>(file: &SafeTensors, name: &str, width: usize, item: impl Fn([u8; 4]) -> T) -> Vec<Vec<T>> {
    let bytes = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data();
    let all: Vec<T> = bytes.chunks_exact(4).map(|b| item(b.try_into().unwrap())).collect();
    let mut all = all.into_iter();
    (0..all.len() / width).map(|_| all.by_ref().take(width).collect()).collect()
}

fn ids(file: &SafeTensors, name: &str, width: usize) -> Vec<Vec<u32>> {
    rows(file, name, width, |b| u32::try_from(i32::from_le_bytes(b)).unwrap())
}

fn reals(file: &SafeTensors, name: &str, width: usize) -> Vec<Vec<f32>> {
    rows(file, name, width, f32::from_le_bytes)
}

fn oracle(folder: &Path) -> Vec<Case> {
    let meta = json(&folder.join("fixtures.json"));
    let bytes = std::fs::read(folder.join("fixtures.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (vocab, canvas) = (number(&meta["model"]["vocab"]) as usize, number(&meta["model"]["canvas"]) as usize);
    let case = |case: &Value| {
        let name = case["name"].as_str().unwrap();
        let all = |what: &str| {
            let name = format!("gen.{name}.{what}");
            let len = file.tensor(&name).unwrap().shape()[0];
            ids(&file, &name, len).concat()
        };
        let (mut noise, mut steps) = (Vec::new(), Vec::new());
        for (k, meta) in case["canvases"].as_array().unwrap().iter().enumerate() {
            let at = |what: &str| format!("gen.{name}.c{k}.{what}");
            let ids = |what: &str| ids(&file, &at(what), canvas);
            let bits = file.tensor(&at("accepted")).unwrap().data();
            let (input, drawn, argmax, output) = (ids("canvas_in"), ids("sampled"), ids("argmax"), ids("canvas_out"));
            let (entropy, logits) = (reals(&file, &at("entropy"), canvas), reals(&file, &at("logits"), canvas * vocab));
            let step = |(n, meta): (usize, &Value)| Step {
                temperature: float(&meta["temperature"]),
                mean_entropy: float(&meta["mean_entropy"]),
                stable: meta["stable"].as_bool().unwrap(),
                stop: meta["stop"].as_bool().unwrap(),
                input: input[n].clone(),
                drawn: drawn[n].clone(),
                argmax: argmax[n].clone(),
                entropy: entropy[n].clone(),
                accepted: bits[n * canvas..][..canvas].iter().map(|b| *b == 1).collect(),
                output: output[n].clone(),
                logits: logits[n].clone(),
            };
            steps.push(meta["steps"].as_array().unwrap().iter().enumerate().map(step).collect::<Vec<_>>());
            noise.push(RecordedCanvas {
                init: ids("init").concat(),
                uniform: reals(&file, &at("u"), canvas),
                renoise: ids("renoise"),
            });
        }
        Case {
            name: format!("{} {name}", folder.display()),
            shape: Shape { vocab, canvas, context: 4096, lanes: 1 },
            settings: settings(&case["config"]),
            max_tokens: number(&case["config"]["max_new_tokens"]) as usize,
            eog: list(&case["config"]["eos_token_id"], number),
            prompt: all("prompt"),
            sequence: all("sequence"),
            noise,
            steps,
        }
    };
    list(&meta["generation_cases"], case)
}

fn traces(path: &Path) -> Vec<Case> {
    let meta = json(path);
    let config = &meta["generation"];
    let case = |prompt: &Value| {
        let (mut noise, mut steps) = (Vec::new(), Vec::new());
        for canvas in prompt["canvases"].as_array().unwrap() {
            let mut input = list(&canvas["init"], number);
            noise.push(RecordedCanvas {
                init: input.clone(),
                uniform: list(&canvas["steps"], |s| list(&s["u"], float)),
                renoise: list(&canvas["steps"], |s| list(&s["renoise"], number)),
            });
            let mut recorded = Vec::new();
            for s in canvas["steps"].as_array().unwrap() {
                let output = list(&s["canvas_out"], number);
                recorded.push(Step {
                    temperature: float(&s["temperature"]),
                    mean_entropy: float(&s["mean_entropy"]),
                    stable: s["stable"].as_bool().unwrap(),
                    stop: s["stop"].as_bool().unwrap(),
                    input: std::mem::replace(&mut input, output.clone()),
                    drawn: list(&s["sampled"], number),
                    argmax: list(&s["argmax"], number),
                    entropy: list(&s["entropy"], float),
                    accepted: list(&s["accepted"], |a| a.as_u64() == Some(1)),
                    output,
                    logits: Vec::new(),
                });
            }
            steps.push(recorded);
        }
        Case {
            name: prompt["prompt"].to_string(),
            shape: Shape { vocab: 1024, canvas: 64, context: 4096, lanes: 1 },
            settings: settings(config),
            max_tokens: number(&config["max_new_tokens"]) as usize,
            eog: list(&config["eos_token_id"], number),
            prompt: list(&prompt["prompt_ids"], number),
            sequence: list(&prompt["sequence"], number),
            noise,
            steps,
        }
    };
    list(&meta["prompts"], case)
}

/// The numbers of a recorded step: from its logits where there are any, else as recorded.
fn positions(step: &Step, vocab: usize, temperature: f32, uniform: &[f32], out: &mut [Position]) {
    for (i, p) in out.iter_mut().enumerate() {
        *p = match step.logits.chunks_exact(vocab).nth(i) {
            Some(row) => position_stats(row, None, temperature, uniform[i]),
            None => Position {
                argmax: step.argmax[i],
                drawn: step.drawn[i],
                entropy: step.entropy[i],
                ..Position::default()
            },
        };
    }
}

/// The network of the recording: it gives the recorded numbers, in the recorded order.
fn network(case: &Case) -> Scripted {
    let recorded = case.steps.clone();
    let (first, canvas, vocab) = (case.prompt.len(), case.shape.canvas, case.shape.vocab);
    let expected = case.sequence.clone();
    let script = move |seen: &Seen<'_>, out: &mut [Position]| {
        assert_eq!(seen.cached, &expected[..seen.cached.len()], "the cache is the sequence so far");
        let index = (seen.cached.len() - first) / canvas;
        let step = &recorded[index][seen.step as usize - 1];
        assert_eq!(seen.canvas, step.input, "canvas {index}, step {}", seen.step);
        positions(step, vocab, seen.temperature, seen.uniform, out);
        Ok(())
    };
    Scripted::new(case.shape, Box::new(script))
}

fn work(case: &Case, max_tokens: usize) -> Work {
    Work {
        prompt: case.prompt.clone(),
        max_tokens,
        settings: case.settings.clone(),
        noise: Box::new(RecordedNoise::new(case.noise.clone())),
        sampler: (by_name("entropy-bound").unwrap().make)(&case.settings),
        text: Box::new(NoText),
        pins: Vec::new(),
        eog: case.eog.as_slice().into(),
    }
}

/// Compares one step as the loop saw it with the recording.
fn compare(name: &str, got: &dllm_engine::event::Step<'_>, want: &Step, last: bool) {
    let at = format!("{name}, canvas {}, step {}", got.canvas, got.step);
    assert!((got.temperature - want.temperature).abs() < 1e-7, "{at}: temperature {}", got.temperature);
    assert_eq!(got.input, want.input, "{at}: input");
    for (i, (a, b)) in got.entropy.iter().zip(&want.entropy).enumerate() {
        assert!((a - b).abs() < 1e-4, "{at}, position {i}: entropy {a} for {b}");
    }
    assert!((got.mean_entropy - want.mean_entropy).abs() < 1e-4, "{at}: mean entropy {}", got.mean_entropy);
    assert_eq!(got.accepted, want.accepted, "{at}: accepted");
    for (i, accepted) in want.accepted.iter().enumerate() {
        assert!(!accepted || got.drawn[i] == want.drawn[i], "{at}, position {i}: drawn");
    }
    assert_eq!(got.output, want.output, "{at}: output");
    assert_eq!(got.argmax, want.argmax, "{at}: argmax");
    assert_eq!(got.stable, want.stable, "{at}: stable");
    assert_eq!(got.stop, want.stop || last, "{at}: stop");
}

fn replay(case: &Case) -> (Generation, usize) {
    let seen = Rc::new(RefCell::new(vec![0usize; case.steps.len()]));
    let mut lanes = Lanes::new(network(case), 64);
    // Whole canvases, as the reference has them.
    let budget = case.max_tokens.div_ceil(case.shape.canvas) * case.shape.canvas;
    let generation = lanes
        .generate(work(case, budget), &mut |event| {
            if let Event::Step(step) = event {
                let n = step.step as usize;
                seen.borrow_mut()[step.canvas] = n;
                compare(&case.name, &step, &case.steps[step.canvas][n - 1], step.step == step.max_steps);
            }
            Control::Continue
        })
        .unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let steps: Vec<_> = case.steps.iter().map(Vec::len).collect();
    assert_eq!(*seen.borrow(), steps, "{}: number of steps", case.name);
    assert_eq!(generation.cost.steps_per_canvas, steps.iter().map(|n| *n as u32).collect::<Vec<_>>(), "{}", case.name);
    (generation, steps.iter().sum())
}

/// The answer in the reference's sequence: without prompt, end token and padding.
fn answer(case: &Case) -> (&[u32], FinishReason) {
    let tokens = &case.sequence[case.prompt.len()..];
    match tokens.iter().position(|token| case.eog.contains(token)) {
        Some(end) => (&tokens[..end], FinishReason::Stop),
        None => (tokens, FinishReason::Length),
    }
}

fn check(cases: &[Case], steps_at_least: usize) {
    let mut steps = 0;
    for case in cases {
        let (generation, n) = replay(case);
        steps += n;
        let (tokens, reason) = answer(case);
        assert_eq!(generation.tokens, tokens, "{}: tokens", case.name);
        assert_eq!(generation.finish_reason, reason, "{}", case.name);
        let converged = case.steps.iter().all(|canvas| canvas.last().is_some_and(|step| step.stop));
        assert_eq!(generation.converged, converged, "{}", case.name);
        let per_forward = generation.cost.tokens_per_forward(tokens.len());
        assert!((per_forward - tokens.len() as f64 / n as f64).abs() < 1e-9, "{}", case.name);
    }
    assert!(steps >= steps_at_least, "only {steps} steps were replayed");
}

#[test]
fn nano_replays() {
    check(&oracle(&data("oracle/nano")), 40);
}

#[test]
fn tiny_replays() {
    check(&oracle(&data("oracle/tiny")), 40);
}

/// The larger fixtures lie beside the repository where they are at hand.
#[test]
fn small_replays_where_it_is_at_hand() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/oracle/small");
    if folder.is_dir() {
        check(&oracle(&folder), 40);
    }
}

#[test]
fn traces_of_the_trained_model_replay() {
    let cases = traces(&data("tiny/traces.json"));
    assert_eq!(cases.len(), 12);
    check(&cases, 24);
}

/// The sampler alone: every recorded step teacher-forced, drawn tokens exact at every position.
#[test]
fn drawn_tokens_are_exact_at_every_position() {
    let mut compared = 0;
    for case in oracle(&data("oracle/nano")).iter().chain(&oracle(&data("oracle/tiny"))) {
        for (noise, steps) in case.noise.iter().zip(&case.steps) {
            for (uniform, step) in noise.uniform.iter().zip(steps) {
                let mut out = vec![Position::default(); case.shape.canvas];
                positions(step, case.shape.vocab, step.temperature, uniform, &mut out);
                let drawn: Vec<_> = out.iter().map(|p| p.drawn).collect();
                assert_eq!(drawn, step.drawn, "{}", case.name);
                compared += drawn.len();
            }
        }
    }
    assert!(compared > 1000, "{compared}");
}

#[test]
fn the_answer_is_cut_to_max_tokens() {
    let case = &traces(&data("tiny/traces.json"))[0];
    let (tokens, _) = answer(case);
    for max_tokens in [1, 63, 64, 65, tokens.len() - 1, tokens.len(), tokens.len() + 1] {
        let generation =
            Lanes::new(network(case), 64).generate(work(case, max_tokens), &mut |_| Control::Continue).unwrap();
        assert_eq!(generation.tokens, tokens[..max_tokens.min(tokens.len())], "{max_tokens}");
        // The end token stands right behind the answer: an answer that fits exactly has ended by itself.
        let ended = max_tokens >= tokens.len();
        let reason = if ended { FinishReason::Stop } else { FinishReason::Length };
        assert_eq!(generation.finish_reason, reason, "{max_tokens}");
    }
}
