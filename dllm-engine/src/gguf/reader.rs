//! Reads the header of one file: counts, metadata and tensor table, all before any tensor data is touched.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. Every length is compared with what is left of the
//! file before memory is taken for it, so a header never costs much more memory than it has bytes.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::io::Read;
use std::path::Path;

use super::tensor::{self, TensorInfo};
use super::value::{Array, Entry, Meta, StrArray, Value};
use crate::error::{Error, Result};

/// Most bytes of a header. That of a model with 262144 tokens and their merges has about 16 MiB.
const MAX_HEADER: u64 = 256 << 20;

/// Most keys and most tensors. Models have hundreds of either, the largest a few thousand.
const MAX_ENTRIES: u64 = 1 << 16;

/// Longest key in bytes, as the format says.
const MAX_KEY: u64 = (1 << 16) - 1;

/// Deepest nesting of arrays, and most arrays in an array. Models have none.
const MAX_DEPTH: u32 = 4;
const MAX_NESTED: u64 = 1 << 12;

/// Alignment of tensor data where the file does not say, and the least that ggml computes on.
const ALIGNMENT: u32 = 32;

/// What stands before the tensor data.
#[derive(Debug, Clone)]
pub struct Header {
    /// Metadata.
    pub meta: Meta,
    /// Tensors in file order.
    pub tensors: Vec<TensorInfo>,
    /// First byte of the data section.
    pub data_start: u64,
}

impl Header {
    /// Reads and checks the header of a file of `file_len` bytes. `path` is for error messages.
    ///
    /// # Errors
    /// `BadFile` for a damaged file, `Unsupported` for an intact one of another version or with unknown types, `Io`.
    pub fn read(source: impl Read, file_len: u64, path: &Path) -> Result<Self> {
        if file_len == 0 {
            return Err(Error::file(path, "the file is empty: get a complete copy"));
        }
        let mut cursor = Cursor { source, path, at: 0, end: file_len.min(MAX_HEADER), file_len };
        read_version(&mut cursor)?;
        let tensors = read_count(&mut cursor, "tensors")?;
        let keys = read_count(&mut cursor, "keys")?;
        let meta = Meta { path: path.to_owned(), entries: read_meta(&mut cursor, keys)? };
        let mut tensors = tensor::read_infos(&mut cursor, tensors)?;
        let alignment = alignment(&meta)?;
        let data_start = cursor.at.next_multiple_of(alignment);
        tensor::place(&cursor, &mut tensors, data_start, alignment)?;
        Ok(Self { meta, tensors, data_start })
    }
}

fn read_version<R: Read>(cursor: &mut Cursor<'_, R>) -> Result<()> {
    let magic: [u8; 4] = cursor.array(&"the magic")?;
    if magic != *b"GGUF" {
        let why = format!("the file begins with \"{}\", not \"GGUF\": it is no GGUF file", magic.escape_ascii());
        return Err(Error::file(cursor.path, why));
    }
    let version = cursor.u32(&"the version")?;
    let why = match version {
        2 | 3 => return Ok(()),
        1 => "GGUF version 1 is too old, versions 2 and 3 are read: convert the model again".into(),
        _ if matches!(version.swap_bytes(), 1..=255) => {
            "the file is big endian, only little endian files are read: convert the model again".into()
        }
        _ => format!("GGUF version {version} is unknown, versions 2 and 3 are read: update this program"),
    };
    Err(Error::unsupported(cursor.path, why))
}

fn read_count<R: Read>(cursor: &mut Cursor<'_, R>, of: &str) -> Result<u64> {
    let at = cursor.at;
    let count = cursor.u64(&format_args!("the number of {of}"))?;
    if count > MAX_ENTRIES {
        return Err(cursor.bad(at, &format!("the file counts {count} {of}, more than {MAX_ENTRIES}")));
    }
    Ok(count)
}

fn alignment(meta: &Meta) -> Result<u64> {
    let alignment = meta.u32_opt("general.alignment")?.unwrap_or(ALIGNMENT);
    if !alignment.is_power_of_two() || alignment < ALIGNMENT {
        let why =
            format!("general.alignment is {alignment}, not a power of two from {ALIGNMENT}: convert the model again");
        return Err(Error::file(&meta.path, why));
    }
    Ok(alignment.into())
}

