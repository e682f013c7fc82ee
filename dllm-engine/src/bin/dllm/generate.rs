//! `dllm generate`, and what it shares with `dllm chat`: following an answer while it is made.

use std::collections::BTreeMap;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{ErrorKind, IsTerminal, LineWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dllm_engine::vocab::Vocab;
use dllm_engine::{
    Completion, Control, Engine, Event, FinishReason, Message, ModelInfo, Prompt, Receipt, Request, prompt, sampler,
};
use serde::Serialize;
use serde_json::{Value, json};

use super::args::{AnswerArgs, GenerateArgs};
use super::canvas_view::{self, CanvasView};
use super::output::{self, Failure, Outcome, Result, bad, count, file_error, note};
use super::signal::Cancellable;

/// Lanes that an engine can have.
const MAX_LANES: usize = 64;
/// Candidates that may be asked for: more than there are lanes wait for one.
const MAX_CANDIDATES: usize = 1024;

/// The JSON form of an answer.
#[derive(Serialize)]
struct Answer<'a> {
    text: &'a str,
    reasoning: Option<&'a str>,
    finish_reason: FinishReason,
    converged: bool,
    receipt: &'a Receipt,
}

impl<'a> From<&'a Completion> for Answer<'a> {
    fn from(c: &'a Completion) -> Self {
        Self {
            text: &c.text,
            reasoning: c.reasoning.as_deref(),
            finish_reason: c.finish_reason,
            converged: c.converged,
            receipt: &c.receipt,
        }
    }
}

pub fn run(args: &GenerateArgs) -> Result {
    output::check_count("n", args.n, MAX_CANDIDATES)?;
    let text = output::text(args.prompt.as_deref(), args.file.as_deref())?;
    let mut request = request(prompt(args, text), &args.answer)?;
    request.candidate = args.candidate;
    prompt::check(&request.prompt)?;
    args.trace.as_deref().map_or(Ok(()), Trace::check)?;
    let mut engine = output::load(args.load.params(args.model.source(), args.n.min(MAX_LANES))?)?;
    let mut follow = Follow::new(args.answer.pace);
    if let Some(path) = &args.trace {
        follow.trace = Some(Trace::new(path, &engine));
    }
    if args.watch && canvas_view::supported() {
        follow.view = Some(CanvasView::new(Arc::clone(engine.vocab())));
    }
    follow.stream = !args.json && args.n == 1;
    let done = answer(&mut engine, request, args.n, &mut follow)?;
    follow.finish(&done)?;
    print(args, &done)?;
    let dropped = args.n - done.len();
    if dropped > 0 {
        note(format_args!("{} had not begun and got no answer", count(dropped, "candidate")));
    }
    let interrupted = dropped > 0 || done.iter().any(|c| c.finish_reason == FinishReason::Cancelled);
    Ok(if interrupted { Outcome::Interrupted } else { Outcome::Done })
}

fn prompt(args: &GenerateArgs, text: String) -> Prompt {
    if args.raw {
        return Prompt::Raw(text);
    }
    let system = args.answer.system.as_ref().map(Message::system);
    Prompt::Messages(system.into_iter().chain([Message::user(text)]).collect())
}

/// A request with the command line's settings.
pub fn request(prompt: Prompt, args: &AnswerArgs) -> Result<Request> {
    let mut request = Request::new("").max_tokens(args.max_tokens);
    request.prompt = prompt;
    request.seed = args.seed;
    request.denoise = args.overrides();
    request.sampler = args.sampler.as_deref().map(sampler::by_name).transpose()?;
    request.stop = args.stop.clone();
    request.thinking = args.think;
    Ok(request)
}

/// One answer, or `n` candidates side by side. Where the user ends it, those that still wait for a lane get no answer: the
/// first ones are returned.
fn answer(engine: &mut Engine, mut request: Request, n: usize, follow: &mut Follow) -> Result<Vec<Completion>> {
    if n == 1 {
        return Ok(vec![engine.generate(&request, &mut |event| follow.event(0, &event))?]);
    }
    // Candidates differ by their number only, so the first one's seed is everyone's.
    request.seed.get_or_insert_with(drawn_seed);
    let mut owner = vec![0; engine.info().lanes];
    let mut done: Vec<Option<Completion>> = Vec::new();
    loop {
        while done.len() < n && engine.free() > 0 && !follow.is_ended() {
            request.candidate = done.len() as u64;
            owner[engine.admit(&request)?] = done.len();
            done.push(None);
        }
        if engine.running() == 0 {
            break;
        }
        for (lane, result) in engine.step(&mut |lane, event| follow.event(owner[lane], &event)) {
            done[owner[lane]] = Some(result?);
        }
    }
    Ok(done.into_iter().flatten().collect())
}

/// A seed of 53 bits, which JSON readers that hold numbers as doubles keep.
fn drawn_seed() -> u64 {
    use std::hash::BuildHasher;
    std::hash::RandomState::new().hash_one(0) >> 11
}

