//! Waiting for a job, with signs of life for callers that asked for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rmcp::model::{ProgressNotificationParam, ProgressToken};
use rmcp::service::{Peer, RoleServer};
use tokio_util::sync::CancellationToken;

use crate::error::{Fault, Kind, Result};
use crate::jobs::{Job, State, Task, View};
use crate::worker::{Engine, Worker};

/// Time between two notifications at least.
const PERIOD: Duration = Duration::from_millis(250);
/// What a sign of life without progress adds: progress must increase with each notification.
const BEAT: f64 = 0.001;

/// The way back to a caller that sent a progress token.
pub struct Notifier {
    /// The caller.
    pub peer: Peer<RoleServer>,
    /// Its token.
    pub token: ProgressToken,
    /// Time between two signs of life without progress.
    pub heartbeat: Duration,
}

/// Waits for a job, at most `wait`. Cancelling the call cancels the job if it is the call's `own`.
///
/// # Errors
/// `Cancelled` when the call was cancelled.
pub async fn wait(
    job: &Arc<Job>,
    wait: Duration,
    cancel: &CancellationToken,
    notifier: Option<&Notifier>,
    worker: &Worker,
    own: bool,
) -> Result<View> {
    let end = tokio::time::Instant::now() + wait;
    let mut changes = job.watch();
    // The engine's thread ends it, if it is not busy with a load.
    let mut deadline = job.deadline.map(tokio::time::Instant::from_std);
    let mut told = Told { value: -BEAT, at: Instant::now() };
    loop {
        tokio::select! {
            biased;
            () = cancel.cancelled() => {
                if own {
                    job.cancel.cancel();
                    worker.nudge();
                }
                return Err(Fault::new(Kind::Cancelled, "the call was cancelled"));
            }
            _ = changes.wait_for(|view| view.state.ended()) => return Ok(job.view()),
            () = tokio::time::sleep_until(end) => return Ok(job.view()),
            () = tokio::time::sleep_until(deadline.unwrap_or(end)), if deadline.is_some() => {
                deadline = None;
                worker.nudge();
            }
            () = tokio::time::sleep(PERIOD), if notifier.is_some() => {}
        }
        // Outside of the select, so that a notification is sent as a whole before any reply.
        if let Some(notifier) = notifier {
            told.tell(notifier, job, &worker.engine(), cancel).await;
        }
    }
}

/// What was told last.
struct Told {
    value: f64,
    at: Instant,
}

impl Told {
    async fn tell(&mut self, notifier: &Notifier, job: &Job, engine: &Engine, cancel: &CancellationToken) {
        let view = job.view();
        let (value, total) = match job.task {
            Task::Batch => (view.done as f64, view.total as f64),
            _ => (view.steps as f64, view.steps_total as f64),
        };
        let value = if value > self.value {
            value
        } else if self.at.elapsed() >= notifier.heartbeat {
            self.value + BEAT
        } else {
            return;
        };
        if cancel.is_cancelled() || view.state.ended() {
            return;
        }
        let mut note =
            ProgressNotificationParam::new(notifier.token.clone(), value).with_message(message(&view, engine));
        if total >= value && total > 0.0 {
            note = note.with_total(total);
        }
        (self.value, self.at) = (value, Instant::now());
        if let Err(error) = notifier.peer.notify_progress(note).await {
            tracing::debug!("a progress notification was not sent: {error}");
        }
    }
}

fn message(view: &View, engine: &Engine) -> String {
    match (view.state, engine) {
        (State::Queued, Engine::Loading(id, done, total)) if *total > 0 => {
            format!("loading {id}: {} %", done.saturating_mul(100) / total)
        }
        (State::Queued, Engine::Loading(id, ..)) => format!("loading {id}"),
        (State::Queued, _) => "waiting for a lane".to_owned(),
        (_, _) if view.total > 1 => format!("{} of {} done", view.done, view.total),
        (_, _) => format!("denoising step {} of at most {}", view.steps, view.steps_total),
    }
}
