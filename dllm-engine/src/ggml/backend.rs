//! Devices and backends.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;
use std::sync::Once;

use llama_sys as sys;

use crate::error::{Error, Result};
use crate::ggml::{Graph, Tensor};

/// Most threads that ggml takes.
pub(crate) const MAX_THREADS: usize = sys::GGML_MAX_N_THREADS as usize;

/// Kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceKind {
    Cpu,
    Gpu,
    /// BLAS, AMX: helpers of the CPU, never chosen by themselves.
    Accelerator,
}

/// A device that ggml knows. Devices live as long as the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Device(NonNull<sys::ggml_backend_device>);

// SAFETY: a device is a static description; ggml's device functions used here only read it or ask the driver.
unsafe impl Send for Device {}
// SAFETY: see above.
unsafe impl Sync for Device {}

/// All devices, in ggml's order (`ggml_backend_dev_get`).
pub(crate) fn devices() -> Vec<Device> {
    load_backends();
    // SAFETY: no arguments.
    let count = unsafe { sys::ggml_backend_dev_count() };
    (0..count)
        .filter_map(|i| {
            // SAFETY: i is below the count just read; devices are never removed.
            NonNull::new(unsafe { sys::ggml_backend_dev_get(i) }).map(Device)
        })
        .collect()
}

/// With `dynamic-backends`, loads the backend libraries once: those beside the program, else those of the build.
fn load_backends() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        super::log::init();
        #[cfg(dynamic_backends)]
        {
            let beside = std::env::current_exe().ok().and_then(|exe| exe.parent().map(|p| p.to_owned()));
            for folder in beside.into_iter().chain([env!("DLLM_BACKEND_DIR").into()]) {
                // SAFETY: no arguments.
                if unsafe { sys::ggml_backend_reg_count() } > 0 {
                    break;
                }
                if let Ok(folder) = std::ffi::CString::new(folder.to_string_lossy().as_bytes()) {
                    // SAFETY: a NUL-terminated path that outlives the call.
                    unsafe { sys::ggml_backend_load_all_from_path(folder.as_ptr()) };
                }
            }
        }
    });
}

fn text(p: *const c_char) -> String {
    if p.is_null() {
        return String::new();
    }
    // SAFETY: ggml returns NUL-terminated static texts.
    unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned()
}

impl Device {
    /// The CPU, which is always there in a static build.
    #[cfg(test)]
    pub fn cpu() -> Option<Self> {
        devices().into_iter().find(|d| d.kind() == DeviceKind::Cpu)
    }

    /// `CPU`, `CUDA0`, `Vulkan0` (`ggml_backend_dev_name`).
    pub fn name(self) -> String {
        // SAFETY: the device is valid for the process's life.
        text(unsafe { sys::ggml_backend_dev_name(self.0.as_ptr()) })
    }

    /// The product's name (`ggml_backend_dev_description`).
    pub fn description(self) -> String {
        // SAFETY: as above.
        text(unsafe { sys::ggml_backend_dev_description(self.0.as_ptr()) })
    }

    pub fn kind(self) -> DeviceKind {
        // SAFETY: as above.
        match unsafe { sys::ggml_backend_dev_type(self.0.as_ptr()) } {
            sys::ggml_backend_dev_type_GGML_BACKEND_DEVICE_TYPE_CPU => DeviceKind::Cpu,
            sys::ggml_backend_dev_type_GGML_BACKEND_DEVICE_TYPE_GPU
            | sys::ggml_backend_dev_type_GGML_BACKEND_DEVICE_TYPE_IGPU => DeviceKind::Gpu,
            _ => DeviceKind::Accelerator,
        }
    }

    /// Free and total memory in bytes (`ggml_backend_dev_memory`). The CPU's free memory is what the system can give.
    pub fn memory(self) -> (u64, u64) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the device is valid; both pointers are to live integers.
        unsafe { sys::ggml_backend_dev_memory(self.0.as_ptr(), &mut free, &mut total) };
        (free as u64, total as u64)
    }

    /// Buffer type of ordinary allocations (`ggml_backend_dev_buffer_type`).
    pub(super) fn buffer_type(self) -> sys::ggml_backend_buffer_type_t {
        // SAFETY: the device is valid.
        unsafe { sys::ggml_backend_dev_buffer_type(self.0.as_ptr()) }
    }

    pub(super) fn raw(self) -> sys::ggml_backend_dev_t {
        self.0.as_ptr()
    }

    /// Whether custom nodes can run here (CUDA with our patch); then sees to it that they do.
    pub fn runs_custom_nodes(self) -> bool {
        super::hook::install(self)
    }

    /// Whether this device can run a node (`ggml_backend_dev_supports_op`).
    pub fn supports(self, node: Tensor<'_>) -> bool {
        // SAFETY: the device is valid for the process's life, the tensor is alive.
        unsafe { sys::ggml_backend_dev_supports_op(self.raw(), node.raw()) }
    }

    /// CUDA's number of this device.
    pub fn cuda_index(self) -> Option<i32> {
        self.name().strip_prefix("CUDA")?.parse().ok()
    }

    /// Address of a function that the device's backend offers beyond the common interface.
    pub(crate) fn proc_address(self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: device and registry are valid for the process's life; the name is NUL-terminated.
        NonNull::new(unsafe {
            sys::ggml_backend_reg_get_proc_address(sys::ggml_backend_dev_backend_reg(self.raw()), name.as_ptr())
        })
    }
}

