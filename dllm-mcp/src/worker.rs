//! The one thread that owns the engine. It takes what waits, keeps all lanes busy, and survives the engine's panics.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::watch;

use crate::backend::{Backend, Host, Loaded};
use crate::batch::BatchRun;
use crate::error::{Fault, Kind, Result, shown};
use crate::jobs::Job;
use crate::queue::{Order, Queue, Unit};

/// Where the engine is.
#[derive(Debug, Clone)]
pub enum Engine {
    /// Nothing is loaded; the next request loads.
    Unloaded,
    /// Bytes done and in all.
    Loading(String, u64, u64),
    /// A model is loaded.
    Ready(Loaded),
    /// The last load failed; the next request tries again.
    Failed(Fault),
}

impl Engine {
    /// As part of a reply.
    pub fn json(&self) -> Value {
        match self {
            Self::Unloaded => json!({"state": "unloaded"}),
            Self::Loading(id, done, total) => {
                json!({"state": "loading", "id": id, "bytes": done, "bytes_total": total})
            }
            Self::Ready(loaded) => json!({"state": "ready", "loaded": loaded}),
            Self::Failed(fault) => json!({"state": "failed", "message": fault.message, "type": fault.kind.name()}),
        }
    }
}

struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    engine: watch::Sender<Engine>,
    running: watch::Sender<usize>,
    stop: std::sync::atomic::AtomicBool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the thread. Under the lock, so that it cannot fall asleep between its last look around and this call.
    fn wake_up(&self) {
        let _queue = self.lock();
        self.wake.notify_all();
    }

    fn stopping(&self) -> bool {
        self.stop.load(std::sync::atomic::Ordering::Relaxed)
    }
}

/// The way to the engine's thread.
pub struct Worker {
    shared: Arc<Shared>,
    /// Hangs up when the thread has ended.
    ended: Mutex<mpsc::Receiver<()>>,
}

impl Worker {
    /// Starts the thread. Nothing is loaded until there is work.
    ///
    /// # Errors
    /// `Internal` where the system refuses a thread.
    pub fn start(host: Arc<dyn Host>, capacity: usize, idle: Option<Duration>) -> Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::new(Queue::new(capacity)),
            wake: Condvar::new(),
            engine: watch::Sender::new(Engine::Unloaded),
            running: watch::Sender::new(0),
            stop: false.into(),
        });
        let theirs = Arc::clone(&shared);
        let (alive, ended) = mpsc::channel();
        std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || {
                let _alive = alive;
                Runner::new(theirs, host, idle).run();
            })
            .map_err(|e| Fault::new(Kind::Internal, format!("cannot start the engine's thread: {e}")))?;
        Ok(Self { shared, ended: Mutex::new(ended) })
    }

    /// Hands over the requests of a job.
    ///
    /// # Errors
    /// `QueueFull`.
    pub fn submit(&self, units: Vec<Unit>) -> Result<()> {
        self.shared.lock().push(units)?;
        self.shared.wake.notify_all();
        Ok(())
    }

    /// Hands over a batch, which is made only once there is a place for it.
    ///
    /// # Errors
    /// `QueueFull`, and what `make` reports.
    pub fn submit_batch(&self, make: impl FnOnce() -> Result<BatchRun>) -> Result<()> {
        self.shared.lock().push_batch(make)?;
        self.shared.wake.notify_all();
        Ok(())
    }

    /// Changes the model after the requests that run.
    pub fn order(&self, order: Order) {
        self.shared.lock().orders.push_back(order);
        self.shared.wake.notify_all();
    }

    /// Ends what waits and was cancelled or is late, also while the thread is busy, and wakes the thread to look at the rest.
    pub fn nudge(&self) {
        self.shared.lock().sweep();
        self.shared.wake.notify_all();
    }

    /// Takes back a change of the model. `false` where it has begun: a load cannot be interrupted.
    pub fn withdraw(&self, job: &Arc<Job>) -> bool {
        let found = self.shared.lock().withdraw(job);
        if found {
            job.finish(Some(Fault::new(Kind::Cancelled, "the job was cancelled before it began")));
        }
        self.nudge();
        found
    }

    /// Where the engine is.
    pub fn engine(&self) -> Engine {
        self.shared.engine.borrow().clone()
    }

    /// Wakes when the engine's state changes.
    pub fn watch_engine(&self) -> watch::Receiver<Engine> {
        self.shared.engine.subscribe()
    }

    /// Requests that wait, batches, and requests that run.
    pub fn load(&self) -> (usize, usize, usize) {
        let queue = self.shared.lock();
        (queue.waiting(), queue.batches(), *self.shared.running.borrow())
    }

    /// Ends the thread after its current step; waits at most `wait` for it.
    pub fn stop(&self, wait: Duration) {
        self.shared.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        self.shared.wake_up();
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        // A load cannot be interrupted; then the end of the process frees the memory.
        if ended.recv_timeout(wait) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::warn!("the engine did not stop within {} ms", wait.as_millis());
        }
    }
}

