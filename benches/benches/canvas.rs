//! Whole canvases: the embedded tiny model, and any file named in DLLM_BENCH_MODEL (on DLLM_BENCH_DEVICE).

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dllm_engine::model::{DenoiseLane, Forward, Network};
use dllm_engine::{Control, DenoiseOverrides, Engine, EngineParams, ModelSource, Prompt, Request};

fn canvases(c: &mut Criterion) {
    let file = std::env::var("DLLM_BENCH_MODEL").ok();
    let device = std::env::var("DLLM_BENCH_DEVICE").ok();
    let models =
        [Some(("tiny".to_owned(), ModelSource::Embedded)), file.map(|f| (f.clone(), ModelSource::Path(f.into())))];
    for (name, model) in models.into_iter().flatten() {
        for lanes in [1, 4] {
            let params = EngineParams {
                model: model.clone(),
                lanes,
                context: 1024,
                device: device.clone(),
                ..EngineParams::default()
            };
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

/// A denoising step against the bare graph it computes: what the engine adds to ggml's own time.
fn step_over_bare_graph(c: &mut Criterion) {
    let file = std::env::var("DLLM_BENCH_MODEL").ok();
    let models =
        [Some(("tiny".to_owned(), ModelSource::Embedded)), file.map(|f| (f.clone(), ModelSource::Path(f.into())))];
    for (name, model) in models.into_iter().flatten() {
        let params = EngineParams {
            model,
            context: 512,
            device: std::env::var("DLLM_BENCH_DEVICE").ok(),
            ..EngineParams::default()
        };
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
        let mut out = Vec::new();
        let mut group = c.benchmark_group("step");
        group.sample_size(20);
        group.bench_function(format!("{name}, engine"), |b| {
            b.iter(|| {
                let lane =
                    DenoiseLane { lane: 0, canvas: &canvas, temperature: 0.8, uniform: &uniform, self_condition: true };
                let _ = black_box(network.denoise(&[lane], &mut out));
            });
        });
        group.bench_function(format!("{name}, bare graph"), |b| b.iter(|| black_box(network.replay()).is_ok()));
        group.finish();
    }
}

criterion_group!(benches, canvases, step_over_bare_graph);
criterion_main!(benches);
