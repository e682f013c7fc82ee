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
    /// Whether `free` is the limit that was set (`memory`, `--memory`), because the device has more.
    pub limited: bool,
    /// Memory of the device in all.
    pub total: u64,
    /// Context length in tokens that this holds for.
    pub context: usize,
    /// Lanes that this holds for.
    pub lanes: usize,
    /// Which part lies where, in words; `None` for a model that is whole on `device`.
    pub placement: Option<String>,
    /// The other devices that hold a part, the host's memory among them.
    pub beside: Vec<DevicePlan>,
}

/// What a device beside the main one would hold, in bytes. Its weights are counted as the main device's are.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct DevicePlan {
    /// Name of the device.
    pub device: String,
    /// Weights used where the file is mapped.
    pub weights_mapped: u64,
    /// Weights copied there.
    pub weights: u64,
    /// Keys and values.
    pub cache: u64,
    /// Intermediate results.
    pub compute: u64,
    /// Free memory now, or the limit that was set, where that is less.
    pub free: u64,
    /// Whether `free` is the limit.
    pub limited: bool,
    /// Memory in all.
    pub total: u64,
}

impl DevicePlan {
    /// Bytes that must be free.
    pub fn needed(&self) -> u64 {
        self.weights + self.cache + self.compute
    }
}

impl MemoryPlan {
    /// Bytes that must be free on the main device: everything but mapped weights.
    pub fn needed(&self) -> u64 {
        self.weights + self.cache + self.compute + self.inputs
    }

    /// Whether it fits now.
    pub fn fits(&self) -> bool {
        self.needed() <= self.free && self.beside.iter().all(|d| d.needed() <= d.free)
    }

    /// An error that names both numbers, where it does not fit.
    pub(crate) fn check(&self) -> Result<()> {
        if self.fits() {
            return Ok(());
        }
        let lanes = if self.lanes == 1 { "1 lane".to_owned() } else { format!("{} lanes", self.lanes) };
        let model = format!("the model with a context of {} tokens and {lanes}", self.context);
        let main = (&self.device, self.needed(), self.free, self.limited);
        let (device, needed, free, limited) = match self.beside.iter().find(|d| d.needed() > d.free) {
            Some(other) if self.needed() <= self.free => (&other.device, other.needed(), other.free, other.limited),
            _ => main,
        };
        let what = self.placement.as_ref().map_or(model.clone(), |where_| format!("{model} ({where_})"));
        let limit = if limited { " within the limit of `memory` (--memory)" } else { "" };
        Err(Error::OutOfMemory { what, needed, free, device: format!("{device}{limit}") })
    }
}

/// Free memory of a device, and all of it. ggml reports all of a machine's memory as the CPU's free one, so that is asked
/// elsewhere.
///
/// # Errors
/// `Io` where the system does not tell.
pub(crate) fn memory(device: Device) -> Result<(u64, u64)> {
    if device.kind() != DeviceKind::Cpu {
        return Ok(device.memory());
    }
    let mut system = sysinfo::System::new();
    system.refresh_memory();
    let (free, total) = (system.available_memory(), system.total_memory());
    if total == 0 {
        // Asked for a group's limits then, it would panic.
        let why = "the system does not tell it (too many open files? allow this process more, with ulimit -n)";
        return Err(Error::io("read", "the free memory", std::io::Error::other(why)));
    }
    Ok(system
        .cgroup_limits()
        .map_or((free, total), |limits| (free.min(limits.free_memory), total.min(limits.total_memory))))
}
