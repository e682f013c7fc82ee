//! What a load decides once: device, sizes, exactness.

use std::sync::Arc;

use crate::error::{Error, Result, brief};
use crate::family::Family;
use crate::ggml::{Device, DeviceKind, GgmlType, MAX_THREADS, devices};
use crate::gguf::Gguf;
use crate::kernels::library::Kernels;
use crate::model::Shape;
use crate::model::cache::{Cache, CacheSize};
use crate::model::compile::measure;
use crate::model::inputs::PassKey;
use crate::model::placement::Placement;
use crate::model::plan::MemoryPlan;
use crate::params::{Dense, EngineParams, KvType, Level, Offload};

/// Tokens of one prefill pass where the caller does not choose.
pub(super) const DEFAULT_CHUNK: usize = 512;

/// Context in tokens where the caller does not choose and the file allows more.
pub(super) const DEFAULT_CONTEXT: usize = 8192;

/// Sizes and choices fixed at load.
#[derive(Clone)]
pub(super) struct Config {
    pub(super) shape: Shape,
    pub(super) embed: usize,
    pub(super) chunk: usize,
    pub(super) level: Level,
    pub(super) kv: KvType,
    /// As it is used: never `Auto`.
    pub(super) dense: Dense,
    /// Most bytes to plan with.
    memory: u64,
    pub(super) padding: usize,
    /// Has the inputs, the state and what belongs to no layer.
    pub(super) device: Device,
    pub(super) placement: Placement,
    /// The CUDA kernels, on a device that runs these.
    pub(super) kernels: Option<&'static Kernels>,
    /// The same for sampling alone, which a composed pass on a CUDA device does with them, too.
    pub(super) sampling: Option<&'static Kernels>,
}

impl Config {
    pub(super) fn new(file: &Gguf, family: &dyn Family, params: &EngineParams) -> Result<Self> {
        let dims = family.dims();
        let chosen = choose_devices(params.device.as_deref())?;
        let device = chosen[0];
        let context = match params.context {
            0 => dims.max_context.min(DEFAULT_CONTEXT),
            n => n,
        };
        let range = dims.canvas + 1..=dims.max_context;
        if !range.contains(&context) {
            let why = format!(
                "{context} tokens are not in {}..={}, from one more than a canvas to the model's limit",
                range.start(),
                range.end()
            );
            return Err(Error::argument("context", why));
        }
        if !(1..=64).contains(&params.lanes) {
            return Err(Error::argument("lanes", format!("{} is not in 1..=64", params.lanes)));
        }
        if params.threads > processors() {
            // ggml's threads wait for each other by spinning: more of them than processors take hours, not seconds.
            let why = format!("{} is not in 0..={}, the processors of this process", params.threads, processors());
            return Err(Error::argument("threads", why));
        }
        if !(1..=65536).contains(&params.key_padding) {
            return Err(Error::argument("key_padding", format!("{} is not in 1..=65536", params.key_padding)));
        }
        let chunk = match params.prefill_chunk {
            0 => DEFAULT_CHUNK,
            n if n <= 1 << 16 => n,
            n => return Err(Error::argument("prefill_chunk", format!("{n} is not in 0..=65536"))),
        };
        let on_cpu = device.kind() == DeviceKind::Cpu;
        let in_parts =
            chosen.len() > 1 || matches!(params.offload, Offload::HostExperts(1..) | Offload::HostLayers(1..));
        if in_parts && on_cpu {
            return Err(Error::argument("offload", "a part in the host's memory needs a GPU for the rest"));
        }
        let sampling = if device.runs_custom_nodes() { Some(Kernels::get()?) } else { None };
        let kernels = sampling.filter(|_| !in_parts);
        let placement = match on_cpu || kernels.is_some() {
            true => Placement::whole(device, family.cache_layers().len()),
            false => Placement::composed(&chosen, file, family, params.offload, sampling.is_some())?,
        };
        match (params.level, sampling) {
            (Level::TopK, None) => {
                let why = "topk needs a CUDA device; `fused` gathers only the likely tokens on the CPU as well";
                return Err(Error::argument("level", why));
            }
            (Level::Reference, _) if !on_cpu => {
                let why = format!("reference runs on the CPU: {} offers fused", device.name());
                return Err(Error::argument("level", why));
            }
            _ => {}
        }
        if params.dense != Dense::Auto && kernels.is_none() {
            let why = "only a model that is whole on a CUDA device has a choice: leave dense at auto";
            return Err(Error::argument("dense", why));
        }
        let kv = match params.kv {
            KvType::Auto if on_cpu => KvType::F32,
            KvType::Auto => KvType::F16,
            chosen => chosen,
        };
        if kernels.is_some() && kv != KvType::F16 {
            return Err(Error::argument(
                "kv",
                format!("{} keeps keys and values in F16: leave kv at auto", device.name()),
            ));
        }
        if params.level == Level::Reference && kv != KvType::F32 && params.kv != KvType::Auto {
            return Err(Error::argument(
                "kv",
                "level reference keeps keys and values in F32: leave kv at auto, or take level fused",
            ));
        }
        let kv = if params.level == Level::Reference { KvType::F32 } else { kv };
        Ok(Self {
            shape: Shape { vocab: dims.vocab, canvas: dims.canvas, context, lanes: params.lanes },
            embed: dims.embed,
            chunk: chunk.min(context),
            level: params.level,
            kv,
            dense: if params.dense == Dense::Auto { Dense::Half } else { params.dense },
            memory: if params.memory == 0 { u64::MAX } else { params.memory },
            padding: params.key_padding,
            device,
            placement,
            kernels,
            sampling,
        })
    }

