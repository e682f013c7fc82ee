//! Custom nodes that run on a CUDA device only: each enqueues one kernel (the experts: three). Shapes, types and contracts are
//! the C headers'; which source is which stands at each op. Several results lie one after the other in the destination's
//! bytes, at the offsets that the op was made with.

use std::ffi::{c_int, c_void};

use llama_sys::ggml_tensor;

use crate::ggml::{GgmlType, NodeOp};
use crate::kernels::contract::{self, Contract, ExpertSizes, HeadSizes};
use crate::kernels::library::{Kernels, Stream};

/// ggml's number of a type, as the kernels want it.
fn number(ty: GgmlType) -> c_int {
    ty.id() as c_int
}

/// What an op sees of its node while it is enqueued.
#[derive(Clone, Copy)]
struct Node<'a>(&'a ggml_tensor);

impl Node<'_> {
    fn dst(self, offset: usize) -> *mut c_void {
        self.0.data.cast::<u8>().wrapping_add(offset).cast()
    }

    /// Data of source `i`.
    ///
    /// # Safety
    /// The node was made with more than `i` sources.
    unsafe fn src(self, i: usize) -> *const c_void {
        // SAFETY: sources of a live node are live tensors.
        unsafe { (*self.0.src[i]).data }
    }

    /// Data of source `i` for a kernel that also writes to it: caches.
    ///
    /// # Safety
    /// As `src`.
    unsafe fn src_mut(self, i: usize) -> *mut c_void {
        // SAFETY: as above.
        unsafe { (*self.0.src[i]).data }
    }
}

