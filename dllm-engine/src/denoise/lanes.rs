//! The scheduler: many requests, each on a lane of its own, advanced together (decision D5).
//!
//! Nothing that a lane computes depends on its neighbours: noise is addressed by request, and the network keeps one state per
//! lane. So a request gives the same result alone and beside others, whenever it is admitted.

use std::time::Instant;

use super::generate::{Generation, Run, Work};
use crate::error::{Error, Result};
use crate::event::{Control, Event, FinishReason};
use crate::model::{Forward, Position, PrefillLane, Shape};

/// Tokens that two prompts must have in common for one lane to wait for the other's cache and copy it.
const SHARE_FROM: usize = 16;

/// Receives the events of all lanes, with the lane's number.
pub type Sink<'a> = dyn FnMut(usize, Event<'_>) -> Control + 'a;

/// A request that has ended; its lane is free again.
#[derive(Debug)]
pub struct Finished {
    /// The lane that `admit` named.
    pub lane: usize,
    /// What it produced, or why it failed. A failure ends only the lanes that took part in the failed pass.
    pub result: Result<Generation>,
}

/// One lane: its cache outlives the requests.
#[derive(Default)]
struct Slot {
    /// Exactly the tokens in the network's cache.
    cached: Vec<u32>,
    run: Option<Box<Run>>,
}

/// The lanes of one network.
pub struct Lanes<F: Forward> {
    forward: F,
    shape: Shape,
    slots: Vec<Slot>,
    prefill_budget: usize,
    positions: Vec<Position>,
}

impl<F: Forward> Lanes<F> {
    /// As many lanes as the network has. `prefill_budget` bounds the tokens, over all lanes, of the one prefill pass between
    /// two denoising steps, so that a long prompt does not hold up the lanes that run.
    pub fn new(forward: F, prefill_budget: usize) -> Self {
        let shape = forward.shape();
        let slots: Vec<_> = (0..shape.lanes).map(|_| Slot::default()).collect();
        // At least one token a lane: every share of the budget makes progress.
        let prefill_budget = prefill_budget.max(slots.len()).max(1);
        Self { forward, shape, slots, prefill_budget, positions: Vec::new() }
    }

    /// Sizes of the network.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The network.
    pub fn forward(&self) -> &F {
        &self.forward
    }

    /// The network, for measurements between steps. Its caches are not to be changed.
    pub fn forward_mut(&mut self) -> &mut F {
        &mut self.forward
    }

    /// Gives the network back. Requests that run are dropped.
    pub fn into_forward(self) -> F {
        self.forward
    }

    /// Lanes that run a request.
    pub fn running(&self) -> usize {
        self.slots.iter().filter(|slot| slot.run.is_some()).count()
    }

    /// Lanes that can take one.
    pub fn free(&self) -> usize {
        self.slots.len() - self.running()
    }

    /// The tokens in a lane's cache: none for a lane that does not exist.
    pub fn cached(&self, lane: usize) -> &[u32] {
        self.slots.get(lane).map_or(&[], |slot| &slot.cached)
    }

    /// Forgets the caches of the free lanes.
    pub fn forget(&mut self) {
        for lane in 0..self.slots.len() {
            if self.slots[lane].run.is_none() {
                self.forget_lane(lane);
            }
        }
    }

    /// Gives a request to the free lane whose cache shares the longest prefix with its prompt, and returns the lane.
    ///
    /// # Errors
    /// `BadArgument` where the work is out of range or no lane is free (ask `free` first), `PromptTooLong`.
    pub fn admit(&mut self, mut work: Work) -> Result<usize> {
        Run::check(&mut work, &self.shape)?;
        let free = |slot: &(usize, &Slot)| slot.1.run.is_none();
        let shared = |slot: &Slot| common(&slot.cached, &work.prompt);
        // Of equal prefixes, the cache whose loss costs least.
        let best =
            self.slots.iter().enumerate().filter(free).map(|(lane, slot)| (shared(slot), slot.cached.len(), lane));
        let Some((kept, _, lane)) = best.min_by_key(|(kept, len, lane)| (usize::MAX - kept, *len, *lane)) else {
            let lanes = self.slots.len();
            return Err(Error::argument(
                "lanes",
                format!("all {lanes} are busy; wait until one is free or load with more"),
            ));
        };
        let kept = self.forward.truncate(lane, kept).min(kept);
        let slot = &mut self.slots[lane];
        slot.cached.truncate(kept);
        slot.run = Some(Box::new(Run::new(work, self.shape, kept, self.forward.counters())));
        Ok(lane)
    }

    /// Cancels a lane's request: it ends at the start of the next step, and keeps what is finished. Nothing happens where none runs.
    pub fn cancel(&mut self, lane: usize) {
        if let Some(run) = self.slots.get_mut(lane).and_then(|slot| slot.run.as_mut()) {
            run.cancel();
        }
    }

