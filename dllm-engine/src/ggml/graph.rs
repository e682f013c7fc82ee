//! Graphs, their custom nodes and their memory.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use llama_sys as sys;

use crate::error::{Error, Result};
use crate::ggml::{Context, Device, GgmlType, Tensor};

/// A custom node (decision D4): computes `dst` from `dst.src`, on the CPU, on a CUDA device, or on both.
pub(crate) trait NodeOp: Send + Sync {
    /// Its name in breakdowns.
    fn name(&self) -> &'static str {
        std::any::type_name::<Self>().rsplit("::").next().unwrap_or_default()
    }

    /// Part `ith` of `nth` on the CPU.
    ///
    /// # Safety
    /// ggml calls this with an allocated `dst` whose sources are those the node was made with. Parts write disjoint data.
    unsafe fn compute(&self, _dst: &sys::ggml_tensor, _ith: usize, _nth: usize) {
        unreachable!("this node has no CPU form: it is made for passes on a CUDA device only")
    }

    /// Whether `enqueue` is there.
    fn has_device_form(&self) -> bool {
        false
    }

    /// Why the device form cannot do this op's sizes, if it cannot.
    fn refusal(&self) -> Option<String> {
        None
    }

    /// Enqueues the whole node on a CUDA stream; no waiting, no allocation, so that it can be captured. Returns 0 or CUDA's
    /// error number.
    ///
    /// # Safety
    /// As `compute`, with data in the device's memory.
    unsafe fn enqueue(&self, _stream: *mut c_void, _dst: &sys::ggml_tensor) -> c_int {
        CUDA_ERROR_NOT_SUPPORTED
    }
}

/// `cudaErrorNotSupported`.
const CUDA_ERROR_NOT_SUPPORTED: c_int = 801;

/// What a custom node's userdata points to; its address must not change.
pub(super) struct Slot {
    op: Box<dyn NodeOp>,
    failure: Mutex<Option<String>>,
}

impl Slot {
    pub(super) fn has_device_form(&self) -> bool {
        self.op.has_device_form()
    }

    /// # Safety
    /// As `NodeOp::enqueue`.
    pub(super) unsafe fn enqueue(&self, stream: *mut c_void, dst: &sys::ggml_tensor) {
        self.guard(|| {
            // SAFETY: by contract.
            match unsafe { self.op.enqueue(stream, dst) } {
                0 => Ok(()),
                code => Err(format!("node {} gave CUDA error {code}", name_of(dst))),
            }
        });
    }

    /// Runs an op and keeps its failure: neither a panic nor a `false` may cross ggml's frames.
    fn guard(&self, run: impl FnOnce() -> Result<(), String>) {
        let failure = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(())) => return,
            Ok(Err(why)) => why,
            Err(panic) => panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                .map_or_else(|| "a custom op panicked".into(), |text| format!("a custom op panicked: {text}")),
        };
        if let Ok(mut kept) = self.failure.lock() {
            kept.get_or_insert(failure);
        }
    }
}

fn name_of(t: &sys::ggml_tensor) -> String {
    let name = t.name.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect::<Vec<_>>();
    String::from_utf8_lossy(&name).into_owned()
}

/// The parameters that `ggml_custom_4d` stores in a node (`ggml_custom_op_params` of ggml-impl.h; the ABI is the pin's).
#[repr(C)]
#[derive(Clone, Copy)]
struct CustomParams {
    fun: sys::ggml_custom_op_t,
    tasks: c_int,
    userdata: *mut c_void,
}

/// Whether a custom node was made here, and its userdata.
pub(super) fn is_ours(node: &sys::ggml_tensor) -> (bool, *mut c_void) {
    const { assert!(size_of::<CustomParams>() <= size_of::<[i32; 16]>()) };
    // SAFETY: op_params holds at least as many bytes (checked above); for other ops they are only compared.
    let params = unsafe { node.op_params.as_ptr().cast::<CustomParams>().read_unaligned() };
    let ours = node.op == sys::ggml_op_GGML_OP_CUSTOM
        && params.fun.is_some_and(|f| f as usize == trampoline as *const () as usize);
    (ours, params.userdata)
}

