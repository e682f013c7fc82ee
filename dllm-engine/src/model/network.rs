//! A network on a device: weights, cache and compiled passes behind the `Forward` seam.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::family::{self, Family};
use crate::ggml::{Backend, Buffer, enqueued};
use crate::gguf::Gguf;
use crate::kernels::{PositionStats, WORDS};
use crate::model::cache::Cache;
use crate::model::compile::{Compiled, Parts, State, compile};
use crate::model::config::{Config, choose, default_threads};
use crate::model::inputs::{InputTensors, PassKey, Span};
use crate::model::plan::MemoryPlan;
use crate::model::weights::Weights;
use crate::model::workspace::{Workspace, refuse_foreign_nodes};
use crate::model::{Counters, DenoiseLane, Forward, Position, PrefillLane, Shape};
use crate::params::{EngineParams, KvType, Level};

/// Compiled passes kept per kind. A conversation needs one or two at a time; older ones are built again.
const KEPT: usize = 6;

/// Graphs of one kind, over one workspace.
pub(super) struct Passes {
    pub(super) workspace: Workspace,
    pub(super) kept: Vec<Compiled>,
}

/// A loaded model. See [`Forward`] for what it does.
pub struct Network {
    // Field order is drop order: graphs refer to weights, cache and state, workspaces to backends.
    pub(super) decode: Passes,
    pub(super) encode: Passes,
    pub(super) state: State,
    pub(super) cache: Cache,
    pub(super) weights: Weights,
    /// Of the devices that the model lies on, in the order of its placement.
    pub(super) backends: Vec<Backend>,
    pub(super) family: Box<dyn Family>,
    pub(super) config: Config,
    pub(super) tapping: bool,
    pub(super) last: Option<PassKey>,
    pub(super) counters: Counters,
    /// Time inside graph computation so far.
    pub(super) computing: Duration,
    pub(super) plan: MemoryPlan,
}

impl Network {
    /// What loading would take.
    ///
    /// # Errors
    /// `BadFile` or `Unsupported` for the file, `BadArgument` and `NoDevice` for the parameters.
    pub fn plan(file: &Arc<Gguf>, params: &EngineParams) -> Result<MemoryPlan> {
        let family = family::load(file)?;
        Ok(choose(file, family.as_ref(), params)?.1)
    }

    /// Loads a model. `progress` is told bytes done and bytes in all.
    ///
    /// # Errors
    /// As `plan`; `OutOfMemory` where the plan does not fit.
    pub fn load(file: Arc<Gguf>, params: &EngineParams, progress: &mut dyn FnMut(u64, u64)) -> Result<Self> {
        let family = family::load(&file)?;
        let (config, plan) = choose(&file, family.as_ref(), params)?;
        if !params.ignore_memory_plan {
            plan.check()?;
        }
        Self::assemble(file, family, config, plan, params, progress)
    }

    /// Loads as was chosen.
    fn assemble(
        file: Arc<Gguf>,
        family: Box<dyn Family>,
        config: Config,
        plan: MemoryPlan,
        params: &EngineParams,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        let threads = if params.threads == 0 { default_threads() } else { params.threads };
        let backends: Vec<_> =
            config.placement.all().into_iter().map(|d| Backend::open(d, threads)).collect::<Result<_>>()?;
        let specs = family.tensors(&file);
        let mut weights = Weights::plan(file, &specs, &config.placement, config.level, config.forms())?;
        weights.load(progress)?;
        let mut cache = config.cache(family.as_ref())?;
        cache.allocate()?;
        let mut state = State::new(&config)?;
        state.buffer = Some(Buffer::for_context(&state.context, config.device, "the denoising state")?);
        let workspace = || Workspace::new(&config, &backends, family.graph_size());
        let (decode, encode) = (workspace()?, workspace()?);
        let passes = |workspace| Passes { workspace, kept: Vec::new() };
        let mut network = Self {
            decode: passes(decode),
            encode: passes(encode),
            state,
            cache,
            weights,
            backends,
            family,
            config,
            tapping: false,
            last: None,
            counters: Counters::default(),
            computing: Duration::ZERO,
            plan,
        };
        // The largest passes first: the compute buffers get their final size, and nothing can run out later.
        for key in network.config.largest(&network.cache) {
            network.pass(key)?;
        }
        network.note_ops_on_cpu();
        network.counters = Counters::default();
        Ok(network)
    }

    pub(crate) fn family(&self) -> &dyn Family {
        self.family.as_ref()
    }

    /// Device that computes (`CPU`, `CUDA0`).
    pub fn device(&self) -> String {
        self.config.device.name()
    }

    /// The device's product name.
    pub fn device_description(&self) -> String {
        self.config.device.description()
    }

