//! libllama's vocabulary: text to token ids and back (decision D3).
//!
//! libllama usually loads a vocabulary from a model file. Here it gets the metadata from memory
//! (`llama_model_init_from_user`), put together from values that were read and checked in Rust. So nothing in a file can
//! reach libllama's own reader, a model inside the program needs no temporary file, and an architecture that libllama does
//! not know can be given under the name of one that it knows.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::NonNull;

use llama_sys as sys;

use super::log;

/// The checked metadata. Requirements, on which nothing here may rely for memory safety but libllama does for not
/// aborting: all texts are free of NUL, token texts are unique, arrays have one entry per token, ids are below their number.
pub(crate) struct Metadata<'a> {
    /// Name of an architecture that libllama knows.
    pub architecture: &'a str,
    /// `tokenizer.ggml.model`.
    pub model: &'a str,
    /// `tokenizer.ggml.pre`.
    pub pre: Option<&'a str>,
    pub tokens: &'a [&'a str],
    pub scores: Option<&'a [f32]>,
    /// `tokenizer.ggml.token_type` codes.
    pub types: &'a [i32],
    pub merges: &'a [&'a str],
    /// Ids of special tokens by key.
    pub ids: &'a [(&'static CStr, u32)],
    pub add_bos: Option<bool>,
}

/// A vocabulary inside libllama. Freed when dropped.
pub(crate) struct RawVocab {
    model: NonNull<sys::llama_model>,
    vocab: NonNull<sys::llama_vocab>,
}

// SAFETY: libllama does not change a vocabulary after loading, and keeps no state per thread or call in it: the functions
// used here take it as const, and their C++ methods are const over plain containers.
unsafe impl Send for RawVocab {}
// SAFETY: as above.
unsafe impl Sync for RawVocab {}

impl Drop for RawVocab {
    fn drop(&mut self) {
        // SAFETY: the model came from libllama, is owned by this value, and nothing borrows from it any more.
        unsafe { sys::llama_model_free(self.model.as_ptr()) }
    }
}

impl RawVocab {
    /// Loads. The error is libllama's reason. Wraps `llama_model_init_from_user` with `vocab_only`.
    pub fn load(meta: &Metadata) -> Result<Self, String> {
        let gguf = Gguf::new(meta)?;
        let mut no_devices = [std::ptr::null_mut()];
        // SAFETY: no arguments.
        let mut params = unsafe { sys::llama_model_default_params() };
        params.vocab_only = true;
        params.devices = no_devices.as_mut_ptr(); // else every GPU is opened to ask for its free memory
        let (model, reason) = log::capture(|| {
            // SAFETY: the metadata and the list of devices outlive the call, which copies what it keeps. Tensors are
            // never asked for with `vocab_only`, so the missing function is not called.
            unsafe { sys::llama_model_init_from_user(gguf.0.as_ptr(), None, std::ptr::null_mut(), params) }
        });
        let model = NonNull::new(model).ok_or_else(|| reason.unwrap_or_else(|| "no reason given".into()))?;
        // SAFETY: the model was just loaded; the vocabulary is a part of it.
        let vocab = NonNull::new(unsafe { sys::llama_model_get_vocab(model.as_ptr()) }.cast_mut());
        match vocab {
            Some(vocab) => Ok(Self { model, vocab }),
            None => {
                // SAFETY: owned and not used afterwards.
                unsafe { sys::llama_model_free(model.as_ptr()) };
                Err("no vocabulary".into())
            }
        }
    }

    /// Number of tokens. Wraps `llama_vocab_n_tokens`.
    pub fn len(&self) -> usize {
        // SAFETY: the vocabulary lives as long as self.
        let n = unsafe { sys::llama_vocab_n_tokens(self.vocab.as_ptr()) };
        usize::try_from(n).unwrap_or(0)
    }

    /// Whether libllama would put a begin token in front. Wraps `llama_vocab_get_add_bos`.
    pub fn add_bos(&self) -> bool {
        // SAFETY: the vocabulary lives as long as self.
        unsafe { sys::llama_vocab_get_add_bos(self.vocab.as_ptr()) }
    }

    /// Whether libllama takes the token for an end of generation. Wraps `llama_vocab_is_eog`.
    pub fn is_eog(&self, id: u32) -> bool {
        // SAFETY: the vocabulary lives as long as self; an id out of range is found in no set.
        i32::try_from(id).is_ok_and(|id| unsafe { sys::llama_vocab_is_eog(self.vocab.as_ptr(), id) })
    }

    /// Appends the ids of `text`, without begin token and without looking for special tokens. Wraps `llama_tokenize`.
    /// The error names the size that was too large.
    pub fn tokenize(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        let too_large = || format!("{} bytes are too many for one call of the tokenizer", text.len());
        let len = i32::try_from(text.len()).map_err(|_| too_large())?;
        // Mostly a byte makes at most one token; the second round is for the exceptions.
        let mut buffer = vec![0i32; text.len()];
        loop {
            let room = i32::try_from(buffer.len()).map_err(|_| too_large())?;
            // SAFETY: text and buffer are valid for the lengths given; libllama writes at most `room` ids.
            let n = unsafe {
                let (text, out) = (text.as_ptr().cast::<c_char>(), buffer.as_mut_ptr());
                sys::llama_tokenize(self.vocab.as_ptr(), text, len, out, room, false, false)
            };
            match (usize::try_from(n), n.checked_neg()) {
                (Ok(n), _) => {
                    ids.extend(buffer.iter().take(n).map(|&id| id.cast_unsigned()));
                    return Ok(());
                }
                (Err(_), Some(needed)) if needed > room => buffer.resize(needed as usize, 0),
                _ => return Err(too_large()),
            }
        }
    }

