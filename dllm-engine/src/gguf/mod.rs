//! Reading GGUF files: metadata, tensor table and, through a memory map, tensor data.
//!
//! Everything but the tensor data is read through an ordinary file handle and checked before use: a damaged or hostile
//! file is an error that names the key or tensor and the byte, never a panic, and never takes much more memory than its
//! header has bytes. Tensor data is mapped at the first use, from the same handle. What may happen to a file meanwhile:
//!
//! - replaced by another under the same name: the opened one is read on;
//! - rewritten in place, grown or shortened: refused when the data is mapped and by [`Gguf::check_unchanged`], where
//!   length or modification time tell;
//! - shortened in place while its map is in use: Unix ends the process (SIGBUS), Windows forbids it.

mod reader;
mod source;
mod split;
mod tensor;
mod value;

use std::collections::HashMap;
use std::path::Path;

pub use reader::Header;
pub use tensor::{GgmlType, TensorInfo};
pub use value::{Array, Meta, StrArray, Value};

use crate::error::{Error, Result};
use crate::ggml::dequantize;
use source::Part;

/// Names of `general.file_type`, by number. Numbers left out are no longer written by any converter.
const FILE_TYPES: [(u32, &str); 36] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (19, "IQ2_XXS"),
    (20, "IQ2_XS"),
    (21, "Q2_K_S"),
    (22, "IQ3_XS"),
    (23, "IQ3_XXS"),
    (24, "IQ1_S"),
    (25, "IQ4_NL"),
    (26, "IQ3_S"),
    (27, "IQ3_M"),
    (28, "IQ2_S"),
    (29, "IQ2_M"),
    (30, "IQ4_XS"),
    (31, "IQ1_M"),
    (32, "BF16"),
    (36, "TQ1_0"),
    (37, "TQ2_0"),
    (38, "MXFP4"),
    (39, "NVFP4"),
    (40, "Q1_0"),
    (41, "Q2_0"),
];

/// An open GGUF model, whole or split.
#[derive(Debug)]
pub struct Gguf {
    meta: Meta,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    parts: Vec<Part>,
}

