//! `dllm_job`: what became of it.

use std::path::PathBuf;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::generate::{answer_data, told, wait_s};
use super::{Call, args, benchmark};
use crate::error::{Fault, Kind, Result};
use crate::item::in_range;
use crate::jobs::{Job, State, Task};
use crate::output;
use crate::progress;
use crate::reply::Reply;
use crate::server::App;

pub(super) const ABOUT: &str = "Look after jobs. operation: get (state now), wait (until it ends, at most wait_s), cancel, list, results \
(a page; pass nextCursor as cursor for the next). Jobs are kept for 1 hour, at most 200; result files of batches stay.";

/// Bytes of results in a page: they are sent twice.
const PAGE: usize = 20 * 1024;
/// Bytes of a text in a page.
const CHUNK: usize = 16 * 1024;

/// Arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Args {
    /// What to do.
    #[schemars(extend("enum" = ["get", "wait", "cancel", "list", "results"]))]
    pub operation: String,
    /// The job; not needed for list.
    #[serde(default)]
    pub job_id: String,
    /// Where a page begins: nextCursor of the page before.
    #[serde(default)]
    pub cursor: String,
    /// Most entries of a page.
    #[serde(default = "limit")]
    #[schemars(range(min = 1, max = 200))]
    pub limit: u32,
    /// Seconds to wait, at most 25.
    #[serde(default = "wait_s")]
    #[schemars(range(min = 0, max = 25))]
    pub wait_s: f64,
}

fn limit() -> u32 {
    50
}

pub(super) async fn run(args: Args, call: &Call) -> Result<Reply> {
    in_range("limit", args.limit, 1, 200)?;
    let (app, limit) = (&call.app, args.limit as usize);
    match args.operation.as_str() {
        "get" => {
            let job = look(app, &args.job_id)?;
            match (job.task, job.view().state) {
                (Task::Benchmark, State::Done) => Ok(benchmark::report(&job)),
                _ => Ok(state(&job)),
            }
        }
        "wait" => {
            let (job, wait) = (look(app, &args.job_id)?, args::wait(args.wait_s)?);
            let view = progress::wait(&job, wait, &call.cancel, call.notifier.as_ref(), &app.worker, false).await?;
            match (job.task, view.state) {
                (Task::Generate | Task::Infill, _) => told(&job),
                (Task::Benchmark, State::Done) => Ok(benchmark::report(&job)),
                _ => Ok(state(&job)),
            }
        }
        "cancel" => cancel(app, &look(app, &args.job_id)?).await,
        "list" => list(app, &args.cursor, limit),
        "results" => {
            let (app, id, cursor) = (Arc::clone(app), args.job_id, args.cursor);
            let page = tokio::task::spawn_blocking(move || results(&app, &id, &cursor, limit)).await;
            page.map_err(|e| Fault::new(Kind::Internal, e.to_string()))?
        }
        other => Err(Fault::argument("operation", format!("{other:?} is none of get, wait, cancel, list, results"))),
    }
}

/// A job. One whose time is over is ended by the look at it: the engine's thread may be busy with a load.
fn look(app: &App, id: &str) -> Result<Arc<Job>> {
    let job = app.jobs.get(id)?;
    if job.over().is_some() {
        app.worker.nudge();
    }
    Ok(job)
}

async fn cancel(app: &App, job: &Arc<Job>) -> Result<Reply> {
    if job.view().state.ended() {
        let reply = state(job);
        return Ok(Reply { message: format!("it had ended before: {}", reply.message), ..reply });
    }
    if job.task == Task::Model {
        if !app.worker.withdraw(job) && !job.view().state.ended() {
            let why = "a change of the model that has begun cannot be interrupted: the file is being read in one go";
            return Err(Fault::argument("operation", why).advise(
                "dllm_job operation=wait tells its end; dllm_models operation=unload gives the memory back afterwards",
            ));
        }
        return Ok(state(job));
    }
    job.cancel.cancel();
    app.worker.nudge();
    // The engine ends it at its next denoising step.
    job.wait(std::time::Duration::from_secs(1)).await;
    Ok(state(job))
}

pub(super) fn state(job: &Job) -> Reply {
    let view = job.view();
    let eta =
        view.eta_s().filter(|_| !view.state.ended()).map_or(String::new(), |eta| format!(", about {eta:.0} s left"));
    let message = format!("{} of {} done, {} failed; {}{eta}", view.done, view.total, view.failed, view.state.name());
    Reply::new(message, Value::Object(job.data()))
}

