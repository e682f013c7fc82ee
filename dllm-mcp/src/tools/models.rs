//! `dllm_models`: which models there are, and which one answers.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;

use super::generate::wait_s;
use super::{Call, args, job};
use crate::error::{Fault, Kind, Result};
use crate::jobs::{Job, State, Task};
use crate::progress;
use crate::queue::Order;
use crate::reply::Reply;
use crate::worker::Engine;

pub(super) const ABOUT: &str = "operation: list the models that can be loaded, load one (requests that run are finished first, requests \
that wait are answered by the new model), or unload to free the memory. Loading waits up to wait_s, then returns a job_id.";

/// Arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Args {
    /// What to do.
    #[schemars(extend("enum" = ["list", "load", "unload"]))]
    pub operation: String,
    /// Id of the model to load, as in the list. For unload it may be left out; another than the loaded one is refused.
    #[serde(default)]
    pub model: String,
    /// Seconds to wait for the end of loading, at most 25.
    #[serde(default = "wait_s")]
    #[schemars(range(min = 0, max = 25))]
    pub wait_s: f64,
}

pub(super) async fn run(args: Args, call: &Call) -> Result<Reply> {
    match args.operation.as_str() {
        "list" => list(call).await,
        "load" if args.model.is_empty() => Err(Fault::argument("model", "it is empty: name a model of the list")),
        "load" => change(call, args.wait_s, |job| Order::Load(args.model, job)).await,
        "unload" => change(call, args.wait_s, |job| Order::Unload(args.model, job)).await,
        other => Err(Fault::argument("operation", format!("{other:?} is none of list, load, unload"))),
    }
}

async fn list(call: &Call) -> Result<Reply> {
    let app = Arc::clone(&call.app);
    let cards = tokio::task::spawn_blocking(move || app.host.models()).await;
    let cards = cards.map_err(|e| Fault::new(Kind::Internal, format!("the models cannot be listed: {e}")))?;
    let loaded = match call.app.worker.engine() {
        Engine::Ready(loaded) => loaded.id,
        _ => String::new(),
    };
    Ok(Reply::new(format!("{} models", cards.len()), json!({"models": cards, "loaded": loaded})))
}

async fn change(call: &Call, wait_s: f64, order: impl FnOnce(Arc<Job>) -> Order) -> Result<Reply> {
    let wait = args::wait(wait_s)?;
    let job = Job::new(Task::Model, 1, None, None);
    call.app.worker.order(order(Arc::clone(&job)));
    call.app.jobs.add(&job);
    let view = progress::wait(&job, wait, &call.cancel, call.notifier.as_ref(), &call.app.worker, false).await?;
    match (view.state, view.fault) {
        (State::Done, _) => {
            Ok(Reply::new("done", json!({"job_id": job.id.to_string(), "engine": call.app.worker.engine().json()})))
        }
        (State::Failed | State::Cancelled, Some(fault)) => Err(fault),
        _ => Ok(job::state(&job)),
    }
}