    /// The same with the experts of the first `layers` layers in the host's memory.
    pub(super) fn with_host_experts(&self, file: &Gguf, family: &dyn Family, layers: usize) -> Result<Self> {
        let offload = Offload::HostExperts(layers);
        let samples = self.sampling.is_some();
        let placement = Placement::composed(self.placement.devices(), file, family, offload, samples)?;
        Ok(Self { placement, kernels: None, ..self.clone() })
    }

    /// The kernels and how they want the dense matrices.
    pub(super) fn forms(&self) -> Option<(&'static Kernels, Dense)> {
        self.kernels.map(|kernels| (kernels, self.dense))
    }

    /// Bytes to plan with where so many are free.
    pub(super) fn limit(&self, free: u64) -> u64 {
        free.min(self.memory)
    }

    pub(super) fn cache(&self, family: &dyn Family) -> Result<Cache> {
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
            on_device: self.kernels.is_some(),
        };
        Cache::new(&family.cache_layers(), size, &self.placement.all(), |i| self.placement.layer(i))
    }

    /// The largest pass of each kind: what buffers are made for.
    pub(super) fn largest(&self, cache: &Cache) -> [PassKey; 2] {
        let keys = cache.most_keys();
        let decode = PassKey { encode: false, lane: 0, lanes: self.shape.lanes, rows: self.shape.canvas, keys };
        // A prefill pass takes one lane's chunk, or several lanes' rows where that is no more (see `group`).
        let encode = PassKey { encode: true, lane: 0, lanes: 1, rows: self.most_encode_rows(), keys };
        [decode, encode]
    }

    /// Most rows of a prefill pass over all lanes: a chunk, or a commit of every lane's canvas.
    pub(super) fn most_encode_rows(&self) -> usize {
        self.chunk.max(self.shape.canvas * self.shape.lanes)
    }
}

/// The choices of a load and what it takes: dense matrices in half precision where nothing else was asked for and they fit,
/// and experts in the host's memory where a GPU's is too small otherwise.
pub(super) fn choose(file: &Arc<Gguf>, family: &dyn Family, params: &EngineParams) -> Result<(Config, MemoryPlan)> {
    let mut config = Config::new(file, family, params)?;
    let mut plan = measure(file, family, &config)?;
    if params.dense == Dense::Auto && config.kernels.is_some() && !plan.fits() {
        config.dense = Dense::Quantized;
        plan = measure(file, family, &config)?;
    }
    // What was asked for by name and only whole passes have is not given up for room.
    let nothing_asked = params.offload == Offload::Auto && params.dense == Dense::Auto;
    if nothing_asked && config.device.kind() == DeviceKind::Gpu && !plan.fits() {
        // The fewest layers that make room: more of them are never more on the GPU.
        let (mut low, mut high) = (1, family.cache_layers().len());
        while low <= high {
            let middle = low.midpoint(high);
            let part = config.with_host_experts(file, family, middle)?;
            let with_part = measure(file, family, &part)?;
            if with_part.fits() {
                high = middle - 1;
                (config, plan) = (part, with_part);
            } else {
                low = middle + 1;
            }
        }
    }
    Ok((config, plan))
}

/// The devices by their names, else the first GPU that this engine has kernels for, else the CPU.
pub(super) fn choose_devices(names: Option<&str>) -> Result<Vec<Device>> {
    let Some(names) = names else { return Ok(vec![choose_device(None)?]) };
    let found: Vec<_> = names.split(',').map(|name| choose_device(Some(name.trim()))).collect::<Result<_>>()?;
    let doubled = |(i, d): (usize, &Device)| found[..i].contains(d);
    if found.len() > 1 && found.iter().any(|d| d.kind() == DeviceKind::Cpu) {
        let why = format!("{names:?}: the host's part is chosen by `offload`, so name GPUs only");
        return Err(Error::argument("device", why));
    }
    match found.iter().enumerate().any(doubled) {
        true => Err(Error::argument("device", format!("{names:?} names a device twice"))),
        false => Ok(found),
    }
}

/// One device by its name, as above.
fn choose_device(name: Option<&str>) -> Result<Device> {
    let all = devices();
    let usable = || all.iter().copied().filter(|d| d.kind() != DeviceKind::Accelerator);
    let able = |d: &Device| {
        d.kind() == DeviceKind::Gpu
            && d.runs_custom_nodes()
            && Kernels::get().inspect_err(|why| tracing::warn!("{} is left out: {why}", d.name())).is_ok()
    };
    let found = match name {
        Some(name) => usable().find(|d| d.name().eq_ignore_ascii_case(name)),
        None => usable().find(able).or_else(|| usable().find(|d| d.kind() == DeviceKind::Cpu)),
    };
    found.ok_or_else(|| Error::NoDevice {
        asked: brief(name.unwrap_or("any")).into_owned(),
        found: usable().map(|d| d.name()).collect::<Vec<_>>().join(", "),
    })
}

/// Kind of the device that a load with this name would take.
#[cfg(feature = "cli")]
pub(crate) fn device_kind(name: Option<&str>) -> Result<DeviceKind> {
    choose_devices(name).map(|devices| devices[0].kind())
}

/// What this process may use (affinity, quota), not what the machine has; no more than ggml takes.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get()).min(MAX_THREADS)
}

pub(super) fn default_threads() -> usize {
    // A second thread per core slows ggml's matrix products down.
    sysinfo::System::physical_core_count().unwrap_or(usize::MAX).clamp(1, processors())
}
