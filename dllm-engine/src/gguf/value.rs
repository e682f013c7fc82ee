//! Metadata values and typed access to them.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use crate::error::{Error, Result};

/// A metadata value. The variants are the format's own types.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    Str(String),
    Array(Array),
}

/// An array of values of one type. Elements take the room they take in the file.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    Str(StrArray),
    Array(Vec<Array>),
}

/// Many strings in two allocations: a vocabulary has 262144, its merges are half a million.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StrArray {
    /// All strings, one behind the other.
    pub(super) text: String,
    /// End of each string in `text`.
    pub(super) ends: Vec<usize>,
}

impl StrArray {
    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The string at `index`, or `None` behind the end.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = index.checked_sub(1).and_then(|i| self.ends.get(i)).copied().unwrap_or(0);
        self.text.get(start..end)
    }

    /// All strings in order.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).filter_map(|i| self.get(i))
    }
}

/// Calls `$body` with `$v` bound to what the array variant holds; all of them have `len`.
macro_rules! each_array {
    ($array:expr, $v:ident => $body:expr) => {
        match $array {
            Array::U8($v) => $body,
            Array::I8($v) => $body,
            Array::U16($v) => $body,
            Array::I16($v) => $body,
            Array::U32($v) => $body,
            Array::I32($v) => $body,
            Array::U64($v) => $body,
            Array::I64($v) => $body,
            Array::F32($v) => $body,
            Array::F64($v) => $body,
            Array::Bool($v) => $body,
            Array::Str($v) => $body,
            Array::Array($v) => $body,
        }
    };
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        each_array!(self, v => v.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element at `index` on its own, or `None` behind the end.
    pub fn get(&self, index: usize) -> Option<Value> {
        Some(match self {
            Self::U8(v) => Value::U8(*v.get(index)?),
            Self::I8(v) => Value::I8(*v.get(index)?),
            Self::U16(v) => Value::U16(*v.get(index)?),
            Self::I16(v) => Value::I16(*v.get(index)?),
            Self::U32(v) => Value::U32(*v.get(index)?),
            Self::I32(v) => Value::I32(*v.get(index)?),
            Self::U64(v) => Value::U64(*v.get(index)?),
            Self::I64(v) => Value::I64(*v.get(index)?),
            Self::F32(v) => Value::F32(*v.get(index)?),
            Self::F64(v) => Value::F64(*v.get(index)?),
            Self::Bool(v) => Value::Bool(*v.get(index)?),
            Self::Str(v) => Value::Str(v.get(index)?.to_owned()),
            Self::Array(v) => Value::Array(v.get(index)?.clone()),
        })
    }

    /// The element type's name, as error messages give it.
    fn element_type(&self) -> &'static str {
        match self {
            Self::U8(_) => "u8",
            Self::I8(_) => "i8",
            Self::U16(_) => "u16",
            Self::I16(_) => "i16",
            Self::U32(_) => "u32",
            Self::I32(_) => "i32",
            Self::U64(_) => "u64",
            Self::I64(_) => "i64",
            Self::F32(_) => "f32",
            Self::F64(_) => "f64",
            Self::Bool(_) => "bool",
            Self::Str(_) => "string",
            Self::Array(_) => "array",
        }
    }

    /// Elements as integers that fit `T`; `None` for other element types or where one does not fit.
    fn integers<T: TryFrom<i128>>(&self) -> Option<Vec<T>> {
        (0..self.len()).map(|i| T::try_from(self.get(i)?.as_integer()?).ok()).collect()
    }
}

impl Value {
    /// Any integer type's value.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(v) => v.into(),
            Self::I8(v) => v.into(),
            Self::U16(v) => v.into(),
            Self::I16(v) => v.into(),
            Self::U32(v) => v.into(),
            Self::I32(v) => v.into(),
            Self::U64(v) => v.into(),
            Self::I64(v) => v.into(),
            _ => return None,
        })
    }

    /// Type and, of numbers, the value: `u32 7`, `string`, `array of 30 i32`. For error messages.
    fn describe(&self) -> String {
        match self {
            Self::U8(v) => format!("u8 {v}"),
            Self::I8(v) => format!("i8 {v}"),
            Self::U16(v) => format!("u16 {v}"),
            Self::I16(v) => format!("i16 {v}"),
            Self::U32(v) => format!("u32 {v}"),
            Self::I32(v) => format!("i32 {v}"),
            Self::U64(v) => format!("u64 {v}"),
            Self::I64(v) => format!("i64 {v}"),
            Self::F32(v) => format!("f32 {v:?}"),
            Self::F64(v) => format!("f64 {v:?}"),
            Self::Bool(v) => format!("bool {v}"),
            Self::Str(_) => "string".into(),
            Self::Array(v) => format!("array of {} {}", v.len(), v.element_type()),
        }
    }
}

impl fmt::Display for Value {
    /// The value on one line. Long arrays show their first elements and their length.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        match self {
            Self::Str(v) => write!(f, "{v:?}"),
            Self::Array(v) => {
                let first: Vec<_> = (0..v.len().min(SHOWN)).filter_map(|i| v.get(i)).map(|v| v.to_string()).collect();
                let more = if v.len() > SHOWN { format!(", ... {} in all", v.len()) } else { String::new() };
                write!(f, "[{}{more}]", first.join(", "))
            }
            Self::Bool(v) => v.fmt(f),
            Self::F32(v) => v.fmt(f),
            Self::F64(v) => v.fmt(f),
            other => write!(f, "{}", other.as_integer().unwrap_or_default()),
        }
    }
}