type ThreadpoolNew = unsafe extern "C" fn(*mut sys::ggml_threadpool_params) -> *mut sys::ggml_threadpool;
type ThreadpoolFree = unsafe extern "C" fn(*mut sys::ggml_threadpool);
type SetThreadpool = unsafe extern "C" fn(sys::ggml_backend_t, *mut sys::ggml_threadpool);
type SetThreads = unsafe extern "C" fn(sys::ggml_backend_t, i32);

/// Threads that live as long as the backend, so that a step does not start any.
#[derive(Debug)]
struct Threads {
    pool: NonNull<sys::ggml_threadpool>,
    free: ThreadpoolFree,
}

/// An open backend: a device and the stream of work on it.
#[derive(Debug)]
pub(crate) struct Backend {
    raw: NonNull<sys::ggml_backend>,
    device: Device,
    threads: Option<Threads>,
    thread_count: usize,
}

// SAFETY: ggml backends may be used from any thread, one at a time; `Backend` is not Sync and all use is through &mut or
// from the thread that owns the engine.
unsafe impl Send for Backend {}

impl Backend {
    /// Opens a device (`ggml_backend_dev_init`). `threads` matters for the CPU only.
    pub fn open(device: Device, threads: usize) -> Result<Self> {
        // SAFETY: the device is valid; a null parameter text is allowed.
        let raw = unsafe { sys::ggml_backend_dev_init(device.raw(), std::ptr::null()) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::Backend(format!("{} could not be opened", device.name())))?;
        let mut backend = Self { raw, device, threads: None, thread_count: threads };
        if device.kind() == DeviceKind::Cpu {
            backend.start_threads(threads);
        }
        Ok(backend)
    }

    fn start_threads(&mut self, threads: usize) {
        let find = |name: &CStr| self.device.proc_address(name);
        let count = threads.clamp(1, MAX_THREADS) as i32;
        if let Some(set) = find(c"ggml_backend_set_n_threads") {
            // SAFETY: the registry promises this signature under this name.
            let set: SetThreads = unsafe { std::mem::transmute(set.as_ptr()) };
            // SAFETY: the backend is open.
            unsafe { set(self.raw.as_ptr(), count) };
        }
        let (Some(new), Some(free), Some(set)) =
            (find(c"ggml_threadpool_new"), find(c"ggml_threadpool_free"), find(c"ggml_backend_cpu_set_threadpool"))
        else {
            return;
        };
        // SAFETY: the registry promises these signatures under these names.
        let (new, free, set): (ThreadpoolNew, ThreadpoolFree, SetThreadpool) = unsafe {
            (
                std::mem::transmute::<*mut c_void, ThreadpoolNew>(new.as_ptr()),
                std::mem::transmute::<*mut c_void, ThreadpoolFree>(free.as_ptr()),
                std::mem::transmute::<*mut c_void, SetThreadpool>(set.as_ptr()),
            )
        };
        // SAFETY: a plain value is returned.
        let mut params = unsafe { sys::ggml_threadpool_params_default(count) };
        // SAFETY: params is a live struct.
        if let Some(pool) = NonNull::new(unsafe { new(&mut params) }) {
            // SAFETY: backend and pool are alive; the pool is freed after the backend in Drop.
            unsafe { set(self.raw.as_ptr(), pool.as_ptr()) };
            self.threads = Some(Threads { pool, free });
        }
    }

    pub(super) fn raw(&self) -> sys::ggml_backend_t {
        self.raw.as_ptr()
    }

    /// Computes a graph whose tensors are allocated (`ggml_backend_graph_compute`), and waits for it.
    pub fn compute(&self, graph: &mut Graph) -> Result<()> {
        // SAFETY: the graph's context is alive and its nodes are allocated (Graph::allocated checks before).
        let status = unsafe { sys::ggml_backend_graph_compute(self.raw.as_ptr(), graph.raw()) };
        graph.take_failure()?;
        match status {
            sys::ggml_status_GGML_STATUS_SUCCESS => Ok(()),
            other => {
                // SAFETY: returns a static text.
                let why = text(unsafe { sys::ggml_status_to_string(other) });
                Err(Error::Backend(format!("{} while computing a graph on {}", why, self.device.name())))
            }
        }
    }

    pub fn threads(&self) -> usize {
        self.thread_count
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // SAFETY: opened by us, freed once; nothing computes on it now, since compute waits.
        unsafe { sys::ggml_backend_free(self.raw.as_ptr()) };
        if let Some(threads) = self.threads.take() {
            // SAFETY: made by the matching `new`, no backend uses it any more.
            unsafe { (threads.free)(threads.pool.as_ptr()) };
        }
    }
}