struct Runner {
    shared: Arc<Shared>,
    host: Arc<dyn Host>,
    backend: Box<dyn Backend>,
    idle: Option<Duration>,
    /// The model to load when there is work.
    model: String,
    loaded: bool,
    /// The request of each lane.
    lanes: Vec<Option<Unit>>,
    last_work: Instant,
}

impl Runner {
    fn new(shared: Arc<Shared>, host: Arc<dyn Host>, idle: Option<Duration>) -> Self {
        let (backend, model) = (host.backend(), host.default_model());
        Self { shared, host, backend, idle, model, loaded: false, lanes: Vec::new(), last_work: Instant::now() }
    }

    fn run(mut self) {
        while self.wait_for_work() {
            self.cancel_lanes();
            self.obey();
            if self.load_if_needed() {
                self.admit();
                self.step();
            }
            self.shared.lock().sweep();
            self.shared.running.send_replace(self.running());
        }
        // Nobody is told: the clients are gone, and some fail over a reply that comes after their end.
        // The model's memory goes back before the process ends.
        let _ = catch_unwind(AssertUnwindSafe(|| self.backend.unload()));
    }

    fn running(&self) -> usize {
        self.lanes.iter().flatten().count()
    }

    /// Sleeps while there is nothing to do. `false` at the end.
    fn wait_for_work(&mut self) -> bool {
        loop {
            let mut queue = self.shared.lock();
            if self.shared.stopping() {
                return false;
            }
            queue.sweep();
            if self.running() > 0 || queue.has_work() || !queue.orders.is_empty() {
                drop(queue);
                self.last_work = Instant::now();
                return true;
            }
            if self.loaded && self.idle.is_some_and(|idle| self.last_work.elapsed() >= idle) {
                drop(queue);
                self.unload();
                continue;
            }
            let until_idle = self.idle.map(|idle| idle.saturating_sub(self.last_work.elapsed()));
            // Without a model to unload there is nothing to wake up for but a call.
            let nap = until_idle.filter(|_| self.loaded).unwrap_or(Duration::from_secs(3600));
            drop(self.shared.wake.wait_timeout(queue, nap));
        }
    }

    fn cancel_lanes(&mut self) {
        let over: Vec<_> = self
            .lanes
            .iter()
            .enumerate()
            .filter(|(_, unit)| unit.as_ref().is_some_and(|u| u.job.over().is_some()))
            .map(|(lane, _)| lane)
            .collect();
        for lane in over {
            self.guarded(|backend| backend.cancel(lane));
        }
    }

    /// Carries out one change of the model, once no request runs.
    fn obey(&mut self) {
        if self.running() > 0 {
            return;
        }
        let order = self.shared.lock().orders.pop_front();
        match order {
            Some(Order::Load(model, job)) => {
                self.model = model;
                job.start();
                let result = self.load();
                job.finish(result.err());
            }
            Some(Order::Unload(model, job)) => {
                // Looked at here: another change may have come before.
                let fault = self.other_than_loaded(&model);
                if fault.is_none() {
                    self.unload();
                }
                job.finish(fault);
            }
            None => {}
        }
    }

    fn other_than_loaded(&self, model: &str) -> Option<Fault> {
        if model.is_empty() || (self.loaded && model == self.model) {
            return None;
        }
        let loaded = if self.loaded { format!("{:?}", self.model) } else { "none".to_owned() };
        Some(Fault::argument(
            "model",
            format!("{:?} is not loaded ({loaded} is): leave it out, or name what is", shown(model)),
        ))
    }

    fn unload(&mut self) {
        self.loaded = false;
        self.guarded(|backend| backend.unload());
        self.shared.engine.send_replace(Engine::Unloaded);
    }

    /// Whether the engine can take requests now.
    fn load_if_needed(&mut self) -> bool {
        if self.loaded {
            return true;
        }
        if !self.shared.lock().has_work() {
            return false;
        }
        match self.load() {
            Ok(()) => true,
            Err(fault) => {
                self.shared.lock().fail_all(&fault);
                false
            }
        }
    }

