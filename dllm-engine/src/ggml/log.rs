//! llama.cpp's log goes to `tracing` (target `llama_cpp`), never to stderr.
//!
//! llama.cpp is talkative: what it calls information is `debug` here, and its debug output is `trace`.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::panic::catch_unwind;
use std::sync::Once;

use llama_sys as sys;

#[derive(Default)]
struct Thread {
    /// A message arrives in pieces; this is the line so far and its level.
    line: String,
    level: sys::ggml_log_level,
    /// Inside [`capture`]: the last error. Warnings are then debug output.
    captured: Option<String>,
    capturing: bool,
}

thread_local! {
    static THREAD: RefCell<Thread> = RefCell::default();
}

/// Takes over the log of ggml and libllama. Every entry into the C libraries calls this first; only the first call acts.
pub fn init() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the callback is a plain function that lives as long as the program and does not unwind.
        unsafe { sys::llama_log_set(Some(on_message), std::ptr::null_mut()) }
    });
}

/// Runs `action` and returns the last error that the C libraries logged on this thread meanwhile. C functions that fail
/// return a null pointer only; the reason is in the log.
pub(crate) fn capture<R>(action: impl FnOnce() -> R) -> (R, Option<String>) {
    init();
    THREAD.with_borrow_mut(|t| (t.capturing, t.captured) = (true, None));
    let result = action();
    let error = THREAD.with_borrow_mut(|t| {
        t.capturing = false;
        t.captured.take()
    });
    (result, error)
}

unsafe extern "C" fn on_message(level: sys::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: ggml hands over a NUL-terminated text that is valid during the call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    // A subscriber that panics must not unwind into C; the message is lost then, which is all that can be done.
    let _ = catch_unwind(|| {
        // Neither a thread that is ending nor a subscriber that logs through ggml itself has a line to add to.
        let _ = THREAD.try_with(|thread| thread.try_borrow_mut().map(|mut t| t.add(level, &text)));
    });
}

impl Thread {
    fn add(&mut self, level: sys::ggml_log_level, text: &str) {
        if level != sys::ggml_log_level_GGML_LOG_LEVEL_CONT {
            self.flush();
            self.level = level;
        }
        self.line.push_str(text);
        if self.line.ends_with('\n') {
            self.flush();
        }
    }

    fn flush(&mut self) {
        let line = std::mem::take(&mut self.line);
        let line = line.trim();
        if line.is_empty() {
            return;
        }
        match self.level {
            sys::ggml_log_level_GGML_LOG_LEVEL_ERROR if self.capturing => {
                // The first error is the reason; what follows only says that something failed.
                self.captured.get_or_insert_with(|| line.to_owned());
                tracing::debug!(target: "llama_cpp", "{line}");
            }
            sys::ggml_log_level_GGML_LOG_LEVEL_ERROR => tracing::error!(target: "llama_cpp", "{line}"),
            sys::ggml_log_level_GGML_LOG_LEVEL_WARN if !self.capturing => tracing::warn!(target: "llama_cpp", "{line}"),
            sys::ggml_log_level_GGML_LOG_LEVEL_WARN | sys::ggml_log_level_GGML_LOG_LEVEL_INFO => {
                tracing::debug!(target: "llama_cpp", "{line}")
            }
            _ => tracing::trace!(target: "llama_cpp", "{line}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(level: sys::ggml_log_level, text: &CStr) {
        // SAFETY: the text is NUL-terminated.
        unsafe { on_message(level, text.as_ptr(), std::ptr::null_mut()) }
    }

    #[test]
    fn the_first_error_is_the_reason() {
        let ((), reason) = capture(|| {
            say(sys::ggml_log_level_GGML_LOG_LEVEL_WARN, c"odd token\n");
            say(sys::ggml_log_level_GGML_LOG_LEVEL_ERROR, c"cannot find ");
            say(sys::ggml_log_level_GGML_LOG_LEVEL_CONT, c"merges\n");
            say(sys::ggml_log_level_GGML_LOG_LEVEL_ERROR, c"failed\n");
        });
        assert_eq!(reason.as_deref(), Some("cannot find merges"));
        assert_eq!(capture(|| 1), (1, None));
    }

    #[test]
    fn text_that_is_not_utf8_is_no_trouble() {
        let ((), reason) = capture(|| say(sys::ggml_log_level_GGML_LOG_LEVEL_ERROR, c"bad \xff byte\n"));
        assert_eq!(reason.as_deref(), Some("bad \u{fffd} byte"));
    }
}
