//! Weights: the tensors a family lists, checked against the file and placed on the device.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ggml::{Buffer, Context, Device, DeviceKind, GgmlType, Handle, Tensor, dequantize};
use crate::gguf::{Gguf, TensorInfo};
use crate::kernels::library::Kernels;
use crate::model::repack::{self, Form, Repacked, RepackedPart, Repacker};
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

/// All tensors of a model. `context` describes them, `buffers` hold or map their data.
pub(crate) struct Weights {
    index: HashMap<String, Handle>,
    // Dropped before `file`, whose mapping they may point into.
    buffers: Vec<Buffer>,
    context: Context,
    plan: Vec<Placed>,
    repacked: HashMap<String, Repacked>,
    bytes: WeightBytes,
    file: Arc<Gguf>,
}

/// One tensor's way from the file to the device.
struct Placed {
    info: TensorInfo,
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
    /// With `kernels` the tensors get the forms that the CUDA kernels read.
    pub fn plan(
        file: Arc<Gguf>,
        specs: &[TensorSpec],
        device: Device,
        level: Level,
        kernels: Option<(&'static Kernels, Dense)>,
    ) -> Result<Self> {
        let context = Context::new(specs.len() + 1, 0)?;
        let mut weights = Self {
            index: HashMap::with_capacity(specs.len()),
            buffers: Vec::new(),
            context,
            plan: Vec::with_capacity(specs.len()),
            repacked: HashMap::new(),
            bytes: WeightBytes::default(),
            file,
        };
        weights.refuse_unused_scales(specs)?;
        if let Some((kernels, dense)) = kernels {
            weights.plan_repacked(specs, dense, kernels)?;
            return Ok(weights);
        }
        // ggml's CPU backend computes on the mapped file; other devices need a copy.
        let can_map = device.kind() == DeviceKind::Cpu;
        for spec in specs {
            let Some(info) = find(&weights.file, spec)? else { continue };
            let expand = info.ty != GgmlType::F32 && (spec.role == Role::Vector || level == Level::Reference);
            let ty = if expand { GgmlType::F32 } else { info.ty };
            // ggml wants 32-byte alignment; the format only promises the file's own.
            let mapped = can_map && !expand && info.offset % 32 == 0;
            let tensor = weights.context.named(weights.context.new_tensor(ty, &spec.shape), &spec.name);
            let size = tensor.bytes() as u64;
            if mapped {
                weights.bytes.mapped += size;
            } else {
                weights.bytes.allocated += size;
            }
            let handle = tensor.handle();
            weights.index.insert(spec.name.clone(), handle);
            weights.plan.push(Placed { info: info.clone(), handle, mapped, form: None });
        }
        Ok(weights)
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
        self.index.get(name).map(|&handle| self.context.tensor(handle))
    }

    /// Tensors in the form of the CUDA kernels, by the name of their stack, or their own.
    pub fn repacked(&self, name: &str) -> Option<&Repacked> {
        self.repacked.get(name)
    }

    /// The tensor of a part of a `Repacked`.
    pub fn part(&self, part: &RepackedPart) -> Tensor<'_> {
        self.context.tensor(part.handle)
    }

    pub fn bytes(&self) -> WeightBytes {
        self.bytes
    }

    /// For a memory measurement only.
    pub fn pretend_allocated(&self) {
        for placed in &self.plan {
            self.context.tensor(placed.handle).pretend_allocated();
        }
    }

    /// Brings the data to the device. `progress` is told bytes done and bytes in all.
    pub fn load(&mut self, device: Device, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
        let total = self.plan.iter().map(|p| p.bytes(self.context.tensor(p.handle))).sum();
        let mut done = 0;
        self.map(device)?;
        if self.plan.iter().any(|p| !p.mapped) {
            // Tensors already placed in a map are skipped by the allocation.
            let buffer = Buffer::for_context(&self.context, device, "the weights")?;
            buffer.mark_as_weights();
            self.buffers.push(buffer);
        }
        // Looking at every value of a large file would read all of it before the first answer; there a NaN shows at the first
        // step, which names it. Vectors are few bytes and would poison everything.
        let small = total <= CHECKED_WHOLE;
        let mut repacker =
            Repacker::new(device, self.plan.iter().filter(|p| p.form.is_some()).map(|p| p.info.bytes).max())?;
        for placed in &self.plan {
            let tensor = self.context.tensor(placed.handle);
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
    fn plan_repacked(&mut self, specs: &[TensorSpec], dense: Dense, kernels: &'static Kernels) -> Result<()> {
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
                let tensor = self.context.named(self.context.new_tensor(planned.ty, &planned.shape), name);
                self.bytes.allocated += tensor.bytes() as u64;
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
                    |(info, form): (&TensorInfo, _)| Placed { info: info.clone(), handle, mapped: false, form };
                self.plan.extend(planned.forms.into_iter().map(placed));
            }
        }
        Ok(())
    }

    fn map(&mut self, device: Device) -> Result<()> {
        for part in 0..self.file.files() {
            let here: Vec<_> = self.plan.iter().filter(|p| p.mapped && p.info.file == part).collect();
            if here.is_empty() {
                continue;
            }
            let data = self.file.file_data(part)?;
            let start = self.file.data_start(part)?;
            let largest = here.iter().map(|p| p.info.bytes).max().unwrap_or(0);
            let buffer = Buffer::over(device, data, largest)
                .ok_or_else(|| Error::Backend(format!("{} cannot compute on a mapped file", device.name())))?;
            for placed in here {
                // Both were checked against the file's length when it was opened.
                let address = &raw const data[(placed.info.offset - start) as usize];
                buffer.place(self.context.tensor(placed.handle), address)?;
            }
            buffer.mark_as_weights();
            self.buffers.push(buffer);
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
                "tensor {} has shape {:?}, but the file's hyper-parameters need {:?}",
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
