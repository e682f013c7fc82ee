//! The memory plan: what a load would take, before anything is loaded.

use serde::Serialize;

use crate::error::{Error, Result};
use crate::ggml::{Device, DeviceKind};
use crate::params::Dense;

/// Bytes that a model needs on its device, and bytes that are there.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// Device that would hold it.
    pub device: String,
    /// How the dense matrices would lie there; `None` where they are as in the file.
    pub dense: Option<Dense>,
    /// Weights used where the file is mapped. The system reads them in and may drop them again.
    pub weights_mapped: u64,
    /// Weights copied to the device, or expanded.
    pub weights: u64,
    /// Keys and values of all lanes at the full context.
    pub cache: u64,
    /// Intermediate results of the largest passes.
    pub compute: u64,
    /// Inputs and state of the passes.
    pub inputs: u64,
    /// Free memory of the device now, or the limit that was set, where that is less.
    pub free: u64,
    /// Memory of the device in all.
    pub total: u64,
    /// Context length in tokens that this holds for.
    pub context: usize,
    /// Lanes that this holds for.
    pub lanes: usize,
}

impl MemoryPlan {
    /// Bytes that must be free: everything but mapped weights.
    pub fn needed(&self) -> u64 {
        self.weights + self.cache + self.compute + self.inputs
    }

    /// Whether it fits now.
    pub fn fits(&self) -> bool {
        self.needed() <= self.free
    }

    /// An error that names both numbers, where it does not fit.
    pub(crate) fn check(&self) -> Result<()> {
        if self.fits() {
            return Ok(());
        }
        Err(Error::OutOfMemory {
            what: format!("the model with a context of {} tokens and {} lanes", self.context, self.lanes),
            needed: self.needed(),
            free: self.free,
            device: self.device.clone(),
        })
    }
}

/// Free memory of a device, and all of it. ggml reports all of a machine's memory as the CPU's free one, so that is asked
/// elsewhere.
pub(crate) fn memory(device: Device) -> (u64, u64) {
    if device.kind() != DeviceKind::Cpu {
        return device.memory();
    }
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let (free, total) = (system.available_memory(), system.total_memory());
    system
        .cgroup_limits()
        .map_or((free, total), |limits| (free.min(limits.free_memory), total.min(limits.total_memory)))
}
