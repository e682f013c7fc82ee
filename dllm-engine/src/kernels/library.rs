//! The CUDA kernels as a table of functions: linked in with feature `cuda`, else loaded from the library beside the program
//! (`dllm_kernels.dll`, `libdllm_kernels.so`). What each function does stands in its C header under `dllm-engine/kernels`.

use std::ffi::{CStr, c_char, c_int, c_void};
#[cfg(not(linked_kernels))]
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// `DLLM_ABI` of library.h.
const ABI: c_int = 3;

/// A CUDA stream.
pub(crate) type Stream = *mut c_void;
pub(crate) type In = *const c_void;
pub(crate) type Out = *mut c_void;

macro_rules! kernels {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty;)*) => {
        /// One function per C function, of the same name.
        #[allow(clippy::too_many_arguments)]
        pub(crate) struct Kernels {
            $(pub $name: unsafe extern "C" fn($($ty),*) -> $ret,)*
            #[cfg(not(linked_kernels))]
            _library: libloading::Library,
        }

        impl Kernels {
            #[cfg(linked_kernels)]
            fn open() -> std::result::Result<Self, String> {
                unsafe extern "C" { $(fn $name($($arg: $ty),*) -> $ret;)* }
                Ok(Self { $($name,)* })
            }

            #[cfg(not(linked_kernels))]
            fn open() -> std::result::Result<Self, String> {
                let library = load()?;
                let missing = |e: libloading::Error| format!("the kernel library is of another version: {e}");
                Ok(Self {
                    // SAFETY: the library is our own; its ABI number, checked below, stands for these signatures.
                    $($name: unsafe { *library.get(concat!(stringify!($name), "\0").as_bytes()).map_err(missing)? },)*
                    _library: library,
                })
            }
        }
    };
}