/// The head of ggml's graph (`ggml_cgraph` of ggml-impl.h; the ABI is the pin's).
#[repr(C)]
struct GraphHead {
    size: c_int,
    nodes_used: c_int,
    leafs_used: c_int,
    nodes: *mut *mut sys::ggml_tensor,
    grads: *mut *mut sys::ggml_tensor,
    grad_accs: *mut *mut sys::ggml_tensor,
    leafs: *mut *mut sys::ggml_tensor,
    use_counts: *mut i32,
    hash_size: usize,
    hash_used: *mut u32,
    hash_keys: *mut *mut sys::ggml_tensor,
    order: c_int,
    uid: u64,
}

/// Gives a new graph a number of its own. Where it has one, ggml's CUDA backend tells a graph that it has captured by the
/// number, instead of comparing about a kilobyte per node before each replay. `false`: this ggml's graphs look otherwise.
fn number(raw: NonNull<sys::ggml_cgraph>, nodes: usize) -> bool {
    // Beyond those that ggml's own scheduler gives.
    static NEXT: AtomicU64 = AtomicU64::new(1 << 32);
    let head = raw.as_ptr().cast::<GraphHead>();
    // SAFETY: a graph just made; what is read before it is known to be the expected structure lies within the graph's own
    // memory, which the arrays behind it make longer than the head.
    unsafe {
        let expected = (*head).size as usize == nodes
            && (*head).nodes == sys::ggml_graph_nodes(raw.as_ptr())
            && (*head).nodes_used == 0
            && (*head).order == 0
            && (*head).uid == 0;
        if expected {
            (*head).uid = NEXT.fetch_add(1, Ordering::Relaxed);
        }
        expected
    }
}

/// A graph with the context that owns its nodes.
pub(crate) struct Graph {
    #[allow(clippy::vec_box)] // nodes point to the slots, so their addresses must not change
    slots: RefCell<Vec<Box<Slot>>>,
    raw: NonNull<sys::ggml_cgraph>,
    context: Context,
}

// SAFETY: the graph lies in its own context; ops are Send + Sync.
unsafe impl Send for Graph {}

/// Called by ggml's CPU threads.
unsafe extern "C" fn trampoline(dst: *mut sys::ggml_tensor, ith: c_int, nth: c_int, userdata: *mut c_void) {
    // SAFETY: userdata is the Slot given at construction; the graph owns it and outlives every compute.
    let slot = unsafe { &*userdata.cast::<Slot>() };
    slot.guard(|| {
        // SAFETY: ggml passes a live, allocated node.
        unsafe { slot.op.compute(&*dst, ith as usize, nth as usize) };
        Ok(())
    });
}

impl Graph {
    /// An empty graph for at most `nodes` nodes and leaves (`ggml_new_graph_custom`).
    pub fn new(nodes: usize) -> Result<Self> {
        let context = Context::new(nodes, nodes)?;
        // SAFETY: the context was sized for this graph.
        let raw = NonNull::new(unsafe { sys::ggml_new_graph_custom(context.raw(), nodes, false) })
            .ok_or_else(|| Error::Backend("ggml made no graph".into()))?;
        number(raw, nodes);
        Ok(Self { slots: RefCell::default(), raw, context })
    }

    /// The context that nodes of this graph are made in.
    pub fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn raw(&mut self) -> *mut sys::ggml_cgraph {
        self.raw.as_ptr()
    }

    /// Takes ownership of a custom op; the returned key makes nodes with `OpKey::node`.
    pub fn own(&self, op: impl NodeOp + 'static) -> OpKey {
        let slot = Box::new(Slot { op: Box::new(op), failure: Mutex::new(None) });
        let address: *const Slot = &*slot;
        self.slots.borrow_mut().push(slot);
        OpKey(address.cast_mut().cast())
    }

    /// Adds a node and all it depends on (`ggml_build_forward_expand`); nodes run in the order of these calls.
    pub fn expand(&self, node: Tensor<'_>) {
        // SAFETY: graph and node are alive and of the same context.
        unsafe { sys::ggml_build_forward_expand(self.raw.as_ptr(), node.raw()) };
    }

