//! Standard output and standard error: exit codes, errors, progress, texts for people.

use std::fmt;
use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;
use std::process::ExitCode;

use dllm_engine::params::ModelSource;
use dllm_engine::vocab::MAX_TEXT;
use dllm_engine::{Engine, EngineParams, Error, Offload, prompt};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

/// Models from this size on show a bar while they load.
const LARGE: u64 = 200 << 20;

/// How a command ended that did its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Exit code 0.
    Done,
    /// The question was answered with no: exit code 1.
    No,
    /// Ctrl-C: exit code 130.
    Interrupted,
}

/// Exit code after Ctrl-C, as shells have it: 128 and the number of the signal.
pub const INTERRUPTED: u8 = 130;

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::SUCCESS,
            Outcome::No => Self::from(1),
            Outcome::Interrupted => Self::from(INTERRUPTED),
        }
    }
}

/// Why a command could not do its work.
#[derive(Debug)]
pub enum Failure {
    /// What to tell the user, in one line.
    Message(String),
    /// Whoever read the output has gone: nothing is left to say, and nobody to say it to.
    Closed,
}

pub type Result<T = Outcome, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// Tells the user, and gives the exit code.
    pub fn report(self) -> ExitCode {
        match self {
            Self::Closed => ExitCode::SUCCESS,
            Self::Message(message) => {
                // Standard error may be closed, too; the exit code remains.
                let _ = writeln!(io::stderr(), "error: {}", one_line(&message));
                ExitCode::from(2)
            }
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Message(words(error))
    }
}

/// An error of the engine, with arguments named as the command line spells them.
pub fn words(error: Error) -> String {
    let Error::BadArgument { name, why } = error else { return error.to_string() };
    let why = match name {
        // They name each other.
        "t_min" | "t_max" => why.replace("t_min", "--t-min").replace("t_max", "--t-max"),
        "device" => why.replace("`offload`", "--host-experts or --host-layers"),
        _ => why,
    };
    format!("bad {}: {why}", option(name))
}

/// The option that sets an argument of the engine; the argument's own name where none does.
fn option(name: &str) -> String {
    match name {
        "context" => "--ctx".into(),
        "n" => "-n".into(),
        "offload" => "--host-experts or --host-layers".into(),
        "max_tokens" | "max_steps" | "steps" | "t_min" | "t_max" | "entropy_bound" | "sampler" | "stop" | "seed"
        | "device" | "level" | "kv" | "dense" | "threads" | "memory" | "lanes" | "repetitions" | "prompt_tokens"
        | "breakdown" | "trace" => format!("--{}", name.replace('_', "-")),
        other => other.into(),
    }
}

/// An error of loading or planning with these parameters.
pub fn loading(error: Error, params: &EngineParams) -> String {
    match (error, params.offload) {
        (Error::BadArgument { name: "offload", why }, Offload::HostExperts(n)) => {
            format!("bad --host-experts: {n}: {why}: change it, leave it out, or name another --device")
        }
        (Error::BadArgument { name: "offload", why }, Offload::HostLayers(n)) => {
            format!("bad --host-layers: {n}: {why}: change it, leave it out, or name another --device")
        }
        // Nobody gave it.
        (Error::BadArgument { name: "context", why }, _) if params.context == 0 => {
            format!("the context that is taken without --ctx does not do: {why}: give one with --ctx")
        }
        (error, _) => words(error),
    }
}

impl From<io::Error> for Failure {
    /// An error of standard output; those of files are made with [`file_error`].
    ///
    /// A standard output that was closed before the program began gives none: std opens the null device in its place, which
    /// cannot be told from one that the caller gave.
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Message(format!("cannot write to standard output: {error}")),
        }
    }
}

/// An error of a file that the user named.
pub fn file_error(action: &str, path: &Path, error: io::Error) -> Failure {
    Failure::Message(format!("cannot {action} {}: {error}", path.display()))
}

/// A wrong argument, in the engine's words.
pub fn bad(name: &'static str, why: impl Into<String>) -> Failure {
    Error::BadArgument { name, why: why.into() }.into()
}

/// Refuses 0 and more than `most`.
pub fn check_count(name: &'static str, n: usize, most: usize) -> Result<()> {
    let action = match n {
        0 => "at least one",
        _ if n > most => "fewer",
        _ => return Ok(()),
    };
    Err(bad(name, format!("{n} is not in 1..={most}: ask for {action}")))
}

