//! Graphs, their custom nodes and their memory.

use std::any::Any;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Mutex;

use llama_sys as sys;

use crate::error::{Error, Result};
use crate::ggml::{Context, Device, GgmlType, Tensor};

/// The CPU side of a custom node (decision D4): computes part `ith` of `nth` of `dst` from `dst.src`.
pub(crate) trait NodeOp: Send + Sync {
    /// # Safety
    /// ggml calls this with an allocated `dst` whose sources are those the node was made with. Parts write disjoint data.
    unsafe fn compute(&self, dst: &sys::ggml_tensor, ith: usize, nth: usize);
}

/// What a custom node's userdata points to; its address must not change.
struct Slot {
    op: Box<dyn NodeOp>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A graph with the context that owns its nodes.
pub(crate) struct Graph {
    #[allow(clippy::vec_box)] // nodes point to the slots, so their addresses must not change
    slots: Vec<Box<Slot>>,
    raw: NonNull<sys::ggml_cgraph>,
    context: Context,
}

// SAFETY: the graph lies in its own context; ops are Send + Sync.
unsafe impl Send for Graph {}

/// Called by ggml's threads. Panics are parked, since they must not cross C frames.
unsafe extern "C" fn trampoline(dst: *mut sys::ggml_tensor, ith: c_int, nth: c_int, userdata: *mut c_void) {
    // SAFETY: userdata is the Slot given at construction; the graph owns it and outlives every compute.
    let slot = unsafe { &*userdata.cast::<Slot>() };
    let run = AssertUnwindSafe(|| {
        // SAFETY: ggml passes a live, allocated node.
        unsafe { slot.op.compute(&*dst, ith as usize, nth as usize) }
    });
    if let Err(panic) = catch_unwind(run)
        && let Ok(mut parked) = slot.panic.lock()
    {
        *parked = Some(panic);
    }
}

impl Graph {
    /// An empty graph for at most `nodes` nodes and leaves (`ggml_new_graph_custom`).
    pub fn new(nodes: usize) -> Result<Self> {
        let context = Context::new(nodes, nodes)?;
        // SAFETY: the context was sized for this graph.
        let raw = NonNull::new(unsafe { sys::ggml_new_graph_custom(context.raw(), nodes, false) })
            .ok_or_else(|| Error::Backend("ggml made no graph".into()))?;
        Ok(Self { slots: Vec::new(), raw, context })
    }

    /// The context that nodes of this graph are made in.
    pub fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn raw(&mut self) -> *mut sys::ggml_cgraph {
        self.raw.as_ptr()
    }

    /// Takes ownership of a custom op; the returned key makes nodes with `OpKey::node`.
    pub fn own(&mut self, op: Box<dyn NodeOp>) -> OpKey {
        self.slots.push(Box::new(Slot { op, panic: Mutex::new(None) }));
        let slot: *const Slot = &**self.slots.last().unwrap_or_else(|| unreachable!("pushed above"));
        OpKey(slot.cast_mut().cast())
    }

    /// Adds a node and all it depends on (`ggml_build_forward_expand`); nodes run in the order of these calls.
    pub fn expand(&self, node: Tensor<'_>) {
        // SAFETY: graph and node are alive and of the same context.
        unsafe { sys::ggml_build_forward_expand(self.raw.as_ptr(), node.raw()) };
    }

    pub fn nodes(&self) -> usize {
        // SAFETY: the graph is alive.
        unsafe { sys::ggml_graph_n_nodes(self.raw.as_ptr()) as usize }
    }

    /// The i-th node, below `nodes()`.
    pub fn node(&self, i: usize) -> Tensor<'_> {
        assert!(i < self.nodes(), "node {i} of {}", self.nodes());
        // SAFETY: in range; nodes belong to this graph's context.
        unsafe { Tensor::from_raw(sys::ggml_graph_node(self.raw.as_ptr(), i as c_int)) }
    }

    /// Turns a parked panic of a custom op into an error.
    pub(super) fn take_panic(&self) -> Result<()> {
        for slot in &self.slots {
            if let Some(panic) = slot.panic.lock().ok().and_then(|mut parked| parked.take()) {
                let text = panic
                    .downcast_ref::<String>()
                    .cloned()
                    .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                    .unwrap_or_default();
                return Err(Error::Backend(format!("a custom op panicked: {text}")));
            }
        }
        Ok(())
    }
}

/// A custom op owned by a graph.
#[derive(Clone, Copy)]
pub(crate) struct OpKey(*mut c_void);

impl OpKey {
    /// A node of the graph that owns the op (`ggml_custom_4d`).
    pub fn node<'c>(self, cx: &'c Context, ty: GgmlType, shape: [usize; 4], args: &[Tensor<'c>]) -> Tensor<'c> {
        assert!(args.len() <= sys::GGML_MAX_SRC as usize, "{} arguments", args.len());
        cx.custom_node(ty, shape, args, Some(trampoline), self.0)
    }
}

/// Memory for the intermediate results of graphs that take turns (`ggml_gallocr`). Each graph is laid out once, over the
/// same bytes, and keeps its places for as long as the memory does not move.
#[derive(Debug)]
pub(crate) struct Allocator {
    raw: NonNull<sys::ggml_gallocr>,
    device: Device,
}

// SAFETY: plain memory bookkeeping that only its owner touches.
unsafe impl Send for Allocator {}

impl Allocator {
    pub fn new(device: Device) -> Result<Self> {
        // SAFETY: a live buffer type.
        let raw = NonNull::new(unsafe { sys::ggml_gallocr_new(device.buffer_type()) })
            .ok_or_else(|| Error::Backend("ggml made no allocator".into()))?;
        Ok(Self { raw, device })
    }

    /// Gives every node of a new graph its place (`ggml_gallocr_alloc_graph`). `true`: the memory had to grow and moved,
    /// so graphs laid out earlier must be dropped, not computed.
    pub fn allocate(&mut self, graph: &mut Graph) -> Result<bool> {
        let before = self.bytes();
        // SAFETY: allocator and graph are alive; nothing computes now.
        if !unsafe { sys::ggml_gallocr_alloc_graph(self.raw.as_ptr(), graph.raw()) } {
            return Err(Error::OutOfMemory {
                what: "the compute buffer".into(),
                needed: Self::measure(self.device, graph)?,
                free: self.device.memory().0,
                device: self.device.name(),
            });
        }
        Ok(before != 0 && self.bytes() != before)
    }

    /// Bytes that a graph would need (`ggml_gallocr_reserve_n_size`); allocates nothing.
    pub fn measure(device: Device, graph: &mut Graph) -> Result<u64> {
        let scratch = Self::new(device)?;
        let mut bytes = 0_usize;
        // SAFETY: null id lists mean buffer 0; `bytes` has one entry for this allocator's one buffer.
        unsafe {
            sys::ggml_gallocr_reserve_n_size(
                scratch.raw.as_ptr(),
                graph.raw(),
                std::ptr::null(),
                std::ptr::null(),
                &mut bytes,
            )
        };
        Ok(bytes as u64)
    }

    /// Bytes held now.
    pub fn bytes(&self) -> u64 {
        // SAFETY: alive; one buffer.
        unsafe { sys::ggml_gallocr_get_buffer_size(self.raw.as_ptr(), 0) as u64 }
    }
}

impl Drop for Allocator {
    fn drop(&mut self) {
        // SAFETY: owned by us, freed once.
        unsafe { sys::ggml_gallocr_free(self.raw.as_ptr()) };
    }
}
