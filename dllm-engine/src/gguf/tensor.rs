//! What a file says of its tensors: checked before anything is read through it.

use std::collections::HashSet;
use std::io::Read;

use super::reader::Cursor;
use crate::error::{Error, Result};
pub use crate::ggml::GgmlType;

/// Bytes of a name that ggml can hold (`GGML_MAX_NAME` less the terminating zero).
const MAX_NAME: u64 = 63;

/// Dimensions of a ggml tensor.
const MAX_DIMS: u32 = 4;

/// A tensor of a file. All its numbers have been checked against the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name (`blk.0.attn_q.weight`), at most 63 bytes.
    pub name: String,
    /// Elements per dimension in ggml's order, contiguous one first; unused dimensions are 1. None is 0.
    pub shape: [u64; 4],
    /// Type of the elements.
    pub ty: GgmlType,
    /// Which part of a split file holds the data, from 0.
    pub file: usize,
    /// First byte of the data, counted from the beginning of its file.
    pub offset: u64,
    /// Bytes of the data.
    pub bytes: u64,
}

impl TensorInfo {
    /// Elements in all; below 2^63.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

/// Reads `count` tensor infos. Offsets are still relative to the data section; see [`place`].
pub(super) fn read_infos<R: Read>(cursor: &mut Cursor<'_, R>, count: u64) -> Result<Vec<TensorInfo>> {
    // 33 bytes is the shortest possible info: a name of one byte, one dimension.
    cursor.need(count.saturating_mul(33), &format_args!("the table of {count} tensors"))?;
    let mut tensors = Vec::new();
    let mut names = HashSet::new();
    for i in 0..count {
        let at = cursor.at();
        let tensor = read_info(cursor, i)?;
        if !names.insert(tensor.name.clone()) {
            return Err(cursor.bad(at, &format!("tensor {:?} appears twice", tensor.name)));
        }
        tensors.push(tensor);
    }
    Ok(tensors)
}

fn read_info<R: Read>(cursor: &mut Cursor<'_, R>, index: u64) -> Result<TensorInfo> {
    let at = cursor.at();
    let name = cursor.string(MAX_NAME, &format_args!("the name of tensor {index}"))?;
    if name.is_empty() || name.chars().any(char::is_control) {
        return Err(cursor.bad(at, &format!("tensor {index} has the name {name:?}: empty or with control characters")));
    }
    let dims = cursor.u32(&format_args!("tensor {name:?}"))?;
    if !(1..=MAX_DIMS).contains(&dims) {
        return Err(cursor.bad(at, &format!("tensor {name:?} has {dims} dimensions, not 1 to {MAX_DIMS}")));
    }
    let mut shape = [1u64; 4];
    for n in shape.iter_mut().take(dims as usize) {
        *n = cursor.u64(&format_args!("the shape of tensor {name:?}"))?;
    }
    let id = cursor.u32(&format_args!("the type of tensor {name:?}"))?;
    let offset = cursor.u64(&format_args!("the offset of tensor {name:?}"))?;
    let ty = GgmlType::from_id(id).ok_or_else(|| {
        let why = format!("tensor {name:?} at byte {at} has type {id}, which this build's ggml does not have");
        Error::unsupported(cursor.path(), format!("{why}: take another quantization or build with a newer llama.cpp"))
    })?;
    let bytes = size(shape, ty).map_err(|why| cursor.bad(at, &format!("tensor {name:?} {why}")))?;
    Ok(TensorInfo { name, shape, ty, file: 0, offset, bytes })
}

/// Bytes of a tensor, or what is wrong with its shape.
fn size(shape: [u64; 4], ty: GgmlType) -> Result<u64, String> {
    if shape.contains(&0) {
        return Err(format!("has the shape {shape:?} with a dimension of 0"));
    }
    let elements = shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n));
    let elements = elements.filter(|n| i64::try_from(*n).is_ok());
    let elements = elements.ok_or_else(|| format!("has the shape {shape:?}, too many elements to count"))?;
    let [row, ..] = shape;
    if !row.is_multiple_of(ty.block_size()) {
        return Err(format!("has rows of {row} elements, but {ty} needs a multiple of {}", ty.block_size()));
    }
    ty.bytes(elements).ok_or_else(|| format!("has the shape {shape:?} of {ty}, too many bytes to count"))
}

/// Turns the offsets into places in the file and checks that each tensor lies in it, aligned and apart from the others.
pub(super) fn place<R: Read>(
    cursor: &Cursor<'_, R>,
    tensors: &mut [TensorInfo],
    data_start: u64,
    alignment: u64,
) -> Result<()> {
    let len = cursor.file_len();
    for t in tensors.iter_mut() {
        if !t.offset.is_multiple_of(alignment) {
            let why = format!("tensor {:?} has the offset {}, no multiple of {alignment}", t.name, t.offset);
            return Err(cursor.bad(data_start.min(len), &why));
        }
        let start = data_start.checked_add(t.offset).filter(|start| *start <= len);
        let start = start.ok_or_else(|| {
            let why =
                format!("tensor {:?} has the offset {}, behind the end of the file of {len} bytes", t.name, t.offset);
            // An alignment may put the data's start itself there.
            cursor.bad(data_start.min(len), &why)
        })?;
        if t.bytes > len - start {
            let (name, left) = (&t.name, len - start);
            let why = format!("tensor {name:?} has {} bytes, but {left} are left in the file of {len}", t.bytes);
            return Err(cursor.bad(start, &why));
        }
        t.offset = start;
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|t| t.offset);
    for pair in order.windows(2) {
        if let [a, b] = pair
            && a.offset + a.bytes > b.offset
        {
            let why = format!("tensors {:?} and {:?} overlap", a.name, b.name);
            return Err(cursor.bad(b.offset, &why));
        }
    }
    Ok(())
}
