//! Where the time of a denoising step goes.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::error::{Error, Result};
use crate::model::Network;

/// Time to spend on one node, which decides how often it is repeated.
const BUDGET: Duration = Duration::from_millis(4);

/// Most repetitions of a node in one go.
const MOST: u32 = 50;

/// A part of a step: all nodes that do the same in any layer.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct PartTime {
    /// What it does: a custom op's name, or ggml's with the weight's (`MUL_MAT attn_q`).
    pub part: String,
    /// How many nodes of the graph do so.
    pub nodes: usize,
    /// Time of them all in milliseconds, each computed alone.
    pub ms: f64,
}

impl Network {
    /// Computes every node of the last decoder pass alone, several times in a row, the wait for an empty graph taken off.
    pub(crate) fn breakdown(&mut self) -> Result<Vec<PartTime>> {
        let compiled = self
            .decode
            .kept
            .last()
            .ok_or_else(|| Error::argument("breakdown", "no denoising step ran yet: run one"))?;
        if self.config.placement.is_composed() {
            let why = "the model lies on several devices: only a pass that is whole on one can be taken apart";
            return Err(Error::argument("breakdown", why));
        }
        let backend = &self.backends[0];
        let timed = |i: usize, times: u32| {
            let mut graph = compiled.graph.alone(i, times as usize)?;
            let since = Instant::now();
            backend.compute(&mut graph)?;
            Ok::<_, Error>(since.elapsed())
        };
        let empty = timed(0, 0)?;
        let mut parts: HashMap<String, PartTime> = HashMap::new();
        for i in (0..compiled.graph.nodes()).filter(|&i| !compiled.graph.node(i).is_view()) {
            // In the graph's order, so that each node finds what the ones before it made. One that overwrites its own source
            // can run once only.
            let once = timed(i, 1)?;
            let times = match compiled.graph.node(i).overwrites_a_source() {
                true => 1,
                false => (BUDGET.as_nanos() / once.as_nanos().max(1)).clamp(1, u128::from(MOST)) as u32,
            };
            let all = if times > 1 { timed(i, times)? } else { once };
            let part = compiled.graph.label(i);
            let entry = parts.entry(part.clone()).or_insert(PartTime { part, nodes: 0, ms: 0.0 });
            entry.nodes += 1;
            entry.ms += all.saturating_sub(empty).as_secs_f64() * 1e3 / f64::from(times);
        }
        let mut parts: Vec<_> = parts.into_values().collect();
        parts.sort_by(|a, b| b.ms.total_cmp(&a.ms));
        Ok(parts)
    }
}
