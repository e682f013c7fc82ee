//! A network on a device: weights, cache and compiled passes behind the `Forward` seam.

use std::cell::RefCell;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::family::{self, Family};
use crate::ggml::{Allocator, Backend, Buffer, Context, Device, DeviceKind, GgmlType, Graph, Handle, devices};
use crate::gguf::Gguf;
use crate::kernels::{ExactGeglu, PositionStats, SoftEmbed, WORDS};
use crate::model::cache::{Cache, CacheSize};
use crate::model::inputs::{InputTensors, PassKey, Span};
use crate::model::layers::{Inputs, Pass};
use crate::model::plan::{MemoryPlan, free_memory};
use crate::model::weights::Weights;
use crate::model::{Counters, DenoiseLane, Forward, Position, PrefillLane, Shape};
use crate::params::{EngineParams, KvType, Level};

/// Compiled passes kept per kind. A conversation needs one or two at a time; older ones are built again.
const KEPT: usize = 6;

/// Tokens of one prefill pass where the caller does not choose.
const DEFAULT_CHUNK: usize = 512;

/// Context in tokens where the caller does not choose and the file allows more.
const DEFAULT_CONTEXT: usize = 8192;

/// A graph with its inputs and what to read from it.
struct Compiled {
    key: PassKey,
    stats: Option<Handle>,
    taps: Vec<(String, Handle)>,
    inputs: InputTensors,
    graph: Graph,
}

/// Graphs of one kind, over one compute buffer.
struct Passes {
    allocator: Allocator,
    kept: Vec<Compiled>,
}

/// Sizes and choices fixed at load.
#[derive(Debug, Clone, Copy)]
struct Config {
    shape: Shape,
    embed: usize,
    chunk: usize,
    level: Level,
    kv: KvType,
    padding: usize,
    device: Device,
}

/// State that outlives a step: the soft embedding of every lane's last step, F32 [H, canvas * lanes].
struct State {
    soft: Handle,
    buffer: Option<Buffer>,
    context: Context,
}

/// A loaded model. See [`Forward`] for what it does.
pub struct Network {
    // Field order is drop order: graphs refer to weights, cache and state.
    decode: Passes,
    encode: Passes,
    state: State,
    cache: Cache,
    weights: Weights,
    backend: Backend,
    family: Box<dyn Family>,
    config: Config,
    tapping: bool,
    last: Option<PassKey>,
    counters: Counters,
    plan: MemoryPlan,
}

impl Config {
    fn new(family: &dyn Family, params: &EngineParams) -> Result<Self> {
        let dims = family.dims();
        let device = choose_device(params.device.as_deref())?;
        let context = match params.context {
            0 => dims.max_context.min(DEFAULT_CONTEXT),
            n => n,
        };
        let range = dims.canvas + 1..=dims.max_context;
        if !range.contains(&context) {
            let why = format!("{context} tokens are not in {}..={}, from one canvas to the model's limit", range.start(), range.end());
            return Err(Error::argument("context", why));
        }
        if !(1..=64).contains(&params.lanes) {
            return Err(Error::argument("lanes", format!("{} is not in 1..=64", params.lanes)));
        }
        if !(1..=65536).contains(&params.key_padding) {
            return Err(Error::argument("key_padding", format!("{} is not in 1..=65536", params.key_padding)));
        }
        let chunk = match params.prefill_chunk {
            0 => DEFAULT_CHUNK,
            n if n <= 1 << 16 => n,
            n => return Err(Error::argument("prefill_chunk", format!("{n} is not in 0..=65536"))),
        };
        if params.level == Level::TopK {
            let why = "topk is not available on this device; `fused` gathers only the likely tokens as well";
            return Err(Error::argument("level", why));
        }
        let kv = match params.kv {
            KvType::Auto if device.kind() == DeviceKind::Cpu => KvType::F32,
            KvType::Auto => KvType::F16,
            chosen => chosen,
        };
        if params.level == Level::Reference && kv != KvType::F32 && params.kv != KvType::Auto {
            return Err(Error::argument("kv", "level reference keeps keys and values in F32: leave kv at auto, or take level fused"));
        }
        let kv = if params.level == Level::Reference { KvType::F32 } else { kv };
        Ok(Self {
            shape: Shape { vocab: dims.vocab, canvas: dims.canvas, context, lanes: params.lanes },
            embed: dims.embed,
            chunk: chunk.min(context),
            level: params.level,
            kv,
            padding: params.key_padding,
            device,
        })
    }

