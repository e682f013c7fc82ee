//! The forms in which the CUDA kernels read weights, made once at load from the file's blocks.
//!
//! Dense matrices of one input are stacked in F16 (on a GPU whose memory is fast the vendor's library on these wins over any
//! kernel on quantized blocks: docs/log/gpu-matmul.md) or, where memory is short, stay quantized, in the order of the tensor
//! cores, as the experts always do. A type or a size that the kernels do not
//! know is expanded to F16 first, with zeros where the inner dimension is no multiple of 64.

use std::borrow::Cow;
use std::ffi::{c_int, c_void};

use half::f16;

use crate::error::{Error, Result};
use crate::ggml::{Buffer, Context, Device, GgmlType, Handle, Tensor, dequantize, row_bytes};
use crate::gguf::{Gguf, TensorInfo};
use crate::kernels::library::Kernels;
use crate::model::weights::{Role, TensorSpec};
use crate::params::Dense;

/// Inner dimensions of repacked matrices are multiples of this.
const INNER: usize = 64;

/// Types of the table that the kernels read as in the file.
const TABLE_TYPES: [u32; 6] = [0, 1, 8, 12, 14, 30];

/// Name of the LM head in F16: its own matrix, or a copy of the table.
pub(crate) const HEAD: &str = "lm_head";

/// Name of a table's F16 copy where the LM head has a matrix of its own.
pub(crate) const SOFT_TABLE: &str = "soft_table";

/// A stack of matrices, or experts, in a form of its own.
#[derive(Debug, Clone)]
pub(crate) struct Repacked {
    /// Matrices one above the other: one in F16, or several repacked.
    pub parts: Vec<RepackedPart>,
    /// Inner dimension, padded.
    pub k: usize,
}

/// One tensor of a `Repacked`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RepackedPart {
    pub handle: Handle,
    /// ggml's number of the type it was repacked from; `None` is plain F16.
    pub ty: Option<c_int>,
    /// Output rows; of experts those of one, gate and up together.
    pub rows: usize,
}

impl Repacked {
    /// Output rows of all parts.
    pub fn rows(&self) -> usize {
        self.parts.iter().map(|p| p.rows).sum()
    }
}

/// Where one tensor of the file goes, and how.
#[derive(Debug, Clone)]
pub(crate) enum Form {
    /// F16, from output row `row` on.
    Half { row: usize },
    /// Repacked experts of gate and up. `partner` is the up tensor where it lies apart.
    GateUp { pack: Pack, partner: Option<TensorInfo> },
    /// Repacked, each expert (a dense matrix is one) by itself.
    Packed { pack: Pack },
    /// Read together with its partner.
    Skip,
}

/// Sizes of repacked experts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pack {
    /// ggml's number of the type that is repacked.
    ty: c_int,
    /// Output rows of one matrix of one expert, padded.
    rows: usize,
    k: usize,
    experts: usize,
    /// Bytes of one repacked expert.
    bytes: usize,
}

/// A tensor to make.
pub(super) struct Planned<'s> {
    /// Its own name, or that of the stack it belongs to.
    pub name: &'s str,
    pub ty: GgmlType,
    pub shape: Vec<usize>,
    /// Type, rows and inner dimension of a part of a `Repacked`.
    pub repacked: Option<(Option<c_int>, usize, usize)>,
    /// The tensors of the file that go there; `None` is as it is, or expanded to F32.
    pub forms: Vec<(&'s TensorInfo, Option<Form>)>,
}

