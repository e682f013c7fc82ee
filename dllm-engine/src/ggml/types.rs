//! Tensor element types, as the linked ggml knows them.

// C enums are `u32` here and `i32` with MSVC: the casts are needed on one of them only.
#![allow(clippy::unnecessary_cast)]

use std::ffi::CStr;
use std::fmt;

use llama_sys as sys;

/// The type of a tensor's elements. Always one that the linked ggml can store; sizes and names come from ggml itself, so
/// another llama.cpp checkout brings its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GgmlType(u32);

impl GgmlType {
    /// 32-bit float.
    pub const F32: Self = Self(sys::ggml_type_GGML_TYPE_F32 as u32);
    /// 16-bit float, 10 bits of fraction.
    pub const F16: Self = Self(sys::ggml_type_GGML_TYPE_F16 as u32);
    /// 16-bit float, the upper half of an `F32`.
    pub const BF16: Self = Self(sys::ggml_type_GGML_TYPE_BF16 as u32);
    /// 8-bit integers in blocks of 32.
    pub const Q8_0: Self = Self(sys::ggml_type_GGML_TYPE_Q8_0 as u32);
    /// 64-bit integer.
    pub const I64: Self = Self(sys::ggml_type_GGML_TYPE_I64 as u32);
    /// 8-bit integer; blocks of bytes.
    pub(crate) const I8: Self = Self(sys::ggml_type_GGML_TYPE_I8 as u32);
    /// 32-bit integer.
    pub const I32: Self = Self(sys::ggml_type_GGML_TYPE_I32 as u32);

    /// The type with this number in files, or `None` where the linked ggml has none: too high, or removed.
    pub fn from_id(id: u32) -> Option<Self> {
        let ty = Self(id);
        (id < sys::ggml_type_GGML_TYPE_COUNT as u32 && ty.type_size() > 0 && ty.block_size() > 0).then_some(ty)
    }