    fn cache(&self, family: &dyn Family) -> Result<Cache> {
        let ty = match self.kv {
            KvType::F16 => GgmlType::F16,
            KvType::Q8_0 => GgmlType::Q8_0,
            KvType::F32 | KvType::Auto => GgmlType::F32,
        };
        let size = CacheSize {
            context: self.shape.context,
            lanes: self.shape.lanes,
            canvas: self.shape.canvas,
            chunk: self.chunk,
            padding: self.padding,
            ty,
        };
        Cache::new(&family.cache_layers(), size)
    }

    /// The largest pass of each kind: what buffers are made for.
    fn largest(&self, cache: &Cache) -> [PassKey; 2] {
        let keys = cache.most_keys();
        let decode =
            PassKey { encode: false, lane: 0, lanes: self.shape.lanes, rows: self.shape.canvas, keys };
        // A prefill pass takes one lane's chunk, or several lanes' rows where that is no more (see `group`).
        let encode = PassKey { encode: true, lane: 0, lanes: 1, rows: self.most_encode_rows(), keys };
        [decode, encode]
    }

    /// Most rows of a prefill pass over all lanes: a chunk, or a commit of every lane's canvas.
    fn most_encode_rows(&self) -> usize {
        self.chunk.max(self.shape.canvas * self.shape.lanes)
    }
}

/// The device by name, else the CPU: the custom ops have no GPU form in the engine yet, so a GPU has to be asked for.
fn choose_device(name: Option<&str>) -> Result<Device> {
    let all = devices();
    let usable = || all.iter().copied().filter(|d| d.kind() != DeviceKind::Accelerator);
    let found = match name {
        Some(name) => usable().find(|d| d.name().eq_ignore_ascii_case(name)),
        None => usable().find(|d| d.kind() == DeviceKind::Cpu),
    };
    found.ok_or_else(|| Error::NoDevice {
        asked: name.unwrap_or("any").to_owned(),
        found: usable().map(|d| d.name()).collect::<Vec<_>>().join(", "),
    })
}

fn default_threads() -> usize {
    // What this process may use (affinity, quota), not what the machine has.
    let logical = std::thread::available_parallelism().map_or(1, |n| n.get());
    // A second thread per core slows ggml's matrix products down.
    sysinfo::System::physical_core_count().unwrap_or(logical).clamp(1, logical)
}

impl State {
    fn new(config: &Config) -> Result<Self> {
        let context = Context::new(1, 0)?;
        let soft = context.new_tensor(GgmlType::F32, &[config.embed, config.shape.canvas * config.shape.lanes]);
        let soft = context.named(soft, "soft_embedding").handle();
        Ok(Self { soft, buffer: None, context })
    }
}

/// What a pass's graph refers to.
struct Parts<'p> {
    family: &'p dyn Family,
    config: &'p Config,
    weights: &'p Weights,
    cache: &'p Cache,
    state: &'p State,
}

