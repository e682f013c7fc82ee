//! What waits for the engine, and who is next.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::backend::Ask;
use crate::batch::BatchRun;
use crate::error::{Fault, Kind, Result};
use crate::jobs::Job;

/// Batches that may run at the same time.
const MAX_BATCHES: usize = 16;
/// After so many interactive requests in a row a batch item gets a lane: neither can starve the other.
const INTERACTIVE_PER_BATCH: u32 = 3;

/// One request of a job.
#[derive(Debug)]
pub struct Unit {
    /// Whose it is.
    pub job: Arc<Job>,
    /// Which of the job's requests it is.
    pub part: usize,
    /// The item's id, for batches.
    pub item: Option<String>,
    /// What to ask the engine.
    pub ask: Ask,
}

/// A change of the model; running requests are finished first.
#[derive(Debug)]
pub enum Order {
    /// Load the model with this id.
    Load(String, Arc<Job>),
    /// Give the memory back; with an id only that of this model.
    Unload(String, Arc<Job>),
}

impl Order {
    /// The job that tells of it.
    pub fn job(&self) -> &Arc<Job> {
        match self {
            Self::Load(_, job) | Self::Unload(_, job) => job,
        }
    }
}

/// What waits. Batches yield their items one by one, so that ten thousand of them take no memory.
#[derive(Debug)]
pub struct Queue {
    capacity: usize,
    interactive: VecDeque<Unit>,
    batches: VecDeque<BatchRun>,
    interactive_run: u32,
    /// Changes of the model, in order.
    pub orders: VecDeque<Order>,
}

impl Queue {
    /// A queue for at most `capacity` interactive requests.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            interactive: VecDeque::new(),
            batches: VecDeque::new(),
            interactive_run: 0,
            orders: VecDeque::new(),
        }
    }

    /// Interactive requests that wait.
    pub fn waiting(&self) -> usize {
        self.interactive.len()
    }

    /// Batches that run or wait.
    pub fn batches(&self) -> usize {
        self.batches.len()
    }

    /// Whether a request could be started.
    pub fn has_work(&self) -> bool {
        !self.interactive.is_empty() || self.batches.iter().any(|batch| !batch.exhausted())
    }

    /// Adds the requests of one job: all or none. A job that finds nobody waiting is taken whatever its size, as no later
    /// try could do better.
    ///
    /// # Errors
    /// `QueueFull`.
    pub fn push(&mut self, units: Vec<Unit>) -> Result<()> {
        if !self.interactive.is_empty() && self.interactive.len().saturating_add(units.len()) > self.capacity {
            let (waiting, new) = (self.interactive.len(), units.len());
            return Err(Fault::new(
                Kind::QueueFull,
                format!("{waiting} of {} places are taken, {new} more do not fit", self.capacity),
            ));
        }
        self.interactive.extend(units);
        Ok(())
    }

    /// Adds a batch, which is made only if there is a place for it: making it changes its output.
    ///
    /// # Errors
    /// `QueueFull`, and what `make` reports.
    pub fn push_batch(&mut self, make: impl FnOnce() -> Result<BatchRun>) -> Result<()> {
        if self.batches.len() >= MAX_BATCHES {
            return Err(Fault::new(Kind::QueueFull, format!("{MAX_BATCHES} batches wait or run already")).advise(
                "wait for the end of one: dllm_job operation=list shows them; more items per batch need no more places",
            ));
        }
        self.batches.push_back(make()?);
        Ok(())
    }

    /// The next request to start: interactive ones first, but batches are not starved, and take turns.
    pub fn take_next(&mut self) -> Option<Unit> {
        if self.interactive_run >= INTERACTIVE_PER_BATCH
            && let Some(unit) = self.next_of_batches()
        {
            return Some(unit);
        }
        if let Some(unit) = self.interactive.pop_front() {
            self.interactive_run = self.interactive_run.saturating_add(1);
            return Some(unit);
        }
        self.next_of_batches()
    }

    fn next_of_batches(&mut self) -> Option<Unit> {
        self.interactive_run = 0;
        for _ in 0..self.batches.len() {
            let mut batch = self.batches.pop_front()?;
            let unit = batch.take_next();
            self.batches.push_back(batch);
            if unit.is_some() {
                return unit;
            }
        }
        None
    }

    /// The batch of a job.
    pub fn batch(&mut self, job: &Arc<Job>) -> Option<&mut BatchRun> {
        self.batches.iter_mut().find(|batch| Arc::ptr_eq(batch.job(), job))
    }

    /// Takes back a change of the model that was not begun. `false` where there is none of this job.
    pub fn withdraw(&mut self, job: &Arc<Job>) -> bool {
        let before = self.orders.len();
        self.orders.retain(|order| !Arc::ptr_eq(order.job(), job));
        self.orders.len() < before
    }

    /// Ends what was cancelled or is late, and batches that are complete.
    pub fn sweep(&mut self) {
        self.interactive.retain(|unit| match unit.job.over() {
            None => true,
            Some(fault) => {
                unit.job.finish_part(unit.part, Err(fault));
                false
            }
        });
        for _ in 0..self.batches.len() {
            if let Some(mut batch) = self.batches.pop_front() {
                if batch.complete() { batch.end() } else { self.batches.push_back(batch) }
            }
        }
    }

    /// Ends everything that waits with one reason. Items in flight are ended by their lanes.
    pub fn fail_all(&mut self, fault: &Fault) {
        for unit in self.interactive.drain(..) {
            unit.job.finish_part(unit.part, Err(fault.clone()));
        }
        for batch in &mut self.batches {
            batch.fail(fault.clone());
        }
        self.sweep();
    }
}