    /// The i-th node alone, `times` over (`ggml_graph_add_node`), for timing: its sources are as the last computation of this
    /// graph left them. Must not outlive this graph.
    pub fn alone(&self, i: usize, times: usize) -> Result<Self> {
        let graph = Self::new(times.max(1) + 16)?;
        for _ in 0..times {
            // SAFETY: both graphs are alive; the node's memory belongs to this one.
            unsafe { sys::ggml_graph_add_node(graph.raw.as_ptr(), self.node(i).raw()) };
        }
        Ok(graph)
    }

    /// What the i-th node does, the same for all layers: a custom op's name, else ggml's, with its weight's.
    pub fn label(&self, i: usize) -> String {
        let node = self.node(i);
        // SAFETY: a live node of this graph.
        let (ours, userdata) = is_ours(unsafe { &*node.raw() });
        if ours {
            // SAFETY: the userdata of our nodes is a slot that this graph owns.
            return unsafe { &*userdata.cast::<Slot>() }.op.name().to_owned();
        }
        let weight = node.source_names().into_iter().find(|name| name.ends_with(".weight"));
        let Some(weight) = weight else { return node.op_name() };
        let weight = weight.trim_end_matches(".weight");
        let part = weight.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map_or(weight, |(_, part)| part);
        format!("{} {part}", node.op_name())
    }

    /// Asks every custom op for what it cannot do, before anything is computed.
    pub fn check(&self) -> Result<()> {
        match self.slots.borrow().iter().find_map(|slot| slot.op.refusal()) {
            None => Ok(()),
            Some(why) => Err(Error::Backend(format!("{why}; run this model on the device CPU"))),
        }
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

    /// Turns the kept failure of a custom op into an error.
    pub(super) fn take_failure(&self) -> Result<()> {
        for slot in self.slots.borrow().iter() {
            if let Some(why) = slot.failure.lock().ok().and_then(|mut kept| kept.take()) {
                return Err(Error::Backend(why));
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
        assert!(args.len() < sys::GGML_MAX_SRC as usize, "{} arguments", args.len());
        let node = cx.custom_node(ty, shape, args, Some(trampoline), self.0);
        // ggml's CUDA backend replays a captured graph while its nodes look the same. A number of its own keeps a node from
        // looking like a dropped one at the same address.
        static SERIAL: AtomicI32 = AtomicI32::new(1);
        // SAFETY: the node was just made and nobody else looks at it; the last word is beyond `CustomParams`.
        unsafe { (*node.raw()).op_params[15] = SERIAL.fetch_add(1, Ordering::Relaxed) };
        node
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

#[cfg(test)]
mod tests {
    use super::*;

    struct Refusing(bool);

    impl NodeOp for Refusing {
        fn refusal(&self) -> Option<String> {
            self.0.then(|| "kernel geglu cannot do width 6".into())
        }
    }

    #[test]
    fn graphs_of_the_pin_take_a_number() {
        let graph = Graph::new(8).unwrap();
        // SAFETY: the graph is alive, and `number` found the structure expected.
        let uid = |graph: &Graph| unsafe { (*graph.raw.as_ptr().cast::<GraphHead>()).uid };
        let other = Graph::new(8).unwrap();
        assert!(uid(&graph) >= 1 << 32, "this ggml's graphs look otherwise: GraphHead must follow ggml-impl.h");
        assert_ne!(uid(&graph), uid(&other));
        assert!(!number(graph.raw, 8), "a graph that has one keeps it");
        assert!(!number(other.raw, 9), "another size is not this graph");
    }

    #[test]
    fn a_graph_says_what_its_ops_cannot_do_before_it_runs() {
        let graph = Graph::new(8).unwrap();
        graph.own(Refusing(false));
        assert!(graph.check().is_ok());
        graph.own(Refusing(true));
        let why = graph.check().unwrap_err().to_string();
        assert!(why.ends_with("kernel geglu cannot do width 6; run this model on the device CPU"), "{why}");
    }
}