/// The tensors made of one spec's tensors in the file, or of those of all specs of its stack.
pub(super) fn plan<'s>(
    file: &Gguf,
    spec: &'s TensorSpec,
    infos: &[&'s TensorInfo],
    dense: Dense,
    kernels: &Kernels,
) -> Result<Vec<Planned<'s>>> {
    let [k, n, experts] = spec.shape;
    let info = infos[0];
    let plain = |ty, form| Planned {
        name: spec.name.as_str(),
        ty,
        shape: spec.shape.to_vec(),
        repacked: None,
        forms: vec![(info, form)],
    };
    Ok(match &spec.role {
        Role::Vector | Role::Router => vec![plain(GgmlType::F32, None)],
        Role::Table { head } => {
            let mut list = match TABLE_TYPES.contains(&info.ty.id()) {
                true => vec![plain(info.ty, None)],
                false => vec![plain(GgmlType::F16, Some(Form::Half { row: 0 }))],
            };
            if *head {
                list.extend(stack(file, HEAD, &[info], dense, kernels)?);
            }
            // The dense soft embedding reads halves, or blocks that a kernel can expand piece by piece.
            let expandable = kernels.repack_bytes(info.ty.id() as c_int, 1, k) != 0;
            let has_halves = *head && dense == Dense::Half;
            if !has_halves && (dense == Dense::Half || !expandable) {
                list.extend(stack(file, SOFT_TABLE, &[info], Dense::Half, kernels)?);
            }
            list
        }
        Role::Dense { stack: name } => stack(file, name, infos, dense, kernels)?,
        Role::GateUp | Role::Gate => {
            let width = if spec.role == Role::Gate { n } else { n / 2 };
            let same = infos.iter().all(|i| i.ty == info.ty);
            let pack = pack(file, info, kernels, [k, width, experts], 2, same && width % INNER == 0)?;
            let partner = infos.get(1).copied();
            let form = Form::GateUp { pack, partner: partner.cloned() };
            let forms = std::iter::once((info, Some(form))).chain(partner.map(|up| (up, Some(Form::Skip)))).collect();
            vec![packed(&spec.name, pack, 2, forms)]
        }
        Role::Down => {
            let pack = pack(file, info, kernels, [k, n, experts], 1, true)?;
            vec![packed(&spec.name, pack, 1, vec![(info, Some(Form::Packed { pack }))])]
        }
        Role::Up => return Err(Error::Backend(format!("tensor {} stands without its gate", spec.name))),
    })
}

/// Dense matrices of one input: one F16 matrix, or each repacked.
fn stack<'s>(
    file: &Gguf,
    name: &'s str,
    infos: &[&'s TensorInfo],
    dense: Dense,
    kernels: &Kernels,
) -> Result<Vec<Planned<'s>>> {
    let k = infos[0].shape[0] as usize;
    if !k.is_multiple_of(8) {
        return Err(Error::unsupported(file.path(), format!("tensor {}: {k} is no multiple of 8", infos[0].name)));
    }
    let rows = |i: &TensorInfo| i.shape[1] as usize;
    if dense == Dense::Quantized {
        let part = |info: &&'s TensorInfo| {
            let pack = pack(file, info, kernels, [k, rows(info), 1], 1, true)?;
            Ok(packed(name, pack, 1, vec![(*info, Some(Form::Packed { pack }))]))
        };
        return infos.iter().map(part).collect();
    }
    let mut row = 0;
    let mut forms = Vec::with_capacity(infos.len());
    for info in infos {
        forms.push((*info, Some(Form::Half { row })));
        row += rows(info);
    }
    Ok(vec![Planned { name, ty: GgmlType::F16, shape: vec![k, row], repacked: Some((None, row, k)), forms }])
}