/// Builds the graph of a pass. Everything it refers to must outlive it.
fn compile(parts: &Parts<'_>, key: PassKey, inputs: InputTensors, tapping: bool) -> Result<Compiled> {
    let &Parts { family, config, weights, cache, state } = parts;
    let mut graph = Graph::new(family.graph_size())?;
    let softcap = family.dims().softcap;
    // Only ggml's CPU backend takes its GELU from a table; others compute it.
    let exact = config.level == Level::Reference && config.device.kind() == DeviceKind::Cpu;
    let exact_gelu = exact.then(|| graph.own(Box::new(ExactGeglu)));
    let stats_op = graph.own(Box::new(PositionStats { softcap }));
    let soft_op = graph.own(Box::new(SoftEmbed { softcap }));
    let mut stats_handle = None;
    let cx = graph.context();
    let rows = key.all_rows();
    let soft_state = state.context.tensor(state.soft);
    let row = soft_state.strides()[1];
    let soft = if key.encode {
        soft_state // not used by causal passes
    } else {
        let offset = key.lane * config.shape.canvas * row;
        cx.view(soft_state, [config.embed, rows, 1, 1], [row, row * rows, row * rows], offset)
    };
    let pass = Pass {
        cx,
        graph: &graph,
        weights,
        cache,
        inputs: Inputs {
            tokens: inputs.tokens(),
            positions: inputs.positions(),
            slots: inputs.slots(),
            masks: inputs.masks(),
            soft,
            conditioned: inputs.conditioned(),
        },
        lanes: (key.lane, key.lanes),
        rows_per_lane: key.rows,
        keys: key.keys,
        exact_gelu,
        taps: tapping.then(|| RefCell::new(Vec::new())),
    };
    if key.encode {
        family.encode(&pass)?;
    } else {
        let decoded = family.decode(&pass)?;
        pass.tap("logits", decoded.logits);
        let args = [decoded.logits, inputs.temperature(), inputs.uniform()];
        let stats = stats_op.node(cx, GgmlType::I32, [WORDS, rows, 1, 1], &args).mark_output();
        graph.expand(cx.named(stats, "position_stats"));
        // For the next step's self-conditioning; the last step's is made in vain, since nobody knows it is the last.
        let args = [decoded.table, decoded.logits, inputs.temperature(), stats];
        let soft = soft_op.node(cx, GgmlType::F32, [config.embed, rows, 1, 1], &args);
        graph.expand(cx.copy(soft, pass.inputs.soft));
        stats_handle = Some(stats.handle());
    }
    let taps = pass.taps.map(RefCell::into_inner).unwrap_or_default();
    Ok(Compiled { key, stats: stats_handle, taps, inputs, graph })
}

/// Measures a load without loading: descriptions only, which look allocated and are never computed.
fn measure(file: &Arc<Gguf>, family: &dyn Family, config: &Config) -> Result<MemoryPlan> {
    let weights = Weights::plan(Arc::clone(file), &family.tensors(file), config.device, config.level)?;
    let cache = config.cache(family)?;
    let state = State::new(config)?;
    let (cache_bytes, state_bytes) = (cache.bytes(config.device), Buffer::size_for_context(&state.context, config.device));
    weights.pretend_allocated();
    cache.pretend_allocated();
    state.context.tensor(state.soft).pretend_allocated();
    let (mut compute, mut inputs_bytes) = (0, state_bytes);
    let parts = Parts { family, config, weights: &weights, cache: &cache, state: &state };
    for key in config.largest(&cache) {
        let inputs = InputTensors::new(&key)?;
        inputs_bytes += inputs.bytes(config.device);
        inputs.pretend_allocated();
        let mut compiled = compile(&parts, key, inputs, false)?;
        compute += Allocator::measure(config.device, &mut compiled.graph)?;
    }
    Ok(MemoryPlan {
        device: config.device.name(),
        weights_mapped: weights.bytes().mapped,
        weights: weights.bytes().allocated,
        cache: cache_bytes,
        compute,
        inputs: inputs_bytes,
        free: free_memory(config.device),
        context: config.shape.context,
        lanes: config.shape.lanes,
    })
}

impl Network {
    /// What loading would take.
    ///
    /// # Errors
    /// `BadFile` or `Unsupported` for the file, `BadArgument` and `NoDevice` for the parameters.
    pub fn plan(file: &Arc<Gguf>, params: &EngineParams) -> Result<MemoryPlan> {
        let family = family::load(file)?;
        let config = Config::new(family.as_ref(), params)?;
        measure(file, family.as_ref(), &config)
    }

