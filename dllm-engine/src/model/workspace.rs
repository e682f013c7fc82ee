//! Where the intermediate results of passes lie, and so how graphs are computed.

use crate::error::{Error, Result};
use crate::ggml::{Allocator, Backend, DeviceKind, Graph, Scheduler};
use crate::model::config::Config;

/// The memory of graphs that take turns.
pub(super) enum Workspace {
    /// On the one device that runs whole passes.
    Whole(Allocator),
    /// On every device that runs a part. It knows one graph at a time.
    Composed(Scheduler),
}

impl Workspace {
    /// On the devices of the open backends.
    pub(super) fn new(config: &Config, backends: &[Backend], nodes: usize) -> Result<Self> {
        Ok(match config.placement.is_composed() {
            true => Self::Composed(Scheduler::new(backends, nodes, config.placement.streams())?),
            false => Self::Whole(Allocator::new(config.device)?),
        })
    }

    /// Lays a new graph out. `true`: graphs laid out before must be dropped, not computed.
    pub(super) fn allocate(&mut self, graph: &mut Graph) -> Result<bool> {
        match self {
            Self::Whole(allocator) => allocator.allocate(graph),
            Self::Composed(scheduler) => scheduler.allocate(graph).map(|()| true),
        }
    }

    /// Computes a graph that is laid out, and waits.
    pub(super) fn compute(&self, backends: &[Backend], graph: &mut Graph) -> Result<()> {
        match self {
            Self::Whole(_) => backends[0].compute(graph),
            Self::Composed(scheduler) => scheduler.compute(graph),
        }
    }

    /// Names of the ops of a composed pass, laid out last, that the CPU runs; the custom ones of sampling aside.
    pub(super) fn ops_on_cpu(&self, graph: &Graph) -> Vec<String> {
        match self {
            Self::Whole(_) => Vec::new(),
            Self::Composed(scheduler) => scheduler.ops_on_cpu(graph).into_iter().filter(|op| op != "CUSTOM").collect(),
        }
    }

    /// Bytes on the main device.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Whole(allocator) => allocator.bytes(),
            Self::Composed(scheduler) => scheduler.bytes(0),
        }
    }
}

/// A whole GPU pass must run on the GPU as a whole, and what writes to a GPU's memory there: a node that cannot is an error,
/// not a silent CPU run (of a composed pass ggml would end the process).
pub(super) fn refuse_foreign_nodes(config: &Config, graph: &Graph) -> Result<()> {
    for device in config.placement.devices().iter().filter(|d| d.kind() != DeviceKind::Cpu) {
        for node in (0..graph.nodes()).map(|i| graph.node(i)) {
            let bound = !config.placement.is_composed() || node.writes_in_place();
            // Its halves would have to be transposed inside of blocks, which ggml ends the process for.
            if node.op_name() == "CONT" && node.ty().block_size() > 1 {
                let why =
                    format!("{} has no attention over {} here: leave kv at auto", device.name(), node.ty().name());
                return Err(Error::argument("kv", why));
            }
            if bound && !device.supports(node) {
                return Err(Error::Backend(format!("{} cannot run {}, node {node:?}", device.name(), node.op_name())));
            }
        }
    }
    Ok(())
}
