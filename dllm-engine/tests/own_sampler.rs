//! A request brings its own sampler: the one of docs/adding-a-sampler.md.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use dllm_engine::denoise::DenoiseSettings;
use dllm_engine::sampler::{self, Entry, Sampler, StepView};
use dllm_engine::{Completion, Control, Engine, EngineParams, Request};

struct Likely {
    at_least: f32,
}

impl Sampler for Likely {
    fn name(&self) -> &'static str {
        LIKELY.name
    }

    fn accept(&mut self, view: &StepView<'_>, accepted: &mut [bool]) {
        let mut best: Option<usize> = None;
        for (i, p) in view.positions.iter().enumerate() {
            if view.fixed[i] {
                continue;
            }
            accepted[i] = p.drawn_prob >= self.at_least;
            if best.is_none_or(|b| p.entropy < view.positions[b].entropy) {
                best = Some(i);
            }
        }
        if let Some(best) = best {
            accepted[best] = true;
        }
    }
}

static MADE: AtomicU32 = AtomicU32::new(0);

fn make(settings: &DenoiseSettings) -> Box<dyn Sampler> {
    assert_eq!(settings.max_steps, 16, "the settings are the request's");
    MADE.fetch_add(1, SeqCst);
    Box::new(Likely { at_least: 0.9 })
}

const LIKELY: Entry = Entry { name: "likely", make };

#[test]
fn issue_2_a_request_brings_its_sampler_alone_in_batches_and_in_conversations() {
    let mut engine =
        Engine::load(EngineParams { lanes: 2, context: 512, threads: 1, ..EngineParams::default() }).unwrap();
    let mut request = Request::new("86 + 45 =").seed(1).max_tokens(64).sampler(LIKELY);
    request.denoise.max_steps = Some(16);
    let check = |answer: Completion| {
        assert_eq!((answer.text.as_str(), answer.receipt.sampler.as_str()), ("131", "likely"));
    };
    check(engine.generate(&request, &mut |_| Control::Continue).unwrap());
    for answer in engine.generate_all(&[request.clone(), request.clone()], &mut |_, _| Control::Continue) {
        check(answer.unwrap());
    }
    check(engine.chat().ask("86 + 45 =", &request, &mut |_| Control::Continue).unwrap());
    assert_eq!(MADE.load(SeqCst), 4, "each request has a sampler of its own");
    let named = request.sampler(sampler::by_name("entropy-bound").unwrap());
    let answer = engine.generate(&named, &mut |_| Control::Continue).unwrap();
    assert_eq!((answer.receipt.sampler.as_str(), MADE.load(SeqCst)), ("entropy-bound", 4));
}

#[test]
fn an_unknown_name_lists_the_known_ones() {
    let error = sampler::by_name("magic").unwrap_err().to_string();
    assert!(error.contains("\"magic\"") && error.contains("entropy-bound"), "{error}");
}
