//! Builds the graphs of passes, and measures them without memory.

use std::cell::RefCell;
use std::sync::Arc;

use crate::error::Result;
use crate::family::Family;
use crate::ggml::{Allocator, Backend, Buffer, Context, Device, DeviceKind, GgmlType, Graph, Handle, Scheduler};
use crate::gguf::Gguf;
use crate::kernels::ExactGeglu;
use crate::model::cache::Cache;
use crate::model::config::Config;
use crate::model::inputs::{InputTensors, PassKey};
use crate::model::layers::{Inputs, Pass};
use crate::model::plan::{DevicePlan, MemoryPlan, memory};
use crate::model::sampling::{Sampling, sample};
use crate::model::weights::Weights;
use crate::params::Level;

/// A graph with its inputs and what to read from it.
pub(super) struct Compiled {
    pub(super) key: PassKey,
    pub(super) stats: Option<Handle>,
    #[cfg_attr(not(feature = "cli"), allow(dead_code))] // only parity looks at them
    pub(super) taps: Vec<(String, Handle)>,
    pub(super) inputs: InputTensors,
    pub(super) graph: Graph,
}

/// State that outlives a step: the soft embedding of every lane's last step, F32 [H, canvas * lanes].
pub(super) struct State {
    pub(super) soft: Handle,
    pub(super) buffer: Option<Buffer>,
    pub(super) context: Context,
}

impl State {
    pub(super) fn new(config: &Config) -> Result<Self> {
        let context = Context::new(1, 0)?;
        let soft = context.new_tensor(GgmlType::F32, &[config.embed, config.shape.canvas * config.shape.lanes]);
        let soft = context.named(soft, "soft_embedding").handle();
        Ok(Self { soft, buffer: None, context })
    }
}

/// What a pass's graph refers to.
pub(super) struct Parts<'p> {
    pub(super) family: &'p dyn Family,
    pub(super) config: &'p Config,
    pub(super) weights: &'p Weights,
    pub(super) cache: &'p Cache,
    pub(super) state: &'p State,
}

/// Builds the graph of a pass. Everything it refers to must outlive it.
pub(super) fn compile(parts: &Parts<'_>, key: PassKey, inputs: InputTensors, tapping: bool) -> Result<Compiled> {
    let &Parts { family, config, weights, cache, state } = parts;
    let graph = Graph::new(family.graph_size())?;
    let softcap = family.dims().softcap;
    // Only ggml's CPU backend takes its GELU from a table; others compute it.
    let exact = config.level == Level::Reference && config.device.kind() == DeviceKind::Cpu;
    let exact_gelu = exact.then(|| graph.own(ExactGeglu));
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
            spans: inputs.spans(),
            soft,
            conditioned: inputs.conditioned(),
        },
        encode: key.encode,
        kernels: config.kernels,
        device: config.device,
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
        let sampling = Sampling { weights, softcap, kernels: config.sampling, level: config.level };
        let (temperature, uniform) = (inputs.temperature(), inputs.uniform());
        let (stats, soft) = sample(&sampling, &graph, decoded.logits, temperature, uniform, decoded.table);
        graph.expand(cx.named(stats, "position_stats").mark_output());
        // For the next step's self-conditioning; the last step's is made in vain, since nobody knows it is the last.
        graph.expand(cx.copy(soft, pass.inputs.soft));
        stats_handle = Some(stats.handle());
    }
    graph.check()?;
    let taps = pass.taps.map(RefCell::into_inner).unwrap_or_default();
    Ok(Compiled { key, stats: stats_handle, taps, inputs, graph })
}

/// Measures a load without loading: descriptions only, which look allocated and are never computed.
pub(super) fn measure(file: &Arc<Gguf>, family: &dyn Family, config: &Config) -> Result<MemoryPlan> {
    let placement = &config.placement;
    let mut weights = Weights::plan(Arc::clone(file), &family.tensors(file), placement, config.level, config.forms())?;
    let mut cache = config.cache(family)?;
    let state = State::new(config)?;
    let devices = placement.all();
    let mut inputs_bytes = Buffer::size_for_context(&state.context, config.device);
    let cache_bytes: Vec<_> = devices.iter().map(|&d| cache.bytes(d)).collect();
    weights.pretend_allocated()?;
    cache.pretend_allocated()?;
    let buffer = Buffer::empty(config.device)?;
    state.context.tensor(state.soft).pretend_allocated(&buffer);
    let backends = match placement.is_composed() {
        true => devices.iter().map(|&d| Backend::open(d, 1)).collect::<Result<Vec<_>>>()?,
        false => Vec::new(),
    };
    let mut compute = vec![0; devices.len()];
    let parts = Parts { family, config, weights: &weights, cache: &cache, state: &state };
    for key in config.largest(&cache) {
        let inputs = InputTensors::new(&key)?;
        inputs_bytes += inputs.bytes(config.device);
        inputs.pretend_allocated(&buffer);
        let mut compiled = compile(&parts, key, inputs, false)?;
        let bytes = match placement.is_composed() {
            true => Scheduler::new(&backends, family.graph_size(), placement.streams())?.measure(&mut compiled.graph),
            false => vec![Allocator::measure(config.device, &mut compiled.graph)?],
        };
        compute.iter_mut().zip(bytes).for_each(|(sum, n)| *sum += n);
    }
    drop(backends); // what they hold themselves is not the model's
    let part = |(i, &device): (usize, &Device)| -> Result<DevicePlan> {
        let (there, total) = memory(device)?;
        let bytes = weights.bytes(device);
        // The limit is not meant for the host beside a GPU.
        let free = if i > 0 && device.kind() == DeviceKind::Cpu { there } else { config.limit(there) };
        Ok(DevicePlan {
            device: device.name(),
            weights_mapped: bytes.mapped,
            weights: bytes.allocated,
            cache: cache_bytes[i],
            compute: compute[i],
            free,
            limited: free < there,
            total,
        })
    };
    let mut beside = devices.iter().enumerate().map(part).collect::<Result<Vec<_>>>()?;
    let main = beside.remove(0);
    Ok(MemoryPlan {
        placement: placement.describe(),
        beside,
        device: main.device,
        dense: config.kernels.map(|_| config.dense),
        weights_mapped: main.weights_mapped,
        weights: main.weights,
        cache: main.cache,
        compute: main.compute,
        inputs: inputs_bytes,
        free: main.free,
        limited: main.limited,
        total: main.total,
        context: config.shape.context,
        lanes: config.shape.lanes,
    })
}