macro_rules! device_op {
    (
        $(#[$doc:meta])* $name:ident { $($field:ident: $ty:ty),* $(,)? }
        contract |$sizes:ident| $contract:expr;
        |$this:ident, $k:ident, $stream:ident, $node:ident| $body:expr
    ) => {
        $(#[$doc])*
        pub(crate) struct $name { pub kernels: &'static Kernels, $(pub $field: $ty,)* }

        impl NodeOp for $name {
            fn has_device_form(&self) -> bool {
                true
            }

            fn refusal(&self) -> Option<String> {
                let $sizes = self;
                $contract.err()
            }

            unsafe fn enqueue(&self, $stream: Stream, dst: &ggml_tensor) -> c_int {
                let ($this, $k, $node) = (self, self.kernels, Node(dst));
                // SAFETY: ggml calls this with the sources that the node was made with, all in the device's memory, and
                // their sizes are those of the fields: `model/device_pass.rs` makes both together.
                unsafe { $body }
            }
        }
    };
}

device_op! {
    /// Sources: table, ids.
    EmbedRows { table: GgmlType, vocab: c_int, hidden: c_int, rows: c_int, scale: f32 }
    contract |o| contract::soft_embed(number(o.table), o.hidden, o.rows, 1);
    |o, k, s, n| (k.dllm_embed_rows)(s, n.src(0), number(o.table), o.vocab, o.hidden, n.src(1), o.rows, o.scale, n.dst(0))
}

device_op! {
    /// Sources: x F32, weight. Destination F16.
    RmsNorm { pre_scale: f32, eps: f32, rows: c_int, hidden: c_int }
    contract |o| contract::norm("rms_norm", o.rows, o.hidden);
    |o, k, s, n| (k.dllm_rms_norm)(
        s, n.src(0), number(GgmlType::F32), n.src(1), o.pre_scale, o.eps, n.dst(0), number(GgmlType::F16), o.rows, o.hidden)
}

device_op! {
    /// Sources: embeddings, self-conditioning signal, its flag, attn_norm. Destination: h F32, at `x` x1 F16.
    NormInput { eps: f32, rows: c_int, hidden: c_int, x: usize }
    contract |o| contract::norm("norm_input", o.rows, o.hidden);
    |o, k, s, n| (k.dllm_norm_input)(
        s, n.src(0), 1.0, n.src(1), n.src(2), std::ptr::null(), n.src(3), o.eps, n.dst(0), n.dst(o.x),
        number(GgmlType::F16), o.rows, o.hidden)
}

device_op! {
    /// Sources: h, a F32, post_attention_norm, ffn_norm, pre_ffw_norm_2, router scale. Destination: r F32, at `x` and `y`
    /// F16, at `z` F32.
    NormAttnOut { eps: f32, rows: c_int, hidden: c_int, x: usize, y: usize, z: usize }
    contract |o| contract::norm("norm_attn_out", o.rows, o.hidden);
    |o, k, s, n| (k.dllm_norm_attn_out)(
        s, n.src(0), n.src(1), number(GgmlType::F32), n.src(2), n.src(3), n.src(4), n.src(5), o.eps, n.dst(0), n.dst(o.x),
        n.dst(o.y), number(GgmlType::F16), n.dst(o.z), o.rows, o.hidden)
}

device_op! {
    /// Sources: r, d F32, m F16 in `parts`, post_ffw_norm_1, post_ffw_norm_2, post_ffw_norm, layer scale, next norm.
    /// Destination: h F32, at `x` F16.
    NormLayerOut { eps: f32, rows: c_int, hidden: c_int, parts: c_int, x: usize }
    contract |o| contract::norm("norm_layer_out", o.rows, o.hidden);
    |o, k, s, n| {
        let hidden = i64::from(o.hidden);
        (k.dllm_norm_layer_out)(
            s, n.src(0), n.src(1), number(GgmlType::F32), n.src(2), number(GgmlType::F16), o.parts,
            hidden * i64::from(o.parts), hidden, n.src(3), n.src(4), n.src(5), n.src(6), n.src(6), std::ptr::null(),
            n.src(7), o.eps, n.dst(0), n.dst(o.x), number(GgmlType::F16), o.rows, o.hidden)
    }
}

/// Goes on only where the enqueueing went well.
macro_rules! ok {
    ($code:expr) => {
        match $code {
            0 => {}
            code => return code,
        }
    };
}

/// A dense product with a stack of matrices: one in F16, or several repacked.
#[derive(Clone)]
pub(crate) struct Product {
    pub k: c_int,
    /// Type (`None`: F16) and output rows of each matrix.
    pub parts: Vec<(Option<c_int>, c_int)>,
}

impl Product {
    fn n(&self) -> c_int {
        self.parts.iter().map(|p| p.1).sum()
    }

    /// Of a product whose input rows hold `width` values.
    fn contract(&self, rows: c_int, width: c_int) -> Contract {
        // Matrices whose inner dimension was padded would read on into the next row.
        contract::same("qmm", "input rows of", width, "the matrix's inner dimension", self.k)?;
        self.parts.iter().try_for_each(|&(ty, n)| match ty {
            None => contract::gemm(rows, self.k, n),
            Some(ty) => contract::qmm(ty, i64::from(self.k), rows, self.k, n),
        })
    }

    /// Enqueues out F32 [rows][n] = W x; the matrices are sources `first` on.
    ///
    /// # Safety
    /// As `NodeOp::enqueue`; x is F16 [rows][k] and `scratch` the library's room.
    #[allow(clippy::too_many_arguments)] // as the kernels' own
    unsafe fn enqueue(
        &self,
        k: &Kernels,
        stream: Stream,
        node: Node<'_>,
        first: usize,
        x: *const c_void,
        rows: c_int,
        out: *mut c_void,
        scratch: *mut c_void,
    ) -> c_int {
        let mut column = 0;
        for (i, &(ty, n)) in self.parts.iter().enumerate() {
            // SAFETY: by contract.
            ok!(unsafe {
                let w = node.src(first + i);
                match ty {
                    None => (k.dllm_gemm)(stream, w, x, rows, self.k, n, out, number(GgmlType::F32), scratch),
                    Some(ty) => {
                        let out = out.cast::<f32>().wrapping_add(column).cast();
                        let (ldx, ldo) = (i64::from(self.k), i64::from(self.n()));
                        (k.dllm_qmm)(
                            stream,
                            ty,
                            w,
                            x,
                            ldx,
                            rows,
                            self.k,
                            n,
                            out,
                            ldo,
                            0,
                            1.0,
                            1,
                            std::ptr::null_mut(),
                            0,
                        )
                    }
                }
            });
            column += n as usize;
        }
        0
    }
}

device_op! {
    /// Sources: x F16 [rows][width], the matrices. Destination: out F32, at `scratch` the library's room.
    DenseProduct { product: Product, rows: c_int, width: c_int, scratch: usize }
    contract |o| o.product.contract(o.rows, o.width);
    |o, k, s, n| o.product.enqueue(k, s, n, 1, n.src(0), o.rows, n.dst(0), n.dst(o.scratch))
}

device_op! {
    /// Source: gate and up F32. Destination F16.
    Geglu { rows: c_int, width: c_int }
    contract |o| contract::geglu(o.rows, o.width);
    |o, k, s, n| (k.dllm_geglu)(s, n.src(0), o.rows, o.width, n.dst(0))
}

device_op! {
    /// Source: x F32. Destination F16.
    ToHalf { rows: c_int, width: c_int }
    contract |o| contract::to_half(i64::from(o.rows) * i64::from(o.width));
    |o, k, s, n| (k.dllm_to_half)(s, n.src(0), i64::from(o.rows) * i64::from(o.width), n.dst(0))
}

device_op! {
    /// Sources: positions, frequency factors where `factors`. Destination: cos, sin F32.
    RopeTable { rows: c_int, head: c_int, base: f32, factors: bool }
    contract |o| contract::rope_table(o.rows, o.head);
    |o, k, s, n| {
        let factors = if o.factors { n.src(1) } else { std::ptr::null() };
        (k.dllm_rope_table)(s, n.src(0), o.rows, o.head, o.base, factors, n.dst(0))
    }
}

device_op! {
    /// Sources: qkv F32, q_norm, k_norm, rope table, slots, key cache F16, value cache F16. Destination: q of `q_type`.
    RopeKv {
        rows: c_int, lanes: c_int, heads: c_int, kv_heads: c_int, head: c_int, value: bool, eps: f32, q_type: GgmlType
    }
    contract |o| {
        let sizes = HeadSizes { rows: o.rows, lanes: o.lanes, heads: o.heads, kv_heads: o.kv_heads, head: o.head };
        contract::rope_kv(sizes, i64::from(o.kv_heads) * i64::from(o.head))
    };
    |o, k, s, n| (k.dllm_rope_kv)(
        s, n.src(0), number(GgmlType::F32), o.rows, o.lanes, o.heads, o.kv_heads, o.head, c_int::from(o.value), n.src(1),
        n.src(2), o.eps, n.src(3), n.src(4).cast(), n.dst(0), number(o.q_type), n.src_mut(5), n.src_mut(6),
        i64::from(o.kv_heads) * i64::from(o.head))
}

device_op! {
    /// Sources: q F16, key cache, value cache, spans; and the node that wrote the keys. Destination: out F16, at `scratch`
    /// the parts of split keys.
    CanvasAttention {
        rows: c_int, lanes: c_int, heads: c_int, kv_heads: c_int, head: c_int, splits: c_int, scratch: usize
    }
    contract |o| {
        let sizes = HeadSizes { rows: o.rows, lanes: o.lanes, heads: o.heads, kv_heads: o.kv_heads, head: o.head };
        contract::canvas_attention(sizes, i64::from(o.kv_heads) * i64::from(o.head), o.splits)
    };
    |o, k, s, n| (k.dllm_canvas_attention)(
        s, n.src(0), o.rows, o.lanes, o.heads, o.kv_heads, o.head, n.src(1), n.src(2),
        i64::from(o.kv_heads) * i64::from(o.head), n.src(3), o.splits, n.dst(0), number(GgmlType::F16), n.dst(o.scratch))
}

/// Most rows for which the down product may start before the gate and up product has ended: measured on an H200, it gains
/// with about 16 rows per expert and loses with 128.
const OVERLAP_ROWS: c_int = 512;

/// `DLLM_MM_F16`: the experts' results are halves, since writing and reading them costs more than making them exact is worth.
const HALF_PARTS: c_int = 1;

/// Offsets of the inputs of the feed-forward's parts in the block that `NormAttnOut` makes, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct BranchInputs {
    /// Of the dense branch, F16.
    pub dense: usize,
    /// Of the experts, F16.
    pub experts: usize,
    /// Of the router, F32.
    pub router: usize,
}

/// Offsets of `FeedForward`'s results and room, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct FeedForwardParts {
    /// Result of the dense branch, F32 [rows][hidden].
    pub dense: usize,
    /// Gate and up of the dense branch, F32 [rows][2 ff], and their product, F16.
    pub dense_both: usize,
    pub dense_act: usize,
    pub gemm_scratch: usize,
    /// Chosen experts, I32 [rows][used], and their weights, F32.
    pub ids: usize,
    pub weights: usize,
    pub router_scratch: usize,
    pub plan: usize,
    /// Activations of the chosen experts, F16 [rows][used][width].
    pub act: usize,
    /// Weighted results of the chosen experts, F16 [rows][used][hidden].
    pub experts: usize,
}

device_op! {
    /// The dense branch and the experts, which do not depend on each other, side by side on two streams.
    ///
    /// Sources: the block of `NormAttnOut`, router weights F32, the experts' gate and up repacked, their down repacked, the
    /// dense branch's gate and up, its down, expert scale where `scaled`. Destination: see `FeedForwardParts`.
    FeedForward {
        rows: c_int, hidden: c_int, gate_up: Product, down: Product, used: c_int, experts: c_int, width: c_int,
        gate_up_type: c_int, down_type: c_int, scaled: bool, inputs: BranchInputs, at: FeedForwardParts
    }
    contract |o| o.contract();
    |o, k, s, n| {
        let at = o.at;
        let input = |offset: usize| n.src(0).cast::<u8>().wrapping_add(offset).cast::<c_void>();
        let mut side = std::ptr::null_mut();
        ok!((k.dllm_fork)(s, &mut side));
        let (both, act, scratch) = (n.dst(at.dense_both), n.dst(at.dense_act), n.dst(at.gemm_scratch));
        let (gate_up, down) = (4, 4 + o.gate_up.parts.len());
        ok!(o.gate_up.enqueue(k, side, n, gate_up, input(o.inputs.dense), o.rows, both, scratch));
        ok!((k.dllm_geglu)(side, both, o.rows, o.down.k, act));
        ok!(o.down.enqueue(k, side, n, down, act, o.rows, n.dst(at.dense), scratch));

        let (ids, weights, plan) = (n.dst(at.ids), n.dst(at.weights), n.dst(at.plan));
        let scale = if o.scaled { n.src(down + o.down.parts.len()) } else { std::ptr::null() };
        ok!((k.dllm_router)(
            s, input(o.inputs.router), n.src(1), scale, o.rows, o.experts, o.hidden, o.used, ids, weights, std::ptr::null_mut(),
            n.dst(at.router_scratch)));
        ok!((k.dllm_moe_route)(s, ids, o.rows * o.used, o.experts, plan));
        let overlap = c_int::from(o.rows <= OVERLAP_ROWS);
        ok!((k.dllm_moe_gate_up)(
            s, o.gate_up_type, n.src(2), input(o.inputs.experts), i64::from(o.hidden), plan, o.rows, o.used, o.experts, o.hidden, o.width,
            n.dst(at.act), overlap, 0));
        ok!((k.dllm_moe_down)(
            s, o.down_type, n.src(3), n.dst(at.act), plan, weights, o.rows, o.used, o.experts, o.width, o.hidden,
            n.dst(at.experts), HALF_PARTS, overlap, 0, o.hidden, 0));
        (k.dllm_join)(s, side)
    }
}

impl FeedForward {
    fn contract(&self) -> Contract {
        let (rows, used, experts, hidden, width) = (self.rows, self.used, self.experts, self.hidden, self.width);
        self.gate_up.contract(rows, hidden)?;
        contract::same("geglu", "width", self.down.k, "half of the product before it", self.gate_up.n() / 2)?;
        contract::geglu(rows, self.down.k)?;
        self.down.contract(rows, self.down.k)?;
        contract::router(rows, experts, hidden, used)?;
        contract::moe_route(rows * used, experts)?;
        let sizes = |k, n| ExpertSizes { rows, used, experts, k, n };
        contract::moe_gate_up(self.gate_up_type, i64::from(hidden), sizes(hidden, width))?;
        contract::moe_down(self.down_type, sizes(width, hidden))
    }
}

device_op! {
    /// Sources: logits F32, temperature, uniform. Destination: words of the statistics, at `scratch` the kernel's room, which
    /// `Likeliest` reads.
    DeviceStats { rows: c_int, vocab: c_int, cap: f32, scratch: usize }
    contract |o| contract::position_stats(number(GgmlType::F32), o.rows, o.vocab, o.cap);
    |o, k, s, n| (k.dllm_position_stats)(
        s, n.src(0), number(GgmlType::F32), o.rows, o.vocab, n.src(1), n.src(2), o.cap, n.dst(0), n.dst(o.scratch))
}

device_op! {
    /// Sources: logits F32, temperature, `DeviceStats`. Destination: ids I32 [rows][count], at `weights` F32, at `dropped`
    /// F32 [rows].
    Likeliest { rows: c_int, vocab: c_int, cap: f32, stats_scratch: usize, count: c_int, weights: usize, dropped: usize }
    contract |o| contract::likeliest(number(GgmlType::F32), o.rows, o.vocab, o.cap, o.count);
    |o, k, s, n| {
        let stats = n.src(2);
        let scratch = stats.cast::<u8>().wrapping_add(o.stats_scratch).cast();
        (k.dllm_likeliest)(
            s, n.src(0), number(GgmlType::F32), o.rows, o.vocab, n.src(1), o.cap, stats, scratch, o.count, 0.0, 1, n.dst(0),
            n.dst(o.weights), n.dst(o.dropped))
    }
}

device_op! {
    /// Sources: table, ids, weights. Destination F32.
    SoftEmbedLikeliest { table: GgmlType, vocab: c_int, hidden: c_int, rows: c_int, count: c_int }
    contract |o| contract::soft_embed(number(o.table), o.hidden, o.rows, o.count);
    |o, k, s, n| (k.dllm_soft_embed)(
        s, n.src(0), number(o.table), o.vocab, o.hidden, n.src(1), n.src(2), o.rows, o.count, 1.0, n.dst(0))
}

device_op! {
    /// Sources: table, logits F32, temperature, `DeviceStats`. Destination: F32, at `probs` the probabilities F16, at `piece`
    /// an expanded piece of a table that is not F16, at `scratch` the library's room.
    SoftEmbedDense {
        table: GgmlType, rows: c_int, vocab: c_int, hidden: c_int, cap: f32, probs: usize, piece: usize, scratch: usize
    }
    contract |o| contract::dense_soft_embed(number(o.table), o.rows, o.vocab, o.hidden);
    |o, k, s, n| (k.dllm_dense_soft_embed)(
        s, n.src(0), number(o.table), n.src(1), n.src(2), o.cap, n.src(3), o.rows, o.vocab, o.hidden, 1.0, n.dst(o.probs),
        n.dst(o.piece), n.dst(0), n.dst(o.scratch))
}

#[cfg(test)]
mod tests {
    use super::Product;

    #[test]
    fn a_product_takes_rows_of_its_own_inner_dimension_only() {
        // Q4_0 of 96 columns is expanded to F16 and padded to 128; in halves it stays 96.
        let padded = Product { k: 128, parts: vec![(Some(1), 64), (Some(1), 32)] };
        let why = padded.contract(256, 96).unwrap_err();
        assert_eq!(why, "kernel qmm cannot do input rows of 96: it must be the matrix's inner dimension, 128");
        assert_eq!(padded.contract(256, 128), Ok(()));
        let halves = Product { k: 96, parts: vec![(None, 96)] };
        assert_eq!(halves.contract(256, 96), Ok(()));
        assert!(Product { k: 96, ..padded }.contract(256, 96).is_err(), "blocks of 96 columns do not exist");
    }
}
