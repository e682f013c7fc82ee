//! Writes GGUF files for tests, bad ones included: what a caller sets is written, whether it makes sense or not.

#![allow(dead_code)]

/// Numbers of value types in files.
pub const U8: u32 = 0;
pub const U16: u32 = 2;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const F32: u32 = 6;
pub const BOOL: u32 = 7;
pub const STR: u32 = 8;
pub const ARRAY: u32 = 9;
pub const U64: u32 = 10;
pub const I64: u32 = 11;
pub const F64: u32 = 12;

/// A GGUF file in the making.
#[derive(Clone)]
pub struct GgufFile {
    pub magic: [u8; 4],
    pub version: u32,
    /// Number of keys to claim, where it should not be the true one.
    pub claimed_keys: Option<u64>,
    /// Number of tensors to claim, where it should not be the true one.
    pub claimed_tensors: Option<u64>,
    pub alignment: usize,
    pub keys: u64,
    pub meta: Vec<u8>,
    pub tensors: u64,
    pub infos: Vec<u8>,
    pub data: Vec<u8>,
}

/// A string as files hold it.
pub fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

/// The payload of an array value.
pub fn array(element_type: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    [&element_type.to_le_bytes(), &count.to_le_bytes()[..], elements].concat()
}

/// The payload of an array of strings.
pub fn strings(texts: &[&str]) -> Vec<u8> {
    array(STR, texts.len() as u64, &texts.iter().flat_map(string).collect::<Vec<_>>())
}

/// Little endian bytes of 32-bit floats.
pub fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

impl GgufFile {
    pub fn new() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            claimed_keys: None,
            claimed_tensors: None,
            alignment: 32,
            keys: 0,
            meta: Vec::new(),
            tensors: 0,
            infos: Vec::new(),
            data: Vec::new(),
        }
    }

    /// A small whole file with every kind of value and three tensors, of 64 F32, 64 F16 and 2 rows of 32 Q8_0.
    pub fn sample() -> Self {
        Self::new()
            .str("general.architecture", "diffusion-gemma")
            .u32("general.file_type", 7)
            .key("a.u8", U8, &[200])
            .key("a.i64", I64, &(-3i64).to_le_bytes())
            .key("a.f32", F32, &1e-6f32.to_le_bytes())
            .key("a.f64", F64, &0.25f64.to_le_bytes())
            .key("a.yes", BOOL, &[1])
            .key("a.kv", ARRAY, &array(I32, 3, &[8, 0, 0, 0, 8, 0, 0, 0, 2, 0, 0, 0]))
            .key("a.pattern", ARRAY, &array(BOOL, 3, &[1, 1, 0]))
            .key("a.scores", ARRAY, &array(F32, 2, &floats(&[0.5, f32::NAN])))
            .key("a.tokens", ARRAY, &strings(&["<pad>", "", "\u{2581}w", "漢"]))
            .key("a.nested", ARRAY, &array(ARRAY, 2, &[array(U8, 2, &[1, 2]), strings(&["x"])].concat()))
            .tensor("a.weight", &[64], 0, &floats(&(0..64).map(|i| i as f32).collect::<Vec<_>>()))
            .tensor("b.weight", &[8, 8], 1, &[0, 0x3c].repeat(64))
            .tensor("c.weight", &[32, 2], 8, &[1; 68])
    }

    /// Adds a key with any payload.
    pub fn key(mut self, key: &str, value_type: u32, payload: &[u8]) -> Self {
        self.keys += 1;
        self.meta.extend([&string(key), &value_type.to_le_bytes()[..], payload].concat());
        self
    }

    pub fn str(self, key: &str, value: &str) -> Self {
        self.key(key, STR, &string(value))
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.key(key, U32, &value.to_le_bytes())
    }

    /// The three keys of part `number` (from 1) of a split model, in the widths that splitting tools write.
    pub fn split(self, number: u16, count: u16, tensors: i32) -> Self {
        self.key("split.no", U16, &(number - 1).to_le_bytes()).key("split.count", U16, &count.to_le_bytes()).key(
            "split.tensors.count",
            I32,
            &tensors.to_le_bytes(),
        )
    }

    /// Adds a tensor behind the others.
    pub fn tensor(mut self, name: &str, dims: &[u64], ty: u32, data: &[u8]) -> Self {
        let offset = self.data.len() as u64;
        self.data.extend(data);
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        self.info(name, dims, ty, offset)
    }

    /// Adds a tensor to the table only.
    pub fn info(mut self, name: &str, dims: &[u64], ty: u32, offset: u64) -> Self {
        self.tensors += 1;
        self.infos.extend(string(name));
        self.infos.extend((dims.len() as u32).to_le_bytes());
        self.infos.extend(dims.iter().flat_map(|n| n.to_le_bytes()));
        self.infos.extend(ty.to_le_bytes());
        self.infos.extend(offset.to_le_bytes());
        self
    }

    /// The file's bytes up to the data section, without its padding.
    pub fn header(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.claimed_tensors.unwrap_or(self.tensors).to_le_bytes());
        out.extend(self.claimed_keys.unwrap_or(self.keys).to_le_bytes());
        out.extend(&self.meta);
        out.extend(&self.infos);
        out
    }

    /// The whole file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }
}
