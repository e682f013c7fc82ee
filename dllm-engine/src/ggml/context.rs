//! A context owns tensor descriptions (no data) and makes graph nodes.
//!
//! Shapes in comments are ggml's order: the row length first.

use std::ffi::CString;
use std::ptr::NonNull;

use llama_sys as sys;

use crate::error::{Error, Result};
use crate::ggml::{GgmlType, Handle, Tensor};

/// Descriptions of tensors and graphs. Their data lies in `Buffer`s or with an `Allocator`.
#[derive(Debug)]
pub(crate) struct Context {
    raw: NonNull<sys::ggml_context>,
    capacity: usize,
    used: std::cell::Cell<usize>,
}

// SAFETY: a context is plain memory that only its owner touches; it is not Sync.
unsafe impl Send for Context {}

/// Rope settings of one layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rope {
    /// Rotated dimensions.
    pub dims: usize,
    /// Frequency base.
    pub base: f32,
}

impl Context {
    /// A context for at most `tensors` tensors and, if `graph_nodes` is not 0, one graph (`ggml_init`).
    pub fn new(tensors: usize, graph_nodes: usize) -> Result<Self> {
        // SAFETY: pure arithmetic.
        let overhead = unsafe { sys::ggml_tensor_overhead() };
        let graph = match graph_nodes {
            0 => 0,
            // SAFETY: pure arithmetic.
            n => unsafe { sys::ggml_graph_overhead_custom(n, false) },
        };
        let params = sys::ggml_init_params {
            mem_size: overhead * tensors + graph,
            mem_buffer: std::ptr::null_mut(),
            no_alloc: true,
        };
        // SAFETY: valid parameters.
        let raw = NonNull::new(unsafe { sys::ggml_init(params) })
            .ok_or_else(|| Error::Backend(format!("no memory for a context of {tensors} tensors")))?;
        Ok(Self { raw, capacity: tensors, used: std::cell::Cell::new(0) })
    }

    pub(super) fn raw(&self) -> *mut sys::ggml_context {
        self.raw.as_ptr()
    }