fn print(args: &GenerateArgs, done: &[Completion]) -> Result<()> {
    match done {
        [one] if args.json => output::json(&Answer::from(one))?,
        all if args.json => {
            let candidates: Vec<_> = all.iter().map(Answer::from).collect();
            output::json(&json!({ "candidates": candidates }))?;
        }
        [_] => {}
        all => {
            for (i, completion) in all.iter().enumerate() {
                output::line(format_args!("--- candidate {i}"))?;
                output::write_text(&completion.text)?;
                output::line("")?;
            }
        }
    }
    for completion in done {
        if let Some(thought) = completion.reasoning.as_ref().filter(|_| !args.json) {
            note(format_args!("thought: {}", output::printable(thought.trim())));
        }
        if std::io::stderr().is_terminal() {
            note(summary(completion));
        }
    }
    Ok(())
}

/// A receipt in one line.
pub fn summary(completion: &Completion) -> String {
    let r = &completion.receipt;
    let steps: Vec<_> = r.steps_per_canvas.iter().map(u32::to_string).collect();
    let steps = match steps.len() {
        0 => "no step".into(),
        1 => count(r.steps_per_canvas.iter().sum::<u32>() as usize, "step"),
        _ => format!("{} steps in {} canvases", steps.join("+"), steps.len()),
    };
    let cut = if completion.converged { "" } else { " · not converged" };
    let why = match completion.finish_reason {
        FinishReason::Stop => "",
        FinishReason::Length => " · cut at the limit",
        FinishReason::Cancelled => " · cancelled",
    };
    format!(
        "{} · {steps} of {:.1} ms · {:.0} tok/s · seed {}{cut}{why}",
        count(r.tokens, "token"),
        r.step_ms,
        r.tokens_per_second,
        r.seed
    )
}

/// Follows answers while they are made: shows, prints, records, waits, cancels.
pub struct Follow {
    pub view: Option<CanvasView>,
    /// Whether settled text is printed at once.
    pub stream: bool,
    trace: Option<Trace>,
    pace: Duration,
    last_step: Instant,
    cancellable: Cancellable,
    /// The first thing that went wrong; it ends the answer.
    failure: Option<Failure>,
    /// Whether the printed text ends within a line; `None` before any was printed.
    open_line: Option<bool>,
}

impl Follow {
    /// `pace` is the least time of a step in milliseconds.
    pub fn new(pace: u64) -> Self {
        Self {
            view: None,
            stream: false,
            trace: None,
            pace: Duration::from_millis(pace),
            last_step: Instant::now(),
            cancellable: Cancellable::begin(),
            failure: None,
            open_line: None,
        }
    }

    /// The engine's events of a candidate.
    pub fn event(&mut self, candidate: usize, event: &Event<'_>) -> Control {
        if self.failure.is_none()
            && let Err(failure) = self.take(candidate, event)
        {
            self.failure = Some(failure);
        }
        if self.is_ended() { Control::Cancel } else { Control::Continue }
    }

    /// Whether the user wants no more, or something went wrong.
    fn is_ended(&self) -> bool {
        self.failure.is_some() || self.cancellable.requested()
    }

    fn take(&mut self, candidate: usize, event: &Event<'_>) -> Result<()> {
        if let Some(trace) = &mut self.trace {
            trace.event(candidate, event)?;
        }
        match event {
            Event::Prefill { done, total } => {
                if let Some(view) = &mut self.view {
                    view.prefill(*done, *total)?;
                }
            }
            Event::Step(step) => {
                if let Some(view) = &mut self.view {
                    view.step(step)?;
                }
                if candidate == 0 {
                    self.wait();
                }
            }
            Event::Canvas { text, .. } if self.stream => self.print(text)?,
            _ => {}
        }
        Ok(())
    }

    fn print(&mut self, text: &str) -> Result<()> {
        if let Some(last) = text.chars().last() {
            self.open_line = Some(last != '\n');
        }
        match &mut self.view {
            Some(view) => view.settle(text)?,
            None => output::write_text(text)?,
        }
        Ok(())
    }

    /// Waits until the step has taken its time, in short naps: a cancel is not kept waiting.
    fn wait(&mut self) {
        const NAP: Duration = Duration::from_millis(20);
        loop {
            let left = self.pace.saturating_sub(self.last_step.elapsed());
            if left.is_zero() || self.cancellable.requested() {
                break;
            }
            std::thread::sleep(left.min(NAP));
        }
        self.last_step = Instant::now();
    }

    /// To be called with the answers: removes the picture, ends the line and the trace, tells what went wrong meanwhile.
    pub fn finish(mut self, done: &[Completion]) -> Result<()> {
        if let Some(view) = self.view.take() {
            view.finish()?;
        }
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        // For scripts an empty answer is a line, too: without it, answers would be counted wrong.
        let empty_line = self.stream && !std::io::stdout().is_terminal();
        if self.open_line.unwrap_or(empty_line) {
            output::line("")?;
        }
        self.trace.take().map_or(Ok(()), |trace| trace.finish(done))
    }
}

