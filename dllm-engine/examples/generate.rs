//! One prompt, one answer, with its receipt.
//!
//! cargo run --release --example generate -- "Sort: 9 4 7"

use dllm_engine::{Control, Engine, EngineParams, Request, Result};

fn main() -> Result<()> {
    let prompt = std::env::args().nth(1).unwrap_or_else(|| "86 + 45 =".into());
    let mut engine = Engine::load(EngineParams::default())?; // the embedded tiny model
    let answer = engine.generate(&Request::new(prompt).seed(7), &mut |_| Control::Continue)?;
    println!("{}", answer.text);
    let r = &answer.receipt;
    println!(
        "{} tokens, {:.0} tok/s, steps per canvas {:?}, seed {}",
        r.tokens, r.tokens_per_second, r.steps_per_canvas, r.seed
    );
    Ok(())
}
