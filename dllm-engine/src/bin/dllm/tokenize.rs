//! `dllm tokenize`: the tokens of a text.

use dllm_engine::{Engine, Prompt, Tokenizer};
use serde_json::json;

use super::args::TokenizeArgs;
use super::output::{self, Outcome, Result};

pub fn run(args: &TokenizeArgs) -> Result {
    let text = output::text(args.text.as_deref(), None)?;
    let tokenizer = Tokenizer::load(&*Engine::open(&args.model.source())?)?;
    let vocab = tokenizer.vocab();
    let ids = match args.chat {
        true => tokenizer.encode(&Prompt::from(text), false)?,
        false => vocab.tokenize(&text, args.special)?,
    };
    let pieces: Vec<_> = ids.iter().map(|id| String::from_utf8_lossy(vocab.piece(*id))).collect();
    if args.json {
        output::json(&json!({ "ids": ids, "pieces": pieces }))?;
        return Ok(Outcome::Done);
    }
    for (id, piece) in ids.iter().zip(&pieces) {
        // Escaped, so that blanks and line ends can be seen and control characters do not act.
        output::line(format_args!("{id:>7}  {piece:?}"))?;
    }
    Ok(Outcome::Done)
}