    fn load(&mut self) -> Result<()> {
        self.loaded = false;
        let (shared, model) = (Arc::clone(&self.shared), self.model.clone());
        shared.engine.send_replace(Engine::Loading(model.clone(), 0, 0));
        let mut progress = |done, total| {
            shared.engine.send_replace(Engine::Loading(model.clone(), done, total));
        };
        let result = self.guarded(|backend| backend.load(&model, &mut progress)).unwrap_or_else(|| Err(panicked()));
        match result {
            Ok(loaded) => {
                tracing::info!(model = loaded.model, device = loaded.device, "loaded");
                self.lanes = (0..loaded.lanes.max(1)).map(|_| None).collect();
                self.loaded = true;
                self.shared.engine.send_replace(Engine::Ready(loaded));
                Ok(())
            }
            Err(fault) => {
                tracing::warn!("cannot load {}: {fault}", self.model);
                self.shared.engine.send_replace(Engine::Failed(fault.clone()));
                // A wrong name must not spoil later requests.
                self.model = self.host.default_model();
                Err(fault)
            }
        }
    }

    /// Fills the free lanes. While a change of the model waits, the lanes run empty.
    fn admit(&mut self) {
        while self.backend.free() > 0 {
            let unit = {
                let mut queue = self.shared.lock();
                queue.sweep();
                if queue.orders.is_empty() { queue.take_next() } else { None }
            };
            let Some(unit) = unit else { return };
            match self.guarded(|backend| backend.admit(&unit.ask)) {
                Some(Ok(lane)) if self.lanes.get(lane).is_some_and(Option::is_none) => {
                    unit.job.start();
                    self.lanes[lane] = Some(unit);
                }
                Some(Ok(lane)) => {
                    self.finish(unit, Err(Fault::new(Kind::Internal, format!("lane {lane} is not free"))))
                }
                Some(Err(fault)) => self.finish(unit, Err(fault)),
                None => {
                    self.finish(unit, Err(panicked()));
                    return;
                }
            }
        }
    }

    fn step(&mut self) {
        if self.running() == 0 {
            return;
        }
        let lanes = std::mem::take(&mut self.lanes);
        let ended = self.guarded(|backend| {
            backend.step(&mut |lane, tick| {
                if let Some(Some(unit)) = lanes.get(lane) {
                    unit.job.tick(unit.part, tick);
                }
            })
        });
        self.lanes = lanes;
        match ended {
            Some(ended) => {
                for (lane, result) in ended {
                    if let Some(unit) = self.lanes.get_mut(lane).and_then(Option::take) {
                        self.finish(unit, result);
                    }
                }
            }
            None => self.end_lanes(&panicked()),
        }
    }

    /// Tells a request's job, or writes a batch's line.
    fn finish(&self, unit: Unit, result: Result<crate::answer::Answer>) {
        // A cancelled request ends with what it has; the job tells why it is incomplete.
        let result = match (result, unit.job.over()) {
            (Ok(answer), Some(fault)) if answer.cancelled() => Err(fault),
            (result, _) => result,
        };
        let mut queue = self.shared.lock();
        match queue.batch(&unit.job) {
            Some(batch) => batch.finish_item(unit, result),
            None => {
                drop(queue);
                unit.job.finish_part(unit.part, result);
            }
        }
    }

    fn end_lanes(&mut self, fault: &Fault) {
        let units: Vec<_> = self.lanes.iter_mut().filter_map(Option::take).collect();
        for unit in units {
            self.finish(unit, Err(fault.clone()));
        }
    }

    /// Runs something that may panic. After a panic (`None`) the engine is in an unknown state, so a new one takes its place.
    fn guarded<R>(&mut self, action: impl FnOnce(&mut dyn Backend) -> R) -> Option<R> {
        match catch_unwind(AssertUnwindSafe(|| action(&mut *self.backend))) {
            Ok(result) => Some(result),
            Err(_) => {
                tracing::error!("the engine panicked; it is started anew");
                let fresh = self.host.backend();
                let old = std::mem::replace(&mut self.backend, fresh);
                // Even its end may panic.
                let _ = catch_unwind(AssertUnwindSafe(|| drop(old)));
                self.loaded = false;
                self.shared.engine.send_replace(Engine::Unloaded);
                let fault = panicked();
                self.end_lanes(&fault);
                None
            }
        }
    }
}

fn panicked() -> Fault {
    Fault::new(Kind::Internal, "the engine panicked and was started anew")
}
