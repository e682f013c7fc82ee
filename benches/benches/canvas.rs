//! Whole canvases, and a step against its bare graph: the embedded tiny model, and any file named in DLLM_BENCH_MODEL (on
//! DLLM_BENCH_DEVICE, with DLLM_BENCH_THREADS).

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dllm_engine::model::{DenoiseLane, Forward, Network};
use dllm_engine::{Control, DenoiseOverrides, Engine, EngineParams, ModelSource, Prompt, Request};

/// The models to measure.
fn models() -> Vec<(String, EngineParams)> {
    let read = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let threads = read("DLLM_BENCH_THREADS").map_or(0, |n| n.parse().expect("DLLM_BENCH_THREADS must be a number"));
    let params = |model| EngineParams { model, threads, device: read("DLLM_BENCH_DEVICE"), ..EngineParams::default() };
    let embedded = ("tiny".to_owned(), params(ModelSource::Embedded));
    let file = read("DLLM_BENCH_MODEL").map(|file| (file.clone(), params(ModelSource::Path(file.into()))));
    [Some(embedded), file].into_iter().flatten().collect()
}

fn canvases(c: &mut Criterion) {
    for (name, params) in models() {
        for lanes in [1, 4] {
            let params = EngineParams { lanes, context: 1024, ..params.clone() };
            let mut engine = match Engine::load(params) {
                Ok(engine) => engine,
                Err(error) => {
                    eprintln!("{name}, {lanes} lanes: {error}");
                    continue;
                }
            };
            let canvas = engine.info().canvas;
            const STEPS: u32 = 4;
            // Forced steps: no early stop, so that every run does the same work.
            let request = Request {
                max_tokens: canvas,
                seed: Some(1),
                denoise: DenoiseOverrides {
                    max_steps: Some(STEPS),
                    confidence_threshold: Some(0.0),
                    ..DenoiseOverrides::default()
                },
                ..Request::new(Prompt::Tokens(vec![2, 3, 5, 8]))
            };
            let requests = vec![request; lanes];
            let mut group = c.benchmark_group("canvas");
            group.sample_size(10).throughput(Throughput::Elements((canvas * lanes) as u64));
            group.bench_function(format!("{name}, {STEPS} steps, {lanes} lanes"), |b| {
                b.iter(|| black_box(engine.generate_all(&requests, &mut |_, _| Control::Continue).len()));
            });
            group.finish();
        }
    }
}

/// Denoising steps and the bare graph that they compute, in turns: what the engine adds to ggml's own time. In turns,
/// because a machine that is busy for a while would else favour one of them; the medians of both are compared.
fn step_over_bare_graph(_: &mut Criterion) {
    const BUDGET: Duration = Duration::from_secs(20);
    for (name, params) in models() {
        let params = EngineParams { context: 512, ..params };
        let network = Engine::open(&params.model).and_then(|file| Network::load(file, &params, &mut |_, _| {}));
        let mut network = match network {
            Ok(network) => network,
            Err(error) => {
                eprintln!("{name}: {error}");
                continue;
            }
        };
        let canvas: Vec<u32> = (0..network.shape().canvas as u32).map(|i| i % 500 + 5).collect();
        let uniform = vec![0.5; canvas.len()];
        let lane = DenoiseLane { lane: 0, canvas: &canvas, temperature: 0.8, uniform: &uniform, self_condition: true };
        let (mut steps, mut bare, mut added, mut out) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let begin = Instant::now();
        while steps.len() < 5 || (steps.len() < 500 && begin.elapsed() < BUDGET) {
            let before = network.computing();
            let step = timed(|| network.denoise(&[lane], &mut out));
            // What the engine adds to its own graph in this very step: no second run to compare with, so no noise of one.
            added.push(step - (network.computing() - before).as_secs_f64() * 1e3);
            steps.push(step);
            bare.push(timed(|| network.replay()));
        }
        let (pairs, step, bare) = (steps.len(), median(&mut steps), median(&mut bare));
        let more = (step / bare - 1.0) * 100.0;
        println!("step/{name}: {step:.3} ms, bare graph {bare:.3} ms, {more:+.2} % (medians of {pairs} pairs)");
        let added = median(&mut added);
        println!("step/{name}: {added:.3} ms of a step outside its graph, {:.3} % (median)", added / step * 100.0);
    }
}

/// Milliseconds.
fn timed<T>(work: impl FnOnce() -> dllm_engine::Result<T>) -> f64 {
    let since = Instant::now();
    black_box(work()).expect("a step of a loaded model");
    since.elapsed().as_secs_f64() * 1e3
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

criterion_group!(benches, canvases, step_over_bare_graph);
criterion_main!(benches);
