//! `dllm_infill`: text between given texts.

use schemars::JsonSchema;
use serde::Deserialize;

use super::generate::{drawn, max_run_s, submit_and_wait, wait_s};
use super::{Call, args};
use crate::backend::{Ask, Piece};
use crate::error::{Fault, Result};
use crate::item::{Settings, in_range};
use crate::jobs::{Job, Task};
use crate::reply::Reply;

pub(super) const ABOUT: &str = "Fill a gap between prefix and suffix, or each [[fill]] in a template ([[fill:40]] gives a length in \
tokens). The given text stays exactly as it is; data.filled has what was put in. A gap is filled with about max_tokens tokens, so \
ask for the length that you need.";

/// Stands for a gap in a template.
const MARK: &str = "[[fill";
const MAX_GAPS: usize = 32;
const MAX_GAP: u32 = 4096;

/// Arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Args {
    /// What the text answers; without it the model is asked to complete the text.
    #[serde(default)]
    pub prompt: String,
    /// Text before the gap.
    #[serde(default)]
    pub prefix: String,
    /// Text after the gap.
    #[serde(default)]
    pub suffix: String,
    /// Text with gaps, instead of prefix and suffix: [[fill]] or [[fill:40]].
    #[serde(default)]
    pub template: String,
    /// Tokens of a gap without a length of its own.
    #[serde(default = "gap")]
    #[schemars(range(min = 1, max = 4096))]
    pub max_tokens: u32,
    /// Seed, for the same answer again; -1 draws one.
    #[serde(default = "drawn")]
    pub seed: i64,
    /// Seconds to wait for the answer, at most 25.
    #[serde(default = "wait_s")]
    #[schemars(range(min = 0, max = 25))]
    pub wait_s: f64,
    /// Seconds after which the job is ended.
    #[serde(default = "max_run_s")]
    #[schemars(range(min = 0.001, max = 86_400))]
    pub max_run_s: f64,
}

fn gap() -> u32 {
    32
}

pub(super) async fn run(args: Args, call: &Call) -> Result<Reply> {
    let (wait, max_run) = (args::wait(args.wait_s)?, args::max_run(args.max_run_s)?);
    in_range("max_tokens", args.max_tokens, 1, MAX_GAP)?;
    let pieces = pieces(&args)?;
    let shown: String =
        pieces.iter().map(|piece| if let Piece::Text(text) = piece { text.as_str() } else { "[...]" }).collect();
    let settings = Settings { seed: args.seed, ..Settings::default() };
    let complete =
        format!("Complete this text: put what is missing at each [...]. Answer with the whole text.\n\n{shown}");
    let prompt = if args.prompt.is_empty() { complete } else { args.prompt };
    let request = settings.request(&prompt, "", None)?;
    let job = Job::new(Task::Infill, 1, Some(max_run), None);
    submit_and_wait(call, job, vec![Ask { pieces, ..Ask::new(request) }], wait).await
}

fn pieces(args: &Args) -> Result<Vec<Piece>> {
    let mut pieces = Vec::new();
    match (args.template.is_empty(), args.prefix.is_empty() && args.suffix.is_empty()) {
        (true, false) => {
            push_text(&mut pieces, &args.prefix);
            pieces.push(Piece::Gap(args.max_tokens as usize));
            push_text(&mut pieces, &args.suffix);
        }
        (false, true) => split(&args.template, args.max_tokens, &mut pieces)?,
        _ => return Err(Fault::argument("template", "give either a template, or prefix and suffix")),
    }
    let gaps = pieces.iter().filter(|piece| matches!(piece, Piece::Gap(_))).count();
    in_range("the number of gaps", gaps, 1, MAX_GAPS)?;
    Ok(pieces)
}

fn split(template: &str, default: u32, pieces: &mut Vec<Piece>) -> Result<()> {
    let mut rest = template;
    while let Some((before, after)) = rest.split_once(MARK) {
        let Some((inner, after)) = after.split_once("]]") else {
            return Err(Fault::argument("template", "a [[fill has no ]]"));
        };
        let len = match inner.strip_prefix(':') {
            Some(number) => number
                .trim()
                .parse()
                .map_err(|_| Fault::argument("template", format!("[[fill:{number}]] has no number")))?,
            None if inner.is_empty() => default,
            None => {
                return Err(Fault::argument(
                    "template",
                    format!("[[fill{inner}]] is no gap: write [[fill]] or [[fill:40]]"),
                ));
            }
        };
        in_range("the length of a gap", len, 1, MAX_GAP)?;
        push_text(pieces, before);
        pieces.push(Piece::Gap(len as usize));
        rest = after;
    }
    push_text(pieces, rest);
    Ok(())
}

fn push_text(pieces: &mut Vec<Piece>, text: &str) {
    if !text.is_empty() {
        pieces.push(Piece::Text(text.to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(json: &str) -> Result<Vec<Piece>> {
        pieces(&serde_json::from_str(json).unwrap())
    }

    #[test]
    fn gaps_come_from_prefix_and_suffix_or_marks() {
        let text = |t: &str| Piece::Text(t.into());
        assert_eq!(of(r#"{"prefix":"a","suffix":"b","max_tokens":3}"#).unwrap(), [text("a"), Piece::Gap(3), text("b")]);
        assert_eq!(
            of(r#"{"template":"a[[fill:5]]b[[fill]]"}"#).unwrap(),
            [text("a"), Piece::Gap(5), text("b"), Piece::Gap(32)]
        );
    }

    #[test]
    fn what_has_no_gap_is_refused() {
        for json in [
            r#"{}"#,
            r#"{"template":"a"}"#,
            r#"{"template":"[[fill"}"#,
            r#"{"template":"[[fill:x]]"}"#,
            r#"{"template":"[[fill]]","prefix":"a"}"#,
            r#"{"template":"[[fill:0]]"}"#,
        ] {
            assert!(of(json).is_err(), "{json}");
        }
    }
}
