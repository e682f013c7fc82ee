//! A CUDA device for tests and bench: memory through ggml's buffers, launches on the default stream.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::input::Matrix;
use crate::error::{Error, Result};
use crate::ggml::{Buffer, Context, Device, GgmlType, Handle, devices};
use crate::kernels::library::{In, Kernels, Out};

/// One user at a time: the tests of one process would else share the default stream and the memory.
static ALONE: Mutex<()> = Mutex::new(());

/// Bytes behind every piece of memory that nobody may write to.
const FENCE: usize = 256;
/// What they hold, and what fresh memory holds: NaN as F32 and F16, -1 as an integer.
const POISON: u8 = 0xFF;
/// Bytes that are copied to the device at a time.
const CHUNK: usize = 1 << 24;

/// The first CUDA device, and the kernels.
pub(crate) struct Gpu {
    pub kernels: &'static Kernels,
    device: Device,
    _alone: MutexGuard<'static, ()>,
}

/// Enqueues a kernel on the default stream and gives its code: `launch!(gpu, dllm_geglu(x.input(), 1, 4, out.out()))`.
macro_rules! launch {
    ($gpu:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: pointers are to device memory that the caller made with the sizes of the kernel's header, or the kernel
        // refuses the sizes before it looks at memory. Freeing device memory waits for what is enqueued.
        unsafe { ($gpu.kernels.$name)(std::ptr::null_mut(), $($arg),*) }
    }};
}
pub(crate) use launch;

impl Gpu {
    /// # Errors
    /// Where there is no CUDA device or no kernel library.
    pub fn open() -> Result<Self> {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let found = devices().into_iter().find_map(|device| device.cuda_index().map(|index| (device, index)));
        let (device, index) = found.ok_or_else(|| Error::Backend("ggml knows no CUDA device".into()))?;
        let kernels = Kernels::get()?;
        kernels.check(kernels.set_device(index), "choosing the device")?;
        Ok(Self { kernels, device, _alone: alone })
    }

    /// The product's name.
    pub fn name(&self) -> String {
        self.device.description()
    }

    /// `n` elements whose bytes are all 0xFF.
    pub fn poisoned<T: Copy>(&self, n: usize) -> Memory<T> {
        let bytes = n * size_of::<T>();
        let make = || {
            let context = Context::new(1, 0)?;
            let tensor = context.new_tensor(GgmlType::I8, &[bytes + FENCE]).handle();
            let buffer = Buffer::for_context(&context, self.device, "an input or output of a kernel")?;
            Ok::<_, Error>((context, tensor, buffer))
        };
        let (context, tensor, buffer) = make().unwrap_or_else(|e| panic!("{e}"));
        let memory = Memory { tensor, n, _buffer: buffer, context, element: PhantomData };
        memory.fill(&[POISON], bytes + FENCE);
        memory
    }

    /// A copy of the values.
    pub fn put<T: Copy>(&self, values: &[T]) -> Memory<T> {
        let memory = self.poisoned(values.len());
        memory.tensor().write(values);
        memory
    }

    /// `n` elements, the values again and again.
    pub fn repeated<T: Copy>(&self, values: &[T], n: usize) -> Memory<T> {
        let memory = self.poisoned(n);
        memory.fill(values, n * size_of::<T>());
        memory
    }

    /// A matrix, or a gate and an up matrix, in the order of the tensor cores, `copies` times one after the other.
    pub fn repacked(&self, matrix: &Matrix, partner: Option<&Matrix>, copies: usize) -> Memory<u8> {
        let (ty, matrices) = (matrix.ty.id() as i32, 1 + usize::from(partner.is_some()));
        let one = self.kernels.repack_bytes(ty, matrix.rows * matrices, matrix.k);
        assert!(one > 0, "{} rows of {} cannot be repacked", matrix.ty, matrix.k);
        let (source, partner) = (self.put(&matrix.bytes), partner.map(|partner| self.put(&partner.bytes)));
        let packed = self.poisoned(one * copies);
        for i in 0..copies {
            let into = packed.out().cast::<u8>().wrapping_add(i * one).cast();
            let partner = partner.as_ref().map(Memory::out);
            self.ran(self.kernels.repack(ty, source.out(), partner, matrix.rows, matrix.k, into));
        }
        packed
    }

    /// Waits, and panics where something went wrong.
    pub fn ran(&self, code: i32) {
        let wait = self.kernels.check(code, "enqueueing").and_then(|()| self.wait());
        wait.unwrap_or_else(|e| panic!("{e}"));
    }

    /// Waits for what is enqueued.
    pub fn wait(&self) -> Result<()> {
        self.kernels.check(self.kernels.wait(), "running")
    }
}

#[cfg(test)]
impl Gpu {
    /// The values of a piece of memory, once all is done; its fence must be as it was.
    pub fn get<T: Copy + Default>(&self, memory: &Memory<T>) -> Vec<T> {
        self.wait().unwrap_or_else(|e| panic!("{e}"));
        let bytes = memory.n * size_of::<T>();
        let fence: Vec<u8> = memory.tensor().read_at(bytes, FENCE);
        assert!(fence.iter().all(|byte| *byte == POISON), "a kernel wrote behind its output");
        memory.tensor().read_at(0, memory.n)
    }

    /// Whether nothing was written there since it was made.
    pub fn untouched<T: Copy>(&self, memory: &Memory<T>) -> bool {
        self.wait().unwrap_or_else(|e| panic!("{e}"));
        memory.tensor().read_at::<u8>(0, memory.n * size_of::<T>() + FENCE).iter().all(|byte| *byte == POISON)
    }
}

/// Memory of the device for `n` elements.
pub(crate) struct Memory<T> {
    tensor: Handle,
    n: usize,
    _buffer: Buffer,
    context: Context,
    element: PhantomData<T>,
}

impl<T: Copy> Memory<T> {
    fn tensor(&self) -> crate::ggml::Tensor<'_> {
        self.context.tensor(self.tensor)
    }

    /// Writes the values again and again, until so many bytes are full.
    fn fill<V: Copy>(&self, values: &[V], bytes: usize) {
        let size = size_of::<V>();
        let most = (CHUNK / size / values.len()).max(1).min((bytes / size).div_ceil(values.len()));
        let piece = values.repeat(most);
        let mut at = 0;
        while at < bytes {
            let n = piece.len().min((bytes - at) / size);
            self.tensor().write_at(at, &piece[..n]);
            at += n * size;
        }
    }

    pub fn len(&self) -> usize {
        self.n
    }

    /// To read from.
    pub fn input(&self) -> In {
        self.tensor().data().cast_const()
    }

    /// From element `i` on.
    pub fn from(&self, i: usize) -> In {
        self.input().cast::<T>().wrapping_add(i).cast()
    }

    /// To write to.
    pub fn out(&self) -> Out {
        self.tensor().data()
    }
}

/// No such argument.
pub(crate) const NONE: In = std::ptr::null::<c_void>();