/// Every step of an answer in a file, one JSON object a line, for a timeline. The file is made when the answer begins, so
/// that a refused request leaves none. What a file holds already is never lost: it may be the model or the prompt, by
/// whatever name.
struct Trace {
    path: PathBuf,
    out: Option<LineWriter<File>>,
    info: ModelInfo,
    vocab: Arc<Vocab>,
    /// What the tokens print that occurred.
    pieces: BTreeMap<u32, String>,
}

impl Trace {
    fn new(path: &Path, engine: &Engine) -> Self {
        let (info, vocab) = (engine.info().clone(), Arc::clone(engine.vocab()));
        Self { path: path.to_owned(), out: None, info, vocab, pieces: BTreeMap::new() }
    }

    /// Refuses early what [`Self::open`] would refuse, where that can be told without making the file.
    fn check(path: &Path) -> Result<()> {
        if path == Path::new("-") {
            return Err(bad("trace", "\"-\" names no file, and standard output has the answer: name a file"));
        }
        match std::fs::metadata(path) {
            Ok(there) => Self::refuse_content(path, &there),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
                let there = std::fs::metadata(folder.unwrap_or(Path::new(".")));
                there.map(drop).map_err(|e| file_error("create", path, e))
            }
            Err(error) => Err(file_error("create", path, error)),
        }
    }

    fn refuse_content(path: &Path, there: &Metadata) -> Result<()> {
        let why = match there.len() {
            _ if there.is_dir() => "is a folder: name a file".into(),
            n if n > 0 && there.is_file() => {
                format!(
                    "is there already and holds {}: name a new file, or move this one away",
                    count(n as usize, "byte")
                )
            }
            _ => return Ok(()),
        };
        Err(bad("trace", format!("{} {why}", path.display())))
    }

    fn open(&self) -> Result<LineWriter<File>> {
        let failed = |e| file_error("create", &self.path, e);
        // Appending: whatever comes to stand in the file meanwhile, nothing of it is written over.
        let file = OpenOptions::new().append(true).create(true).open(&self.path).map_err(failed)?;
        Self::refuse_content(&self.path, &file.metadata().map_err(failed)?)?;
        Ok(LineWriter::new(file))
    }

    fn event(&mut self, candidate: usize, event: &Event<'_>) -> Result<()> {
        let line = match event {
            Event::Prefill { done, total } => {
                json!({ "event": "prefill", "candidate": candidate, "done": done, "total": total })
            }
            Event::Step(s) => {
                for id in s.input.iter().chain(s.argmax).chain(s.drawn).chain(s.output) {
                    let piece = || String::from_utf8_lossy(self.vocab.piece(*id)).into_owned();
                    self.pieces.entry(*id).or_insert_with(piece);
                }
                json!({
                    "event": "step", "candidate": candidate, "canvas": s.canvas, "step": s.step,
                    "max_steps": s.max_steps, "temperature": s.temperature, "mean_entropy": s.mean_entropy,
                    "stable": s.stable, "stop": s.stop, "input": s.input, "argmax": s.argmax, "drawn": s.drawn,
                    "entropy": s.entropy, "accepted": s.accepted, "output": s.output,
                })
            }
            Event::Canvas { index, steps, converged, text } => json!({
                "event": "canvas", "candidate": candidate, "canvas": index, "steps": steps, "converged": converged,
                "text": text,
            }),
            _ => return Ok(()),
        };
        self.write(&line)
    }

    fn write(&mut self, line: &Value) -> Result<()> {
        let mut out = match self.out.take() {
            Some(out) => out,
            None => {
                let (mut out, info) = (self.open()?, &self.info);
                let start = json!({
                    "event": "start", "model": info.name, "family": info.family, "quantization": info.quantization,
                    "device": info.device, "level": info.level, "canvas": info.canvas,
                });
                self.put(&mut out, &start)?;
                out
            }
        };
        self.put(&mut out, line)?;
        self.out = Some(out);
        Ok(())
    }

    fn put(&self, out: &mut LineWriter<File>, line: &Value) -> Result<()> {
        writeln!(out, "{}", output::escaped(&line.to_string())).map_err(|e| file_error("write", &self.path, e))
    }

    fn finish(mut self, done: &[Completion]) -> Result<()> {
        let pieces = std::mem::take(&mut self.pieces);
        self.write(&json!({ "event": "pieces", "pieces": pieces }))?;
        for (i, c) in done.iter().enumerate() {
            self.write(&json!({
                "event": "done", "candidate": i, "text": c.text, "reasoning": c.reasoning,
                "finish_reason": c.finish_reason, "converged": c.converged, "receipt": c.receipt,
            }))?;
        }
        self.out.map_or(Ok(()), |mut out| out.flush().map_err(|e| file_error("write", &self.path, e)))
    }
}
