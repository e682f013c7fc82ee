//! Weights: the tensors a family lists, checked against the file and placed on the device.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ggml::{Buffer, Device, DeviceKind, GgmlType, Handle, Store, Tensor, dequantize};
use crate::gguf::{Gguf, TensorInfo};
use crate::kernels::library::Kernels;
use crate::model::placement::Placement;
use crate::model::repack::{self, Form, HEAD, Repacked, RepackedPart, Repacker, SOFT_TABLE};
use crate::params::{Dense, Level};

/// Up to so many bytes of weights, every value is checked to be a number at load.
const CHECKED_WHOLE: u64 = 1 << 30;

/// What a tensor is used for: decides the form it is stored in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Role {
    /// Takes part in element-wise ops, which want F32.
    Vector,
    /// The router's matrix: its choices are discrete, so products run in F32.
    Router,
    /// The embedding table; `head`: also the LM head.
    Table {
        head: bool,
    },
    /// A dense product. Matrices of one stack have the same input; listed one after the other they are one product on a GPU.
    Dense {
        stack: String,
    },
    /// Gate and up matrices of all experts, the gate's rows first.
    GateUp,
    /// Gate matrices of all experts where the file has the up matrices (the next tensor) apart.
    Gate,
    Up,
    /// Down matrices of all experts.
    Down,
}

/// A tensor that a family's graph uses.
#[derive(Debug, Clone)]
pub(crate) struct TensorSpec {
    pub name: String,
    /// ggml order; unused dimensions are 1.
    pub shape: [usize; 3],
    pub role: Role,
    pub required: bool,
}

impl TensorSpec {
    pub fn new(name: impl Into<String>, shape: [usize; 3], role: Role) -> Self {
        Self { name: name.into(), shape, role, required: true }
    }

    pub fn vector(name: impl Into<String>, n: usize) -> Self {
        Self::new(name, [n, 1, 1], Role::Vector)
    }

    /// A dense matrix [k, n] of a stack.
    pub fn dense(name: &str, k: usize, n: usize, stack: &str) -> Self {
        Self::new(name, [k, n, 1], Role::Dense { stack: stack.to_owned() })
    }

    pub fn optional(self) -> Self {
        Self { required: false, ..self }
    }
}

/// How the weights were placed, for receipts and plans.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WeightBytes {
    /// Used where the file is mapped: no copy.
    pub mapped: u64,
    /// Allocated on the device.
    pub allocated: u64,
}

/// All tensors of a model.
pub(crate) struct Weights {
    index: HashMap<String, Handle>,
    // Buffers over the mapped file. They and what lies in them are dropped before `file`.
    maps: Vec<Buffer>,
    store: Store,
    plan: Vec<Placed>,
    repacked: HashMap<String, Repacked>,
    /// Device, whether mapped, and size of every tensor.
    bytes: Vec<(Device, bool, u64)>,
    file: Arc<Gguf>,
}

/// One tensor's way from the file to its device.
struct Placed {
    info: TensorInfo,
    device: Device,
    handle: Handle,
    /// Its data is used where it lies in the mapped file.
    mapped: bool,
    /// How the CUDA kernels want it, where that is not as it is.
    form: Option<Form>,
}

impl Placed {
    /// Its share of the load, for progress.
    fn bytes(&self, tensor: Tensor<'_>) -> u64 {
        if self.form.is_some() { self.info.bytes } else { tensor.bytes() as u64 }
    }
}

