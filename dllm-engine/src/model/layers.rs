//! Building blocks of forward passes that families share. Shapes are ggml's order, the row length first; `rows` counts the
//! tokens of all lanes of the pass, lane by lane.

use std::cell::RefCell;

use crate::ggml::{Context, Device, GgmlType, Graph, Handle, OpKey, Rope, Tensor};
use crate::kernels::library::Kernels;
use crate::model::cache::Cache;
use crate::model::repack::Repacked;
use crate::model::weights::Weights;

/// Tensors that the host fills before a pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inputs<'c> {
    /// Token ids, I32 [rows].
    pub tokens: Tensor<'c>,
    /// Absolute positions, I32 [rows].
    pub positions: Tensor<'c>,
    /// Cache slots that the rows' keys go to, I64 [rows]: whole-context layers and ring layers.
    pub slots: [Tensor<'c>; 2],
    /// Visible keys, F16 [keys, rows per lane, 1, lanes]: whole-context layers and ring layers.
    pub masks: [Tensor<'c>; 2],
    /// What a canvas sees on a CUDA device, instead of a mask: I64 [4, lanes].
    pub spans: [Tensor<'c>; 2],
    /// Soft embedding of the previous step, F32 [H, rows]. Decoder only.
    pub soft: Tensor<'c>,
    /// 1 where a previous step conditions the row, else 0, F32 [1, rows]. Decoder only.
    pub conditioned: Tensor<'c>,
}

/// What a decoder pass hands to the sampling ops.
pub(crate) struct Decoded<'c> {
    /// Raw logits, before softcap and temperature, F32 [V, rows].
    pub logits: Tensor<'c>,
    /// The table that soft embeddings are gathered from, [H, V].
    pub table: Tensor<'c>,
}

/// Sizes and names of one layer's attention.
pub(crate) struct Attention {
    pub layer: usize,
    pub heads: usize,
    pub head: usize,
    pub kv_heads: usize,
    pub rope: Rope,
    pub rope_factors: Option<&'static str>,
    /// Whether there is a value projection; else the raw key projection is the value.
    pub value: bool,
    pub eps: f32,
    pub scale: f32,
}

/// Sizes of one layer's experts.
pub(crate) struct Experts {
    pub layer: usize,
    pub count: usize,
    pub used: usize,
    pub width: usize,
    pub fused: bool,
}

/// A forward pass under construction.
pub(crate) struct Pass<'c> {
    pub cx: &'c Context,
    pub graph: &'c Graph,
    pub weights: &'c Weights,
    pub cache: &'c Cache,
    pub inputs: Inputs<'c>,
    /// Causal, over prompt tokens or finished canvases.
    pub encode: bool,
    /// The CUDA kernels, where the pass runs on these.
    pub kernels: Option<&'static Kernels>,
    pub device: Device,
    /// First lane of the pass and how many follow.
    pub lanes: (usize, usize),
    /// Rows of each lane.
    pub rows_per_lane: usize,
    /// Keys that attention visits: whole-context layers and ring layers.
    pub keys: [usize; 2],
    /// gelu(gate) * up computed exactly by a custom op, where the backend's own is not exact enough.
    pub exact_gelu: Option<OpKey>,
    /// Intermediate results to keep for parity checks; `None` keeps none.
    pub taps: Option<RefCell<Vec<(String, Handle)>>>,
}

impl<'c> Pass<'c> {
    pub fn rows(&self) -> usize {
        self.lanes.1 * self.rows_per_lane
    }

