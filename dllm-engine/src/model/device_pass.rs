//! Building blocks of passes on a CUDA device: the same maths as `layers`, in fewer and wider nodes. A method's doc gives its
//! formula; the kernels behind it are described in their C headers. Activations between matrix products are F16, the
//! residual, norms, routing and all sums are F32.

use crate::error::{Error, Result};
use crate::ggml::{Context, GgmlType, NodeOp, Rope, Tensor};
use crate::kernels::device as op;
use crate::kernels::library::Kernels;
use crate::model::layers::{Attention, Experts, Pass};

/// Room of the vendor's library for one product (`DLLM_GEMM_SCRATCH_BYTES`).
pub(super) const GEMM_SCRATCH: usize = 32 << 20;

/// Sections of a node's bytes start at multiples of this.
const ALIGN: usize = 256;

/// Lays several results of one node out, one after the other.
#[derive(Default)]
pub(super) struct Sections(usize);

impl Sections {
    /// Offset of a section of so many bytes.
    pub fn add(&mut self, bytes: usize) -> usize {
        let at = self.0;
        self.0 = (at + bytes).next_multiple_of(ALIGN);
        at
    }

    /// Bytes of all sections.
    pub fn bytes(&self) -> usize {
        self.0
    }
}

/// What the attention block leaves for the two branches of the feed-forward, in one block of bytes.
pub(crate) struct Branches<'c> {
    block: Tensor<'c>,
    /// Residual, F32 [H, rows].
    pub residual: Tensor<'c>,
    inputs: op::BranchInputs,
}

/// A pass under construction on a CUDA device.
pub(crate) struct DevicePass<'p, 'c> {
    pub pass: &'p Pass<'c>,
    pub kernels: &'static Kernels,
    pub eps: f32,
    pub hidden: usize,
    /// cos and sin of the rows' positions: whole-context layers and ring layers.
    pub rope: [Tensor<'c>; 2],
}

impl<'p, 'c> DevicePass<'p, 'c> {
    /// `ropes`: settings, head size and frequency factors of whole-context layers and ring layers.
    pub fn new(
        pass: &'p Pass<'c>,
        (eps, hidden): (f32, usize),
        ropes: [(Rope, usize, Option<&str>); 2],
    ) -> Result<Self> {
        let kernels = pass.kernels.ok_or_else(|| Error::Backend("a pass without CUDA kernels".into()))?;
        let rope = ropes.map(|(rope, head, factors)| {
            let table = op::RopeTable {
                kernels,
                rows: pass.rows() as i32,
                head: head as i32,
                base: rope.base,
                factors: factors.is_some(),
            };
            let factors = factors.map(|name| pass.weight(name));
            let args: Vec<_> = std::iter::once(pass.inputs.positions).chain(factors).collect();
            pass.graph.own(table).node(pass.cx, GgmlType::F32, [2, head / 2, pass.rows(), 1], &args)
        });
        Ok(Self { pass, kernels, eps, hidden, rope })
    }

    fn cx(&self) -> &'c Context {
        self.pass.cx
    }

    fn rows(&self) -> i32 {
        self.pass.rows() as i32
    }

