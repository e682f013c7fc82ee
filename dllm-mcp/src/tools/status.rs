//! `dllm_status`: what is loaded, and what runs.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Call;
use crate::error::Result;
use crate::reply::Reply;
use crate::server::App;
use crate::worker::Engine;

pub(super) const ABOUT: &str =
    "Show which model is loaded, memory, queue, running jobs, folders and versions. Loads nothing.";

/// No arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Args {}

pub(super) fn run(_: Args, call: &Call) -> Result<Reply> {
    let app = &call.app;
    let engine = app.worker.engine();
    let (waiting, batches, running) = app.worker.load();
    let jobs: Vec<Value> = app
        .jobs
        .list()
        .iter()
        .filter(|job| !job.view().state.ended())
        .take(20)
        .map(|job| Value::Object(job.data()))
        .collect();
    let (model, quantization) = match &engine {
        Engine::Ready(loaded) => (loaded.model.clone(), loaded.quantization.clone()),
        _ => (String::new(), String::new()),
    };
    let message = match &engine {
        Engine::Ready(loaded) => {
            format!("{} is loaded on {}; {running} running, {waiting} waiting", loaded.model, loaded.device)
        }
        Engine::Loading(id, ..) => format!("{id} is being loaded; {waiting} waiting"),
        Engine::Failed(fault) => format!("the last load failed: {fault}"),
        Engine::Unloaded => format!("nothing is loaded; the first request loads {}", app.host.default_model()),
    };
    let problems = app.host.problems();
    let message = std::iter::once(message).chain(problems.iter().cloned()).collect::<Vec<_>>().join("; ");
    let data = json!({
        "state": engine.json(),
        "model": model,
        "quantization": quantization,
        "memory": app.host.memory(),
        "queue": {"waiting": waiting, "capacity": app.config.queue, "batches": batches, "running": running},
        "jobs": jobs,
        "problems": problems,
        "config": config(app),
    });
    Ok(Reply::new(message, data))
}

/// What the operator set, as far as callers may know it.
pub fn config(app: &App) -> Value {
    let roots: Vec<String> = app.roots.folders().iter().map(|root| root.display().to_string()).collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "default_model": app.host.default_model(),
        "roots": roots,
        "lanes": app.config.lanes,
        "idle_minutes": app.config.idle_minutes,
        "queue": app.config.queue,
    })
}
