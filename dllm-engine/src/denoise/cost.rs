//! What a request cost: the numbers of a receipt that the loop knows.

use std::time::{Duration, Instant};

use crate::model::Counters;

/// Work and time of one request.
#[derive(Debug, Clone, Default)]
pub struct Cost {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens found in the cache.
    pub cached_tokens: usize,
    /// Denoising steps of each canvas.
    pub steps_per_canvas: Vec<u32>,
    /// Time of the passes that read the prompt; a pass shared with other lanes counts whole for each.
    pub prefill: Duration,
    /// Median time of the passes that denoised.
    pub step: Duration,
    /// Time of the passes that committed a canvas.
    pub commit: Duration,
    /// Host work of the loop for this request outside the forward passes, the caller's event handler left out.
    pub host: Duration,
    /// From admission to the end.
    pub total: Duration,
    /// Lanes that ran beside this one at most, itself included.
    pub lanes: usize,
    /// Graphs that were built and replayed while this request ran.
    pub graphs: Counters,
}

impl Cost {
    /// Decoder passes.
    pub fn forwards(&self) -> u64 {
        self.steps_per_canvas.iter().map(|n| u64::from(*n)).sum()
    }

    /// Answer tokens per decoder pass; 0 before the first.
    pub fn tokens_per_forward(&self, tokens: usize) -> f64 {
        let passes = self.forwards();
        if passes == 0 { 0.0 } else { tokens as f64 / passes as f64 }
    }

    /// Answer tokens per second from admission to the end, prefill included.
    pub fn tokens_per_second(&self, tokens: usize) -> f64 {
        let seconds = self.total.as_secs_f64();
        if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
    }
}

/// Collects a `Cost` while the request runs.
#[derive(Debug)]
pub(super) struct Meter {
    pub cost: Cost,
    start: Instant,
    counters: Counters,
    steps: Vec<Duration>,
}

impl Meter {
    pub fn start(prompt_tokens: usize, cached_tokens: usize, counters: Counters) -> Self {
        let cost = Cost { prompt_tokens, cached_tokens, ..Cost::default() };
        Self { cost, start: Instant::now(), counters, steps: Vec::new() }
    }

    /// Counts one denoising pass.
    pub fn step(&mut self, time: Duration) {
        self.steps.push(time);
    }

    /// Adds the host time of `work`.
    pub fn host<T>(&mut self, since: Instant, work: T) -> T {
        self.cost.host += since.elapsed();
        work
    }

    pub fn finish(mut self, now: Counters) -> Cost {
        self.steps.sort_unstable();
        let n = self.steps.len();
        if n > 0 {
            self.cost.step = (self.steps[n / 2] + self.steps[(n - 1) / 2]) / 2;
        }
        self.cost.total = self.start.elapsed();
        self.cost.graphs = Counters {
            graphs_built: now.graphs_built.saturating_sub(self.counters.graphs_built),
            graphs_replayed: now.graphs_replayed.saturating_sub(self.counters.graphs_replayed),
            captured_replays: now.captured_replays.saturating_sub(self.counters.captured_replays),
        };
        self.cost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_median_and_the_differences() {
        let counters =
            |built, replayed| Counters { graphs_built: built, graphs_replayed: replayed, captured_replays: 0 };
        let finish = |times: &[u64]| {
            let mut meter = Meter::start(5, 3, counters(2, 10));
            times.iter().for_each(|ms| meter.step(Duration::from_millis(*ms)));
            meter.finish(counters(3, 14))
        };
        assert_eq!(finish(&[]).step, Duration::ZERO);
        assert_eq!(finish(&[9, 1, 2]).step, Duration::from_millis(2));
        assert_eq!(finish(&[9, 1, 2, 4]).step, Duration::from_millis(3));
        assert_eq!(finish(&[1]).graphs, counters(1, 4));
    }

    #[test]
    fn rates_of_nothing_are_zero() {
        let cost = Cost { steps_per_canvas: vec![3, 1], ..Cost::default() };
        assert_eq!((cost.forwards(), cost.tokens_per_forward(10)), (4, 2.5));
        assert_eq!(cost.tokens_per_second(10), 0.0);
        assert_eq!(Cost::default().tokens_per_forward(0), 0.0);
    }
}
