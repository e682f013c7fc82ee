//! Requests and a small made-up network, for the tests of the loop.
#![allow(dead_code)] // no test program uses all of it

use dllm_engine::denoise::scripted::Scripted;
use dllm_engine::denoise::{DenoiseSettings, Finished, Generation, Lanes, NoText, Work};
use dllm_engine::event::{Control, Event};
use dllm_engine::model::Shape;
use dllm_engine::rng::SeededNoise;
use dllm_engine::sampler::by_name;

pub const SHAPE: Shape = Shape { vocab: 100, canvas: 8, context: 64, lanes: 3 };
pub const EOG: u32 = 99;

pub fn work(prompt: &[u32], max_tokens: usize, candidate: u64) -> Work {
    let settings = DenoiseSettings { max_steps: 12, ..DenoiseSettings::default() };
    Work {
        prompt: prompt.to_vec(),
        max_tokens,
        noise: Box::new(SeededNoise::new(5, candidate, SHAPE.vocab as u32)),
        sampler: (by_name("entropy-bound").unwrap().make)(&settings),
        settings,
        text: Box::new(NoText),
        pins: Vec::new(),
        eog: [EOG].into(),
    }
}

pub fn lanes(n: usize) -> Lanes<Scripted> {
    Lanes::new(Scripted::made_up(Shape { lanes: n, ..SHAPE }).logged(), 16)
}

pub fn silent(_: Event<'_>) -> Control {
    Control::Continue
}

pub fn alone(work: Work) -> Generation {
    lanes(1).generate(work, &mut silent).unwrap()
}

/// Steps until nothing runs.
pub fn drain(lanes: &mut Lanes<Scripted>) -> Vec<Finished> {
    let mut finished = Vec::new();
    for _ in 0..10_000 {
        if lanes.running() == 0 {
            return finished;
        }
        finished.extend(lanes.step(&mut |_, _| Control::Continue));
    }
    panic!("still running after 10000 steps");
}