    /// Loads a model. `progress` is told bytes done and bytes in all.
    ///
    /// # Errors
    /// As `plan`; `OutOfMemory` where the plan does not fit.
    pub fn load(file: Arc<Gguf>, params: &EngineParams, progress: &mut dyn FnMut(u64, u64)) -> Result<Self> {
        let family = family::load(&file)?;
        let config = Config::new(family.as_ref(), params)?;
        let plan = measure(&file, family.as_ref(), &config)?;
        if !params.ignore_memory_plan {
            plan.check()?;
        }
        let threads = if params.threads == 0 { default_threads() } else { params.threads };
        let backend = Backend::open(config.device, threads)?;
        let specs = family.tensors(&file);
        let mut weights = Weights::plan(file, &specs, config.device, config.level)?;
        weights.load(config.device, progress)?;
        let mut cache = config.cache(family.as_ref())?;
        cache.allocate(config.device)?;
        let mut state = State::new(&config)?;
        state.buffer = Some(Buffer::for_context(&state.context, config.device, "the denoising state")?);
        let passes = || Ok::<_, Error>(Passes { allocator: Allocator::new(config.device)?, kept: Vec::new() });
        let mut network = Self {
            decode: passes()?,
            encode: passes()?,
            state,
            cache,
            weights,
            backend,
            family,
            config,
            tapping: false,
            last: None,
            counters: Counters::default(),
            plan,
        };
        // The largest passes first: the compute buffers get their final size, and nothing can run out later.
        for key in network.config.largest(&network.cache) {
            network.pass(key)?;
        }
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
        self.backend.threads()
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
        if self.config.device.kind() != DeviceKind::Cpu {
            refuse_foreign_nodes(&self.backend, &compiled.graph)?;
        }
        if passes.kept.len() == KEPT {
            passes.kept.remove(0);
        }
        if passes.allocator.allocate(&mut compiled.graph)? {
            passes.kept.clear(); // the buffer moved
        }
        passes.kept.push(compiled);
        self.counters.graphs_built += 1;
        Ok(())
    }

    /// Runs the last pass of a kind for the given lanes' spans.
    fn run(&mut self, encode: bool, spans: &[Span], tokens: &[i32]) -> Result<&Compiled> {
        let passes = if encode { &mut self.encode } else { &mut self.decode };
        let compiled = passes.kept.last_mut().ok_or_else(|| Error::Backend("no compiled pass".into()))?;
        compiled.inputs.place(&compiled.key, spans, &self.cache);
        compiled.inputs.tokens().write(tokens);
        self.backend.compute(&mut compiled.graph)?;
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
            Some(bad) => Err(Error::argument("tokens", format!("{bad} is not below the vocabulary's {}", self.config.shape.vocab))),
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
        self.run(true, &spans, &tokens)?;
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
                let why = format!("{} tokens and {} uniform numbers, not {} each", lane.canvas.len(), lane.uniform.len(), shape.canvas);
                return Err(Error::argument("canvas", why));
            }
            if !(lane.temperature > 0.0 && lane.temperature.is_finite()) {
                return Err(Error::argument("temperature", format!("{} is not above 0", lane.temperature)));
            }
            let filled = self.cache.filled(lane.lane);
            if filled + shape.canvas > shape.context {
                return Err(Error::PromptTooLong {
                    tokens: filled,
                    fits: shape.context - shape.canvas,
                    context: shape.context,
                    canvas: shape.canvas,
                });
            }
        }
        Ok(())
    }
}