fn read_meta<R: Read>(cursor: &mut Cursor<'_, R>, count: u64) -> Result<BTreeMap<String, Entry>> {
    let mut entries = BTreeMap::new();
    for i in 0..count {
        let at = cursor.at;
        let key = cursor.string(MAX_KEY, &format_args!("the name of key {i}"))?;
        if key.is_empty() {
            return Err(cursor.bad(at, &format!("key {i} has an empty name")));
        }
        let value = read_value(cursor, &key)?;
        if entries.insert(key.clone(), Entry { value, at }).is_some() {
            return Err(cursor.bad(at, &format!("key {key:?} appears twice")));
        }
    }
    Ok(entries)
}

fn read_value<R: Read>(cursor: &mut Cursor<'_, R>, key: &str) -> Result<Value> {
    let at = cursor.at;
    let what = format_args!("key {key:?}");
    let ty = cursor.u32(&what)?;
    Ok(match ty {
        0 => Value::U8(u8::from_le_bytes(cursor.array(&what)?)),
        1 => Value::I8(i8::from_le_bytes(cursor.array(&what)?)),
        2 => Value::U16(u16::from_le_bytes(cursor.array(&what)?)),
        3 => Value::I16(i16::from_le_bytes(cursor.array(&what)?)),
        4 => Value::U32(cursor.u32(&what)?),
        5 => Value::I32(i32::from_le_bytes(cursor.array(&what)?)),
        6 => Value::F32(f32::from_le_bytes(cursor.array(&what)?)),
        7 => Value::Bool(cursor.bool(&what)?),
        8 => Value::Str(cursor.string(u64::MAX, &what)?),
        9 => Value::Array(read_array(cursor, key, 1)?),
        10 => Value::U64(cursor.u64(&what)?),
        11 => Value::I64(i64::from_le_bytes(cursor.array(&what)?)),
        12 => Value::F64(f64::from_le_bytes(cursor.array(&what)?)),
        _ => return Err(cursor.bad(at, &format!("key {key:?} has the value type {ty}, not 0 to 12"))),
    })
}

fn read_array<R: Read>(cursor: &mut Cursor<'_, R>, key: &str, depth: u32) -> Result<Array> {
    let at = cursor.at;
    let ty = cursor.u32(&format_args!("key {key:?}"))?;
    let n = cursor.u64(&format_args!("key {key:?}"))?;
    Ok(match ty {
        0 => Array::U8(read_numbers(cursor, key, n, u8::from_le_bytes)?),
        1 => Array::I8(read_numbers(cursor, key, n, i8::from_le_bytes)?),
        2 => Array::U16(read_numbers(cursor, key, n, u16::from_le_bytes)?),
        3 => Array::I16(read_numbers(cursor, key, n, i16::from_le_bytes)?),
        4 => Array::U32(read_numbers(cursor, key, n, u32::from_le_bytes)?),
        5 => Array::I32(read_numbers(cursor, key, n, i32::from_le_bytes)?),
        6 => Array::F32(read_numbers(cursor, key, n, f32::from_le_bytes)?),
        7 => Array::Bool(read_bools(cursor, key, n)?),
        8 => Array::Str(read_strings(cursor, key, n)?),
        9 if depth < MAX_DEPTH && n <= MAX_NESTED => {
            cursor.need(n * 12, &format_args!("key {key:?}, {n} arrays"))?;
            Array::Array((0..n).map(|_| read_array(cursor, key, depth + 1)).collect::<Result<_>>()?)
        }
        9 => {
            let why = format!("key {key:?} nests {n} arrays {depth} deep, more than {MAX_NESTED} or {MAX_DEPTH} deep");
            return Err(cursor.bad(at, &why));
        }
        10 => Array::U64(read_numbers(cursor, key, n, u64::from_le_bytes)?),
        11 => Array::I64(read_numbers(cursor, key, n, i64::from_le_bytes)?),
        12 => Array::F64(read_numbers(cursor, key, n, f64::from_le_bytes)?),
        _ => return Err(cursor.bad(at, &format!("key {key:?} has the element type {ty}, not 0 to 12"))),
    })
}

/// An array of numbers of `N` bytes each.
fn read_numbers<R: Read, T, const N: usize>(
    cursor: &mut Cursor<'_, R>,
    key: &str,
    n: u64,
    convert: fn([u8; N]) -> T,
) -> Result<Vec<T>> {
    let what = format_args!("key {key:?}, {n} elements");
    let mut values = Vec::with_capacity(cursor.room(n, N as u64, &what)?);
    for _ in 0..n {
        values.push(convert(cursor.array(&what)?));
    }
    Ok(values)
}