impl Weights {
    /// Checks names, shapes and types, and decides where each tensor will lie. Reads no tensor data.
    ///
    /// With `kernels`, which want a model whole on one device, the tensors get the forms that the CUDA kernels read.
    pub fn plan(
        file: Arc<Gguf>,
        specs: &[TensorSpec],
        placement: &Placement,
        level: Level,
        kernels: Option<(&'static Kernels, Dense)>,
    ) -> Result<Self> {
        let mut weights = Self {
            index: HashMap::with_capacity(specs.len()),
            maps: Vec::new(),
            store: Store::new(&placement.all(), specs.len() + 1)?,
            plan: Vec::with_capacity(specs.len()),
            repacked: HashMap::new(),
            bytes: Vec::new(),
            file,
        };
        weights.refuse_unused_scales(specs)?;
        if let Some((kernels, dense)) = kernels {
            weights.plan_repacked(specs, dense, kernels, placement.main())?;
            return Ok(weights);
        }
        for spec in specs {
            let Some(info) = find(&weights.file, spec)?.cloned() else { continue };
            let expand = info.ty != GgmlType::F32 && (spec.role == Role::Vector || level == Level::Reference);
            weights.place(&spec.name, &info, placement.of(spec), expand);
            // The look-up of a few rows is little work; the LM head and the soft embedding go over the whole vocabulary.
            if let Role::Table { head } = spec.role
                && placement.of(spec) != placement.main()
                && (head || placement.samples_on_main())
            {
                let copy = if head { HEAD } else { SOFT_TABLE };
                weights.place(copy, &info, placement.main(), expand);
            }
        }
        Ok(weights)
    }

    /// Plans one tensor as it is in the file, or expanded to F32.
    fn place(&mut self, name: &str, info: &TensorInfo, device: Device, expand: bool) {
        let ty = if expand { GgmlType::F32 } else { info.ty };
        // ggml's CPU backend computes on the mapped file; other devices need a copy. ggml wants 32-byte alignment; the format
        // only promises the file's own.
        let mapped = device.kind() == DeviceKind::Cpu && !expand && info.offset.is_multiple_of(32);
        let context = self.store.context(device);
        let tensor = context.named(context.new_tensor(ty, &info.shape.map(|n| n as usize)[..3]), name);
        self.bytes.push((device, mapped, tensor.bytes() as u64));
        let handle = tensor.handle();
        self.index.insert(name.to_owned(), handle);
        self.plan.push(Placed { info: info.clone(), device, handle, mapped, form: None });
    }

    /// Files of some types (NVFP4, MXFP4) bring scales beside a matrix. Left out, the numbers would be wrong in silence.
    fn refuse_unused_scales(&self, specs: &[TensorSpec]) -> Result<()> {
        let used = |name: &str| specs.iter().any(|s| s.name == name);
        match self.file.tensors().iter().find(|t| t.name.ends_with("scale") && !used(&t.name)) {
            None => Ok(()),
            Some(t) => Err(Error::unsupported(
                self.file.path(),
                format!("tensor {} is a scale that this engine does not apply: take another quantization", t.name),
            )),
        }
    }

    pub fn get(&self, name: &str) -> Option<Tensor<'_>> {
        self.index.get(name).map(|&handle| self.store.tensor(handle))
    }

    /// Tensors in the form of the CUDA kernels, by the name of their stack, or their own.
    pub fn repacked(&self, name: &str) -> Option<&Repacked> {
        self.repacked.get(name)
    }

    /// The tensor of a part of a `Repacked`.
    pub fn part(&self, part: &RepackedPart) -> Tensor<'_> {
        self.store.tensor(part.handle)
    }

    /// How the weights of a device are placed.
    pub fn bytes(&self, device: Device) -> WeightBytes {
        let sum = |mapped| self.bytes.iter().filter(|b| b.0 == device && b.1 == mapped).map(|b| b.2).sum();
        WeightBytes { mapped: sum(true), allocated: sum(false) }
    }

    /// For a memory measurement only.
    pub fn pretend_allocated(&mut self) -> Result<()> {
        self.store.pretend_allocated(true)
    }

    /// Brings the data to the devices. `progress` is told bytes done and bytes in all.
    pub fn load(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
        let total = self.plan.iter().map(|p| p.bytes(self.store.tensor(p.handle))).sum();
        let mut done = 0;
        self.map()?;
        self.store.allocate("the weights")?; // all but those in a map
        self.store.mark_as_weights();
        // Looking at every value of a large file would read all of it before the first answer; there a NaN shows at the first
        // step, which names it. Vectors are few bytes and would poison everything.
        let small = total <= CHECKED_WHOLE;
        let repacked = self.plan.iter().filter(|p| p.form.is_some()).map(|p| p.info.bytes);
        let mut repacker = Repacker::new(self.store.main(), repacked.max())?;
        for placed in &self.plan {
            let tensor = self.store.tensor(placed.handle);
            if small || placed.info.shape[1] == 1 {
                self.file.check_finite(&placed.info)?;
            }
            if let Some(form) = &placed.form {
                repacker.bring(&self.file, &placed.info, form, tensor)?;
            } else if !placed.mapped {
                let data = self.file.data(&placed.info)?;
                if tensor.ty() == placed.info.ty {
                    tensor.write(data);
                } else {
                    expand(tensor, placed.info.ty, data)?;
                }
            }
            done += placed.bytes(tensor);
            progress(done, total);
        }
        self.file.check_unchanged()
    }

    /// The forms of the CUDA kernels: vectors and the router in F32, the table as in the file, dense stacks in F16, experts
    /// repacked.
    fn plan_repacked(
        &mut self,
        specs: &[TensorSpec],
        dense: Dense,
        kernels: &'static Kernels,
        device: Device,
    ) -> Result<()> {
        let file = Arc::clone(&self.file);
        let mut at = 0;
        while at < specs.len() {
            let members = match &specs[at].role {
                Role::Dense { stack } => {
                    let same = |s: &&TensorSpec| matches!(&s.role, Role::Dense { stack: other } if other == stack);
                    specs[at..].iter().take_while(same).count()
                }
                Role::Gate => 2,
                _ => 1,
            };
            let mut infos = Vec::with_capacity(members);
            for spec in specs.iter().skip(at).take(members) {
                infos.extend(find(&file, spec)?);
            }
            let spec = &specs[at];
            at += members;
            if infos.is_empty() {
                continue;
            }
            for planned in repack::plan(&file, spec, &infos, dense, kernels)? {
                let name = planned.name;
                let context = self.store.context(device);
                let tensor = context.named(context.new_tensor(planned.ty, &planned.shape), name);
                self.bytes.push((device, false, tensor.bytes() as u64));
                let handle = tensor.handle();
                match planned.repacked {
                    Some((ty, rows, k)) => {
                        let new = || Repacked { parts: Vec::new(), k };
                        let parts = &mut self.repacked.entry(name.to_owned()).or_insert_with(new).parts;
                        parts.push(RepackedPart { handle, ty, rows });
                    }
                    None => {
                        self.index.insert(name.to_owned(), handle);
                    }
                }
                let placed =
                    |(info, form): (&TensorInfo, _)| Placed { info: info.clone(), device, handle, mapped: false, form };
                self.plan.extend(planned.forms.into_iter().map(placed));
            }
        }
        Ok(())
    }

    fn map(&mut self) -> Result<()> {
        for part in 0..self.file.files() {
            let here: Vec<_> = self.plan.iter().filter(|p| p.mapped && p.info.file == part).collect();
            let Some(device) = here.first().map(|p| p.device) else { continue };
            let data = self.file.file_data(part)?;
            let start = self.file.data_start(part)?;
            let largest = here.iter().map(|p| p.info.bytes).max().unwrap_or(0);
            let buffer = Buffer::over(device, data, largest)
                .ok_or_else(|| Error::Backend(format!("{} cannot compute on a mapped file", device.name())))?;
            for placed in here {
                // Both were checked against the file's length when it was opened.
                let address = &raw const data[(placed.info.offset - start) as usize];
                buffer.place(self.store.tensor(placed.handle), address)?;
            }
            buffer.mark_as_weights();
            self.maps.push(buffer);
        }
        Ok(())
    }
}

