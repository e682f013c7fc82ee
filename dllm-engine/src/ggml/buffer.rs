//! Memory on a device.

use std::ptr::NonNull;

use llama_sys as sys;

use crate::error::{Error, Result};
use crate::ggml::{Context, Device, Tensor};

/// Memory that tensors lie in.
#[derive(Debug)]
pub(crate) struct Buffer(NonNull<sys::ggml_backend_buffer>);

// SAFETY: a buffer is an address range; ggml's buffer functions do not depend on the calling thread.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Allocates all tensors of a context that have no memory yet (`ggml_backend_alloc_ctx_tensors_from_buft`), zeroed.
    pub fn for_context(context: &Context, device: Device, what: &str) -> Result<Self> {
        let needed = Self::size_for_context(context, device);
        // SAFETY: context and buffer type are alive.
        let raw = unsafe { sys::ggml_backend_alloc_ctx_tensors_from_buft(context.raw(), device.buffer_type()) };
        let buffer = NonNull::new(raw).map(Self).ok_or_else(|| Error::OutOfMemory {
            what: what.to_owned(),
            needed,
            free: device.memory().0,
            device: device.name(),
        })?;
        // SAFETY: the buffer is alive.
        unsafe { sys::ggml_backend_buffer_clear(buffer.0.as_ptr(), 0) };
        Ok(buffer)
    }

    /// Bytes that `for_context` would allocate (`ggml_backend_alloc_ctx_tensors_from_buft_size`).
    pub fn size_for_context(context: &Context, device: Device) -> u64 {
        // SAFETY: context and buffer type are alive.
        unsafe { sys::ggml_backend_alloc_ctx_tensors_from_buft_size(context.raw(), device.buffer_type()) as u64 }
    }

    /// A buffer of no bytes, for measurements (`ggml_backend_buft_alloc_buffer`).
    pub fn empty(device: Device) -> Result<Self> {
        // SAFETY: a live buffer type.
        let raw = unsafe { sys::ggml_backend_buft_alloc_buffer(device.buffer_type(), 0) };
        NonNull::new(raw).map(Self).ok_or_else(|| Error::Backend(format!("{} made no buffer", device.name())))
    }

    pub(super) fn raw(&self) -> sys::ggml_backend_buffer_t {
        self.0.as_ptr()
    }

    /// A buffer over memory that belongs to somebody else (`ggml_backend_dev_buffer_from_host_ptr`), where the device can
    /// compute on such memory. Weights are only read.
    ///
    /// The memory must stay mapped for as long as the buffer lives: the caller keeps both in one struct, the buffer first.
    pub fn over(device: Device, bytes: &[u8], largest_tensor: u64) -> Option<Self> {
        // SAFETY: the range is valid for reads for the buffer's life (see above); ggml does not write to weight tensors.
        let raw = unsafe {
            sys::ggml_backend_dev_buffer_from_host_ptr(
                device.raw(),
                bytes.as_ptr().cast_mut().cast(),
                bytes.len(),
                largest_tensor as usize,
            )
        };
        NonNull::new(raw).map(Self)
    }

    /// Gives a tensor its place (`ggml_backend_tensor_alloc`).
    pub fn place(&self, tensor: Tensor<'_>, address: *const u8) -> Result<()> {
        // SAFETY: the caller passes an address inside the memory that this buffer was made over.
        let status =
            unsafe { sys::ggml_backend_tensor_alloc(self.0.as_ptr(), tensor.raw(), address.cast_mut().cast()) };
        match status {
            sys::ggml_status_GGML_STATUS_SUCCESS => Ok(()),
            _ => Err(Error::Backend(format!("tensor {} could not be placed", tensor.name()))),
        }
    }

    /// Marks the buffer as weights, which schedulers may prefer to run ops near (`ggml_backend_buffer_set_usage`).
    pub fn mark_as_weights(&self) {
        // SAFETY: the buffer is alive.
        unsafe {
            sys::ggml_backend_buffer_set_usage(
                self.0.as_ptr(),
                sys::ggml_backend_buffer_usage_GGML_BACKEND_BUFFER_USAGE_WEIGHTS,
            )
        };
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: owned by us, freed once; tensors in it are not used after their owner drops.
        unsafe { sys::ggml_backend_buffer_free(self.0.as_ptr()) };
    }
}
