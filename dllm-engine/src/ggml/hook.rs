//! The CUDA side of custom nodes (decision D4): ggml's CUDA backend, with our patch, asks these two functions about every
//! `GGML_OP_CUSTOM` node and lets them enqueue it.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use llama_sys as sys;

use super::graph::{Slot, is_ours};
use crate::ggml::Device;

/// Nodes that the host has enqueued so far. A captured graph that is replayed asks for none.
static ENQUEUED: AtomicU64 = AtomicU64::new(0);

pub(crate) fn enqueued() -> u64 {
    ENQUEUED.load(Ordering::Relaxed)
}

type Supports = unsafe extern "C" fn(c_int, *const sys::ggml_tensor) -> bool;
type Compute = unsafe extern "C" fn(c_int, *mut c_void, *mut sys::ggml_tensor) -> bool;
type SetCustomOp = unsafe extern "C" fn(Option<Supports>, Option<Compute>);

/// Installs the hook in the device's backend. `false`: this backend has none (another vendor, or an unpatched library).
pub(super) fn install(device: Device) -> bool {
    let Some(set) = device.proc_address(c"ggml_backend_cuda_set_custom_op") else { return false };
    // SAFETY: our patch exports this signature under this name.
    let set: SetCustomOp = unsafe { std::mem::transmute(set.as_ptr()) };
    // SAFETY: both functions live as long as the process; setting them again is harmless.
    unsafe { set(Some(supports), Some(compute)) };
    true
}

/// The slot of a node that this engine made.
///
/// # Safety
/// `node` is a live tensor.
unsafe fn slot<'a>(node: *const sys::ggml_tensor) -> Option<&'a Slot> {
    // SAFETY: live by contract.
    let (ours, userdata) = unsafe { is_ours(&*node) };
    // SAFETY: our own userdata is a Slot, which the graph that is being computed owns.
    if ours { Some(unsafe { &*userdata.cast::<Slot>() }) } else { None }
}

unsafe extern "C" fn supports(_device: c_int, node: *const sys::ggml_tensor) -> bool {
    // SAFETY: ggml passes a live node.
    unsafe { slot(node) }.is_some_and(|slot| slot.has_device_form())
}

/// Always `true` for our own nodes: `false` would make ggml abort. What went wrong is kept for `Backend::compute`.
unsafe extern "C" fn compute(_device: c_int, stream: *mut c_void, node: *mut sys::ggml_tensor) -> bool {
    ENQUEUED.fetch_add(1, Ordering::Relaxed);
    // SAFETY: ggml passes a live, allocated node.
    match unsafe { slot(node) } {
        // SAFETY: as above; the stream is the backend's.
        Some(slot) => unsafe { slot.enqueue(stream, &*node) },
        None => return false,
    }
    true
}
