//! Jobs: everything that runs is one, so that no call needs to wait for its end.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::answer::Answer;
use crate::backend::{Frame, Tick};
use crate::error::{Fault, Kind, Result};
use crate::format::Format;

/// Ended jobs are kept so long.
const KEPT: Duration = Duration::from_secs(3600);
/// And so many.
const KEPT_JOBS: usize = 200;

/// Denoising steps that a traced job keeps.
const KEPT_FRAMES: usize = 512;

/// What a job is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// `dllm_generate`.
    Generate,
    /// `dllm_infill`.
    Infill,
    /// `dllm_batch`.
    Batch,
    /// `dllm_benchmark`.
    Benchmark,
    /// `dllm_models` load or unload.
    Model,
}

impl Task {
    /// The name in replies.
    pub fn name(self) -> &'static str {
        match self {
            Self::Generate => "generate",
            Self::Infill => "infill",
            Self::Batch => "batch",
            Self::Benchmark => "benchmark",
            Self::Model => "model",
        }
    }
}

/// Where a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Waits for a lane or for the model.
    Queued,
    /// At least one request runs or ran.
    Running,
    /// All requests have ended; single ones may have failed.
    Done,
    /// It ended as a whole with an error.
    Failed,
    /// It was cancelled.
    Cancelled,
}

impl State {
    /// The name in replies.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether nothing more will happen.
    pub fn ended(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }
}

/// What can be told of a job at a moment.
#[derive(Debug, Clone)]
pub struct View {
    /// Where it is.
    pub state: State,
    /// Requests that ended, failed ones included.
    pub done: u64,
    /// Of these, failed.
    pub failed: u64,
    /// Requests in all.
    pub total: u64,
    /// Requests that were done before this job began (resumed batches).
    pub skipped: u64,
    /// Denoising steps done, over all requests.
    pub steps: u64,
    /// Most steps, over all requests that are known.
    pub steps_total: u64,
    /// When its first request began.
    pub started: Option<Instant>,
    /// When it ended.
    pub ended: Option<Instant>,
    /// Why it failed.
    pub fault: Option<Fault>,
}

impl View {
    /// Requests per second since the start.
    pub fn rate(&self) -> f64 {
        let seconds = self
            .started
            .map_or(0.0, |start| self.ended.unwrap_or_else(Instant::now).duration_since(start).as_secs_f64());
        if seconds > 0.0 { self.done as f64 / seconds } else { 0.0 }
    }

    /// Seconds until the end at the rate so far; unknown before anything was done.
    pub fn eta_s(&self) -> Option<f64> {
        if self.state.ended() {
            return Some(0.0);
        }
        let start = self.started?;
        let share = if self.total > 1 {
            self.done as f64 / self.total as f64
        } else {
            self.steps as f64 / self.steps_total.max(1) as f64
        };
        (share > 0.0).then(|| start.elapsed().as_secs_f64() * (1.0 - share) / share)
    }
}

/// Something that was asked for.
#[derive(Debug)]
pub struct Job {
    /// Its name for callers.
    pub id: Uuid,
    /// What it is for.
    pub task: Task,
    /// Trips when it is to end.
    pub cancel: CancellationToken,
    /// When it is ended in any case.
    pub deadline: Option<Instant>,
    /// The file with its results, for batches.
    pub output: Option<PathBuf>,
    /// What its answers must look like.
    pub format: Option<Format>,
    view: watch::Sender<View>,
    parts: Mutex<Vec<Part>>,
}

#[derive(Debug, Default, Clone)]
struct Part {
    steps: u64,
    total: u64,
    frames: Vec<Frame>,
    result: Option<Result<Answer>>,
}

impl Job {
    /// A job of `total` requests whose answers are kept in memory.
    pub fn new(task: Task, total: u64, max_run: Option<Duration>, format: Option<Format>) -> Arc<Self> {
        Self::build(Uuid::new_v4(), task, total, max_run, None, format)
    }