kernels! {
    fn dllm_abi() -> c_int;
    fn dllm_set_device(device: c_int) -> c_int;
    fn dllm_wait() -> c_int;
    fn dllm_fork(stream: Stream, side: *mut Stream) -> c_int;
    fn dllm_join(stream: Stream, side: Stream) -> c_int;
    fn dllm_error(code: c_int) -> *const c_char;
    fn dllm_repack_bytes(ty: c_int, rows: i64, k: i64) -> i64;
    fn dllm_repack(stream: Stream, ty: c_int, src: In, src2: In, rows: i64, k: i64, dst: Out, tile0: i64) -> c_int;
    fn dllm_dequant_f16(stream: Stream, ty: c_int, src: In, rows: i64, k: i64, dst: Out) -> c_int;
    fn dllm_qmm(stream: Stream, ty: c_int, w: In, x: In, ldx: i64, rows: c_int, k: c_int, n: c_int, out: Out, ldo: i64,
                epilogue: c_int, alpha: f32, splits: c_int, scratch: Out, tile: c_int) -> c_int;
    fn dllm_gemm(stream: Stream, w: In, x: In, rows: c_int, k: c_int, n: c_int, out: Out, out_type: c_int,
                 scratch: Out) -> c_int;
    fn dllm_geglu(stream: Stream, x: In, rows: c_int, n: c_int, out: Out) -> c_int;
    fn dllm_to_half(stream: Stream, x: In, count: i64, out: Out) -> c_int;
    fn dllm_dense_soft_embed(stream: Stream, table: In, table_type: c_int, logits: In, temp: In, cap: f32, stats: In,
                             rows: c_int, vocab: c_int, hidden: c_int, scale: f32, probs: Out, piece: Out, out: Out,
                             scratch: Out) -> c_int;
    fn dllm_dense_soft_piece_bytes(table_type: c_int, hidden: c_int) -> usize;
    fn dllm_moe_plan_bytes(n_ids: c_int, n_expert: c_int) -> i64;
    fn dllm_moe_route(stream: Stream, ids: In, n_ids: c_int, n_expert: c_int, plan: Out) -> c_int;
    fn dllm_moe_gate_up(stream: Stream, ty: c_int, w: In, x: In, ldx: i64, plan: Out, rows: c_int, top_k: c_int,
                        n_expert: c_int, k: c_int, n_ff: c_int, act: Out, overlap: c_int, tile: c_int) -> c_int;
    fn dllm_moe_down(stream: Stream, ty: c_int, w: In, act: In, plan: Out, weights: In, rows: c_int, top_k: c_int,
                     n_expert: c_int, n_ff: c_int, n: c_int, part: Out, part_type: c_int, overlap: c_int,
                     gate_up_tile: c_int, gate_up_k: c_int, tile: c_int) -> c_int;
    fn dllm_rms_norm(stream: Stream, x: In, x_type: c_int, weight: In, pre_scale: f32, eps: f32, out: Out,
                     out_type: c_int, rows: c_int, hidden: c_int) -> c_int;
    fn dllm_norm_input(stream: Stream, e: In, e_scale: f32, sc: In, sc_flag: In, causal: In, attn_norm: In, eps: f32,
                       h: Out, x1: Out, x1_type: c_int, rows: c_int, hidden: c_int) -> c_int;
    fn dllm_norm_attn_out(stream: Stream, h: In, a: In, a_type: c_int, post_attention_norm: In, ffn_norm: In,
                          pre_ffw_norm_2: In, router_scale: In, eps: f32, r: Out, x: Out, y: Out, xy_type: c_int,
                          zr: Out, rows: c_int, hidden: c_int) -> c_int;
    fn dllm_norm_layer_out(stream: Stream, r: In, d: In, d_type: c_int, m: In, m_type: c_int, m_parts: c_int,
                           m_row_stride: i64, m_part_stride: i64, post_ffw_norm_1: In, post_ffw_norm_2: In,
                           post_ffw_norm: In, scale_canvas: In, scale_causal: In, causal: In, next_norm: In, eps: f32,
                           h_next: Out, x_next: Out, x_type: c_int, rows: c_int, hidden: c_int) -> c_int;
    fn dllm_router_scratch_bytes(rows: c_int, experts: c_int, hidden: c_int) -> usize;
    fn dllm_router(stream: Stream, zr: In, wr: In, expert_scale: In, rows: c_int, experts: c_int, hidden: c_int,
                   used: c_int, ids: Out, weights: Out, logits_out: Out, scratch: Out) -> c_int;
    fn dllm_rope_table(stream: Stream, pos: In, rows: c_int, head: c_int, theta: f32, factors: In, table: Out) -> c_int;
    fn dllm_rope_kv(stream: Stream, qkv: In, qkv_type: c_int, rows: c_int, lanes: c_int, q_heads: c_int,
                    kv_heads: c_int, head: c_int, has_v: c_int, q_norm: In, k_norm: In, eps: f32, table: In, slots: In,
                    q_out: Out, q_type: c_int, k_cache: Out, v_cache: Out, cache_stride: i64) -> c_int;
    fn dllm_canvas_attention_scratch_bytes(rows: c_int, q_heads: c_int, head: c_int, splits: c_int) -> usize;
    fn dllm_canvas_attention_splits(rows: c_int, lanes: c_int, q_heads: c_int, kv_heads: c_int, head: c_int,
                                    max_keys: c_int) -> c_int;
    fn dllm_canvas_attention(stream: Stream, q: In, rows: c_int, lanes: c_int, q_heads: c_int, kv_heads: c_int,
                             head: c_int, k_cache: In, v_cache: In, cache_stride: i64, spans: In, splits: c_int,
                             out: Out, out_type: c_int, scratch: Out) -> c_int;
    fn dllm_position_stats_scratch_bytes(rows: c_int, vocab: c_int) -> usize;
    fn dllm_position_stats(stream: Stream, logits: In, logits_type: c_int, rows: c_int, vocab: c_int, temp: In, u: In,
                           cap: f32, stats: Out, scratch: Out) -> c_int;
    fn dllm_likeliest(stream: Stream, logits: In, logits_type: c_int, rows: c_int, vocab: c_int, temp: In, cap: f32,
                      stats: In, scratch: In, k: c_int, tau: f32, renorm: c_int, ids: Out, weights: Out,
                      dropped: Out) -> c_int;
    fn dllm_embed_rows(stream: Stream, table: In, table_type: c_int, vocab: c_int, hidden: c_int, ids: In, rows: c_int,
                       scale: f32, out: Out) -> c_int;
    fn dllm_soft_embed(stream: Stream, table: In, table_type: c_int, vocab: c_int, hidden: c_int, ids: In, weights: In,
                       rows: c_int, k: c_int, scale: f32, out: Out) -> c_int;
}

impl Kernels {
    /// The table, opened at the first call.
    ///
    /// # Errors
    /// `Backend` where the library is not there, cannot be loaded, or is of another version.
    pub fn get() -> Result<&'static Self> {
        static TABLE: OnceLock<std::result::Result<Kernels, String>> = OnceLock::new();
        let table = TABLE.get_or_init(|| {
            let kernels = Self::open()?;
            // SAFETY: takes nothing, reads nothing.
            match unsafe { (kernels.dllm_abi)() } {
                ABI => Ok(kernels),
                other => Err(format!("the kernel library has interface {other}, this program needs {ABI}")),
            }
        });
        table.as_ref().map_err(|why| Error::Backend(format!("no CUDA kernels: {why}")))
    }

    /// A returned code as a result.
    pub fn check(&self, code: c_int, what: &str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: CUDA returns a static text for every number.
        let name = unsafe { CStr::from_ptr((self.dllm_error)(code)) };
        Err(Error::Backend(format!("{what}: {}", name.to_string_lossy())))
    }
}

