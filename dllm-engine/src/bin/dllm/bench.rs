//! `dllm bench`: speed.

use std::time::{Duration, Instant};

use dllm_engine::vocab::TokenKind;
use dllm_engine::{Completion, Control, Engine, Error, Event, PartTime, Prompt, Request};
use serde::Serialize;

use super::args::BenchArgs;
use super::output::{self, Failure, Outcome, Result, bad, bytes, count, progress};
use super::signal::Cancellable;

/// Most repetitions.
const MAX_REPETITIONS: usize = 10_000;

/// What was measured. Times in milliseconds.
#[derive(Serialize)]
struct Measured {
    model: String,
    quantization: String,
    device: String,
    threads: usize,
    level: dllm_engine::Level,
    lanes: usize,
    repetitions: usize,
    prompt_tokens: usize,
    /// A step of all lanes together: one forward pass and the loop's work.
    step_ms_median: f64,
    step_ms_min: f64,
    step_ms_p90: f64,
    steps_per_canvas: f64,
    /// Answer tokens per second of wall time, of all lanes together.
    tokens_per_second: f64,
    prefill_tokens_per_second: f64,
    device_bytes: u64,
    /// Passes of the measured repetitions that a CUDA device ran as one captured graph.
    captured_replays: u64,
    /// Where a step's time goes, with `--breakdown`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    breakdown: Vec<PartTime>,
}

/// One repetition.
struct Run {
    completions: Vec<Completion>,
    /// Time of each step that nothing else was part of.
    steps: Vec<Duration>,
    total: Duration,
}