    /// A batch: its answers go to a file.
    pub fn batch(id: Uuid, total: u64, output: PathBuf, format: Option<Format>) -> Arc<Self> {
        Self::build(id, Task::Batch, total, None, Some(output), format)
    }

    fn build(
        id: Uuid,
        task: Task,
        total: u64,
        max_run: Option<Duration>,
        output: Option<PathBuf>,
        format: Option<Format>,
    ) -> Arc<Self> {
        let view = View {
            state: State::Queued,
            done: 0,
            failed: 0,
            total,
            skipped: 0,
            steps: 0,
            steps_total: 0,
            started: None,
            ended: None,
            fault: None,
        };
        let parts = if output.is_some() { 0 } else { usize::try_from(total).unwrap_or(0) };
        Arc::new(Self {
            id,
            task,
            cancel: CancellationToken::new(),
            deadline: max_run.and_then(|run| Instant::now().checked_add(run)),
            output,
            format,
            view: watch::Sender::new(view),
            parts: Mutex::new(vec![Part::default(); parts]),
        })
    }

    /// What can be told now.
    pub fn view(&self) -> View {
        self.view.borrow().clone()
    }

    /// Wakes at the start, at each request that ends, and at the end; not at each step.
    pub fn watch(&self) -> watch::Receiver<View> {
        self.view.subscribe()
    }

    /// Why it must not go on.
    pub fn over(&self) -> Option<Fault> {
        if self.cancel.is_cancelled() {
            return Some(Fault::new(Kind::Cancelled, "the job was cancelled"));
        }
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        late.then(|| Fault::new(Kind::Deadline, "max_run_s is over before the job was done"))
    }

    /// Notes that a request runs.
    pub fn start(&self) {
        self.view.send_if_modified(|view| {
            let first = view.state == State::Queued;
            if first {
                view.state = State::Running;
                view.started = Some(Instant::now());
            }
            first
        });
    }

    /// Notes requests that need not run again.
    pub fn skip(&self, n: u64) {
        self.view.send_modify(|view| view.skipped = n);
    }

    /// Notes the progress of a request.
    pub fn tick(&self, part: usize, tick: Tick) {
        let (steps, total) = {
            let mut parts = self.lock();
            if let Some(part) = parts.get_mut(part) {
                (part.steps, part.total) = (part.steps.max(tick.steps), tick.total);
                if part.frames.len() < KEPT_FRAMES {
                    part.frames.extend(tick.frame);
                }
            }
            (parts.iter().map(|p| p.steps).sum(), parts.iter().map(|p| p.total).sum())
        };
        // Wakes nobody: who waits, waits for the end, and who tells of progress looks by a clock.
        self.view.send_if_modified(|view| {
            (view.steps, view.steps_total) = (steps, total);
            false
        });
    }

    /// Notes the end of a request. The job ends with its last one.
    pub fn finish_part(&self, part: usize, result: Result<Answer>) {
        let failed = result.is_err();
        let last = {
            let mut parts = self.lock();
            if let Some(part) = parts.get_mut(part) {
                part.result = Some(result);
            }
            !parts.is_empty() && parts.iter().all(|part| part.result.is_some())
        };
        self.count(failed);
        if last {
            let fault = self.over().or_else(|| self.first_fault());
            self.finish(fault);
        }
    }

    /// Counts a request that ended.
    pub fn count(&self, failed: bool) {
        self.view.send_modify(|view| {
            view.done += 1;
            view.failed += u64::from(failed);
        });
    }

    /// Ends the job. Only the first end counts.
    pub fn finish(&self, fault: Option<Fault>) {
        self.view.send_if_modified(|view| {
            if view.state.ended() {
                return false;
            }
            view.state = match &fault {
                None => State::Done,
                Some(fault) if fault.kind == Kind::Cancelled => State::Cancelled,
                Some(_) => State::Failed,
            };
            view.ended = Some(Instant::now());
            view.fault = fault;
            true
        });
    }

    /// The answers so far, by request.
    pub fn results(&self) -> Vec<Option<Result<Answer>>> {
        self.lock().iter().map(|part| part.result.clone()).collect()
    }

