//! `dllm_benchmark`: how fast this machine is with the loaded model.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::generate::{max_run_s, wait_s};
use super::{Call, args, job};
use crate::answer::Answer;
use crate::backend::Ask;
use crate::error::{Fault, Result};
use crate::item::Settings;
use crate::jobs::{Job, State, Task};
use crate::progress;
use crate::queue::Unit;
use crate::reply::Reply;

pub(super) const ABOUT: &str = "Measure tokens per second, milliseconds per denoising step and steps per canvas. preset: quick (one \
request) or standard (twice as many requests as there are lanes).";

/// Arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Args {
    /// How much to measure.
    #[serde(default = "quick")]
    #[schemars(extend("enum" = ["quick", "standard"]))]
    pub preset: String,
    /// Seconds to wait for the end, at most 25.
    #[serde(default = "wait_s")]
    #[schemars(range(min = 0, max = 25))]
    pub wait_s: f64,
    /// Seconds after which the job is ended.
    #[serde(default = "max_run_s")]
    #[schemars(range(min = 0.001, max = 86_400))]
    pub max_run_s: f64,
}

fn quick() -> String {
    "quick".to_owned()
}

pub(super) async fn run(args: Args, call: &Call) -> Result<Reply> {
    let requests = match args.preset.as_str() {
        "quick" => 1,
        "standard" => 2 * u32::from(call.app.config.lanes),
        other => return Err(Fault::argument("preset", format!("{other:?} is neither quick nor standard"))),
    };
    let (wait, max_run) = (args::wait(args.wait_s)?, args::max_run(args.max_run_s)?);
    // The same seeds each time, so that two runs do the same work.
    let unit = |job: &Arc<Job>, n: u32| -> Result<Unit> {
        let settings = Settings { max_tokens: 256, seed: i64::from(n), ..Settings::default() };
        let request = settings.request(
            "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
            "",
            None,
        )?;
        Ok(Unit { job: Arc::clone(job), part: n as usize, item: None, ask: Ask::new(request) })
    };
    let job = Job::new(Task::Benchmark, u64::from(requests), Some(max_run), None);
    call.app.worker.submit((0..requests).map(|n| unit(&job, n)).collect::<Result<_>>()?)?;
    call.app.jobs.add(&job);
    let view = progress::wait(&job, wait, &call.cancel, call.notifier.as_ref(), &call.app.worker, true).await?;
    match (view.state, view.fault) {
        (State::Done, _) => Ok(report(&job)),
        (State::Failed | State::Cancelled, Some(fault)) => Err(fault),
        _ => Ok(job::state(&job)),
    }
}

/// What a benchmark that is done has measured.
pub(super) fn report(job: &Job) -> Reply {
    let answers: Vec<Answer> = job.results().into_iter().flatten().filter_map(Result::ok).collect();
    let view = job.view();
    let wall = view.started.zip(view.ended).map_or(0.0, |(start, end)| end.duration_since(start).as_secs_f64());
    let tokens: usize = answers.iter().map(|answer| answer.tokens).sum();
    let rate = if wall > 0.0 { tokens as f64 / wall } else { 0.0 };
    let mut step_ms: Vec<f64> = answers.iter().filter_map(|answer| answer.receipt["step_ms"].as_f64()).collect();
    step_ms.sort_by(f64::total_cmp);
    let steps: Vec<&Value> =
        answers.iter().filter_map(|answer| answer.receipt["steps_per_canvas"].as_array()).flatten().collect();
    let mean = steps.iter().filter_map(|n| n.as_f64()).sum::<f64>() / steps.len().max(1) as f64;
    let data = json!({
        "job_id": job.id.to_string(),
        "state": view.state.name(),
        "preset": if view.total == 1 { "quick" } else { "standard" },
        "requests": answers.len(),
        "tokens": tokens,
        "seconds": wall,
        "tokens_per_second": rate,
        "ms_per_step": step_ms.get(step_ms.len() / 2),
        "steps_per_canvas": mean,
        "peak_memory": answers.iter().filter_map(|answer| answer.receipt["device_bytes"].as_u64()).max(),
        "receipt": answers.first().map(|answer| answer.receipt.clone()),
    });
    Reply::new(format!("{rate:.1} tokens per second over {} requests", answers.len()), data)
}