    /// All types of the linked ggml, by number.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..sys::ggml_type_GGML_TYPE_COUNT as u32).filter_map(Self::from_id)
    }

    /// The number in files and in ggml's C API.
    pub fn id(self) -> u32 {
        self.0
    }

    /// Elements per block; a row must be a whole number of blocks. 1 for plain numbers. Wraps `ggml_blck_size`.
    pub fn block_size(self) -> u64 {
        // SAFETY: a look into a constant table; the number is below its length, as `from_id` and the constants see to.
        let elements = unsafe { sys::ggml_blck_size(self.0 as sys::ggml_type) };
        u64::try_from(elements).unwrap_or(0)
    }

    /// Bytes per block. Wraps `ggml_type_size`.
    pub fn type_size(self) -> u64 {
        // SAFETY: as in `block_size`.
        unsafe { sys::ggml_type_size(self.0 as sys::ggml_type) as u64 }
    }

    /// The name as people write it (`Q4_K`, `BF16`). Wraps `ggml_type_name`.
    pub fn name(self) -> String {
        // SAFETY: as in `block_size`; the entry is a null pointer or a C string that lives as long as the program.
        let name = unsafe { sys::ggml_type_name(self.0 as sys::ggml_type) };
        if name.is_null() {
            return format!("type {}", self.0);
        }
        // SAFETY: not null, and zero-terminated static text as said above.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().to_uppercase()
    }

    /// Bytes of `elements` elements, or `None` where they are no whole number of blocks or too many to count.
    pub fn bytes(self, elements: u64) -> Option<u64> {
        let blocks = elements.is_multiple_of(self.block_size()).then(|| elements / self.block_size())?;
        blocks.checked_mul(self.type_size())
    }

    /// Whether its values can be read as floats: not integers, not F64, and not the types that ggml only makes itself while it
    /// computes (Q8_1, Q8_K). Wraps `ggml_type_traits.to_float`.
    pub fn is_readable(self) -> bool {
        // SAFETY: as in `block_size`; the entry is static.
        self == Self::F32 || unsafe { &*sys::ggml_get_type_traits(self.0 as sys::ggml_type) }.to_float.is_some()
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

impl fmt::Debug for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::GgmlType;

    /// Number in files, name, elements and bytes per block of every type that published files use, written down from the
    /// block layouts of the format: a pin whose ggml differs cannot read those files.
    const PUBLISHED: [(u32, &str, u64, u64); 35] = [
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 2 + 16),
        (3, "Q4_1", 32, 4 + 16),
        (6, "Q5_0", 32, 2 + 4 + 16),
        (7, "Q5_1", 32, 4 + 4 + 16),
        (8, "Q8_0", 32, 2 + 32),
        (9, "Q8_1", 32, 4 + 32),
        (10, "Q2_K", 256, 16 + 64 + 4),
        (11, "Q3_K", 256, 32 + 64 + 12 + 2),
        (12, "Q4_K", 256, 4 + 12 + 128),
        (13, "Q5_K", 256, 4 + 12 + 32 + 128),
        (14, "Q6_K", 256, 128 + 64 + 16 + 2),
        (15, "Q8_K", 256, 4 + 256 + 32),
        (16, "IQ2_XXS", 256, 2 + 64),
        (17, "IQ2_XS", 256, 2 + 64 + 8),
        (18, "IQ3_XXS", 256, 2 + 96),
        (19, "IQ1_S", 256, 2 + 32 + 16),
        (20, "IQ4_NL", 32, 2 + 16),
        (21, "IQ3_S", 256, 2 + 64 + 8 + 32 + 4),
        (22, "IQ2_S", 256, 2 + 64 + 8 + 8),
        (23, "IQ4_XS", 256, 2 + 2 + 4 + 128),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 32 + 16 + 8),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 48 + 4 + 2),
        (35, "TQ2_0", 256, 64 + 2),
        (39, "MXFP4", 32, 1 + 16),
        (40, "NVFP4", 64, 4 + 32),
        (41, "Q1_0", 128, 2 + 16),
        (42, "Q2_0", 64, 2 + 16),
    ];

    #[test]
    fn every_published_type_has_its_block_layout() {
        for (id, name, block, bytes) in PUBLISHED {
            let ty = GgmlType::from_id(id).unwrap_or_else(|| panic!("ggml has no type {id} ({name})"));
            assert_eq!((ty.name().as_str(), ty.block_size(), ty.type_size()), (name, block, bytes), "type {id}");
        }
        for ty in GgmlType::all() {
            assert!(PUBLISHED.iter().any(|(id, ..)| *id == ty.id()), "the table above lacks {ty}");
        }
    }

    #[test]
    fn issue_2_types_that_files_do_not_have_are_not_readable() {
        let unreadable: Vec<_> = GgmlType::all().filter(|ty| !ty.is_readable()).map(GgmlType::name).collect();
        assert_eq!(unreadable, ["Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"]);
    }

    #[test]
    fn removed_and_unknown_types_are_none() {
        for id in [4, 5, 31, 32, 33, 36, 37, 38, 43, 1000, u32::MAX] {
            assert_eq!(GgmlType::from_id(id), None, "type {id}");
        }
    }

    #[test]
    fn bytes_counts_whole_blocks_without_overflow() {
        let q4_k = GgmlType::from_id(12).expect("Q4_K");
        assert_eq!(q4_k.bytes(512), Some(288));
        assert_eq!(q4_k.bytes(100), None);
        assert_eq!(GgmlType::F32.bytes(u64::MAX), None);
    }

    #[test]
    fn constants_are_what_their_names_say() {
        let all = [
            (GgmlType::F32, "F32"),
            (GgmlType::F16, "F16"),
            (GgmlType::BF16, "BF16"),
            (GgmlType::Q8_0, "Q8_0"),
            (GgmlType::I32, "I32"),
        ];
        for (ty, name) in all {
            assert_eq!(ty.to_string(), name);
        }
    }
}