/// Messages may quote names from files; a line end in one must not look like another message.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if acts(c) { ' ' } else { c }).collect()
}

/// Text of a model, a file or a user that may be shown on a terminal: without characters that act.
pub fn printable(text: &str) -> String {
    text.chars().filter(|c| matches!(c, '\n' | '\t') || !acts(*c)).collect()
}

/// Characters that do something to a terminal or to the text around them instead of being seen: control characters could
/// move the cursor, direction characters let text read other than it is, invisible ones hide what stands there. The two
/// joiners stay: scripts and emoji need them.
pub fn acts(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{feff}')
        || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{fff9}'..='\u{fffb}')
        || matches!(c, '\u{e0000}'..='\u{e007f}')
}

/// JSON that says the same and shows such characters as escapes: a terminal may be its reader. serde_json escapes the
/// first 32 control characters only.
pub fn escaped(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        match acts(c) {
            true => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out += &format!("\\u{unit:04x}")),
            false => out.push(c),
        }
    }
    out
}

/// The answer, on standard output. A terminal gets it without control characters, pipes and files as it is.
pub fn write_text(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.is_terminal() {
        true => out.write_all(printable(text).as_bytes())?,
        false => out.write_all(text.as_bytes())?,
    }
    out.flush()
}

/// A line on standard output.
pub fn line(text: impl fmt::Display) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{text}")
}

/// A line on standard error. What is said there is not worth failing for.
pub fn note(text: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// One JSON object on a line of standard output.
pub fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|e| Failure::Message(format!("cannot write JSON: {e}")))?;
    Ok(line(escaped(&text))?)
}

/// The text that a command works on: an argument, a file, or standard input.
pub fn text(argument: Option<&str>, file: Option<&Path>) -> Result<String> {
    let bytes = match (argument, file) {
        (Some(text), None) if text != "-" => return Ok(text.to_owned()),
        (_, Some(path)) if path != Path::new("-") => {
            let file = std::fs::File::open(path).map_err(|e| file_error("open", path, e))?;
            read(file).map_err(|e| file_error("read", path, e))?
        }
        (None, None) if io::stdin().is_terminal() => {
            return Err(bad("prompt", "there is none: give a text, or pipe one in"));
        }
        _ => read(io::stdin().lock()).map_err(|e| Failure::Message(format!("cannot read standard input: {e}")))?,
    };
    let text = prompt::text_from_bytes(&bytes)?;
    let text = text.strip_suffix('\n').map_or(text, |text| text.strip_suffix('\r').unwrap_or(text));
    Ok(text.to_owned())
}

/// Reads no more than is refused for its length anyway.
fn read(from: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(MAX_TEXT as u64 + 2).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Loads a model, a large one with a bar.
pub fn load(params: EngineParams) -> Result<Engine> {
    let large = match &params.model {
        ModelSource::Embedded => false,
        ModelSource::Path(path) => std::fs::metadata(path).is_ok_and(|m| m.len() > LARGE),
    };
    let bar = if large { progress("loading", "{bytes} of {total_bytes}") } else { ProgressBar::hidden() };
    let engine = Engine::load_with(params.clone(), &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    engine.map_err(|error| Failure::Message(loading(error, &params)))
}

/// A bar on standard error, which shows nothing where that is no terminal. `count` is indicatif's template for the numbers.
pub fn progress(what: &str, count: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
    let template = format!("{what} {{wide_bar}} {count} {{elapsed}}");
    match ProgressStyle::with_template(&template) {
        Ok(style) => bar.with_style(style.progress_chars("━╸─")),
        Err(_) => bar,
    }
}

/// Bytes for people: `3.25 GiB`, `12.0 MiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [(u64, &str, usize); 3] = [(1 << 30, "GiB", 2), (1 << 20, "MiB", 1), (1 << 10, "KiB", 1)];
    UNITS
        .iter()
        .find(|(unit, ..)| n >= *unit)
        .map_or(format!("{n} B"), |(unit, name, digits)| format!("{:.digits$} {name}", n as f64 / *unit as f64))
}

/// A number and its noun: `1 step`, `7 steps`.
pub fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}
