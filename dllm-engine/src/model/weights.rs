//! Weights: the tensors a family lists, checked against the file and placed on the device.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ggml::{Buffer, Context, Device, DeviceKind, GgmlType, Handle, Tensor, dequantize};
use crate::gguf::{Gguf, TensorInfo};
use crate::params::Level;

/// Up to so many bytes of weights, every value is checked to be a number at load.
const CHECKED_WHOLE: u64 = 1 << 30;

/// A tensor that a family's graph uses.
#[derive(Debug, Clone)]
pub(crate) struct TensorSpec {
    pub name: String,
    /// ggml order; unused dimensions are 1.
    pub shape: [usize; 3],
    /// Vectors take part in element-wise ops, which want F32; matrices may be of any type.
    pub vector: bool,
    pub required: bool,
}

impl TensorSpec {
    pub fn vector(name: impl Into<String>, n: usize) -> Self {
        Self { name: name.into(), shape: [n, 1, 1], vector: true, required: true }
    }

    pub fn matrix(name: impl Into<String>, shape: [usize; 3]) -> Self {
        Self { name: name.into(), shape, vector: false, required: true }
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
    bytes: WeightBytes,
    file: Arc<Gguf>,
}

/// One tensor's way from the file to the device.
struct Placed {
    info: TensorInfo,
    handle: Handle,
    /// Its data is used where it lies in the mapped file.
    mapped: bool,
}

impl Weights {
    /// Checks names, shapes and types, and decides where each tensor will lie. Reads no tensor data.
    pub fn plan(file: Arc<Gguf>, specs: &[TensorSpec], device: Device, level: Level) -> Result<Self> {
        let context = Context::new(specs.len(), 0)?;
        let mut weights = Self {
            index: HashMap::with_capacity(specs.len()),
            buffers: Vec::new(),
            context,
            plan: Vec::with_capacity(specs.len()),
            bytes: WeightBytes::default(),
            file,
        };
        weights.refuse_unused_scales(specs)?;
        // ggml's CPU backend computes on the mapped file; other devices need a copy.
        let can_map = device.kind() == DeviceKind::Cpu;
        for spec in specs {
            let Some(info) = weights.file.tensor(&spec.name) else {
                if spec.required {
                    return Err(Error::file(
                        weights.file.path(),
                        format!(
                            "tensor {} is missing: the file is incomplete, or made by another converter",
                            spec.name
                        ),
                    ));
                }
                continue;
            };
            check(&weights.file, spec, info)?;
            let expand = info.ty != GgmlType::F32 && (spec.vector || level == Level::Reference);
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
            weights.plan.push(Placed { info: info.clone(), handle, mapped });
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
        let total = self.bytes.mapped + self.bytes.allocated;
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
        for placed in &self.plan {
            let tensor = self.context.tensor(placed.handle);
            if small || tensor.shape()[1] == 1 {
                self.file.check_finite(&placed.info)?;
            }
            if !placed.mapped {
                let data = self.file.data(&placed.info)?;
                if tensor.ty() == placed.info.ty {
                    tensor.write(data);
                } else {
                    expand(tensor, placed.info.ty, data)?;
                }
            }
            done += tensor.bytes() as u64;
            progress(done, total);
        }
        self.file.check_unchanged()
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
    if spec.vector && !float {
        return Err(Error::file(
            file.path(),
            format!("tensor {} is {}: expected F32, F16 or BF16", info.name, info.ty.name()),
        ));
    }
    // A matrix may be quantized, but not of integers or doubles: ggml would abort.
    if !float && info.ty.block_size() == 1 {
        let why = format!("tensor {} is {}: a matrix is F32, F16, BF16 or quantized", info.name, info.ty.name());
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