pub fn run(args: &BenchArgs) -> Result {
    output::check_count("repetitions", args.repetitions, MAX_REPETITIONS)?;
    let mut engine = output::load(args.load.params(args.model.source(), args.lanes)?)?;
    let request = request(args, &engine)?;
    let bar = progress("measuring", "{pos} of {len}");
    bar.set_length(args.repetitions as u64);
    let cancellable = Cancellable::begin();
    let mut runs = Vec::new();
    for i in 0..=args.repetitions {
        let seed = args.seed.wrapping_add(i.saturating_sub(1) as u64);
        let run = repeat(&mut engine, &request.clone().seed(seed), args.lanes, &cancellable)?;
        if cancellable.requested() {
            return Ok(Outcome::Interrupted);
        }
        // The first builds graphs and warms caches.
        if i > 0 {
            runs.push(run);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let mut measured = measured(&engine, &runs)?;
    if args.breakdown {
        measured.breakdown = engine.breakdown()?;
    }
    match args.json {
        true => output::json(&measured)?,
        false => output::line(table(&measured))?,
    }
    Ok(Outcome::Done)
}

fn request(args: &BenchArgs, engine: &Engine) -> Result<Request> {
    let mut request = Request::new("").max_tokens(args.max_tokens);
    request.prompt = match &args.prompt {
        Some(text) => Prompt::from(text.as_str()),
        None => Prompt::Tokens(drawn_prompt(engine, args.prompt_tokens)?),
    };
    if let Some(steps) = args.steps {
        request.denoise.max_steps = Some(steps);
        // Here the option has another name than elsewhere.
        engine.settings().with(&request.denoise).map_err(|error| match error {
            Error::BadArgument { name: "max_steps", why } => bad("steps", why),
            error => error.into(),
        })?;
        // No canvas is surer than certain: the stop rule never ends one early.
        request.denoise.confidence_threshold = Some(0.0);
    }
    Ok(request)
}

/// Ordinary tokens in a scattered order: speed does not depend on what they say.
fn drawn_prompt(engine: &Engine, n: usize) -> Result<Vec<u32>> {
    let (vocab, context) = (engine.vocab(), engine.info().context);
    if n == 0 || n > context {
        return Err(bad("prompt_tokens", format!("{n} is not in 1..={context}, the context: change one of them")));
    }
    let plain: Vec<u32> = (0..vocab.len() as u32).filter(|id| vocab.kind(*id) == Some(TokenKind::Normal)).collect();
    const STRIDE: usize = 7919; // a prime: no short cycles
    let token = |i: usize| plain.get(i.wrapping_mul(STRIDE) % plain.len().max(1)).copied();
    Ok((1..=n).filter_map(token).collect())
}

fn repeat(engine: &mut Engine, request: &Request, lanes: usize, cancellable: &Cancellable) -> Result<Run> {
    engine.forget();
    let begin = Instant::now();
    for i in 0..lanes as u64 {
        let mut request = request.clone();
        request.candidate = i;
        engine.admit(&request)?;
    }
    let (mut completions, mut steps) = (Vec::new(), Vec::new());
    while engine.running() > 0 {
        let since = Instant::now();
        let (mut stepped, mut mixed) = (false, false);
        let finished = engine.step(&mut |_, event| {
            match event {
                // A canvas' first step comes in one go with reading the prompt or committing the canvas before.
                Event::Step(step) => (stepped, mixed) = (true, mixed || step.step == 1),
                Event::Prefill { .. } => mixed = true,
                _ => {}
            }
            if cancellable.requested() { Control::Cancel } else { Control::Continue }
        });
        if stepped && !mixed {
            steps.push(since.elapsed());
        }
        for (_, result) in finished {
            completions.push(result?);
        }
    }
    Ok(Run { completions, steps, total: begin.elapsed() })
}

fn measured(engine: &Engine, runs: &[Run]) -> Result<Measured> {
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    let mut steps: Vec<f64> = runs.iter().flat_map(|run| &run.steps).map(|d| ms(*d)).collect();
    let all: Vec<_> = runs.iter().flat_map(|run| &run.completions).map(|c| &c.receipt).collect();
    if steps.is_empty() {
        // With one step a canvas, the receipts alone know.
        steps = all.iter().map(|r| r.step_ms).collect();
    }
    steps.sort_by(f64::total_cmp);
    let at = |share: f64| steps.get((share * steps.len().saturating_sub(1) as f64).round() as usize).copied();
    let nothing = || Failure::Message("nothing was measured: no answer took a step".into());
    let canvases: usize = all.iter().map(|r| r.steps_per_canvas.len()).sum();
    let total_steps: u32 = all.iter().flat_map(|r| &r.steps_per_canvas).sum();
    let tokens: usize = all.iter().map(|r| r.tokens).sum();
    let seconds: f64 = runs.iter().map(|run| run.total.as_secs_f64()).sum();
    // The lanes' prompts are read side by side: the slowest lane tells how long all took.
    let read: usize = all.iter().map(|r| r.prompt_tokens - r.cached_tokens.min(r.prompt_tokens)).sum();
    let slowest = |run: &Run| run.completions.iter().map(|c| c.receipt.prefill_ms).fold(0.0, f64::max);
    let reading: f64 = runs.iter().map(slowest).sum::<f64>() / 1e3;
    let info = engine.info();
    Ok(Measured {
        model: info.name.clone(),
        quantization: info.quantization.clone(),
        device: info.device.clone(),
        threads: info.threads,
        level: info.level,
        lanes: info.lanes,
        repetitions: runs.len(),
        prompt_tokens: all.first().map_or(0, |r| r.prompt_tokens),
        step_ms_median: at(0.5).ok_or_else(nothing)?,
        step_ms_min: at(0.0).ok_or_else(nothing)?,
        step_ms_p90: at(0.9).ok_or_else(nothing)?,
        steps_per_canvas: f64::from(total_steps) / canvases.max(1) as f64,
        tokens_per_second: tokens as f64 / seconds,
        prefill_tokens_per_second: if reading > 0.0 { read as f64 / reading } else { 0.0 },
        device_bytes: engine.device_bytes(),
        captured_replays: all.iter().map(|r| r.captured_replays).sum(),
        breakdown: Vec::new(),
    })
}

fn table(m: &Measured) -> String {
    let level = serde_json::to_value(m.level).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
    let head = format!("{} · {} · {} · {}", output::printable(&m.model), m.quantization, m.device, level);
    let setting = format!(
        "{}, {}, {}, {}",
        count(m.lanes, "lane"),
        count(m.threads, "thread"),
        count(m.prompt_tokens, "prompt token"),
        count(m.repetitions, "repetition")
    );
    let rows = [
        ("step", format!("{:.2} ms   (min {:.2}, p90 {:.2})", m.step_ms_median, m.step_ms_min, m.step_ms_p90)),
        ("steps per canvas", format!("{:.1}", m.steps_per_canvas)),
        ("answer", format!("{:.0} tok/s", m.tokens_per_second)),
        ("prefill", format!("{:.0} tok/s", m.prefill_tokens_per_second)),
        ("memory", bytes(m.device_bytes)),
        ("captured replays", m.captured_replays.to_string()),
    ];
    // Only CUDA captures graphs.
    let rows = &rows[..if m.device.starts_with("CUDA") { rows.len() } else { rows.len() - 1 }];
    let rows: Vec<_> = rows.iter().map(|(name, value)| format!("{name:<18}{value}")).collect();
    format!("{head}\n{setting}\n\n{}{}", rows.join("\n"), parts(&m.breakdown))
}

/// The parts of a step, those that take next to nothing as one.
fn parts(breakdown: &[PartTime]) -> String {
    if breakdown.is_empty() {
        return String::new();
    }
    let sum: f64 = breakdown.iter().map(|p| p.ms).sum();
    let row = |name: &str, nodes: usize, ms: f64| {
        format!("{name:<38}{nodes:>6}{ms:>11.3}{:>7.1} %", 100.0 * ms / sum.max(1e-9))
    };
    let (large, small): (Vec<&PartTime>, Vec<_>) = breakdown.iter().partition(|p| p.ms >= 0.005 * sum);
    let mut lines = vec![
        String::new(),
        String::new(),
        format!("{:<38}{:>6}{:>11}", "part of a step, computed alone", "nodes", "ms"),
    ];
    lines.extend(large.iter().map(|p| row(&p.part, p.nodes, p.ms)));
    if !small.is_empty() {
        lines.push(row("less than 0.5 % each", small.iter().map(|p| p.nodes).sum(), small.iter().map(|p| p.ms).sum()));
    }
    lines.push(row("sum", breakdown.iter().map(|p| p.nodes).sum(), sum));
    lines.join("\n")
}