fn read_bools<R: Read>(cursor: &mut Cursor<'_, R>, key: &str, n: u64) -> Result<Vec<bool>> {
    let what = format_args!("key {key:?}, {n} elements");
    let mut values = Vec::with_capacity(cursor.room(n, 1, &what)?);
    for _ in 0..n {
        values.push(cursor.bool(&what)?);
    }
    Ok(values)
}

fn read_strings<R: Read>(cursor: &mut Cursor<'_, R>, key: &str, n: u64) -> Result<StrArray> {
    let mut ends = Vec::with_capacity(cursor.room(n, 8, &format_args!("key {key:?}, {n} strings"))?);
    let mut text = String::new();
    let mut bytes = Vec::new();
    for i in 0..n {
        let at = cursor.at;
        let what = Item { key, index: i };
        let len = cursor.u64(&what)?;
        let len = cursor.room(len, 1, &what)?;
        bytes.resize(len, 0);
        cursor.fill(&mut bytes, &what)?;
        text.push_str(std::str::from_utf8(&bytes).map_err(|_| cursor.bad(at, &format!("{what} is not UTF-8")))?);
        ends.push(text.len());
    }
    text.shrink_to_fit();
    Ok(StrArray { text, ends })
}

/// Names an array's string only when something is wrong with it.
struct Item<'a> {
    key: &'a str,
    index: u64,
}

impl Display for Item<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "string {} of key {:?}", self.index, self.key)
    }
}

/// A source that knows where it is and how much is left. `what` names, in errors, what was being read.
pub(super) struct Cursor<'a, R> {
    source: R,
    path: &'a Path,
    at: u64,
    /// Where the header must end: the file's length or `MAX_HEADER`.
    end: u64,
    file_len: u64,
}

impl<R: Read> Cursor<'_, R> {
    pub(super) fn path(&self) -> &Path {
        self.path
    }

    pub(super) fn at(&self) -> u64 {
        self.at
    }

    pub(super) fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Damage at byte `at`.
    pub(super) fn bad(&self, at: u64, why: &str) -> Error {
        Error::file(self.path, format!("damaged at byte {at}: {why}. Get an intact copy, or convert the model again"))
    }

    /// Refuses to read on where fewer than `bytes` are left.
    pub(super) fn need(&self, bytes: u64, what: &dyn Display) -> Result<()> {
        let left = self.end - self.at;
        if bytes <= left {
            return Ok(());
        }
        let at = self.at;
        Err(if self.end < self.file_len && bytes <= self.file_len - at {
            self.bad(at, &format!("{what} makes the header longer than {MAX_HEADER} bytes"))
        } else {
            let why = format!("truncated at byte {at}: {what} needs {bytes} bytes, {} are left", self.file_len - at);
            Error::file(self.path, format!("{why}. Get a complete copy of the file"))
        })
    }

    /// `n` as a length, once `n` elements of `size` bytes are known to be there.
    fn room(&self, n: u64, size: u64, what: &dyn Display) -> Result<usize> {
        self.need(n.saturating_mul(size), what)?;
        usize::try_from(n).map_err(|_| self.bad(self.at, &format!("{what} is too long for this machine")))
    }

    fn fill(&mut self, out: &mut [u8], what: &dyn Display) -> Result<()> {
        self.need(out.len() as u64, what)?;
        self.source.read_exact(out).map_err(|source| Error::io("read", self.path, source))?;
        self.at += out.len() as u64;
        Ok(())
    }

    fn array<const N: usize>(&mut self, what: &dyn Display) -> Result<[u8; N]> {
        let mut out = [0; N];
        self.fill(&mut out, what)?;
        Ok(out)
    }

    pub(super) fn u32(&mut self, what: &dyn Display) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &dyn Display) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn bool(&mut self, what: &dyn Display) -> Result<bool> {
        match self.array(what)? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(self.bad(self.at - 1, &format!("{what} is a bool of value {other}, not 0 or 1"))),
        }
    }

    /// A string of at most `most` bytes.
    pub(super) fn string(&mut self, most: u64, what: &dyn Display) -> Result<String> {
        let at = self.at;
        let len = self.u64(what)?;
        if len > most {
            return Err(self.bad(at, &format!("{what} has {len} bytes, more than {most}")));
        }
        let mut bytes = vec![0; self.room(len, 1, what)?];
        self.fill(&mut bytes, what)?;
        String::from_utf8(bytes).map_err(|_| self.bad(at, &format!("{what} is not UTF-8")))
    }
}
