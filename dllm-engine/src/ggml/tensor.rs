//! Tensors and element types.

use std::ffi::CStr;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

use llama_sys as sys;

use crate::error::{Error, Result};
use crate::ggml::{Buffer, Context, GgmlType};

/// Bytes of a row of `n` elements (`ggml_row_size`).
pub(crate) fn row_bytes(ty: GgmlType, n: usize) -> usize {
    // SAFETY: pure arithmetic on a known type.
    unsafe { sys::ggml_row_size(ty.id() as sys::ggml_type, n as i64) }
}

/// Expands `out.len()` elements to F32 (`ggml_type_traits.to_float`). The length is a multiple of the type's block.
pub(crate) fn dequantize(ty: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    let wrong = |why: &str| Error::Backend(format!("cannot expand {} values: {why}", ty.name()));
    if !out.len().is_multiple_of(ty.block_size() as usize) || bytes.len() < row_bytes(ty, out.len()) {
        return Err(wrong("the length is not that of whole blocks"));
    }
    if ty == GgmlType::F32 {
        for (value, raw) in out.iter_mut().zip(bytes.chunks_exact(4)) {
            *value = f32::from_le_bytes([raw[0], raw[1], raw[2], raw[3]]);
        }
        return Ok(());
    }
    // SAFETY: known type, static table.
    let traits = unsafe { &*sys::ggml_get_type_traits(ty.id() as sys::ggml_type) };
    let convert = traits.to_float.ok_or_else(|| wrong("ggml has no conversion"))?;
    // SAFETY: the lengths were checked above; conversions read whole blocks and write that many floats.
    unsafe { convert(bytes.as_ptr().cast(), out.as_mut_ptr(), out.len() as i64) };
    Ok(())
}

/// A node or leaf, borrowed from the context it was made in.
#[derive(Clone, Copy)]
pub(crate) struct Tensor<'c> {
    raw: NonNull<sys::ggml_tensor>,
    context: PhantomData<&'c Context>,
}

/// A tensor stored beside the context that owns it; `Context::tensor` gives the borrow back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle(pub(super) NonNull<sys::ggml_tensor>);

// SAFETY: only a name; it is dereferenced through the owning context alone.
unsafe impl Send for Handle {}

impl<'c> Tensor<'c> {
    /// # Safety
    /// `raw` is null or a tensor of a context that lives for `'c`.
    pub(super) unsafe fn from_raw(raw: *mut sys::ggml_tensor) -> Self {
        // ggml never returns null from a constructor: it aborts when a context is full, and contexts here are sized first.
        let raw = NonNull::new(raw).unwrap_or_else(|| unreachable!("ggml returned no tensor"));
        Self { raw, context: PhantomData }
    }

    pub(crate) fn raw(self) -> *mut sys::ggml_tensor {
        self.raw.as_ptr()
    }

