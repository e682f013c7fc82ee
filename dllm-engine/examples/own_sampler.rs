//! A sampler of one's own: accept what is likelier than a threshold, and always the most certain position.
//!
//! cargo run --release --example own_sampler -- "Spell: garden"

use dllm_engine::sampler::{Entry, Sampler, StepView};
use dllm_engine::{Control, Engine, EngineParams, Request, Result};

struct Threshold(f32);

const THRESHOLD: Entry = Entry { name: "threshold", make: |_| Box::new(Threshold(0.9)) };

impl Sampler for Threshold {
    fn name(&self) -> &'static str {
        THRESHOLD.name
    }

    fn accept(&mut self, view: &StepView<'_>, accepted: &mut [bool]) {
        let open = |i: &usize| !view.fixed[*i];
        let certain = |i: usize| view.positions[i].argmax_prob;
        for i in (0..accepted.len()).filter(open) {
            accepted[i] = certain(i) >= self.0;
        }
        if let Some(best) = (0..accepted.len()).filter(open).max_by(|a, b| certain(*a).total_cmp(&certain(*b))) {
            accepted[best] = true;
        }
    }
}

fn main() -> Result<()> {
    let prompt = std::env::args().nth(1).unwrap_or_else(|| "Spell: garden".into());
    let mut engine = Engine::load(EngineParams::default())?;
    let request = Request::new(prompt).seed(7).sampler(THRESHOLD);
    let answer = engine.generate(&request, &mut |_| Control::Continue)?;
    println!("{} (sampler {}, steps {:?})", answer.text, answer.receipt.sampler, answer.receipt.steps_per_canvas);
    Ok(())
}