/// The tensor of a spec, checked; `None` where an optional one is not there.
fn find<'f>(file: &'f Gguf, spec: &TensorSpec) -> Result<Option<&'f TensorInfo>> {
    match file.tensor(&spec.name) {
        Some(info) => check(file, spec, info).map(|()| Some(info)),
        None if spec.required => Err(Error::file(
            file.path(),
            format!("tensor {} is missing: the file is incomplete, or made by another converter", spec.name),
        )),
        None => Ok(None),
    }
}

fn check(file: &Gguf, spec: &TensorSpec, info: &TensorInfo) -> Result<()> {
    let wanted = [spec.shape[0] as u64, spec.shape[1] as u64, spec.shape[2] as u64, 1];
    if info.shape != wanted {
        return Err(Error::file(
            file.path(),
            format!(
                "tensor {} has shape {:?}, but the file's hyper-parameters need {:?}: convert the model again",
                info.name, info.shape, wanted
            ),
        ));
    }
    let float = [GgmlType::F32, GgmlType::F16, GgmlType::BF16].contains(&info.ty);
    if spec.role == Role::Vector && !float {
        return Err(Error::file(
            file.path(),
            format!("tensor {} is {}: expected F32, F16 or BF16; get an intact file", info.name, info.ty.name()),
        ));
    }
    // A matrix may be quantized, but not of integers or doubles: ggml would abort. Nor of what ggml makes only itself.
    if !info.ty.is_readable() {
        let why = format!(
            "tensor {} is {}: a matrix is F32, F16, BF16 or quantized as files are: get an intact file",
            info.name,
            info.ty.name()
        );
        return Err(Error::file(file.path(), why));
    }
    Ok(())
}

/// Writes `data` of type `from` into an F32 tensor, in pieces that keep the extra memory small.
fn expand(tensor: Tensor<'_>, from: GgmlType, data: &[u8]) -> Result<()> {
    const PIECE: usize = 1 << 20; // a multiple of every block size
    let total = tensor.elements();
    let mut values = vec![0.0_f32; PIECE.min(total)];
    let mut at = 0;
    while at < total {
        let n = PIECE.min(total - at);
        let first = crate::ggml::row_bytes(from, at);
        dequantize(from, &data[first..], &mut values[..n])?;
        tensor.write_at(4 * at, &values[..n]);
        at += n;
    }
    Ok(())
}