fn packed<'s>(name: &'s str, pack: Pack, matrices: usize, forms: Vec<(&'s TensorInfo, Option<Form>)>) -> Planned<'s> {
    Planned {
        name,
        ty: GgmlType::I8,
        shape: vec![pack.bytes * pack.experts],
        repacked: Some((Some(pack.ty), pack.rows * matrices, pack.k)),
        forms,
    }
}

fn pack(
    file: &Gguf,
    info: &TensorInfo,
    kernels: &Kernels,
    [k, n, experts]: [usize; 3],
    matrices: usize,
    as_is: bool,
) -> Result<Pack> {
    let bytes = |ty: u32, rows: usize, k: usize| kernels.repack_bytes(ty as c_int, rows * matrices, k);
    let direct = if as_is { bytes(info.ty.id(), n, k) } else { 0 };
    let (ty, rows, k, bytes) = match direct {
        0 => {
            // Gate and up rows are the down product's inner dimension.
            let rows = if matrices == 2 { n.next_multiple_of(INNER) } else { n };
            let k = k.next_multiple_of(INNER);
            (GgmlType::F16.id(), rows, k, bytes(GgmlType::F16.id(), rows, k))
        }
        bytes => (info.ty.id(), n, k, bytes),
    };
    if bytes == 0 {
        let why = format!("tensor {}: {rows} x {k} cannot be repacked for the GPU", info.name);
        return Err(Error::unsupported(file.path(), why));
    }
    Ok(Pack { ty: ty as c_int, rows, k, experts, bytes })
}

/// Brings tensors to the device and into their forms.
pub(super) struct Repacker {
    staging: Option<Staging>,
    device: Device,
}

/// Room on the device for the file's blocks of one tensor.
struct Staging {
    tensor: Handle,
    bytes: usize,
    _buffer: Buffer,
    context: Context,
}

impl Repacker {
    /// `largest` is the size of the largest tensor to come, if any comes.
    pub fn new(device: Device, largest: Option<u64>) -> Result<Self> {
        let mut new = Self { staging: None, device };
        if let Some(bytes) = largest {
            let index =
                device.cuda_index().ok_or_else(|| Error::Backend(format!("{} is no CUDA device", device.name())))?;
            let kernels = Kernels::get()?;
            kernels.check(kernels.set_device(index), "choosing the device")?;
            new.room(bytes as usize)?;
        }
        Ok(new)
    }

    fn room(&mut self, bytes: usize) -> Result<Tensor<'_>> {
        if self.staging.as_ref().is_none_or(|s| s.bytes < bytes) {
            self.staging = None;
            let context = Context::new(1, 0)?;
            let tensor = context.new_tensor(GgmlType::I8, &[bytes]).handle();
            let buffer = Buffer::for_context(&context, self.device, "the weights on their way")?;
            self.staging = Some(Staging { tensor, bytes, _buffer: buffer, context });
        }
        let staging = self.staging.as_ref().ok_or_else(|| Error::Backend("no staging memory".into()))?;
        Ok(staging.context.tensor(staging.tensor))
    }

    /// Brings one tensor of the file into `into`.
    pub fn bring(&mut self, file: &Gguf, info: &TensorInfo, form: &Form, into: Tensor<'_>) -> Result<()> {
        match form {
            Form::Skip => Ok(()),
            Form::Half { row } => self.half(file, info, *row, into),
            Form::GateUp { pack, partner } => self.gate_up(file, info, *pack, partner.as_ref(), into),
            Form::Packed { pack } => self.pack(file, info, *pack, into),
        }
    }

    fn half(&mut self, file: &Gguf, info: &TensorInfo, row: usize, into: Tensor<'_>) -> Result<()> {
        let [k, rows] = [info.shape[0] as usize, info.shape[1] as usize];
        let (data, offset) = (file.data(info)?, 2 * row * k);
        let kernels = Kernels::get()?;
        if info.ty == GgmlType::F16 {
            into.write_at(offset, data);
        } else if kernels.repack_bytes(info.ty.id() as c_int, rows, k) != 0 {
            let staged = self.room(data.len())?;
            staged.write(data);
            let code = kernels.dequant_f16(info.ty.id() as c_int, staged.data(), rows, k, at(into.data(), offset));
            kernels.check(code, &info.name)?;
        } else {
            into.write_at(offset, &expand(info.ty, data, [k, rows, 1], [k, rows])?);
        }
        Ok(())
    }

    fn gate_up(
        &mut self,
        file: &Gguf,
        info: &TensorInfo,
        pack: Pack,
        partner: Option<&TensorInfo>,
        into: Tensor<'_>,
    ) -> Result<()> {
        // Blocks of one expert's gate or up matrix; with a partner the two lie in halves of the staging memory.
        let (matrix, step, up) = match partner {
            None => {
                // [k, 2 width, experts] read as [k, width, 2 experts]
                let data = blocks(file, info, pack, 2 * pack.experts)?;
                self.room(data.len())?.write(&data);
                let matrix = data.len() / (2 * pack.experts);
                (matrix, 2 * matrix, matrix)
            }
            Some(partner) => {
                let (gate, up) = (blocks(file, info, pack, pack.experts)?, blocks(file, partner, pack, pack.experts)?);
                let staged = self.room(gate.len() + up.len())?;
                staged.write(&gate);
                staged.write_at(gate.len(), &up);
                let matrix = gate.len() / pack.experts;
                (matrix, matrix, gate.len())
            }
        };
        debug_assert!(matrix > 0);
        let source = self.room(0)?.data();
        let (kernels, dst) = (Kernels::get()?, into.data());
        for e in 0..pack.experts {
            let (gate, up) = (at(source, e * step), at(source, e * step + up));
            kernels.check(
                kernels.repack(pack.ty, gate, Some(up), pack.rows, pack.k, at(dst, e * pack.bytes)),
                &info.name,
            )?;
        }
        kernels.check(kernels.wait(), &info.name)
    }

    fn pack(&mut self, file: &Gguf, info: &TensorInfo, pack: Pack, into: Tensor<'_>) -> Result<()> {
        let data = blocks(file, info, pack, pack.experts)?;
        let staged = self.room(data.len())?;
        staged.write(&data);
        let (kernels, source, dst) = (Kernels::get()?, staged.data(), into.data());
        let matrix = data.len() / pack.experts;
        for e in 0..pack.experts {
            let (from, to) = (at(source, e * matrix), at(dst, e * pack.bytes));
            kernels.check(kernels.repack(pack.ty, from, None, pack.rows, pack.k, to), &info.name)?;
        }
        kernels.check(kernels.wait(), &info.name)
    }
}