    /// Advances every request: one bounded prefill pass for the lanes that wait for their cache (new prompts, finished
    /// canvases), then one denoising step for all lanes that have a canvas. Returns the requests that ended.
    pub fn step(&mut self, sink: &mut Sink<'_>) -> Vec<Finished> {
        let mut finished = Vec::new();
        self.end_cancelled(&mut finished);
        let running = self.running();
        for run in self.slots.iter_mut().filter_map(|slot| slot.run.as_mut()) {
            run.meter.cost.lanes = run.meter.cost.lanes.max(running);
        }
        self.prefill(sink, &mut finished);
        self.end_cancelled(&mut finished);
        self.start_canvases(&mut finished);
        self.denoise(sink, &mut finished);
        self.end_cancelled(&mut finished);
        finished
    }

    /// Runs one request to its end, with no others beside it.
    ///
    /// # Errors
    /// As `admit`, and what the network reports. `BadArgument` where other requests run.
    pub fn generate(&mut self, work: Work, sink: &mut dyn FnMut(Event<'_>) -> Control) -> Result<Generation> {
        if self.running() > 0 {
            return Err(Error::argument("lanes", "other requests run; use admit and step"));
        }
        self.admit(work)?;
        loop {
            if let Some(done) = self.step(&mut |_, event| sink(event)).pop() {
                return done.result;
            }
        }
    }

    /// Copies prefixes that another lane has already read: candidates of one request and items of a batch begin alike.
    fn share_prefixes(&mut self) {
        for lane in 0..self.slots.len() {
            let slot = &self.slots[lane];
            let Some(run) = slot.run.as_ref().filter(|run| !run.uncached(slot.cached.len()).is_empty()) else {
                continue;
            };
            let others = self.slots.iter().enumerate().filter(|(other, _)| *other != lane);
            let best = others.map(|(other, slot)| (common(&slot.cached, run.sequence()), other)).max();
            let Some((len, other)) = best.filter(|(len, _)| *len >= slot.cached.len() + SHARE_FROM) else { continue };
            if self.forward.copy_prefix(other, lane, len) == len {
                let slot = &mut self.slots[lane];
                let Some(run) = slot.run.as_mut() else { continue };
                run.shared(len - slot.cached.len());
                slot.cached = run.sequence()[..len].to_vec();
            }
        }
    }

    /// Whether a lane before this one is about to read what this one needs, too: then its cache is copied afterwards.
    fn waits_for_another(&self, lane: usize) -> bool {
        let (before, rest) = self.slots.split_at(lane);
        let Some((own, cached)) =
            rest.first().and_then(|slot| Some((slot.run.as_ref()?.sequence(), slot.cached.len())))
        else {
            return false;
        };
        before.iter().any(|slot| {
            let shared = slot.run.as_ref().map_or(0, |run| common(run.sequence(), own));
            shared >= cached + SHARE_FROM && slot.cached.len() < shared
        })
    }

    fn prefill(&mut self, sink: &mut Sink<'_>, finished: &mut Vec<Finished>) {
        self.share_prefixes();
        let shares = self.shares();
        if shares.is_empty() {
            return;
        }
        let slots = &self.slots;
        let part = |&(lane, n): &(usize, usize)| {
            let slot = &slots[lane];
            let uncached = slot.run.as_ref().map_or(&[][..], |run| run.uncached(slot.cached.len()));
            PrefillLane { lane, tokens: &uncached[..n.min(uncached.len())] }
        };
        let parts: Vec<_> = shares.iter().map(part).collect();
        let since = Instant::now();
        let result = self.forward.prefill(&parts);
        let time = since.elapsed();
        if let Err(error) = result {
            return self.fail(shares.iter().map(|share| share.0), &error, finished);
        }
        for (lane, n) in shares {
            let slot = &mut self.slots[lane];
            let Some(run) = slot.run.as_mut() else { continue };
            let len = slot.cached.len();
            slot.cached.extend(run.uncached(len).iter().take(n));
            let (want, filled) = (slot.cached.len(), self.forward.filled(lane));
            if filled != want {
                let error = Error::Backend(format!("lane {lane} holds {filled} tokens after a prefill up to {want}"));
                self.fail([lane].into_iter(), &error, finished);
            } else if let Some(event) = run.prefilled(time, want)
                && sink(lane, event) == Control::Cancel
            {
                run.cancel();
            }
        }
    }

    /// Splits the prefill budget fairly over the lanes that wait: (lane, tokens), lanes ascending. Who needs less than an
    /// equal share leaves the rest to the others, so a commit is not held up by a long prompt, nor a prompt by commits.
    fn shares(&self) -> Vec<(usize, usize)> {
        let need = |slot: &Slot| slot.run.as_ref().map_or(0, |run| run.uncached(slot.cached.len()).len());
        let mut shares: Vec<_> = self.slots.iter().map(need).enumerate().filter(|(_, need)| *need > 0).collect();
        shares.retain(|(lane, _)| !self.waits_for_another(*lane));
        shares.sort_by_key(|(_, need)| *need);
        let (mut budget, mut waiting) = (self.prefill_budget, shares.len());
        for (_, share) in &mut shares {
            *share = (*share).min(budget / waiting);
            budget -= *share;
            waiting -= 1;
        }
        shares.sort_unstable();
        shares
    }

    fn start_canvases(&mut self, finished: &mut Vec<Finished>) {
        for lane in 0..self.slots.len() {
            let slot = &mut self.slots[lane];
            let Some(run) = slot.run.as_mut() else { continue };
            if !run.denoising()
                && run.uncached(slot.cached.len()).is_empty()
                && let Err(error) = run.start_canvas()
            {
                self.end(lane, Err(error), finished);
            }
        }
    }

    fn denoise(&mut self, sink: &mut Sink<'_>, finished: &mut Vec<Finished>) {
        let lanes = self.prepare(finished);
        if lanes.is_empty() {
            return;
        }
        let run = |lane: &usize| self.slots[*lane].run.as_ref().map(|run| run.lane(*lane));
        let parts: Vec<_> = lanes.iter().filter_map(run).collect();
        let mut positions = std::mem::take(&mut self.positions);
        positions.clear();
        let since = Instant::now();
        let mut result = self.forward.denoise(&parts, &mut positions);
        let time = since.elapsed();
        let (got, want) = (positions.len(), lanes.len() * self.shape.canvas);
        if result.is_ok() && got != want {
            result = Err(Error::Backend(format!("a denoising step gave {got} positions for {want}")));
        }
        match result {
            Err(error) => self.fail(lanes.into_iter(), &error, finished),
            Ok(()) => {
                for (lane, positions) in lanes.into_iter().zip(positions.chunks_exact(self.shape.canvas.max(1))) {
                    let Some(run) = self.slots[lane].run.as_mut() else { continue };
                    run.meter.step(time);
                    if let Some(result) = advance(run, positions, &mut |event| sink(lane, event)).transpose() {
                        self.end(lane, result, finished);
                    }
                }
            }
        }
        self.positions = positions;
    }

    /// Prepares the next step of every lane that has a canvas, and returns these lanes.
    fn prepare(&mut self, finished: &mut Vec<Finished>) -> Vec<usize> {
        let mut lanes = Vec::with_capacity(self.slots.len());
        for lane in 0..self.slots.len() {
            match self.slots[lane].run.as_mut().filter(|run| run.denoising()).map(|run| run.prepare()) {
                Some(Ok(())) => lanes.push(lane),
                Some(Err(error)) => self.end(lane, Err(error), finished),
                None => {}
            }
        }
        lanes
    }

    fn end_cancelled(&mut self, finished: &mut Vec<Finished>) {
        for lane in 0..self.slots.len() {
            if self.slots[lane].run.as_ref().is_some_and(|run| run.cancelled()) {
                self.end(lane, Ok(FinishReason::Cancelled), finished);
            }
        }
    }

    /// Frees a lane; its cache stays for the next request.
    fn end(&mut self, lane: usize, result: Result<FinishReason>, finished: &mut Vec<Finished>) {
        if let Some(run) = self.slots[lane].run.take() {
            let result = result.map(|reason| run.finish(reason, self.forward.counters()));
            finished.push(Finished { lane, result });
        }
    }

    /// Ends the lanes of a failed pass. What their caches hold is unknown, so they are emptied.
    fn fail(&mut self, lanes: impl Iterator<Item = usize>, error: &Error, finished: &mut Vec<Finished>) {
        for lane in lanes {
            self.end(lane, Err(again(error)), finished);
            self.forget_lane(lane);
        }
    }

    fn forget_lane(&mut self, lane: usize) {
        self.forward.truncate(lane, 0);
        self.slots[lane].cached.clear();
    }
}

/// Length of the common prefix.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// One lane's part of a step after the forward pass. Returns the reason if its request ends here.
fn advance(
    run: &mut Run,
    positions: &[Position],
    sink: &mut dyn FnMut(Event<'_>) -> Control,
) -> Result<Option<FinishReason>> {
    run.advance(positions)?;
    if sink(run.step_event()) == Control::Cancel {
        run.cancel();
    }
    let Some((event, reason)) = run.settle() else { return Ok(None) };
    if sink(event) == Control::Cancel {
        run.cancel();
    }
    Ok(reason)
}

/// The error once more, for the next lane of the same pass.
fn again(error: &Error) -> Error {
    match *error {
        Error::NotFinite { what, step, position } => Error::NotFinite { what, step, position },
        Error::PromptTooLong { tokens, fits, context, canvas } => {
            Error::PromptTooLong { tokens, fits, context, canvas }
        }
        Error::Backend(ref why) => Error::Backend(why.clone()),
        ref other => Error::Backend(other.to_string()),
    }
}