    /// A node with one result.
    fn node(&self, op: impl NodeOp + 'static, ty: GgmlType, shape: [usize; 2], args: &[Tensor<'c>]) -> Tensor<'c> {
        self.pass.graph.own(op).node(self.cx(), ty, [shape[0], shape[1], 1, 1], args)
    }

    /// A node whose results lie in one block of bytes.
    fn block(&self, op: impl NodeOp + 'static, sections: &Sections, args: &[Tensor<'c>]) -> Tensor<'c> {
        self.node(op, GgmlType::I8, [sections.bytes(), 1], args)
    }

    fn part(&self, block: Tensor<'c>, ty: GgmlType, width: usize, offset: usize) -> Tensor<'c> {
        self.cx().part(block, ty, [width, self.pass.rows(), 1, 1], offset)
    }

    /// Bytes of a matrix of the pass's rows.
    fn bytes(&self, ty: GgmlType, width: usize) -> usize {
        ty.type_size() as usize * width * self.pass.rows()
    }

    fn layer_weight(&self, layer: usize, name: &str) -> Tensor<'c> {
        self.pass.weight(&format!("blk.{layer}.{name}"))
    }

    /// scale * E[token], F32 [H, rows].
    pub fn embed(&self, table: &str, scale: f32) -> Tensor<'c> {
        let table = self.pass.weight(table);
        let op = op::EmbedRows {
            kernels: self.kernels,
            table: table.ty(),
            vocab: table.shape()[1] as i32,
            hidden: self.hidden as i32,
            rows: self.rows(),
            scale,
        };
        self.node(op, GgmlType::F32, [self.hidden, self.pass.rows()], &[table, self.pass.inputs.tokens])
    }

    /// rms(scale * x) * w, F16.
    pub fn norm(&self, weight: Tensor<'c>, x: Tensor<'c>, pre_scale: f32) -> Tensor<'c> {
        let op = op::RmsNorm {
            kernels: self.kernels,
            pre_scale,
            eps: self.eps,
            rows: self.rows(),
            hidden: self.hidden as i32,
        };
        self.node(op, GgmlType::F16, [self.hidden, self.pass.rows()], &[x, weight])
    }

    /// A stack's product and its matrices.
    fn product(&self, stack: &str) -> (op::Product, Vec<Tensor<'c>>) {
        let form = self.pass.repacked(stack);
        let parts = form.parts.iter().map(|p| (p.ty, p.rows as i32)).collect();
        let tensors = form.parts.iter().map(|p| self.pass.weights.part(p)).collect();
        (op::Product { k: form.k as i32, parts }, tensors)
    }

    /// W x of a stack of matrices, F32 [n, rows]; x is F16.
    pub fn dense(&self, stack: &str, x: Tensor<'c>) -> Tensor<'c> {
        let n = self.pass.repacked(stack).rows();
        let (product, matrices) = self.product(stack);
        let mut sections = Sections::default();
        sections.add(self.bytes(GgmlType::F32, n));
        let scratch = sections.add(GEMM_SCRATCH);
        let width = x.shape()[0] as i32;
        let op = op::DenseProduct { kernels: self.kernels, product, rows: self.rows(), width, scratch };
        let args: Vec<_> = std::iter::once(x).chain(matrices).collect();
        self.part(self.block(op, &sections, &args), GgmlType::F32, n, 0)
    }

    /// Wdown (gelu(Wgate x) * (Wup x)), F32; x is F16.
    pub fn gated(&self, gate_up: &str, down: &str, x: Tensor<'c>) -> Tensor<'c> {
        let both = self.dense(gate_up, x);
        let width = both.shape()[0] / 2;
        let op = op::Geglu { kernels: self.kernels, rows: self.rows(), width: width as i32 };
        self.dense(down, self.node(op, GgmlType::F16, [width, self.pass.rows()], &[both]))
    }

    /// h = rms(e + flag * signal), F32, and rms(h) * w, F16.
    pub fn input(&self, e: Tensor<'c>, signal: Tensor<'c>, weight: Tensor<'c>) -> (Tensor<'c>, Tensor<'c>) {
        let mut sections = Sections::default();
        sections.add(self.bytes(GgmlType::F32, self.hidden));
        let x = sections.add(self.bytes(GgmlType::F16, self.hidden));
        let op =
            op::NormInput { kernels: self.kernels, eps: self.eps, rows: self.rows(), hidden: self.hidden as i32, x };
        let block = self.block(op, &sections, &[e, signal, self.pass.inputs.conditioned, weight]);
        (self.part(block, GgmlType::F32, self.hidden, 0), self.part(block, GgmlType::F16, self.hidden, x))
    }

    /// Writes the rows' keys and values to the cache; their rotated queries [d, rows per lane, heads, lanes].
    pub fn write_keys(&self, a: &Attention, x: Tensor<'c>) -> Tensor<'c> {
        let pass = self.pass;
        let qkv = self.dense(&format!("blk.{}.attn_qkv", a.layer), x);
        let ring = usize::from(pass.cache.is_ring(a.layer));
        // The canvas kernel reads halves; ggml's attention, which masks causal rows, wants F32.
        let q_type = if pass.encode { GgmlType::F32 } else { GgmlType::F16 };
        let op = op::RopeKv {
            kernels: self.kernels,
            rows: self.rows(),
            lanes: pass.lanes.1 as i32,
            heads: a.heads as i32,
            kv_heads: a.kv_heads as i32,
            head: a.head as i32,
            value: a.value,
            eps: a.eps,
            q_type,
        };
        let [keys, values] = pass.cache.tensors(a.layer);
        let norm = |name| self.layer_weight(a.layer, name);
        let args = [
            qkv,
            norm("attn_q_norm.weight"),
            norm("attn_k_norm.weight"),
            self.rope[ring],
            pass.inputs.slots[ring],
            keys,
            values,
        ];
        let q = pass.graph.own(op).node(self.cx(), q_type, [a.head, pass.rows_per_lane, a.heads, pass.lanes.1], &args);
        pass.graph.expand(q);
        q
    }

    /// Wo attention(x), F32 [H, rows]; x is F16.
    pub fn attention(&self, a: &Attention, x: Tensor<'c>) -> Tensor<'c> {
        let pass = self.pass;
        let q = self.write_keys(a, x);
        let ring = usize::from(pass.cache.is_ring(a.layer));
        let [keys, values] = pass.cache.tensors(a.layer);
        let width = a.head * a.heads;
        let out = if pass.encode {
            let (lane, lanes) = pass.lanes;
            let [k, v] = [keys, values].map(|t| pass.cache.window(self.cx(), t, a, lane, lanes, pass.keys[ring]));
            let out = pass.masked_attention(q, k, v, pass.inputs.masks[ring], a.scale);
            let op = op::ToHalf { kernels: self.kernels, rows: self.rows(), width: width as i32 };
            self.node(op, GgmlType::F16, [width, pass.rows()], &[out])
        } else {
            let sizes = [a.heads, a.kv_heads, a.head];
            let (splits, room) = self.kernels.attention_splits([pass.rows(), pass.lanes.1], sizes, pass.keys[ring]);
            let mut sections = Sections::default();
            sections.add(self.bytes(GgmlType::F16, width));
            let scratch = sections.add(room.max(1));
            let op = op::CanvasAttention {
                kernels: self.kernels,
                rows: self.rows(),
                lanes: pass.lanes.1 as i32,
                heads: a.heads as i32,
                kv_heads: a.kv_heads as i32,
                head: a.head as i32,
                splits,
                scratch,
            };
            let block = self.block(op, &sections, &[q, keys, values, pass.inputs.spans[ring]]);
            self.part(block, GgmlType::F16, width, 0)
        };
        self.dense(&format!("blk.{}.attn_output", a.layer), out)
    }

    /// r = h + rms(a) * post_attention_norm; rms(r) * ffn_norm; rms(r) * pre_ffw_norm_2; rms(r) * router scale / sqrt(H).
    pub fn branches(&self, layer: usize, h: Tensor<'c>, attended: Tensor<'c>) -> Branches<'c> {
        let mut sections = Sections::default();
        sections.add(self.bytes(GgmlType::F32, self.hidden));
        let x = sections.add(self.bytes(GgmlType::F16, self.hidden));
        let y = sections.add(self.bytes(GgmlType::F16, self.hidden));
        let z = sections.add(self.bytes(GgmlType::F32, self.hidden));
        let op = op::NormAttnOut {
            kernels: self.kernels,
            eps: self.eps,
            rows: self.rows(),
            hidden: self.hidden as i32,
            x,
            y,
            z,
        };
        let w = |name| self.layer_weight(layer, name);
        let args = [
            h,
            attended,
            w("post_attention_norm.weight"),
            w("ffn_norm.weight"),
            w("pre_ffw_norm_2.weight"),
            w("ffn_gate_inp.scale"),
        ];
        let block = self.block(op, &sections, &args);
        Branches {
            block,
            residual: self.part(block, GgmlType::F32, self.hidden, 0),
            inputs: op::BranchInputs { dense: x, experts: y, router: z },
        }
    }

    /// The dense branch, F32 [H, rows], and the chosen experts' results times their weights, not summed yet, F16
    /// [H, used, rows].
    pub fn feed_forward(&self, e: &Experts, branches: &Branches<'c>) -> (Tensor<'c>, Tensor<'c>) {
        let pass = self.pass;
        let name = |part: &str| format!("blk.{}.{part}", e.layer);
        let (dense_gate_up, dense_gate_up_matrices) = self.product(&name("ffn_gate_up"));
        let (dense_down, dense_down_matrices) = self.product(&name("ffn_down"));
        let gate_up = if e.fused { "ffn_gate_up_exps.weight" } else { "ffn_gate_exps.weight" };
        let (gate_up, gate_up_matrices) = self.product(&name(gate_up));
        let (down, down_matrices) = self.product(&name("ffn_down_exps.weight"));
        let scale = pass.weights.get(&name("ffn_down_exps.scale"));
        let (ff, width) = (dense_down.k as usize, down.k as usize);
        let (f32, f16) = (GgmlType::F32, GgmlType::F16);
        let type_of = |product: &op::Product| product.parts[0].0.unwrap_or(f16.id() as i32);
        let mut sections = Sections::default();
        let at = op::FeedForwardParts {
            dense: sections.add(self.bytes(f32, self.hidden)),
            dense_both: sections.add(self.bytes(f32, 2 * ff)),
            dense_act: sections.add(self.bytes(f16, ff)),
            gemm_scratch: sections.add(GEMM_SCRATCH),
            ids: sections.add(self.bytes(GgmlType::I32, e.used)),
            weights: sections.add(self.bytes(f32, e.used)),
            router_scratch: sections.add(self.kernels.router_scratch(pass.rows(), e.count, self.hidden)),
            plan: sections.add(self.kernels.plan_bytes(e.used * pass.rows(), e.count)),
            act: sections.add(self.bytes(f16, width) * e.used),
            experts: sections.add(self.bytes(f16, self.hidden) * e.used),
        };
        let op = op::FeedForward {
            kernels: self.kernels,
            rows: self.rows(),
            hidden: self.hidden as i32,
            used: e.used as i32,
            experts: e.count as i32,
            width: width as i32,
            gate_up_type: type_of(&gate_up),
            down_type: type_of(&down),
            gate_up: dense_gate_up,
            down: dense_down,
            scaled: scale.is_some(),
            inputs: branches.inputs,
            at,
        };
        let matrices = [gate_up_matrices, down_matrices, dense_gate_up_matrices, dense_down_matrices];
        let args: Vec<_> = [branches.block, self.layer_weight(e.layer, "ffn_gate_inp.weight")]
            .into_iter()
            .chain(matrices.into_iter().flatten())
            .chain(scale)
            .collect();
        let block = self.block(op, &sections, &args);
        pass.tap(&format!("route.{}", e.layer), self.part(block, GgmlType::I32, e.used, at.ids));
        pass.tap(&format!("route_weight.{}", e.layer), self.part(block, f32, e.used, at.weights));
        let experts = self.cx().part(block, f16, [self.hidden, e.used, pass.rows(), 1], at.experts);
        (self.part(block, f32, self.hidden, at.dense), experts)
    }

    /// h' = s (r + rms(rms(d) * post_ffw_norm_1 + rms(sum of m) * post_ffw_norm_2) * post_ffw_norm), F32, and
    /// rms(h') * next, F16. `scalar` names s, `next` the norm in front of what follows.
    pub fn join(
        &self,
        layer: usize,
        residual: Tensor<'c>,
        dense: Tensor<'c>,
        experts: Tensor<'c>,
        scalar: &str,
        next: Tensor<'c>,
    ) -> (Tensor<'c>, Tensor<'c>) {
        let mut sections = Sections::default();
        sections.add(self.bytes(GgmlType::F32, self.hidden));
        let x = sections.add(self.bytes(GgmlType::F16, self.hidden));
        let op = op::NormLayerOut {
            kernels: self.kernels,
            eps: self.eps,
            rows: self.rows(),
            hidden: self.hidden as i32,
            parts: experts.shape()[1] as i32,
            x,
        };
        let w = |name| self.layer_weight(layer, name);
        let args = [
            residual,
            dense,
            experts,
            w("post_ffw_norm_1.weight"),
            w("post_ffw_norm_2.weight"),
            w("post_ffw_norm.weight"),
            w(scalar),
            next,
        ];
        let block = self.block(op, &sections, &args);
        (self.part(block, GgmlType::F32, self.hidden, 0), self.part(block, GgmlType::F16, self.hidden, x))
    }
}