fn at(base: *mut c_void, offset: usize) -> *mut c_void {
    base.cast::<u8>().wrapping_add(offset).cast()
}

/// The blocks to repack: the file's, or an expansion to F16, padded, of `matrices` matrices.
fn blocks<'f>(file: &'f Gguf, info: &TensorInfo, pack: Pack, matrices: usize) -> Result<Cow<'f, [u8]>> {
    let data = file.data(info)?;
    let (k, all) = (info.shape[0] as usize, (info.shape[1] * info.shape[2]) as usize);
    if pack.ty == info.ty.id() as c_int && k == pack.k && all == pack.rows * matrices {
        return Ok(Cow::Borrowed(data));
    }
    let halves = expand(info.ty, data, [k, all / matrices, matrices], [pack.k, pack.rows])?;
    Ok(Cow::Owned(halves.iter().flat_map(|h| h.to_le_bytes()).collect()))
}

/// Matrices [k, rows] as F16, each padded with zeros to `padded`. Values beyond F16's range are refused.
fn expand(ty: GgmlType, data: &[u8], [k, rows, n]: [usize; 3], padded: [usize; 2]) -> Result<Vec<f16>> {
    let mut out = vec![f16::ZERO; padded[0] * padded[1] * n];
    let mut values = vec![0.0_f32; k];
    let bytes = row_bytes(ty, k);
    for i in 0..rows * n {
        dequantize(ty, &data[i * bytes..], &mut values)?;
        let to = (i / rows * padded[1] + i % rows) * padded[0];
        for (to, &x) in out[to..].iter_mut().zip(&values) {
            *to = f16::from_f32(x);
            if to.is_infinite() {
                return Err(Error::Backend(format!("a weight of {x} is beyond half precision")));
            }
        }
    }
    Ok(out)
}