    fn get(self) -> &'c sys::ggml_tensor {
        // SAFETY: the context lives for 'c and owns the tensor.
        unsafe { self.raw.as_ref() }
    }

    pub fn handle(self) -> Handle {
        Handle(self.raw)
    }

    pub fn ty(self) -> GgmlType {
        GgmlType::from_id(self.get().type_).unwrap_or_else(|| unreachable!("ggml made a tensor of no type"))
    }

    /// Elements per dimension, the row length first.
    pub fn shape(self) -> [usize; 4] {
        self.get().ne.map(|n| n as usize)
    }

    pub fn elements(self) -> usize {
        self.shape().iter().product()
    }

    /// Bytes from one index to the next, per dimension.
    pub fn strides(self) -> [usize; 4] {
        self.get().nb
    }

    pub fn bytes(self) -> usize {
        // SAFETY: the tensor is alive.
        unsafe { sys::ggml_nbytes(self.raw()) }
    }

    pub fn name(self) -> String {
        // SAFETY: the name is a NUL-terminated array inside the tensor.
        unsafe { CStr::from_ptr(self.get().name.as_ptr()) }.to_string_lossy().into_owned()
    }

    /// Address of the data, on whatever device it lies.
    pub fn data(self) -> *mut std::ffi::c_void {
        self.get().data
    }

    pub fn is_allocated(self) -> bool {
        !self.get().data.is_null()
    }

    /// Copies host values in, from the tensor's start (`ggml_backend_tensor_set`).
    pub fn write<T: Copy>(self, values: &[T]) {
        self.write_at(0, values);
    }

    /// Copies host values in, `offset` bytes from the start.
    pub fn write_at<T: Copy>(self, offset: usize, values: &[T]) {
        let bytes = std::mem::size_of_val(values);
        assert!(self.is_allocated() && offset + bytes <= self.bytes(), "write beyond tensor {}", self.name());
        // SAFETY: allocated and in range (checked); T is plain data by contract of the callers (integers and floats).
        unsafe { sys::ggml_backend_tensor_set(self.raw(), values.as_ptr().cast(), offset, bytes) };
    }

    /// Copies values to the host, `offset` bytes from the start (`ggml_backend_tensor_get`).
    pub fn read_at<T: Copy + Default>(self, offset: usize, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];
        self.read_into(offset, &mut values);
        values
    }

    /// As `read_at`, into a buffer of the caller's.
    pub fn read_into<T: Copy>(self, offset: usize, values: &mut [T]) {
        let bytes = std::mem::size_of_val(values);
        assert!(self.is_allocated() && offset + bytes <= self.bytes(), "read beyond tensor {}", self.name());
        // SAFETY: allocated and in range (checked); every bit pattern is a valid T (integers and floats).
        unsafe { sys::ggml_backend_tensor_get(self.raw(), values.as_mut_ptr().cast(), offset, bytes) };
    }

    /// Copies `rows` rows of a matrix to other rows of it, on its device (`ggml_backend_tensor_copy`).
    pub fn copy_rows(self, from: usize, to: usize, rows: usize) {
        let [width, all, ..] = self.shape();
        assert!(self.is_allocated() && from.max(to) + rows <= all, "rows {from} and {to} + {rows} of {self:?}");
        let stride = self.strides()[1];
        // Views of their own, in a context that lives as long as the copy.
        let Ok(context) = Context::new(2, 0) else { unreachable!("room for two descriptions") };
        let view =
            |at: usize| context.view(self, [width, rows, 1, 1], [stride, stride * rows, stride * rows], at * stride);
        let (source, target) = (view(from), view(to));
        // SAFETY: views of an allocated tensor, in range (checked) and not overlapping, since lanes do not.
        unsafe {
            sys::ggml_backend_view_init(source.raw());
            sys::ggml_backend_view_init(target.raw());
            sys::ggml_backend_tensor_copy(source.raw(), target.raw());
        }
    }

    /// Keeps the tensor's memory from being reused within the graph (`ggml_set_output`).
    pub fn mark_output(self) -> Self {
        // SAFETY: the tensor is alive, and so is what it is a view of: the memory is kept or reused as a whole.
        unsafe {
            sys::ggml_set_output(self.raw());
            if !self.get().view_src.is_null() {
                sys::ggml_set_output(self.get().view_src);
            }
        };
        self
    }

    /// For a memory measurement only: makes the tensor look as if it lay in `buffer`. It must never be computed on.
    pub fn pretend_allocated(self, buffer: &Buffer) {
        // SAFETY: the tensor is alive; nobody else looks at it during a measurement.
        unsafe {
            (*self.raw()).data = 64 as *mut _;
            (*self.raw()).buffer = buffer.raw();
        }
    }

    /// The op that makes it, as ggml names it (`ggml_op_name`).
    pub fn op_name(self) -> String {
        // SAFETY: returns a static text for every op of a live tensor.
        unsafe { CStr::from_ptr(sys::ggml_op_name(self.get().op)) }.to_string_lossy().into_owned()
    }

    /// Whether its data lies where a source's does.
    pub fn overwrites_a_source(self) -> bool {
        // SAFETY: sources of a live tensor are alive or null.
        self.get().src.iter().any(|t| unsafe { t.as_ref() }.is_some_and(|t| t.data == self.get().data))
    }

    /// Names of what it is made from.
    pub fn source_names(self) -> Vec<String> {
        let name = |t: &*mut sys::ggml_tensor| {
            // SAFETY: sources of a live tensor are alive or null; names end with NUL.
            unsafe { t.as_ref() }.map(|t| unsafe { CStr::from_ptr(t.name.as_ptr()) }.to_string_lossy().into_owned())
        };
        self.get().src.iter().filter_map(name).collect()
    }

    /// Whether it only looks at another tensor's data: such nodes run nowhere.
    pub fn is_view(self) -> bool {
        use sys::{
            ggml_op_GGML_OP_NONE as NONE, ggml_op_GGML_OP_PERMUTE as PERMUTE, ggml_op_GGML_OP_RESHAPE as RESHAPE,
            ggml_op_GGML_OP_TRANSPOSE as TRANSPOSE, ggml_op_GGML_OP_VIEW as VIEW,
        };
        [NONE, PERMUTE, RESHAPE, TRANSPOSE, VIEW].contains(&self.get().op)
    }

    /// Whether it writes into a tensor that has its memory already: such a node runs where that memory is.
    pub fn writes_in_place(self) -> bool {
        // SAFETY: what a live tensor views is alive.
        !self.is_view() && unsafe { self.get().view_src.as_ref() }.is_some_and(|t| !t.buffer.is_null())
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} {:?}", self.name(), self.ty(), self.shape())
    }
}