fn list(app: &App, cursor: &str, limit: usize) -> Result<Reply> {
    let start = if cursor.is_empty() { 0 } else { cursor.parse().map_err(|_| bad_cursor(cursor))? };
    let jobs = app.jobs.list();
    let entry = |job: &Arc<Job>| {
        let view = job.view();
        json!({"job_id": job.id.to_string(), "task": job.task.name(), "state": view.state.name(), "done": view.done, "total": view.total})
    };
    let page: Vec<Value> = jobs.iter().skip(start).take(limit).map(entry).collect();
    let end = start.saturating_add(page.len());
    let mut data = json!({"jobs": page, "total": jobs.len()});
    if end < jobs.len() {
        data["nextCursor"] = json!(end.to_string());
    }
    Ok(Reply::new(format!("{} jobs", jobs.len()), data))
}

/// A page of a job's results. Results of batches can be read even after the process that made them has ended.
///
/// # Errors
/// `UnknownJob`, `BadArgument` for a cursor.
pub fn results(app: &App, id: &str, cursor: &str, limit: usize) -> Result<Reply> {
    match app.jobs.get(id) {
        Ok(job) => match &job.output {
            Some(path) => file_page(path.clone(), cursor, limit, !job.view().state.ended()),
            None => match (job.task, job.view().state) {
                (Task::Model, _) => Err(Fault::argument("operation", "a load or unload has no results")
                    .advise("dllm_job operation=get tells its state, dllm_status what is loaded")),
                (Task::Benchmark, State::Done) => {
                    Ok(Reply::new("the report", json!({"results": [benchmark::report(&job).data]})))
                }
                (Task::Benchmark, _) if !job.view().state.ended() => Ok(Reply::new(
                    "not done yet; the report comes at the end",
                    json!({"results": [], "nextCursor": ""}),
                )),
                _ => answer_page(&job, cursor),
            },
        },
        Err(fault) => {
            let file = uuid::Uuid::try_parse(id).ok().map(|id| app.results_file(id)).filter(|file| file.is_file());
            file.map_or(Err(fault), |file| file_page(file, cursor, limit, false))
        }
    }
}

fn file_page(path: PathBuf, cursor: &str, limit: usize, grows: bool) -> Result<Reply> {
    let start = if cursor.is_empty() { 0 } else { cursor.parse().map_err(|_| bad_cursor(cursor))? };
    let (items, end, more) = output::page(&path, start, limit, PAGE)?;
    let message = format!(
        "{} results{}",
        items.len(),
        if more || grows { "; more follow: pass nextCursor as cursor" } else { "; the last page" }
    );
    let mut data = json!({"results": items, "output_path": path.display().to_string()});
    if more || grows {
        data["nextCursor"] = json!(end.to_string());
    }
    Ok(Reply::new(message, data))
}

/// One candidate's text, or a piece of it; the cursor is `candidate.byte`.
fn answer_page(job: &Job, cursor: &str) -> Result<Reply> {
    let (part, start) = match cursor.split_once('.') {
        _ if cursor.is_empty() => (0, 0),
        Some((part, start)) => {
            (part.parse().map_err(|_| bad_cursor(cursor))?, start.parse().map_err(|_| bad_cursor(cursor))?)
        }
        None => return Err(bad_cursor(cursor)),
    };
    let all = job.results();
    let Some(slot) = all.get(part) else { return Err(bad_cursor(cursor)) };
    let mut next = (part + 1 < all.len()).then(|| format!("{}.0", part + 1));
    let entry = match slot {
        None if job.view().state.ended() => return Ok(Reply::new("there is no more", json!({"results": []}))),
        None => return Ok(Reply::new("not done yet", json!({"results": [], "nextCursor": format!("{part}.{start}")}))),
        Some(Err(fault)) => json!({"candidate": part, "ok": false, "message": fault.message, "error": fault.json()}),
        Some(Ok(answer)) => {
            let rest = answer.text.get(start..).ok_or_else(|| bad_cursor(cursor))?;
            let end = (0..=rest.len().min(CHUNK)).rev().find(|&at| rest.is_char_boundary(at)).unwrap_or(0);
            if end < rest.len() {
                next = Some(format!("{part}.{}", start + end));
            }
            let mut data = answer_data(job, answer);
            // The JSON value repeats the text, which is what pages are for.
            data.remove("json");
            data.insert("text".into(), json!(rest.get(..end).unwrap_or("")));
            data.insert("ok".into(), json!(true));
            data.insert("candidate".into(), json!(part));
            Value::Object(data)
        }
    };
    let mut data = json!({"results": [entry]});
    if let Some(next) = next {
        data["nextCursor"] = json!(next);
    }
    Ok(Reply::new("a piece of the results", data))
}

fn bad_cursor(cursor: &str) -> Fault {
    let shown: String = cursor.chars().take(40).collect();
    Fault::argument("cursor", format!("{shown:?} is none that was given out"))
}