impl Gguf {
    /// Opens a model and reads its headers. Of a split model, any part will do; the others must lie beside it.
    ///
    /// # Errors
    /// `Io` where the file cannot be read, `BadFile` where it is damaged, incomplete or no GGUF file, `Unsupported` where
    /// its version or a tensor's type is unknown.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::join(split::open(path.as_ref())?)
    }

    /// A model inside the program; `name` stands for its path in messages. The bytes must be aligned to 32.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn from_static(bytes: &'static [u8], name: &str) -> Result<Self> {
        Self::join(vec![Part::from_static(bytes, name)?])
    }

    /// Joins the parts' tensor tables. The metadata is the first part's.
    fn join(opened: Vec<(Part, Header)>) -> Result<Self> {
        let (mut meta, mut tensors) = (None, Vec::new());
        let (mut by_name, mut parts) = (HashMap::new(), Vec::new());
        for (file, (part, header)) in opened.into_iter().enumerate() {
            meta.get_or_insert(header.meta);
            for mut tensor in header.tensors {
                tensor.file = file;
                if by_name.insert(tensor.name.clone(), tensors.len()).is_some() {
                    let why = format!("tensor {:?} is in another part too: get all parts again", tensor.name);
                    return Err(Error::file(part.path(), why));
                }
                tensors.push(tensor);
            }
            parts.push(part);
        }
        let meta = meta.ok_or_else(|| Error::file("", "a model has at least one file"))?;
        Ok(Self { meta, tensors, by_name, parts })
    }

    /// The (first) file.
    pub fn path(&self) -> &Path {
        &self.meta.path
    }

    /// Metadata.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// All tensors in file order, part after part.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name, if there is one.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).and_then(|i| self.tensors.get(*i))
    }

    /// Number of files.
    pub fn files(&self) -> usize {
        self.parts.len()
    }

    /// A tensor's data. Maps its file at the first use, after a look whether that has changed.
    ///
    /// # Errors
    /// `BadFile` where the file has changed, `Io` where it cannot be mapped, `BadArgument` for another file's tensor.
    pub fn data(&self, tensor: &TensorInfo) -> Result<&[u8]> {
        let part = self.part(tensor.file)?;
        let range = || {
            let start = usize::try_from(tensor.offset.checked_sub(part.data_start())?).ok()?;
            Some(start..start.checked_add(usize::try_from(tensor.bytes).ok()?)?)
        };
        let foreign =
            || Error::argument("tensor", format!("{:?} does not lie in {}", tensor.name, part.path().display()));
        let range = range().ok_or_else(foreign)?;
        part.data()?.get(range).ok_or_else(foreign)
    }

    /// The whole data section of a file (see [`TensorInfo::file`]), for backends that use the map as a buffer. It begins at
    /// a multiple of 32 in memory, at [`Self::data_start`] in the file.
    ///
    /// # Errors
    /// As [`Self::data`].
    pub fn file_data(&self, file: usize) -> Result<&[u8]> {
        self.part(file)?.data()
    }

    /// Where a file's data section begins in it, in bytes.
    ///
    /// # Errors
    /// `BadArgument` where there is no such file.
    pub fn data_start(&self, file: usize) -> Result<u64> {
        Ok(self.part(file)?.data_start())
    }

    /// Refuses a model of which a file was written to since it was opened: same length and modification time count as
    /// unchanged. One system call per file.
    ///
    /// # Errors
    /// `BadFile` naming the file and the change, `Io`.
    pub fn check_unchanged(&self) -> Result<()> {
        self.parts.iter().try_for_each(Part::check_unchanged)
    }

    /// Reads all of a tensor and refuses it where a value is NaN or infinite.
    ///
    /// # Errors
    /// `BadFile` naming the tensor, `Unsupported` for a type whose values cannot be read as floats; also as [`Self::data`].
    pub fn check_finite(&self, tensor: &TensorInfo) -> Result<()> {
        let (name, ty, at) = (&tensor.name, tensor.ty, tensor.offset);
        let path = self.part(tensor.file)?.path();
        if !ty.is_readable() {
            let why =
                format!("tensor {name:?} is {ty}, whose values this engine cannot read: take another quantization");
            return Err(Error::unsupported(path, why));
        }
        // Not ggml_validate_row_data, which writes to standard error what it finds.
        const BLOCKS: u64 = 256;
        let piece = usize::try_from(BLOCKS * ty.type_size()).unwrap_or(usize::MAX);
        let mut values = vec![0.0_f32; (BLOCKS * ty.block_size()) as usize];
        for bytes in self.data(tensor)?.chunks(piece) {
            let n = bytes.len() as u64 / ty.type_size() * ty.block_size();
            let values = &mut values[..n as usize];
            dequantize(ty, bytes, values)?;
            if values.iter().any(|x| !x.is_finite()) {
                let why = "has a value that is NaN or infinite: get an intact copy";
                return Err(Error::file(path, format!("tensor {name:?} ({ty}, from byte {at}) {why}")));
            }
        }
        Ok(())
    }

    /// The type that most bytes of the weights have; `None` without tensors.
    pub fn main_type(&self) -> Option<GgmlType> {
        let mut bytes = HashMap::<GgmlType, u64>::new();
        for tensor in &self.tensors {
            let sum = bytes.entry(tensor.ty).or_default();
            *sum = sum.saturating_add(tensor.bytes);
        }
        bytes.into_iter().max_by_key(|(ty, sum)| (*sum, *ty)).map(|(ty, _)| ty)
    }

    /// The quantization as people name it (`Q4_K_M`, `BF16`): what `general.file_type` says, else [`Self::main_type`].
    pub fn quantization(&self) -> String {
        let said = self.meta.u32_opt("general.file_type").ok().flatten();
        let named = FILE_TYPES.iter().find(|(id, _)| Some(*id) == said).map(|(_, name)| (*name).to_owned());
        named.or_else(|| self.main_type().map(GgmlType::name)).unwrap_or_else(|| "none".into())
    }

    fn part(&self, file: usize) -> Result<&Part> {
        let there = || format!("there is no file {file}, the model has {}", self.parts.len());
        self.parts.get(file).ok_or_else(|| Error::argument("file", there()))
    }
}
