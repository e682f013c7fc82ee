//! Which device holds and computes which part of a model.

use crate::error::{Error, Result};
use crate::family::Family;
use crate::ggml::{Device, DeviceKind, devices};
use crate::gguf::Gguf;
use crate::model::weights::{Role, TensorSpec};
use crate::params::Offload;

/// Where the layers, their experts and the rest of a model lie.
///
/// A model on one device whose kernels know all of a pass is whole there. Otherwise the pass is composed of ggml's own
/// ops and `Scheduler` runs each where its weights are: then the embedding table stays in the host's memory, where rows are
/// looked up, and canvases are sampled where `samples` says.
#[derive(Debug, Clone)]
pub(crate) struct Placement {
    /// GPUs, or the CPU alone. The first has what belongs to no layer.
    devices: Vec<Device>,
    /// The host beside them, of a composed pass.
    cpu: Option<Device>,
    /// Device of every layer.
    layers: Vec<Device>,
    /// So many first layers keep their experts in the host's memory.
    host_experts: usize,
    /// Whether the main device samples canvases, so that logits stay there.
    samples: bool,
}

impl Placement {
    /// All on `device`, as one pass.
    pub(crate) fn whole(device: Device, layers: usize) -> Self {
        Self { devices: vec![device], cpu: None, layers: vec![device; layers], host_experts: 0, samples: true }
    }

    /// Over GPUs by layer, in the order given and in proportion to their free memory, and the host. `samples`: the first GPU
    /// has the kernels for sampling.
    ///
    /// # Errors
    /// `BadArgument` for more layers than there are, `NoDevice` without a CPU backend.
    pub(crate) fn composed(
        gpus: &[Device],
        file: &Gguf,
        family: &dyn Family,
        offload: Offload,
        samples: bool,
    ) -> Result<Self> {
        let cpu = devices()
            .into_iter()
            .find(|d| d.kind() == DeviceKind::Cpu)
            .ok_or_else(|| Error::NoDevice { asked: "CPU".into(), found: String::new() })?;
        let count = family.cache_layers().len();
        let (host_layers, host_experts) = match offload {
            Offload::Auto | Offload::Whole => (0, 0),
            Offload::HostExperts(n) => (0, n),
            Offload::HostLayers(n) => (n, 0),
        };
        let asked = host_layers.max(host_experts);
        if asked > count {
            return Err(Error::argument(
                "offload",
                format!("{asked} layers, but the model has {count}: give at most these"),
            ));
        }
        let mut layers = vec![cpu; host_layers];
        layers.extend(spread(gpus, &layer_bytes(file, count)[host_layers..]));
        Ok(Self { devices: gpus.to_vec(), cpu: Some(cpu), layers, host_experts, samples })
    }

    /// Whether passes are composed of stock ops.
    pub(crate) fn is_composed(&self) -> bool {
        self.cpu.is_some()
    }

    /// Whether the main device samples; else the host does.
    pub(crate) fn samples_on_main(&self) -> bool {
        self.samples
    }

    /// The device that has what belongs to no layer.
    pub(crate) fn main(&self) -> Device {
        self.devices[0]
    }

    /// All devices that hold something, the main one first and the host last.
    pub(crate) fn all(&self) -> Vec<Device> {
        self.devices.iter().copied().chain(self.cpu).collect()
    }

    /// The GPUs, or the one device of a whole model.
    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Where a layer's keys and values lie.
    pub(crate) fn layer(&self, i: usize) -> Device {
        self.layers[i]
    }

    /// Whether experts in the host's memory are sent to the GPU for each pass: many rows share each of them, and a bus is
    /// faster than a processor at that.
    pub(crate) fn streams(&self) -> bool {
        self.host_experts > 0
    }

    /// Where a tensor lies.
    pub(crate) fn of(&self, spec: &TensorSpec) -> Device {
        let Some(cpu) = self.cpu else { return self.main() };
        let expert = matches!(spec.role, Role::GateUp | Role::Gate | Role::Up | Role::Down);
        match layer_of(&spec.name) {
            Some(i) if expert && i < self.host_experts => cpu,
            Some(i) => self.layers[i],
            None if matches!(spec.role, Role::Table { .. }) => cpu,
            None => self.main(),
        }
    }

    /// In words, for receipts; `None` for a model that is whole on one device.
    pub(crate) fn describe(&self) -> Option<String> {
        let cpu = self.cpu?;
        let mut parts = Vec::new();
        for device in self.all() {
            let n = self.layers.iter().filter(|d| **d == device).count();
            if n > 0 {
                parts.push(format!("{n} layers on {}", device.name()));
            }
        }
        if self.host_experts > 0 {
            parts.push(format!("experts of {} of them in the host's memory", self.host_experts));
        }
        let sampling = if self.samples { self.main() } else { cpu };
        parts.push(format!("embedding table on {}, sampling on {}", cpu.name(), sampling.name()));
        Some(parts.join(", "))
    }
}

/// Layer of a tensor, by the names of GGUF files (`blk.12.attn_q.weight`).
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// Bytes of the weights of each layer.
fn layer_bytes(file: &Gguf, count: usize) -> Vec<u64> {
    let mut bytes = vec![0; count];
    for tensor in file.tensors() {
        if let Some(of_layer) = layer_of(&tensor.name).and_then(|i| bytes.get_mut(i)) {
            *of_layer += tensor.bytes;
        }
    }
    bytes
}

/// A device for each of the given layers: neighbours together, each device's bytes in proportion to its free memory.
fn spread(gpus: &[Device], bytes: &[u64]) -> Vec<Device> {
    let free: Vec<f64> = gpus.iter().map(|d| d.memory().0.max(1) as f64).collect();
    shares(&free, bytes).into_iter().map(|i| gpus[i]).collect()
}

/// Index of a share for each item: the item's middle decides, so that no share is off by more than half an item.
fn shares(weights: &[f64], bytes: &[u64]) -> Vec<usize> {
    let (all_weights, all_bytes) = (weights.iter().sum::<f64>(), bytes.iter().sum::<u64>().max(1) as f64);
    let mut before = 0.0;
    let item = |&size: &u64| {
        let middle = (before + size as f64 / 2.0) / all_bytes;
        before += size as f64;
        let mut end = 0.0;
        let passed = |w: &&f64| {
            end += **w / all_weights;
            end <= middle
        };
        weights.iter().take_while(passed).count().min(weights.len() - 1)
    };
    bytes.iter().map(item).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_go_to_devices_in_proportion_to_their_memory() {
        assert_eq!(shares(&[1.0], &[5, 5, 5]), [0, 0, 0]);
        assert_eq!(shares(&[1.0, 1.0], &[5, 5, 5, 5]), [0, 0, 1, 1]);
        assert_eq!(shares(&[24.0, 8.0], &[1; 8]), [0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(shares(&[1.0, 1.0], &[1, 1, 6]), [0, 0, 1]);
        assert_eq!(shares(&[1.0, 1.0, 2.0], &[1; 4]), [0, 1, 2, 2]);
        assert_eq!(shares(&[1.0, 1.0], &[]), [0; 0]);
        assert_eq!(shares(&[1.0, 3.0], &[0, 0]), [0, 0], "layers without bytes");
    }

    #[test]
    fn names_tell_the_layer() {
        assert_eq!(layer_of("blk.12.ffn_down_exps.weight"), Some(12));
        assert_eq!(layer_of("token_embd.weight"), None);
        assert_eq!(layer_of("blk.x.attn_q.weight"), None);
    }
}