    /// CPU threads.
    pub fn threads(&self) -> usize {
        self.backends.iter().map(Backend::threads).max().unwrap_or(0)
    }

    /// Exactness.
    pub fn level(&self) -> Level {
        self.config.level
    }

    /// Storage of keys and values.
    pub fn kv(&self) -> KvType {
        self.config.kv
    }

    /// What loading took.
    pub fn memory(&self) -> &MemoryPlan {
        &self.plan
    }

    /// The compiled pass for a key, built if it must be. It is the last of its kind's list afterwards.
    fn pass(&mut self, key: PassKey) -> Result<()> {
        let passes = if key.encode { &mut self.encode } else { &mut self.decode };
        self.last = Some(key);
        if let Some(i) = passes.kept.iter().position(|c| c.key == key) {
            let compiled = passes.kept.remove(i);
            passes.kept.push(compiled);
            self.counters.graphs_replayed += 1;
            return Ok(());
        }
        let mut inputs = InputTensors::new(&key)?;
        inputs.allocate(self.config.device)?;
        let parts = Parts {
            family: self.family.as_ref(),
            config: &self.config,
            weights: &self.weights,
            cache: &self.cache,
            state: &self.state,
        };
        let mut compiled = compile(&parts, key, inputs, self.tapping)?;
        refuse_foreign_nodes(&self.config, &compiled.graph)?;
        if passes.kept.len() == KEPT {
            passes.kept.remove(0);
        }
        if passes.workspace.allocate(&mut compiled.graph)? {
            passes.kept.clear(); // their places are gone
        }
        passes.kept.push(compiled);
        self.counters.graphs_built += 1;
        Ok(())
    }

    /// Runs the last pass of a kind for the given lanes' spans.
    fn run(&mut self, encode: bool, spans: &[Span]) -> Result<&Compiled> {
        let passes = if encode { &mut self.encode } else { &mut self.decode };
        let compiled = passes.kept.last_mut().ok_or_else(|| Error::Backend("no compiled pass".into()))?;
        compiled.inputs.place(&compiled.key, spans, &self.cache);
        let (since, enqueued) = (Instant::now(), enqueued());
        passes.workspace.compute(&self.backends, &mut compiled.graph)?;
        self.computing += since.elapsed();
        self.counters.captured_replays +=
            u64::from(self.config.kernels.is_some() && enqueued == crate::ggml::enqueued());
        Ok(compiled)
    }

    fn check_lane(&self, lane: usize) -> Result<()> {
        match lane < self.config.shape.lanes {
            true => Ok(()),
            false => Err(Error::argument("lane", format!("{lane} is not below {}", self.config.shape.lanes))),
        }
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        match tokens.iter().find(|&&t| t as usize >= self.config.shape.vocab) {
            None => Ok(()),
            Some(bad) => Err(Error::argument(
                "tokens",
                format!("{bad} is not below the vocabulary's {}", self.config.shape.vocab),
            )),
        }
    }