/// Beside the program first, then where the backends of the build lie.
#[cfg(not(linked_kernels))]
fn load() -> std::result::Result<libloading::Library, String> {
    let name = libloading::library_filename("dllm_kernels");
    let beside = std::env::current_exe().ok().and_then(|exe| exe.parent().map(|p| p.join(&name)));
    let built = option_env!("DLLM_BACKEND_DIR").map(|dir| PathBuf::from(dir).join(&name));
    let tried: Vec<_> = beside.into_iter().chain(built).collect();
    let Some(path) = tried.iter().find(|path| path.is_file()) else {
        return Err(format!(
            "{} was not found beside the program: put it there, or build with feature `cuda`",
            name.to_string_lossy()
        ));
    };
    // SAFETY: our own library, whose start-up code only registers kernels with the CUDA runtime.
    unsafe { libloading::Library::new(path) }.map_err(|e| format!("{}: {e}", path.display()))
}

/// Calls at load time, on the device's default stream.
impl Kernels {
    /// Bytes of a repacked matrix; 0 where the type or `k` cannot be repacked.
    pub fn repack_bytes(&self, ty: c_int, rows: usize, k: usize) -> usize {
        // SAFETY: pure arithmetic.
        usize::try_from(unsafe { (self.dllm_repack_bytes)(ty, rows as i64, k as i64) }).unwrap_or(0)
    }

    /// Makes a device the calling thread's.
    pub fn set_device(&self, index: c_int) -> c_int {
        // SAFETY: CUDA checks the number.
        unsafe { (self.dllm_set_device)(index) }
    }

    /// Waits for what was enqueued here.
    pub fn wait(&self) -> c_int {
        // SAFETY: takes nothing.
        unsafe { (self.dllm_wait)() }
    }

    /// Repacks one matrix, or a gate and an up matrix. Pointers are to device memory of the sizes that the type, `rows` and
    /// `k` make.
    pub fn repack(&self, ty: c_int, a: Out, b: Option<Out>, rows: usize, k: usize, into: Out) -> c_int {
        let b = b.map_or(std::ptr::null(), |b| b.cast_const());
        // SAFETY: sizes by contract.
        unsafe { (self.dllm_repack)(std::ptr::null_mut(), ty, a.cast_const(), b, rows as i64, k as i64, into, 0) }
    }

    /// Expands blocks to F16 and waits. As `repack`.
    pub fn dequant_f16(&self, ty: c_int, from: Out, rows: usize, k: usize, into: Out) -> c_int {
        // SAFETY: sizes by contract.
        let code = unsafe {
            (self.dllm_dequant_f16)(std::ptr::null_mut(), ty, from.cast_const(), rows as i64, k as i64, into)
        };
        if code == 0 { self.wait() } else { code }
    }

    /// Room that a custom node needs beside its result, in bytes.
    pub fn router_scratch(&self, rows: usize, experts: usize, hidden: usize) -> usize {
        // SAFETY: pure arithmetic.
        unsafe { (self.dllm_router_scratch_bytes)(rows as c_int, experts as c_int, hidden as c_int) }
    }

    /// As `router_scratch`.
    pub fn stats_scratch(&self, rows: usize, vocab: usize) -> usize {
        // SAFETY: pure arithmetic.
        unsafe { (self.dllm_position_stats_scratch_bytes)(rows as c_int, vocab as c_int) }
    }

    /// As `router_scratch`.
    pub fn plan_bytes(&self, ids: usize, experts: usize) -> usize {
        // SAFETY: pure arithmetic.
        usize::try_from(unsafe { (self.dllm_moe_plan_bytes)(ids as c_int, experts as c_int) }).unwrap_or(0)
    }

    /// As `router_scratch`: an expanded piece of a table for the dense soft embedding.
    pub fn soft_piece_bytes(&self, ty: c_int, hidden: usize) -> usize {
        // SAFETY: pure arithmetic.
        unsafe { (self.dllm_dense_soft_piece_bytes)(ty, hidden as c_int) }
    }

    /// Parts to cut the keys into, and the room for them.
    pub fn attention_splits(
        &self,
        [rows, lanes]: [usize; 2],
        [heads, kv_heads, head]: [usize; 3],
        keys: usize,
    ) -> (c_int, usize) {
        let [r, l, h, kv, d] = [rows, lanes, heads, kv_heads, head].map(|n| n as c_int);
        // SAFETY: pure arithmetic, and a question to the driver about the chip.
        unsafe {
            let splits = (self.dllm_canvas_attention_splits)(r, l, h, kv, d, keys as c_int);
            (splits, (self.dllm_canvas_attention_scratch_bytes)(r, h, d, splits))
        }
    }
}
