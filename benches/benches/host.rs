//! Host pieces: the loop around a scripted network, the CPU sampler, the tokenizer.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dllm_engine::denoise::scripted::Scripted;
use dllm_engine::denoise::{DenoiseSettings, Lanes, NoText, Work};
use dllm_engine::kernels::position_stats::position_stats;
use dllm_engine::model::Shape;
use dllm_engine::rng::SeededNoise;
use dllm_engine::{Control, Engine, EngineParams, sampler};

const VOCAB: usize = 262_144;
const CANVAS: usize = 256;

/// One denoising step of one lane around a forward pass that costs nothing: accept, renoise, stop rule, events.
fn loop_overhead(c: &mut Criterion) {
    const STEPS: u32 = 16;
    let shape = Shape { vocab: VOCAB, canvas: CANVAS, context: 4096, lanes: 1 };
    let settings = DenoiseSettings {
        max_steps: STEPS,
        stability_threshold: None,
        confidence_threshold: None,
        ..DenoiseSettings::default()
    };
    let mut group = c.benchmark_group("loop");
    group.throughput(Throughput::Elements(u64::from(STEPS)));
    group.bench_function("16 steps, scripted forward", |b| {
        let mut lanes = Lanes::new(Scripted::made_up(shape), 2048);
        b.iter(|| {
            let work = Work {
                prompt: vec![2, 3, 4],
                max_tokens: CANVAS,
                settings: settings.clone(),
                noise: Box::new(SeededNoise::new(1, 0, VOCAB as u32)),
                sampler: (sampler::REGISTRY[0].make)(&settings),
                text: Box::new(NoText),
                pins: Vec::new(),
                eog: [1].into(),
            };
            let done = lanes.generate(work, &mut |_| Control::Continue);
            black_box(done.map(|d| d.tokens.len()).unwrap_or(0))
        });
    });
    group.finish();
}

/// The CPU twin of the sampler: one row of logits to argmax, draw and entropy.
fn sampler_rows(c: &mut Criterion) {
    let rows: Vec<Vec<f32>> = (0..8_u64)
        .map(|r| {
            (0..VOCAB as u64)
                .map(|i| (((i * 2_654_435_761 + r * 977) % 65_536) as f32 / 65_536.0 - 0.5) * 40.0)
                .collect()
        })
        .collect();
    let mut group = c.benchmark_group("position_stats");
    group.throughput(Throughput::Bytes((VOCAB * 4) as u64));
    for (name, cap) in [("softcap", Some(30.0)), ("no softcap", None)] {
        let mut next = 0;
        group.bench_function(format!("one row of {VOCAB}, {name}"), |b| {
            b.iter(|| {
                next = (next + 1) % rows.len(); // other rows than the last, so that memory is read
                black_box(position_stats(&rows[next], cap, 0.8, 0.37))
            });
        });
    }
    group.finish();
}

/// The same for a whole canvas on all cores, rows dealt out as the graph operation does.
fn sampler_canvas(c: &mut Criterion) {
    let logits: Vec<f32> =
        (0..CANVAS * VOCAB).map(|i| ((i as u64 * 2_654_435_761 % 65_536) as f32 / 65_536.0 - 0.5) * 40.0).collect();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut group = c.benchmark_group("position_stats");
    group.sample_size(10).throughput(Throughput::Bytes((CANVAS * VOCAB * 4) as u64));
    group.bench_function(format!("{CANVAS} rows of {VOCAB}, softcap, {threads} threads"), |b| {
        b.iter(|| {
            std::thread::scope(|scope| {
                for rows in logits.chunks(VOCAB * CANVAS.div_ceil(threads)) {
                    scope.spawn(|| {
                        for row in rows.chunks(VOCAB) {
                            black_box(position_stats(row, Some(30.0), 0.8, 0.37));
                        }
                    });
                }
            });
        });
    });
    group.finish();
}

fn tokenizer(c: &mut Criterion) {
    let Ok(engine) = Engine::load(EngineParams { threads: 1, context: 256, ..EngineParams::default() }) else { return };
    let text = "Count from 3 to 40 and sort the words of this line by their first letter. ".repeat(64);
    let ids = engine.vocab().tokenize(&text, false).unwrap_or_default();
    let mut group = c.benchmark_group("tokenizer");
    group.throughput(Throughput::Bytes(text.len() as u64));
    group.bench_function("tokenize 4.7 KB", |b| {
        b.iter(|| black_box(engine.vocab().tokenize(&text, false).map(|t| t.len())))
    });
    group.bench_function("detokenize 4.7 KB", |b| b.iter(|| black_box(engine.vocab().detokenize(&ids, false).len())));
    group.finish();
}

criterion_group!(benches, loop_overhead, sampler_rows, sampler_canvas, tokenizer);
criterion_main!(benches);