    /// Which of the waiting lanes go into the next prefill pass, and with how many rows each: all of them if that wastes
    /// less than half of the pass, else the first.
    fn group(&self, waiting: &[PrefillLane<'_>]) -> (usize, usize) {
        let rows = |lanes: &[PrefillLane<'_>]| {
            let most = lanes.iter().map(|l| l.tokens.len()).max().unwrap_or(0).min(self.config.chunk);
            most.next_power_of_two().min(self.config.chunk)
        };
        let together = rows(waiting);
        let span = waiting[waiting.len() - 1].lane - waiting[0].lane + 1;
        let useful: usize = waiting.iter().map(|l| l.tokens.len().min(together)).sum();
        let all = span * together;
        if waiting.len() > 1 && all <= self.config.most_encode_rows() && 2 * useful >= all {
            (waiting.len(), together)
        } else {
            (1, rows(&waiting[..1]))
        }
    }

    /// One prefill pass: up to `rows` tokens of each of the given neighbouring lanes.
    fn encode_pass(&mut self, lanes: &[PrefillLane<'_>], rows: usize) -> Result<()> {
        let (first, count) = (lanes[0].lane, lanes[lanes.len() - 1].lane - lanes[0].lane + 1);
        let mut spans = vec![Span::default(); count];
        let mut tokens = vec![0_i32; count * rows];
        let mut last = 0;
        for lane in lanes {
            let part = &lane.tokens[..lane.tokens.len().min(rows)];
            let i = lane.lane - first;
            spans[i] = Span { start: self.cache.filled(lane.lane), count: part.len() };
            last = last.max(spans[i].start + part.len() - 1);
            for (to, from) in tokens[i * rows..].iter_mut().zip(part) {
                *to = *from as i32;
            }
        }
        self.pass(PassKey { encode: true, lane: first, lanes: count, rows, keys: self.cache.keys(last) })?;
        if let Some(compiled) = self.encode.kept.last() {
            compiled.inputs.write_tokens(&tokens);
        }
        self.run(true, &spans)?;
        for (i, span) in spans.iter().enumerate() {
            self.cache.note_written(first + i, span.count, true);
        }
        Ok(())
    }

    fn check_denoise(&self, lanes: &[DenoiseLane<'_>]) -> Result<()> {
        let shape = self.config.shape;
        if lanes.is_empty() || lanes.windows(2).any(|pair| pair[0].lane >= pair[1].lane) {
            return Err(Error::argument("lanes", "a denoising step needs lanes in ascending order, each once"));
        }
        for lane in lanes {
            self.check_lane(lane.lane)?;
            self.check_tokens(lane.canvas)?;
            if lane.canvas.len() != shape.canvas || lane.uniform.len() != shape.canvas {
                let why = format!(
                    "{} tokens and {} uniform numbers, not {} each",
                    lane.canvas.len(),
                    lane.uniform.len(),
                    shape.canvas
                );
                return Err(Error::argument("canvas", why));
            }
            if !(lane.temperature > 0.0 && lane.temperature.is_finite()) {
                return Err(Error::argument("temperature", format!("{} is not above 0", lane.temperature)));
            }
            shape.check_room(self.cache.filled(lane.lane))?;
        }
        Ok(())
    }
}

impl Forward for Network {
    fn shape(&self) -> Shape {
        self.config.shape
    }

    fn filled(&self, lane: usize) -> usize {
        if lane < self.config.shape.lanes { self.cache.filled(lane) } else { 0 }
    }

    fn truncate(&mut self, lane: usize, len: usize) -> usize {
        if lane < self.config.shape.lanes { self.cache.truncate(lane, len) } else { 0 }
    }

    fn copy_prefix(&mut self, from: usize, to: usize, len: usize) -> usize {
        let lanes = self.config.shape.lanes;
        if from < lanes && to < lanes { self.cache.copy_prefix(from, to, len) } else { self.filled(to) }
    }

    fn prefill(&mut self, lanes: &[PrefillLane<'_>]) -> Result<()> {
        let shape = self.config.shape;
        for lane in lanes {
            self.check_lane(lane.lane)?;
            self.check_tokens(lane.tokens)?;
            shape.check_room(self.cache.filled(lane.lane) + lane.tokens.len())?;
        }
        let mut waiting: Vec<_> = lanes.iter().copied().filter(|l| !l.tokens.is_empty()).collect();
        waiting.sort_by_key(|l| l.lane);
        if waiting.windows(2).any(|pair| pair[0].lane == pair[1].lane) {
            return Err(Error::argument("lanes", "a lane is named twice in one prefill"));
        }
        while !waiting.is_empty() {
            let (count, rows) = self.group(&waiting);
            self.encode_pass(&waiting[..count], rows)?;
            for lane in &mut waiting[..count] {
                lane.tokens = &lane.tokens[lane.tokens.len().min(rows)..];
            }
            waiting.retain(|l| !l.tokens.is_empty());
        }
        Ok(())
    }

    fn denoise(&mut self, lanes: &[DenoiseLane<'_>], out: &mut Vec<Position>) -> Result<()> {
        self.check_denoise(lanes)?;
        let canvas = self.config.shape.canvas;
        let (first, count) = (lanes[0].lane, lanes[lanes.len() - 1].lane - lanes[0].lane + 1);
        let rows = count * canvas;
        let mut spans = vec![Span::default(); count];
        let mut tokens = vec![0_i32; rows];
        // Idle lanes inside the range compute on harmless values, and nobody reads their results.
        let (mut temperature, mut uniform, mut conditioned) =
            (vec![1.0_f32; rows], vec![0.0_f32; rows], vec![0.0_f32; rows]);
        let mut last = 0;
        for lane in lanes {
            let i = lane.lane - first;
            let here = i * canvas..(i + 1) * canvas;
            spans[i] = Span { start: self.cache.filled(lane.lane), count: canvas };
            last = last.max(spans[i].start + canvas - 1);
            for (to, from) in tokens[here.clone()].iter_mut().zip(lane.canvas) {
                *to = *from as i32;
            }
            temperature[here.clone()].fill(lane.temperature);
            uniform[here.clone()].copy_from_slice(lane.uniform);
            conditioned[here].fill(f32::from(u8::from(lane.self_condition)));
        }
        self.pass(PassKey { encode: false, lane: first, lanes: count, rows: canvas, keys: self.cache.keys(last) })?;
        if let Some(compiled) = self.decode.kept.last() {
            compiled.inputs.write_step(&tokens, &temperature, &uniform, &conditioned);
        }
        for lane in lanes {
            self.cache.note_written(lane.lane, canvas, false);
        }
        let compiled = self.run(false, &spans)?;
        let stats = compiled.stats.ok_or_else(|| Error::Backend("a decoder pass without statistics".into()))?;
        let words: Vec<u32> = compiled.graph.context().tensor(stats).read_at(0, WORDS * rows);
        out.clear();
        for lane in lanes {
            let i = lane.lane - first;
            let rows = words.chunks_exact(WORDS).skip(i * canvas).take(canvas);
            out.extend(rows.map(PositionStats::unpack));
            if out[out.len() - canvas..].iter().any(|p| p.entropy.is_nan()) {
                self.forget_soft(lane.lane);
            }
        }
        Ok(())
    }

    fn counters(&self) -> Counters {
        self.counters
    }

    fn device_bytes(&self) -> u64 {
        let inputs: u64 = [&self.decode, &self.encode]
            .iter()
            .map(|p| p.workspace.bytes() + p.kept.iter().map(|c| c.inputs.bytes(self.config.device)).sum::<u64>())
            .sum();
        self.plan.weights + self.plan.cache + inputs
    }
}

impl Network {
    /// Says in the placement which ops of a composed pass run on the CPU.
    fn note_ops_on_cpu(&mut self) {
        if let (Some(placement), Some(compiled)) = (&mut self.plan.placement, self.decode.kept.last()) {
            let ops = self.decode.workspace.ops_on_cpu(&compiled.graph);
            *placement = format!("{placement}; ops that the CPU runs: {}", ops.join(", "));
        }
    }

    /// After a step that gave no numbers: 0 * NaN would be NaN in the next canvas, too.
    fn forget_soft(&mut self, lane: usize) {
        let soft = self.state.context.tensor(self.state.soft);
        let lane_bytes = self.config.shape.canvas * soft.strides()[1];
        soft.write_at(lane * lane_bytes, &vec![0.0_f32; self.config.shape.canvas * self.config.embed]);
    }
}

impl Network {
    /// Time spent inside graph computation so far, by all passes.
    #[doc(hidden)]
    pub fn computing(&self) -> Duration {
        self.computing
    }

    /// Computes the last decoder pass's graph again and nothing else: the floor that a step is measured against.
    #[doc(hidden)]
    pub fn replay(&mut self) -> Result<()> {
        match self.decode.kept.last_mut() {
            Some(compiled) => self.decode.workspace.compute(&self.backends, &mut compiled.graph),
            None => Err(Error::Backend("no decoder pass to replay".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embedded;
    use crate::ggml::Device;
    use crate::model::compile::measure;
    use crate::model::placement::Placement;
    use crate::params::Offload;

    /// Two canvases behind a prompt, one conditioned step each.
    fn run(network: &mut Network) -> Vec<Position> {
        let canvas: Vec<u32> = (0..network.shape().canvas as u32).map(|i| i * 37 % 1000).collect();
        let uniform = vec![0.5; canvas.len()];
        let (mut all, mut out) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            network.prefill(&[PrefillLane { lane: 0, tokens: &canvas[..20] }]).unwrap();
            for self_condition in [false, true] {
                let lane =
                    DenoiseLane { lane: 0, canvas: &canvas, temperature: 0.8, uniform: &uniform, self_condition };
                network.denoise(&[lane], &mut out).unwrap();
                all.extend_from_slice(&out);
            }
        }
        all
    }

    /// A composed pass without a GPU: the CPU as "GPU" and as host. Same ops, same results.
    #[test]
    fn a_composed_pass_gives_what_a_whole_one_gives() {
        let file = Arc::new(embedded::model().unwrap());
        let params = EngineParams { device: Some("CPU".into()), threads: 1, ..EngineParams::default() };
        let mut whole = Network::load(Arc::clone(&file), &params, &mut |_, _| {}).unwrap();
        let wanted = run(&mut whole);
        let cpu = Device::cpu().unwrap();
        for offload in [Offload::Whole, Offload::HostExperts(3), Offload::HostLayers(5)] {
            let family = family::load(&file).unwrap();
            let (mut config, _) = choose(&file, family.as_ref(), &params).unwrap();
            config.placement = Placement::composed(&[cpu], &file, family.as_ref(), offload, false).unwrap();
            let plan = measure(&file, family.as_ref(), &config).unwrap();
            assert!(plan.placement.as_ref().unwrap().contains("sampling on CPU"), "{plan:?}");
            assert!(plan.compute > 0 && plan.cache > 0, "{plan:?}");
            let mut composed =
                Network::assemble(Arc::clone(&file), family, config, plan, &params, &mut |_, _| {}).unwrap();
            assert_eq!(run(&mut composed), wanted, "{offload:?}");
            assert_eq!(composed.counters().graphs_built, 2, "one graph of each kind is enough for all passes");
        }
    }
}