    /// A canvas after a step, if the job was traced and has come so far.
    pub fn frame(&self, canvas: usize, step: u32) -> Option<Frame> {
        let parts = self.lock();
        let frames = parts.first()?.frames.iter();
        frames.into_iter().find(|frame| (frame.canvas, frame.step) == (canvas, step)).cloned()
    }

    /// Steps that were kept, per canvas; empty without a trace.
    fn frames(&self) -> Vec<usize> {
        let parts = self.lock();
        let mut counts = Vec::new();
        for frame in parts.first().map_or(&[][..], |part| &part.frames) {
            counts.resize(counts.len().max(frame.canvas + 1), 0);
            counts[frame.canvas] += 1;
        }
        counts
    }

    /// Waits until the job has ended, at most `wait`.
    pub async fn wait(&self, wait: Duration) -> View {
        let mut watch = self.watch();
        // A closed watch or the end of the time: either way the view is what can be told.
        let _ = tokio::time::timeout(wait, watch.wait_for(|view| view.state.ended())).await;
        self.view()
    }

    /// The job as the data of a reply.
    pub fn data(&self) -> Map<String, Value> {
        let view = self.view();
        let mut data = Map::new();
        data.insert("job_id".into(), json!(self.id.to_string()));
        data.insert("task".into(), json!(self.task.name()));
        data.insert("state".into(), json!(view.state.name()));
        data.insert("done".into(), json!(view.done));
        data.insert("failed".into(), json!(view.failed));
        data.insert("total".into(), json!(view.total));
        data.insert("skipped".into(), json!(view.skipped));
        data.insert("progress".into(), json!({"steps": view.steps, "steps_total": view.steps_total}));
        data.insert("rate".into(), json!(view.rate()));
        if let Some(eta) = view.eta_s() {
            data.insert("eta_s".into(), json!(eta));
        }
        let frames = self.frames();
        if !frames.is_empty() {
            data.insert("frames_per_canvas".into(), json!(frames));
        }
        if let Some(fault) = &view.fault {
            let mut told = json!({"message": fault.message});
            if let (Value::Object(told), Value::Object(error)) = (&mut told, fault.json()) {
                told.extend(error);
            }
            data.insert("fault".into(), told);
        }
        data
    }

    fn first_fault(&self) -> Option<Fault> {
        // One good candidate makes the job good.
        let parts = self.lock();
        let results = || parts.iter().filter_map(|part| part.result.as_ref());
        if results().any(|result| result.is_ok()) {
            return None;
        }
        results().find_map(|result| result.as_ref().err().cloned())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Part>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The jobs that callers can ask for.
#[derive(Debug, Default)]
pub struct Jobs(Mutex<VecDeque<Arc<Job>>>);

impl Jobs {
    /// Remembers a job, and forgets the oldest ended ones.
    pub fn add(&self, job: &Arc<Job>) {
        let mut jobs = self.lock();
        jobs.push_back(Arc::clone(job));
        jobs.retain(|job| job.view().ended.is_none_or(|end| end.elapsed() < KEPT));
        while jobs.len() > KEPT_JOBS {
            let Some(oldest) = jobs.iter().position(|job| job.view().state.ended()) else { break };
            jobs.remove(oldest);
        }
    }

    /// A job by the id that a caller sent.
    ///
    /// # Errors
    /// `UnknownJob`.
    pub fn get(&self, id: &str) -> Result<Arc<Job>> {
        let job = Uuid::try_parse(id).ok().and_then(|id| self.lock().iter().find(|job| job.id == id).cloned());
        let shown: String = id.chars().take(64).collect();
        job.ok_or_else(|| {
            Fault::new(
                Kind::UnknownJob,
                format!("there is no job {shown:?}: jobs are kept for 1 hour, at most {KEPT_JOBS}"),
            )
        })
    }

    /// All of them, the newest first.
    pub fn list(&self) -> Vec<Arc<Job>> {
        self.lock().iter().rev().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Arc<Job>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
