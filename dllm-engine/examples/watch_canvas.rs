//! Prints the draft of every denoising step: how a canvas comes into focus.
//!
//! cargo run --release --example watch_canvas -- "Count from 3 to 20."

use dllm_engine::{Control, Engine, EngineParams, Event, Request, Result};

fn main() -> Result<()> {
    let prompt = std::env::args().nth(1).unwrap_or_else(|| "Count from 3 to 20.".into());
    let mut engine = Engine::load(EngineParams::default())?;
    let vocab = engine.vocab().clone();
    let answer = engine.generate(&Request::new(prompt).seed(7), &mut |event| {
        if let Event::Step(step) = event {
            let accepted = step.accepted.iter().filter(|a| **a).count();
            println!(
                "canvas {} step {:>2}  T {:.2}  mean entropy {:.3}  accepted {accepted:>3}  {:?}",
                step.canvas,
                step.step,
                step.temperature,
                step.mean_entropy,
                vocab.detokenize(step.argmax, false).chars().take(60).collect::<String>()
            );
        }
        Control::Continue
    })?;
    println!("{}", answer.text);
    Ok(())
}