    /// A weight by name. Families list all their tensors, so loading has found it.
    pub fn weight(&self, name: &str) -> Tensor<'c> {
        self.weights.get(name).unwrap_or_else(|| unreachable!("tensor {name} is not in the family's list"))
    }

    /// Tensors in the form of the CUDA kernels, by their stack's name or their own.
    pub fn repacked(&self, name: &str) -> &'c Repacked {
        self.weights.repacked(name).unwrap_or_else(|| unreachable!("{name} is not among the repacked tensors"))
    }

    fn layer_weight(&self, layer: usize, name: &str) -> Tensor<'c> {
        self.weight(&format!("blk.{layer}.{name}"))
    }

    /// Keeps an intermediate result for parity checks.
    pub fn tap(&self, name: &str, tensor: Tensor<'c>) {
        if let Some(taps) = &self.taps {
            self.graph.expand(tensor.mark_output());
            taps.borrow_mut().push((name.to_owned(), tensor.handle()));
        }
    }

    /// W x.
    pub fn linear(&self, name: &str, x: Tensor<'c>) -> Tensor<'c> {
        self.cx.mul_mat(self.weight(name), x)
    }

    /// rms(x) * w.
    pub fn norm(&self, name: &str, x: Tensor<'c>, eps: f32) -> Tensor<'c> {
        self.cx.mul(self.cx.rms_norm(x, eps), self.weight(name))
    }

    /// `norm` with a weight of a layer.
    pub fn norm_in(&self, layer: usize, name: &str, x: Tensor<'c>, eps: f32) -> Tensor<'c> {
        self.norm(&format!("blk.{layer}.{name}"), x, eps)
    }

    /// gelu(gate) * up, tanh form.
    fn geglu(&self, gate: Tensor<'c>, up: Tensor<'c>) -> Tensor<'c> {
        match self.exact_gelu {
            Some(op) => op.node(self.cx, GgmlType::F32, gate.shape(), &[gate, up]),
            None => self.cx.geglu_split(gate, up),
        }
    }

    /// Wdown (gelu(Wgate x) * (Wup x)).
    pub fn gated(&self, gate: &str, up: &str, down: &str, x: Tensor<'c>) -> Tensor<'c> {
        self.linear(down, self.geglu(self.linear(gate, x), self.linear(up, x)))
    }

    /// The sum over the chosen experts of weight * expert(x), [H, rows]. `routed` is the router's input, `x` the experts'.
    pub fn experts(&self, e: &Experts, routed: Tensor<'c>, x: Tensor<'c>) -> Tensor<'c> {
        let cx = self.cx;
        let rows = self.rows();
        let probs = cx.soft_max(cx.mul_mat(self.layer_weight(e.layer, "ffn_gate_inp.weight"), routed)); // [experts, rows]
        let ids = cx.top_k(probs, e.used); // [used, rows]
        let pick = |p| cx.reshape(cx.get_rows(cx.reshape(p, [1, e.count, rows, 1]), ids), [e.used, rows, 1, 1]);
        let chosen = pick(probs); // [used, rows]
        // Renormalised over the chosen, then scaled per expert, so the weights need not sum to 1.
        let scaled = match self.weights.get(&format!("blk.{}.ffn_down_exps.scale", e.layer)) {
            Some(scale) => pick(cx.mul(probs, scale)),
            None => chosen,
        };
        let weights = cx.div(scaled, cx.sum_rows(chosen)); // [used, rows]
        self.tap(&format!("route.{}", e.layer), ids);
        self.tap(&format!("route_weight.{}", e.layer), weights);

        let h = x.shape()[0];
        let x = cx.reshape(x, [h, 1, rows, 1]);
        let product = |name: &str, x| cx.mul_mat_id(self.layer_weight(e.layer, name), x, ids);
        let (gate, up) = if e.fused {
            let both = product("ffn_gate_up_exps.weight", x); // [2 width, used, rows]
            let strides = both.strides();
            let half = |at: usize| {
                cx.view(
                    both,
                    [e.width, e.used, rows, 1],
                    [strides[1], strides[2], strides[3]],
                    at * e.width * strides[0],
                )
            };
            (half(0), half(1))
        } else {
            (product("ffn_gate_exps.weight", x), product("ffn_up_exps.weight", x))
        };
        let out = product("ffn_down_exps.weight", self.geglu(gate, up)); // [H, used, rows]
        let out = cx.mul(out, cx.reshape(weights, [1, e.used, rows, 1]));
        let strides = out.strides();
        let part = |j: usize| cx.view(out, [h, rows, 1, 1], [strides[2], strides[3], strides[3]], j * strides[1]);
        // Summed in a fixed order, so that results do not depend on threads.
        (1..e.used).fold(part(0), |sum, j| cx.add(sum, part(j)))
    }

    /// Normed and rotated keys and normed values of the rows, written to the cache. Returns nothing: attention reads the
    /// cache, and nodes run in the order they were added.
    pub fn write_keys(&self, a: &Attention, x: Tensor<'c>) {
        let cx = self.cx;
        let rows = self.rows();
        let key = self.layer_weight_product(a, "attn_k.weight", x);
        let key = cx.reshape(key, [a.head, a.kv_heads, rows, 1]);
        let value = match a.value {
            true => cx.reshape(self.layer_weight_product(a, "attn_v.weight", x), [a.head, a.kv_heads, rows, 1]),
            false => key,
        };
        let value = cx.rms_norm(value, a.eps);
        let key = self.rotate(a, self.norm_in(a.layer, "attn_k_norm.weight", key, a.eps));
        let ring = usize::from(self.cache.is_ring(a.layer));
        let row = a.head * a.kv_heads;
        for (into, from) in self.cache.tensors(a.layer).into_iter().zip([key, value]) {
            let from = cx.reshape(from, [row, rows, 1, 1]);
            self.graph.expand(cx.set_rows(into, from, self.inputs.slots[ring]));
        }
    }

    fn layer_weight_product(&self, a: &Attention, name: &str, x: Tensor<'c>) -> Tensor<'c> {
        self.cx.mul_mat(self.layer_weight(a.layer, name), x)
    }

    /// [d, heads, rows] rotated by the rows' positions.
    fn rotate(&self, a: &Attention, x: Tensor<'c>) -> Tensor<'c> {
        self.cx.rope(x, self.inputs.positions, a.rope_factors.map(|name| self.weight(name)), a.rope)
    }

    /// softmax(q k^T * scale + mask) v: q [d, n, heads, lanes], k and v [d, keys, kv heads, lanes] -> [d, heads, n, lanes]. In
    /// parts where the device's attention does not know the head size.
    pub fn masked_attention(
        &self,
        q: Tensor<'c>,
        k: Tensor<'c>,
        v: Tensor<'c>,
        mask: Tensor<'c>,
        scale: f32,
    ) -> Tensor<'c> {
        let cx = self.cx;
        let whole = cx.attention(q, k, v, mask, scale);
        if self.device.supports(whole) {
            return whole;
        }
        let probs = cx.soft_max_masked(cx.mul_mat_exact(k, q), mask, scale); // [keys, n, heads, lanes]
        let v = cx.cont(cx.permute(v, [1, 0, 2, 3])); // [keys, d, kv heads, lanes]
        cx.cont(cx.permute(cx.mul_mat_exact(v, probs), [0, 2, 1, 3]))
    }

    /// Wo attention(x), [H, rows]: writes the rows' keys and values, then attends to what the mask shows.
    pub fn attention(&self, a: &Attention, x: Tensor<'c>) -> Tensor<'c> {
        let cx = self.cx;
        let (lane, lanes) = self.lanes;
        self.write_keys(a, x);
        let q = self.layer_weight_product(a, "attn_q.weight", x);
        let q = cx.reshape(q, [a.head, a.heads, self.rows(), 1]);
        let q = self.rotate(a, self.norm_in(a.layer, "attn_q_norm.weight", q, a.eps));
        let q = cx.reshape(q, [a.head, a.heads, self.rows_per_lane, lanes]);
        let q = cx.permute(q, [0, 2, 1, 3]); // [d, rows per lane, heads, lanes]
        let ring = usize::from(self.cache.is_ring(a.layer));
        let [k, v] = self.cache.tensors(a.layer).map(|t| self.cache.window(cx, t, a, lane, lanes, self.keys[ring]));
        let out = self.masked_attention(q, k, v, self.inputs.masks[ring], a.scale); // [d, heads, rows per lane, lanes]
        let out = cx.reshape(out, [a.head * a.heads, self.rows(), 1, 1]);
        self.cx.mul_mat(self.layer_weight(a.layer, "attn_output.weight"), out)
    }
}
