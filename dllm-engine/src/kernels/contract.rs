//! What sizes the CUDA kernels can do: the rules of the C headers, checked before anything is enqueued, so that an error names
//! the kernel, the size and the rule. The kernels refuse the same sizes with a bare number; the tests hold the two together.

use std::ffi::c_int;
use std::fmt::Display;

/// `Err` says which kernel cannot do which size, and what it could do.
pub(crate) type Contract = Result<(), String>;

/// Numbers of the block types that are repacked and expanded (quant_mm.h).
pub(crate) const BLOCK_TYPES: [c_int; 10] = [1, 2, 3, 6, 7, 8, 12, 13, 14, 30];
/// Those whose blocks have 256 columns.
const K_TYPES: [c_int; 3] = [12, 13, 14];
/// Numbers of F32 and F16.
const FLOAT_TYPES: [c_int; 2] = [0, 1];
/// `gridDim.y` ends here.
const MOST_GRID_ROWS: c_int = 65_535;

/// The checks of one kernel.
struct Kernel(&'static str);

impl Kernel {
    fn refuse(&self, what: &str, value: impl Display, rule: impl Display) -> Contract {
        Err(format!("kernel {} cannot do {what} {value}: it must be {rule}", self.0))
    }

    fn between(&self, what: &str, value: c_int, lowest: c_int, highest: c_int) -> Contract {
        if (lowest..=highest).contains(&value) {
            return Ok(());
        }
        match highest {
            c_int::MAX => self.refuse(what, value, format_args!("{lowest} or more")),
            _ => self.refuse(what, value, format_args!("from {lowest} to {highest}")),
        }
    }

    fn positive(&self, what: &str, value: c_int) -> Contract {
        self.between(what, value, 1, c_int::MAX)
    }

    fn multiple(&self, what: &str, value: i64, of: i64) -> Contract {
        if value % of == 0 { Ok(()) } else { self.refuse(what, value, format_args!("a multiple of {of}")) }
    }

    fn one_of(&self, what: &str, value: c_int, list: &[c_int]) -> Contract {
        if list.contains(&value) { Ok(()) } else { self.refuse(what, value, format_args!("one of {list:?}")) }
    }

    /// A matrix of blocks with an inner dimension of `k`.
    fn blocks(&self, ty: c_int, rows: c_int, k: c_int) -> Contract {
        self.one_of("block type", ty, &BLOCK_TYPES)?;
        self.positive("matrix rows", rows)?;
        self.positive("inner dimension", k)?;
        self.multiple("inner dimension", i64::from(k), if K_TYPES.contains(&ty) { 256 } else { 64 })
    }
}

/// The four norms, by name.
pub(crate) fn norm(kernel: &'static str, rows: c_int, hidden: c_int) -> Contract {
    let k = Kernel(kernel);
    k.positive("rows", rows)?;
    k.between("row length", hidden, 4, 8192)?;
    k.multiple("row length", i64::from(hidden), 4)
}

pub(crate) fn router(rows: c_int, experts: c_int, hidden: c_int, used: c_int) -> Contract {
    let k = Kernel("router");
    k.positive("rows", rows)?;
    k.between("row length", hidden, 16, c_int::MAX)?;
    k.multiple("row length", i64::from(hidden), 16)?;
    k.between("experts", experts, 4, 256)?;
    k.multiple("experts", i64::from(experts), 4)?;
    k.between("chosen experts", used, 1, experts.min(16))
}

pub(crate) fn moe_route(ids: c_int, experts: c_int) -> Contract {
    let k = Kernel("moe_route");
    k.positive("ids", ids)?;
    k.positive("experts", experts)
}

/// Sizes of the two expert products: input rows, choices per row, experts, inner dimension and output rows of an expert.
#[derive(Clone, Copy)]
pub(crate) struct ExpertSizes {
    pub rows: c_int,
    pub used: c_int,
    pub experts: c_int,
    pub k: c_int,
    pub n: c_int,
}

impl ExpertSizes {
    fn check(self, k: &Kernel) -> Contract {
        k.positive("rows", self.rows)?;
        k.positive("chosen experts", self.used)?;
        k.positive("experts", self.experts)
    }
}

/// `n` is the width of an expert: half of its output rows.
pub(crate) fn moe_gate_up(ty: c_int, ldx: i64, s: ExpertSizes) -> Contract {
    let k = Kernel("moe_gate_up");
    s.check(&k)?;
    k.positive("expert width", s.n)?;
    k.multiple("expert width", i64::from(s.n), 8)?;
    k.multiple("distance of input rows", ldx, 8)?;
    k.blocks(ty, s.n, s.k)
}

pub(crate) fn moe_down(ty: c_int, s: ExpertSizes) -> Contract {
    let k = Kernel("moe_down");
    s.check(&k)?;
    k.blocks(ty, s.n, s.k)
}

pub(crate) fn qmm(ty: c_int, ldx: i64, rows: c_int, inner: c_int, n: c_int) -> Contract {
    let k = Kernel("qmm");
    k.positive("rows", rows)?;
    k.multiple("distance of input rows", ldx, 8)?;
    k.blocks(ty, n, inner)
}

pub(crate) fn gemm(rows: c_int, inner: c_int, n: c_int) -> Contract {
    let k = Kernel("gemm");
    k.positive("rows", rows)?;
    k.positive("output columns", n)?;
    k.between("inner dimension", inner, 8, c_int::MAX)?;
    k.multiple("inner dimension", i64::from(inner), 8)
}

pub(crate) fn geglu(rows: c_int, n: c_int) -> Contract {
    let k = Kernel("geglu");
    k.positive("rows", rows)?;
    k.between("width", n, 4, c_int::MAX)?;
    k.multiple("width", i64::from(n), 4)
}

pub(crate) fn to_half(count: i64) -> Contract {
    let k = Kernel("to_half");
    if count < 4 {
        return k.refuse("count", count, "4 or more");
    }
    k.multiple("count", count, 4)
}

pub(crate) fn rope_table(rows: c_int, head: c_int) -> Contract {
    rope_sizes(&Kernel("rope_table"), rows, head)
}

fn rope_sizes(k: &Kernel, rows: c_int, head: c_int) -> Contract {
    k.positive("rows", rows)?;
    k.between("head size", head, 8, 512)?;
    k.multiple("head size", i64::from(head), 8)
}

/// Rows, lanes, query heads, key-value heads and head size of an attention block.
#[derive(Clone, Copy)]
pub(crate) struct HeadSizes {
    pub rows: c_int,
    pub lanes: c_int,
    pub heads: c_int,
    pub kv_heads: c_int,
    pub head: c_int,
}

impl HeadSizes {
    fn check(self, k: &Kernel) -> Contract {
        k.positive("rows", self.rows)?;
        k.positive("lanes", self.lanes)?;
        k.multiple("rows", i64::from(self.rows), i64::from(self.lanes))?;
        k.positive("query heads", self.heads)?;
        k.positive("key-value heads", self.kv_heads)
    }
}

pub(crate) fn rope_kv(s: HeadSizes, stride: i64) -> Contract {
    let k = Kernel("rope_kv");
    s.check(&k)?;
    rope_sizes(&k, s.rows, s.head)?;
    k.multiple("cache row", stride, 4)
}

pub(crate) fn canvas_attention(s: HeadSizes, stride: i64, splits: c_int) -> Contract {
    let k = Kernel("canvas_attention");
    s.check(&k)?;
    k.multiple("query heads", i64::from(s.heads), i64::from(s.kv_heads))?;
    k.one_of("head size", s.head, &[32, 64, 128, 256, 512])?;
    k.between("splits", splits, 1, 16)?;
    k.multiple("cache row", stride, 8)
}

/// Logits [rows][vocab] over a softcap, of a kernel by name.
fn logits(k: &Kernel, ty: c_int, vocab: c_int, cap: f32) -> Contract {
    k.one_of("type of logits", ty, &FLOAT_TYPES)?;
    k.between("vocabulary", vocab, 8, c_int::MAX)?;
    k.multiple("vocabulary", i64::from(vocab), 8)?;
    if cap >= 0.0 { Ok(()) } else { k.refuse("softcap", cap, "0 (none) or more") }
}

pub(crate) fn position_stats(ty: c_int, rows: c_int, vocab: c_int, cap: f32) -> Contract {
    let k = Kernel("position_stats");
    k.between("rows", rows, 1, MOST_GRID_ROWS)?;
    logits(&k, ty, vocab, cap)
}

pub(crate) fn likeliest(ty: c_int, rows: c_int, vocab: c_int, cap: f32, count: c_int) -> Contract {
    let k = Kernel("likeliest");
    k.positive("rows", rows)?;
    logits(&k, ty, vocab, cap)?;
    k.between("vocabulary", vocab, 8, 524_288)?;
    k.between("tokens per row", count, 1, vocab.min(256))
}

/// `count` tokens of each row of a table; a plain lookup has one.
pub(crate) fn soft_embed(ty: c_int, hidden: c_int, rows: c_int, count: c_int) -> Contract {
    let k = Kernel("soft_embed");
    k.between("rows", rows, 1, MOST_GRID_ROWS)?;
    k.between("tokens per row", count, 1, 512)?;
    k.one_of("type of the table", ty, &[0, 1, 8, 12, 14, 30])?;
    let columns = match ty {
        12 | 14 => 256,
        8 => 32,
        _ => 8,
    };
    k.between("row length", hidden, 8, c_int::MAX)?;
    k.multiple("row length", i64::from(hidden), columns)
}

pub(crate) fn dense_soft_embed(ty: c_int, rows: c_int, vocab: c_int, hidden: c_int) -> Contract {
    let k = Kernel("dense_soft_embed");
    k.between("rows", rows, 1, MOST_GRID_ROWS)?;
    k.between("vocabulary", vocab, 8, c_int::MAX)?;
    k.multiple("vocabulary", i64::from(vocab), 8)?;
    k.between("row length", hidden, 8, c_int::MAX)?;
    // Halves go to the vendor's library as they are; blocks are expanded first.
    if ty == 1 { Ok(()) } else { k.blocks(ty, vocab, hidden) }
}

/// Two sizes that must be the same, since one step's output is the next one's input.
pub(crate) fn same(kernel: &'static str, what: &str, value: c_int, other: &str, wanted: c_int) -> Contract {
    if value == wanted {
        return Ok(());
    }
    Kernel(kernel).refuse(what, value, format_args!("{other}, {wanted}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is refused names the kernel, the value and the rule.
    #[test]
    fn a_refusal_names_kernel_value_and_rule() {
        let sizes = HeadSizes { rows: 5, lanes: 2, heads: 4, kv_heads: 2, head: 256 };
        let experts = ExpertSizes { rows: 1, used: 1, experts: 1, k: 64, n: 12 };
        for (refusal, want) in [
            (norm("rms_norm", 1, 10), "kernel rms_norm cannot do row length 10: it must be a multiple of 4"),
            (norm("rms_norm", 0, 8), "kernel rms_norm cannot do rows 0: it must be 1 or more"),
            (norm("rms_norm", 1, 8196), "kernel rms_norm cannot do row length 8196: it must be from 4 to 8192"),
            (router(1, 8, 32, 9), "kernel router cannot do chosen experts 9: it must be from 1 to 8"),
            (canvas_attention(sizes, 512, 1), "kernel canvas_attention cannot do rows 5: it must be a multiple of 2"),
            (moe_gate_up(12, 64, experts), "kernel moe_gate_up cannot do expert width 12: it must be a multiple of 8"),
            (qmm(12, 64, 1, 64, 1), "kernel qmm cannot do inner dimension 64: it must be a multiple of 256"),
            (
                qmm(10, 64, 1, 64, 1),
                "kernel qmm cannot do block type 10: it must be one of [1, 2, 3, 6, 7, 8, 12, 13, 14, 30]",
            ),
            (position_stats(0, 1, 8, -1.0), "kernel position_stats cannot do softcap -1: it must be 0 (none) or more"),
            (
                same("geglu", "width", 96, "that of the product before it", 128),
                "kernel geglu cannot do width 96: it must be that of the product before it, 128",
            ),
        ] {
            assert_eq!(refusal, Err(want.to_owned()));
        }
    }

    /// The sizes of DiffusionGemma 26B-A4B, with one lane and with 8.
    #[test]
    fn the_models_own_sizes_are_taken() {
        for lanes in [1, 8] {
            let rows = 256 * lanes;
            for (kv_heads, head) in [(8, 256), (2, 512)] {
                let sizes = HeadSizes { rows, lanes, heads: 16, kv_heads, head };
                let stride = i64::from(kv_heads * head);
                assert_eq!(rope_table(rows, head), Ok(()));
                assert_eq!(rope_kv(sizes, stride), Ok(()));
                assert_eq!(canvas_attention(sizes, stride, 16), Ok(()));
            }
            let sizes = |k, n| ExpertSizes { rows, used: 8, experts: 128, k, n };
            let all = [
                norm("rms_norm", rows, 2816),
                router(rows, 128, 2816, 8),
                moe_route(rows * 8, 128),
                moe_gate_up(12, 2816, sizes(2816, 704)),
                moe_down(6, sizes(704, 2816)),
                qmm(12, 2816, rows, 2816, 8192),
                gemm(rows, 2112, 2816),
                geglu(rows, 2112),
                to_half(i64::from(rows) * 4096),
                position_stats(0, rows, 262_144, 30.0),
                likeliest(0, rows, 262_144, 30.0, 64),
                soft_embed(14, 2816, rows, 64),
                dense_soft_embed(14, rows, 262_144, 2816),
                dense_soft_embed(1, rows, 262_144, 2816),
            ];
            assert!(all.iter().all(Result::is_ok), "{all:?}");
        }
    }
}