    /// The text of a token, special tokens included; not always whole UTF-8 characters. Empty for an id out of range.
    /// Wraps `llama_token_to_piece`.
    pub fn piece(&self, id: u32) -> Vec<u8> {
        if id as usize >= self.len() {
            return Vec::new();
        }
        let mut buffer = vec![0u8; 64];
        loop {
            let room = i32::try_from(buffer.len()).unwrap_or(i32::MAX);
            // SAFETY: the id is in range (libllama throws otherwise), and libllama writes at most `room` bytes.
            let n = unsafe {
                let out = buffer.as_mut_ptr().cast::<c_char>();
                sys::llama_token_to_piece(self.vocab.as_ptr(), id.cast_signed(), out, room, 0, true)
            };
            if let Ok(n) = usize::try_from(n) {
                buffer.truncate(n);
                return buffer;
            }
            buffer.resize(n.unsigned_abs() as usize, 0);
        }
    }
}

/// Metadata in libllama's form. Freed when dropped.
struct Gguf(NonNull<sys::gguf_context>);

impl Drop for Gguf {
    fn drop(&mut self) {
        // SAFETY: owned, and libllama keeps no pointer into it after loading.
        unsafe { sys::gguf_free(self.0.as_ptr()) }
    }
}

impl Gguf {
    fn new(meta: &Metadata) -> Result<Self, String> {
        // SAFETY: no arguments.
        let ctx = unsafe { sys::gguf_init_empty() };
        let gguf = Self(NonNull::new(ctx).ok_or("out of memory")?);
        gguf.text(c"general.architecture", meta.architecture)?;
        gguf.text(c"tokenizer.ggml.model", meta.model)?;
        if let Some(pre) = meta.pre {
            gguf.text(c"tokenizer.ggml.pre", pre)?;
        }
        gguf.texts(c"tokenizer.ggml.tokens", meta.tokens)?;
        gguf.texts(c"tokenizer.ggml.merges", meta.merges)?;
        gguf.numbers(c"tokenizer.ggml.token_type", sys::GGUF_TYPE_INT32, meta.types);
        if let Some(scores) = meta.scores {
            gguf.numbers(c"tokenizer.ggml.scores", sys::GGUF_TYPE_FLOAT32, scores);
        }
        for &(key, id) in meta.ids {
            // SAFETY: the key is NUL-terminated and copied.
            unsafe { sys::gguf_set_val_u32(gguf.0.as_ptr(), key.as_ptr(), id) }
        }
        if let Some(add_bos) = meta.add_bos {
            // SAFETY: the key is NUL-terminated and copied.
            unsafe { sys::gguf_set_val_bool(gguf.0.as_ptr(), c"tokenizer.ggml.add_bos_token".as_ptr(), add_bos) }
        }
        Ok(gguf)
    }

    fn text(&self, key: &CStr, value: &str) -> Result<(), String> {
        let value = CString::new(value).map_err(|_| format!("{key:?} contains a NUL character"))?;
        // SAFETY: key and value are NUL-terminated and copied.
        unsafe { sys::gguf_set_val_str(self.0.as_ptr(), key.as_ptr(), value.as_ptr()) }
        Ok(())
    }

    fn texts(&self, key: &CStr, values: &[&str]) -> Result<(), String> {
        // All in one buffer: the real vocabulary has 776 thousand texts.
        let mut buffer = Vec::with_capacity(values.iter().map(|v| v.len() + 1).sum());
        let mut starts = Vec::with_capacity(values.len());
        for value in values {
            if value.contains('\0') {
                return Err(format!("{key:?} contains a NUL character"));
            }
            starts.push(buffer.len());
            buffer.extend_from_slice(value.as_bytes());
            buffer.push(0);
        }
        let mut pointers: Vec<*const c_char> = starts.iter().map(|&s| buffer[s..].as_ptr().cast()).collect();
        // SAFETY: the key and every text are NUL-terminated, there are as many pointers as said, and all is copied.
        unsafe { sys::gguf_set_arr_str(self.0.as_ptr(), key.as_ptr(), pointers.as_mut_ptr(), pointers.len()) }
        Ok(())
    }

    fn numbers<T: Copy>(&self, key: &CStr, code: u32, values: &[T]) {
        const { assert!(size_of::<T>() == 4) } // both codes used above stand for numbers of four bytes
        let data = values.as_ptr().cast::<c_void>();
        // SAFETY: the key is NUL-terminated, the values are as many as said and of the code's size, and all is copied.
        unsafe { sys::gguf_set_arr_data(self.0.as_ptr(), key.as_ptr(), code, data, values.len()) }
    }
}