/// A GPU pass must run on the GPU as a whole: a node that the backend cannot run is an error, not a silent CPU run.
fn refuse_foreign_nodes(backend: &Backend, graph: &Graph) -> Result<()> {
    for i in 0..graph.nodes() {
        let node = graph.node(i);
        if !backend.supports(node) {
            return Err(Error::Backend(format!("{} cannot run node {node:?}", backend.device().name())));
        }
    }
    Ok(())
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

    fn prefill(&mut self, lanes: &[PrefillLane<'_>]) -> Result<()> {
        let shape = self.config.shape;
        for lane in lanes {
            self.check_lane(lane.lane)?;
            self.check_tokens(lane.tokens)?;
            let after = self.cache.filled(lane.lane) + lane.tokens.len();
            if after + shape.canvas > shape.context {
                return Err(Error::PromptTooLong {
                    tokens: after,
                    fits: shape.context - shape.canvas,
                    context: shape.context,
                    canvas: shape.canvas,
                });
            }
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
        let (mut temperature, mut uniform, mut conditioned) = (vec![1.0_f32; rows], vec![0.0_f32; rows], vec![0.0_f32; rows]);
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
            compiled.inputs.temperature().write(&temperature);
            compiled.inputs.uniform().write(&uniform);
            compiled.inputs.conditioned().write(&conditioned);
        }
        for lane in lanes {
            self.cache.note_written(lane.lane, canvas, false);
        }
        let compiled = self.run(false, &spans, &tokens)?;
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
            .map(|p| p.allocator.bytes() + p.kept.iter().map(|c| c.inputs.bytes(self.config.device)).sum::<u64>())
            .sum();
        self.plan.weights + self.plan.cache + inputs
    }
}

impl Network {
    /// After a step that gave no numbers: 0 * NaN would be NaN in the next canvas, too.
    fn forget_soft(&mut self, lane: usize) {
        let soft = self.state.context.tensor(self.state.soft);
        let lane_bytes = self.config.shape.canvas * soft.strides()[1];
        soft.write_at(lane * lane_bytes, &vec![0.0_f32; self.config.shape.canvas * self.config.embed]);
    }
}

impl Network {
    /// Computes the last decoder pass's graph again and nothing else: the floor that a step is measured against.
    #[doc(hidden)]
    pub fn replay(&mut self) -> Result<()> {
        match self.decode.kept.last_mut() {
            Some(compiled) => self.backend.compute(&mut compiled.graph),
            None => Err(Error::Backend("no decoder pass to replay".into())),
        }
    }
}

/// What parity checks need to see and to inject.
impl Network {
    /// Keeps intermediate results of the passes built from now on.
    pub(crate) fn tap(&mut self) {
        self.tapping = true;
        self.decode.kept.clear();
        self.encode.kept.clear();
    }

    /// An intermediate result of the last decoder (`encode` false) or encoder pass, as 32-bit words, row by row.
    pub(crate) fn tapped(&self, encode: bool, name: &str) -> Option<(usize, Vec<u32>)> {
        let compiled = if encode { self.encode.kept.last()? } else { self.decode.kept.last()? };
        let (_, handle) = compiled.taps.iter().find(|(n, _)| n == name)?;
        let tensor = compiled.graph.context().tensor(*handle);
        let [row, ..] = tensor.shape();
        let strides = tensor.strides();
        let rows = tensor.elements() / row;
        // Top-k results are views of a wider sort: read row by row.
        let words = (0..rows).flat_map(|i| tensor.read_at::<u32>(i * strides[1], row)).collect();
        Some((row, words))
    }

    /// Keys (`which` 0) or values (1) of a layer and lane at a position, F32 [kv heads * head].
    pub(crate) fn cached(&self, layer: usize, which: usize, lane: usize, position: usize) -> Result<Vec<f32>> {
        self.cache.read(layer, which, lane, position)
    }

    /// Positions of a lane that the cache of a layer still holds: all, or those that a ring has not overwritten.
    pub(crate) fn held(&self, layer: usize, lane: usize, len: usize) -> std::ops::Range<usize> {
        self.cache.held(layer, lane, len)
    }

    /// Makes a lane's next step be conditioned by given logits (softcapped already), [canvas, V], over `temperature`.
    pub(crate) fn condition_on(&mut self, lane: usize, logits: &[f32], temperature: f32) -> Result<()> {
        let (device, shape) = (self.config.device, self.config.shape);
        let holder = Context::new(4, 0)?;
        let given = holder.new_tensor(GgmlType::F32, &[shape.vocab, shape.canvas]);
        let temperatures = holder.new_tensor(GgmlType::F32, &[shape.canvas]);
        let uniform = holder.new_tensor(GgmlType::F32, &[shape.canvas]);
        let _buffer = Buffer::for_context(&holder, device, "given logits")?;
        given.write(logits);
        temperatures.write(&vec![temperature; shape.canvas]);
        let mut graph = Graph::new(16)?;
        let stats_op = graph.own(Box::new(PositionStats { softcap: None }));
        let soft_op = graph.own(Box::new(SoftEmbed { softcap: None }));
        let table = self.weights.get("token_embd.weight").ok_or_else(|| Error::Backend("no embedding table".into()))?;
        {
            let cx = graph.context();
            let stats = stats_op.node(cx, GgmlType::I32, [WORDS, shape.canvas, 1, 1], &[given, temperatures, uniform]);
            let soft = soft_op.node(
                cx,
                GgmlType::F32,
                [self.config.embed, shape.canvas, 1, 1],
                &[table, given, temperatures, stats],
            );
            let state = self.state.context.tensor(self.state.soft);
            let row = state.strides()[1];
            let into = cx.view(
                state,
                [self.config.embed, shape.canvas, 1, 1],
                [row, row * shape.canvas, row * shape.canvas],
                lane * shape.canvas * row,
            );
            graph.expand(cx.copy(soft, into));
        }
        let mut allocator = Allocator::new(device)?;
        allocator.allocate(&mut graph)?;
        self.backend.compute(&mut graph)
    }
}
