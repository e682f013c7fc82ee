//! Graphs over several backends: ggml's scheduler runs every node where its weights lie and moves what crosses.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_int};
use std::ptr::NonNull;

use llama_sys as sys;

use crate::error::{Error, Result};
use crate::ggml::{Backend, Graph};

/// A scheduler (`ggml_backend_sched`) with the memory for the intermediate results of one graph at a time.
///
/// A graph can be laid out once only: the scheduler redirects its nodes to copies that it makes on their devices, and
/// these go with the next graph's layout.
#[derive(Debug)]
pub(crate) struct Scheduler {
    raw: NonNull<sys::ggml_backend_sched>,
    backends: usize,
}

// SAFETY: used by its owner alone; backends may be used from any thread, one at a time.
unsafe impl Send for Scheduler {}

impl Scheduler {
    /// Over `backends`, the preferred ones first, the CPU last; they must outlive it. `stream`: products with large batches
    /// whose weights lie in the host's memory run on a GPU, which is sent the weights each time.
    pub fn new(backends: &[Backend], nodes: usize, stream: bool) -> Result<Self> {
        let mut raw: Vec<_> = backends.iter().map(Backend::raw).collect();
        // SAFETY: open backends; null stands for each one's own buffer type.
        let sched = unsafe {
            sys::ggml_backend_sched_new(
                raw.as_mut_ptr(),
                std::ptr::null_mut(),
                raw.len() as c_int,
                nodes,
                false,
                stream,
            )
        };
        let raw = NonNull::new(sched).ok_or_else(|| Error::Backend("ggml made no scheduler".into()))?;
        Ok(Self { raw, backends: backends.len() })
    }

    /// Chooses a backend for every node of a new graph and gives it its place (`ggml_backend_sched_alloc_graph`). The graph
    /// before it must not be computed any more.
    pub fn allocate(&mut self, graph: &mut Graph) -> Result<()> {
        // SAFETY: scheduler and graph are alive; nothing computes now.
        let done = unsafe {
            sys::ggml_backend_sched_reset(self.raw.as_ptr());
            sys::ggml_backend_sched_alloc_graph(self.raw.as_ptr(), graph.raw())
        };
        match done {
            true => Ok(()),
            false => Err(Error::Backend("no memory for a pass's intermediate results on one of the devices".into())),
        }
    }

    /// Computes the graph that was laid out last (`ggml_backend_sched_graph_compute`), and waits for it.
    pub fn compute(&self, graph: &mut Graph) -> Result<()> {
        // SAFETY: laid out before; the scheduler keeps which graph it is.
        let status = unsafe { sys::ggml_backend_sched_graph_compute(self.raw.as_ptr(), graph.raw()) };
        graph.take_failure()?;
        if status == sys::ggml_status_GGML_STATUS_SUCCESS {
            return Ok(());
        }
        // SAFETY: returns a static text.
        let why = unsafe { CStr::from_ptr(sys::ggml_status_to_string(status)) };
        Err(Error::Backend(format!("{} while computing a graph over several devices", why.to_string_lossy())))
    }

    /// Bytes that a graph would need on each backend (`ggml_backend_sched_reserve_size`); allocates nothing. The graph is
    /// spent afterwards.
    pub fn measure(&mut self, graph: &mut Graph) -> Vec<u64> {
        let mut bytes = vec![0_usize; self.backends];
        // SAFETY: alive; `bytes` has one entry per backend.
        unsafe { sys::ggml_backend_sched_reserve_size(self.raw.as_ptr(), graph.raw(), bytes.as_mut_ptr()) };
        bytes.into_iter().map(|n| n as u64).collect()
    }

    /// Bytes held on backend `i`.
    pub fn bytes(&self, i: usize) -> u64 {
        // SAFETY: alive; i is below the number of backends by contract of the callers' lists.
        unsafe {
            let backend = sys::ggml_backend_sched_get_backend(self.raw.as_ptr(), i as c_int);
            sys::ggml_backend_sched_get_buffer_size(self.raw.as_ptr(), backend) as u64
        }
    }

    /// Names of the ops that the last backend, the CPU, runs of a graph that was laid out.
    pub fn ops_on_cpu(&self, graph: &Graph) -> BTreeSet<String> {
        let cpu = self.backends as c_int - 1;
        let on_cpu = |i: &usize| {
            // SAFETY: alive; the node belongs to the graph that was laid out.
            unsafe {
                let chosen = sys::ggml_backend_sched_get_tensor_backend(self.raw.as_ptr(), graph.node(*i).raw());
                chosen == sys::ggml_backend_sched_get_backend(self.raw.as_ptr(), cpu)
            }
        };
        (0..graph.nodes()).filter(on_cpu).map(|i| graph.node(i)).filter(|n| !n.is_view()).map(|n| n.op_name()).collect()
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        // SAFETY: owned by us, freed once; its backends are still open.
        unsafe { sys::ggml_backend_sched_free(self.raw.as_ptr()) };
    }
}