    /// The borrow for a stored handle. The handle must come from this context; owners keep the two in one struct.
    pub fn tensor(&self, handle: Handle) -> Tensor<'_> {
        // SAFETY: by contract the handle's tensor belongs to this context (or to one that lives as long), which lives for
        // the borrow.
        unsafe { Tensor::from_raw(handle.0.as_ptr()) }
    }

    /// All tensors made here (`ggml_get_first_tensor`, `ggml_get_next_tensor`).
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        // SAFETY: the context is alive.
        let first = NonNull::new(unsafe { sys::ggml_get_first_tensor(self.raw()) });
        // SAFETY: as above; the tensor is of this context.
        std::iter::successors(first, |t| NonNull::new(unsafe { sys::ggml_get_next_tensor(self.raw(), t.as_ptr()) }))
            // SAFETY: made in this context, which lives for the borrow.
            .map(|t| unsafe { Tensor::from_raw(t.as_ptr()) })
    }

    /// ggml aborts when a context is full, so every constructor counts first.
    fn one_more(&self) {
        let used = self.used.get() + 1;
        assert!(used <= self.capacity, "graph context sized for {} tensors is full", self.capacity);
        self.used.set(used);
    }

    /// Wraps a node that a C constructor just made in this context.
    fn node(&self, make: impl FnOnce(*mut sys::ggml_context) -> *mut sys::ggml_tensor) -> Tensor<'_> {
        self.one_more();
        // SAFETY: made in this context, which lives for the borrow.
        unsafe { Tensor::from_raw(make(self.raw())) }
    }

    /// A tensor without data (`ggml_new_tensor`).
    pub fn new_tensor(&self, ty: GgmlType, shape: &[usize]) -> Tensor<'_> {
        let mut ne = [1_i64; 4];
        for (to, from) in ne.iter_mut().zip(shape) {
            *to = *from as i64;
        }
        // SAFETY: four dimensions, a known type, a live context with room.
        self.node(|cx| unsafe { sys::ggml_new_tensor(cx, ty.id() as sys::ggml_type, 4, ne.as_ptr()) })
    }

    /// Names a tensor, for messages and for finding it (`ggml_set_name`; ggml cuts at 63 bytes).
    pub fn named<'c>(&'c self, tensor: Tensor<'c>, name: &str) -> Tensor<'c> {
        if let Ok(name) = CString::new(name) {
            // SAFETY: live tensor, NUL-terminated name that ggml copies.
            unsafe { sys::ggml_set_name(tensor.raw(), name.as_ptr()) };
        }
        tensor
    }

    // ---- element-wise ------------------------------------------------------------------------------------------------

    /// a + b, b repeated over a's rows (`ggml_add`).
    pub fn add<'c>(&'c self, a: Tensor<'c>, b: Tensor<'c>) -> Tensor<'c> {
        // SAFETY: live tensors, shapes by the caller's construction.
        self.node(|cx| unsafe { sys::ggml_add(cx, a.raw(), b.raw()) })
    }

    /// a * b, b repeated over a's rows (`ggml_mul`).
    pub fn mul<'c>(&'c self, a: Tensor<'c>, b: Tensor<'c>) -> Tensor<'c> {
        // SAFETY: as above.
        self.node(|cx| unsafe { sys::ggml_mul(cx, a.raw(), b.raw()) })
    }

    /// a / b, b repeated over a's rows (`ggml_div`).
    pub fn div<'c>(&'c self, a: Tensor<'c>, b: Tensor<'c>) -> Tensor<'c> {
        // SAFETY: as above.
        self.node(|cx| unsafe { sys::ggml_div(cx, a.raw(), b.raw()) })
    }

    /// a * factor (`ggml_scale`).
    pub fn scale<'c>(&'c self, a: Tensor<'c>, factor: f32) -> Tensor<'c> {
        // SAFETY: as above.
        self.node(|cx| unsafe { sys::ggml_scale(cx, a.raw(), factor) })
    }

    /// gelu(gate) * up, tanh form (`ggml_geglu_split`).
    pub fn geglu_split<'c>(&'c self, gate: Tensor<'c>, up: Tensor<'c>) -> Tensor<'c> {
        // SAFETY: as above; equal shapes.
        self.node(|cx| unsafe { sys::ggml_geglu_split(cx, gate.raw(), up.raw()) })
    }

    /// x / sqrt(mean(x^2) + eps) over the row (`ggml_rms_norm`).
    pub fn rms_norm<'c>(&'c self, a: Tensor<'c>, eps: f32) -> Tensor<'c> {
        // SAFETY: as above.
        self.node(|cx| unsafe { sys::ggml_rms_norm(cx, a.raw(), eps) })
    }

    /// Softmax over the row (`ggml_soft_max`).
    pub fn soft_max<'c>(&'c self, a: Tensor<'c>) -> Tensor<'c> {
        // SAFETY: as above.
        self.node(|cx| unsafe { sys::ggml_soft_max(cx, a.raw()) })
    }

    /// Sum of each row, [1, ...] (`ggml_sum_rows`).
    pub fn sum_rows<'c>(&'c self, a: Tensor<'c>) -> Tensor<'c> {
        // SAFETY: as above.
        self.node(|cx| unsafe { sys::ggml_sum_rows(cx, a.raw()) })
    }

    // ---- matrices and rows -------------------------------------------------------------------------------------------

    /// Weights [k, m] times activations [k, n] = [m, n] (`ggml_mul_mat`).
    pub fn mul_mat<'c>(&'c self, weights: Tensor<'c>, x: Tensor<'c>) -> Tensor<'c> {
        debug_assert_eq!(weights.shape()[0], x.shape()[0], "{weights:?} x {x:?}");
        // SAFETY: as above.
        self.node(|cx| unsafe { sys::ggml_mul_mat(cx, weights.raw(), x.raw()) })
    }

    /// Experts [k, m, e], activations [k, 1 or u, n], ids [u, n] = [m, u, n] (`ggml_mul_mat_id`).
    pub fn mul_mat_id<'c>(&'c self, experts: Tensor<'c>, x: Tensor<'c>, ids: Tensor<'c>) -> Tensor<'c> {
        // SAFETY: as above.
        self.node(|cx| unsafe { sys::ggml_mul_mat_id(cx, experts.raw(), x.raw(), ids.raw()) })
    }

    /// Rows of `a` by number (`ggml_get_rows`), as F32.
    pub fn get_rows<'c>(&'c self, a: Tensor<'c>, ids: Tensor<'c>) -> Tensor<'c> {
        // SAFETY: as above; ids are below the row count (checked on the host before they are written).
        self.node(|cx| unsafe { sys::ggml_get_rows(cx, a.raw(), ids.raw()) })
    }

    /// Writes rows of `from` [r, n] into `into` [r, slots] at `slots` I64 [n] (`ggml_set_rows`). Returns a view of `into`.
    pub fn set_rows<'c>(&'c self, into: Tensor<'c>, from: Tensor<'c>, slots: Tensor<'c>) -> Tensor<'c> {
        // SAFETY: as above; slots are below the slot count (computed by the cache).
        self.node(|cx| unsafe { sys::ggml_set_rows(cx, into.raw(), from.raw(), slots.raw()) })
    }

    /// Numbers of the `k` largest elements per row, largest first (`ggml_argsort_top_k`).
    pub fn top_k<'c>(&'c self, a: Tensor<'c>, k: usize) -> Tensor<'c> {
        self.one_more(); // it is a sort and a view
        // SAFETY: as above.
        self.node(|cx| unsafe { sys::ggml_argsort_top_k(cx, a.raw(), k as i32) })
    }

    // ---- attention ---------------------------------------------------------------------------------------------------

    /// NEOX rotation (pairs i, i + dims/2) of [d, heads, n] at positions I32 [n] (`ggml_rope_ext`). `factors` divides the
    /// frequency of each pair.
    pub fn rope<'c>(
        &'c self,
        a: Tensor<'c>,
        positions: Tensor<'c>,
        factors: Option<Tensor<'c>>,
        rope: Rope,
    ) -> Tensor<'c> {
        let factors = factors.map_or(std::ptr::null_mut(), Tensor::raw);
        // SAFETY: as above; positions has one entry per token.
        self.node(|cx| unsafe {
            sys::ggml_rope_ext(
                cx,
                a.raw(),
                positions.raw(),
                factors,
                rope.dims as i32,
                sys::GGML_ROPE_TYPE_NEOX as i32,
                0,
                rope.base,
                1.0,
                0.0,
                1.0,
                0.0,
                0.0,
            )
        })
    }

    /// softmax(q k^T * scale + mask) v (`ggml_flash_attn_ext`): q [d, n, heads, lanes], k and v [d, keys, kv heads, lanes],
    /// mask F16 [keys, n, 1, lanes] -> [d, heads, n, lanes].
    pub fn attention<'c>(
        &'c self,
        q: Tensor<'c>,
        k: Tensor<'c>,
        v: Tensor<'c>,
        mask: Tensor<'c>,
        scale: f32,
    ) -> Tensor<'c> {
        self.node(|cx| {
            // SAFETY: as above.
            let out = unsafe { sys::ggml_flash_attn_ext(cx, q.raw(), k.raw(), v.raw(), mask.raw(), scale, 0.0, 0.0) };
            // SAFETY: out was just made; sums of products in F32 whatever the keys' type.
            unsafe { sys::ggml_prec_set_acc(out, sys::ggml_prec_GGML_PREC_F32) };
            out
        })
    }

    /// softmax(a * scale + mask) over the row (`ggml_soft_max_ext`): a [keys, n, heads, lanes], mask F16 [keys, n, 1, lanes].
    pub fn soft_max_masked<'c>(&'c self, a: Tensor<'c>, mask: Tensor<'c>, scale: f32) -> Tensor<'c> {
        // SAFETY: as above.
        self.node(|cx| unsafe { sys::ggml_soft_max_ext(cx, a.raw(), mask.raw(), scale, 0.0) })
    }

    /// `mul_mat` with products and sums in F32 whatever the device prefers.
    pub fn mul_mat_exact<'c>(&'c self, weights: Tensor<'c>, x: Tensor<'c>) -> Tensor<'c> {
        let out = self.mul_mat(weights, x);
        // SAFETY: out was just made.
        unsafe { sys::ggml_mul_mat_set_prec(out.raw(), sys::ggml_prec_GGML_PREC_F32) };
        out
    }

    /// A contiguous copy (`ggml_cont`).
    pub fn cont<'c>(&'c self, a: Tensor<'c>) -> Tensor<'c> {
        // SAFETY: as above.
        self.node(|cx| unsafe { sys::ggml_cont(cx, a.raw()) })
    }

    // ---- shapes ------------------------------------------------------------------------------------------------------

    /// The same data in another shape (`ggml_reshape_4d`).
    pub fn reshape<'c>(&'c self, a: Tensor<'c>, shape: [usize; 4]) -> Tensor<'c> {
        debug_assert_eq!(a.elements(), shape.iter().product::<usize>(), "{a:?}");
        let n = shape.map(|n| n as i64);
        // SAFETY: as above; the element count is the same and the tensor contiguous.
        self.node(|cx| unsafe { sys::ggml_reshape_4d(cx, a.raw(), n[0], n[1], n[2], n[3]) })
    }

    /// Dimensions in another order (`ggml_permute`): dimension i becomes dimension `order[i]`.
    pub fn permute<'c>(&'c self, a: Tensor<'c>, order: [i32; 4]) -> Tensor<'c> {
        // SAFETY: as above.
        self.node(|cx| unsafe { sys::ggml_permute(cx, a.raw(), order[0], order[1], order[2], order[3]) })
    }

    /// A part of a tensor (`ggml_view_4d`): shape, strides of dimensions 1 to 3 and offset in bytes.
    pub fn view<'c>(&'c self, a: Tensor<'c>, shape: [usize; 4], strides: [usize; 3], offset: usize) -> Tensor<'c> {
        let n = shape.map(|n| n as i64);
        // SAFETY: as above; the part lies inside (ggml checks that as well).
        self.node(|cx| unsafe {
            sys::ggml_view_4d(cx, a.raw(), n[0], n[1], n[2], n[3], strides[0], strides[1], strides[2], offset)
        })
    }

    /// A part of a node's bytes as a contiguous tensor of its own type, `offset` bytes from the start. Custom nodes with
    /// several results put them into one block of bytes.
    pub fn part<'c>(&'c self, block: Tensor<'c>, ty: GgmlType, shape: [usize; 4], offset: usize) -> Tensor<'c> {
        let row = crate::ggml::row_bytes(ty, shape[0]);
        let bytes = row * shape[1] * shape[2] * shape[3];
        assert!(
            block.ty() == GgmlType::I8 && offset + bytes <= block.bytes(),
            "{bytes} bytes at {offset} of {block:?}"
        );
        let view = self.view(block, [bytes, 1, 1, 1], [bytes, bytes, bytes], offset);
        // SAFETY: the view was just made and nobody else looks at it; the new description covers the same bytes.
        unsafe {
            let raw = &mut *view.raw();
            raw.type_ = ty.id() as sys::ggml_type;
            raw.ne = shape.map(|n| n as i64);
            raw.nb = [ty.type_size() as usize, row, row * shape[1], row * shape[1] * shape[2]];
        }
        view
    }

    /// Copies `from` into `to`, converting the type (`ggml_cpy`). Returns a view of `to`.
    pub fn copy<'c>(&'c self, from: Tensor<'c>, to: Tensor<'c>) -> Tensor<'c> {
        // SAFETY: as above; equal element counts.
        self.node(|cx| unsafe { sys::ggml_cpy(cx, from.raw(), to.raw()) })
    }

    /// Raw constructor for custom nodes; see `Graph::custom`.
    pub(super) fn custom_node(
        &self,
        ty: GgmlType,
        shape: [usize; 4],
        args: &[Tensor<'_>],
        fun: sys::ggml_custom_op_t,
        userdata: *mut std::ffi::c_void,
    ) -> Tensor<'_> {
        let n = shape.map(|n| n as i64);
        let mut args: Vec<_> = args.iter().map(|t| t.raw()).collect();
        // SAFETY: at most 10 live arguments (checked by the caller), a function and userdata that outlive the graph.
        self.node(|cx| unsafe {
            sys::ggml_custom_4d(
                cx,
                ty.id() as sys::ggml_type,
                n[0],
                n[1],
                n[2],
                n[3],
                args.as_mut_ptr(),
                args.len() as i32,
                fun,
                sys::GGML_N_TASKS_MAX,
                userdata,
            )
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: owned by us, freed once.
        unsafe { sys::ggml_free(self.raw()) };
    }
}