/// A file's metadata: key to value, with the place for error messages. Getters come in two forms: `x` refuses a file
/// without the key, `x_opt` gives `None`; both refuse a value of another type.
#[derive(Debug, Clone)]
pub struct Meta {
    pub(super) path: PathBuf,
    pub(super) entries: BTreeMap<String, Entry>,
}

/// A value and the byte of the file where its key starts.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub value: Value,
    pub at: u64,
}

/// The two forms of a getter, from what one value becomes.
macro_rules! getters {
    ($(#[doc = $doc:literal])* $name:ident, $opt:ident: $ty:ty, $expected:literal, $convert:expr) => {
        $(#[doc = $doc])*
        ///
        /// # Errors
        /// `BadFile`, naming the key, where it is missing or of another type.
        #[allow(clippy::needless_lifetimes)] // some types borrow from the metadata, some do not
        pub fn $name<'a>(&'a self, key: &str) -> Result<$ty> {
            self.$opt(key)?.ok_or_else(|| self.missing(key, $expected))
        }

        #[doc = concat!("As [`Self::", stringify!($name), "`], with `None` for a missing key.")]
        ///
        /// # Errors
        /// `BadFile`, naming the key, where it is of another type.
        #[allow(clippy::needless_lifetimes)]
        pub fn $opt<'a>(&'a self, key: &str) -> Result<Option<$ty>> {
            let convert: fn(&'a Value) -> Option<$ty> = $convert;
            self.convert(key, $expected, convert)
        }
    };
}

impl Meta {
    /// The value of any type under `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    /// All keys and values, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, entry)| (key.as_str(), &entry.value))
    }

    getters!(/// Text.
        str, str_opt: &'a str, "string", |v| match v { Value::Str(v) => Some(v), _ => None });
    getters!(/// A yes or no.
        bool, bool_opt: bool, "bool", |v| match v { Value::Bool(v) => Some(*v), _ => None });
    getters!(/// An integer of any width that fits.
        u32, u32_opt: u32, "u32", |v| v.as_integer()?.try_into().ok());
    getters!(/// An integer of any width that fits.
        u64, u64_opt: u64, "u64", |v| v.as_integer()?.try_into().ok());
    getters!(/// A finite floating-point number of either width.
        f32, f32_opt: f32, "finite f32", |v| match v {
            Value::F32(v) => Some(*v),
            // Not one that becomes 0.
            Value::F64(v) => Some(*v as f32).filter(|narrow| *narrow != 0.0 || *v == 0.0),
            _ => None,
        }.filter(|v| v.is_finite()));
    getters!(/// An array of integers of any width that all fit.
        array_u32, array_u32_opt: Vec<u32>, "array of u32",
        |v| match v { Value::Array(v) => v.integers(), _ => None });
    getters!(/// An array of integers of any width that all fit.
        array_i32, array_i32_opt: Vec<i32>, "array of i32",
        |v| match v { Value::Array(v) => v.integers(), _ => None });
    getters!(/// An array of floats, as they are: they need not be finite.
        array_f32, array_f32_opt: &'a [f32], "array of f32",
        |v| match v { Value::Array(Array::F32(v)) => Some(v), _ => None });
    getters!(/// An array of yes or no.
        array_bool, array_bool_opt: &'a [bool], "array of bool",
        |v| match v { Value::Array(Array::Bool(v)) => Some(v), _ => None });
    getters!(/// An array of strings.
        array_str, array_str_opt: &'a StrArray, "array of string",
        |v| match v { Value::Array(Array::Str(v)) => Some(v), _ => None });

    /// One number per layer: an array of `layers` integers, or a single integer that holds for all layers.
    ///
    /// # Errors
    /// `BadFile`, naming the key, where it is missing, of another type, or has another number of entries.
    pub fn per_layer_u32(&self, key: &str, layers: u32) -> Result<Vec<u32>> {
        if self.get(key).is_some_and(|v| v.as_integer().is_some()) {
            return Ok(vec![self.u32(key)?; layers as usize]);
        }
        let values = self.array_u32(key)?;
        if values.len() != layers as usize {
            return Err(self.bad(key, &format!("array of {layers} u32, one per layer")));
        }
        Ok(values)
    }

    /// Looks up and converts; a value that does not convert is an error.
    fn convert<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.entries.get(key) {
            None => Ok(None),
            Some(entry) => convert(&entry.value).map(Some).ok_or_else(|| self.bad(key, expected)),
        }
    }

    fn missing(&self, key: &str, expected: &str) -> Error {
        Error::file(&self.path, format!("key {key:?} ({expected}) is missing: convert the model again"))
    }

    /// The error for a key whose value is not as expected.
    fn bad(&self, key: &str, expected: &str) -> Error {
        let (found, at) = match self.entries.get(key) {
            Some(entry) => (entry.value.describe(), entry.at),
            None => ("nothing".into(), 0),
        };
        let why = format!("key {key:?} at byte {at} is {found}, expected {expected}: convert the model again");
        Error::file(&self.path, why)
    }
}
