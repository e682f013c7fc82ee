//! One error type. Variants are told apart by what the caller can do next; messages are lower case, name the value that
//! was wrong and the next action.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// The engine's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A parameter or a field of a request is out of range or contradictory. Change it and call again.
    #[error("bad {name}: {why}")]
    BadArgument {
        /// The field, as the caller wrote it (`max_tokens`).
        name: &'static str,
        /// The value, the allowed range, and what to write instead.
        why: String,
    },
    /// The prompt leaves no room in the context. Shorten it or load with a larger context.
    #[error(
        "the prompt has {tokens} tokens, but {fits} fit (context {context}, less one canvas of {canvas}): shorten it or load with a larger context"
    )]
    PromptTooLong {
        /// Tokens of the rendered prompt.
        tokens: usize,
        /// Tokens that would fit.
        fits: usize,
        /// The context length the engine was loaded with, in tokens.
        context: usize,
        /// Canvas length in tokens.
        canvas: usize,
    },
    /// The file cannot be read as a model. Get an intact file, or another one.
    #[error("{}: {why}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, at which place, and what to do.
        why: String,
    },
    /// The file is intact, but this engine does not run it.
    #[error("{}: {why}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What is not supported, and what is.
        why: String,
    },
    /// The operating system refused to read or write.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// `read`, `open`, `map`, ...
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// It would not fit. Free memory, take a smaller context, fewer lanes, or a smaller file.
    #[error("{what} needs {}, but {}: take a smaller context, fewer lanes or a smaller quantization", gib(*needed), shortage(*needed, *free, device))]
    OutOfMemory {
        /// What was to be allocated.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes free on the device.
        free: u64,
        /// The device's name.
        device: String,
    },
    /// The device asked for is not there.
    #[error(
        "there is no device {asked:?}; found: {found}. Name one of these, or build with the feature for yours (cuda, vulkan, metal)"
    )]
    NoDevice {
        /// As the caller wrote it.
        asked: String,
        /// The devices that are there, comma separated.
        found: String,
    },
    /// The model computed something that is no number. The file is damaged or the backend is wrong.
    #[error(
        "the model's output is not a number at step {step}, position {position} ({what}): get the file again and compare its checksum, or try another device. `dllm inspect` looks at no values"
    )]
    NotFinite {
        /// Which quantity.
        what: &'static str,
        /// Denoising step, counted from 1; 0 for a prefill.
        step: u32,
        /// Position in the canvas.
        position: usize,
    },
    /// The backend failed. The message is ggml's.
    #[error("the backend failed: {0}")]
    Backend(String),
    /// The chat template cannot be used with these messages.
    #[error("chat template: {0}")]
    Template(String),
}

impl Error {
    /// A wrong argument: `bad max_tokens: 0 is not in 1..=131072`.
    pub(crate) fn argument(name: &'static str, why: impl Into<String>) -> Self {
        Self::BadArgument { name, why: brief(&why.into()).into_owned() }
    }

    /// A damaged or incomplete file.
    pub(crate) fn file(path: impl AsRef<Path>, why: impl Into<String>) -> Self {
        Self::BadFile { path: path.as_ref().to_owned(), why: brief(&why.into()).into_owned() }
    }

    /// An intact file that cannot be run.
    pub(crate) fn unsupported(path: impl AsRef<Path>, why: impl Into<String>) -> Self {
        Self::Unsupported { path: path.as_ref().to_owned(), why: brief(&why.into()).into_owned() }
    }

    /// A refusal of the operating system.
    pub(crate) fn io(action: &'static str, path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io { action, path: path.as_ref().to_owned(), source }
    }
}

/// Why memory was refused. The system may refuse what the device seems to have: then something limits this process.
fn shortage(needed: u64, free: u64, device: &str) -> String {
    match needed > free {
        true => format!("{device} has {} free", gib(free)),
        false => format!("the system refuses it, although {device} has {} free (a limit of this process?)", gib(free)),
    }
}

/// Why something failed, with what came from outside bounded: of a long text the beginning and the end, where the next
/// action stands.
pub(crate) fn brief(why: &str) -> Cow<'_, str> {
    const MOST: usize = 1000;
    const END: usize = 300;
    if why.len() <= MOST {
        return Cow::Borrowed(why);
    }
    let from = (why.len() - END..why.len()).find(|&at| why.is_char_boundary(at)).unwrap_or(why.len());
    let end = why.get(from..).unwrap_or_default();
    Cow::Owned(format!("{} ... ({} bytes in all) ... {end}", cut(why, MOST - END), why.len()))
}

/// At most so many bytes of a text.
pub(crate) fn cut(text: &str, most: usize) -> &str {
    let end = (0..=most.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
    text.get(..end.unwrap_or(0)).unwrap_or_default()
}

/// Bytes for people: `3.25 GiB`, `12.0 MiB`.
pub(crate) fn gib(bytes: u64) -> String {
    let b = bytes as f64;
    match bytes {
        0..0x10_0000 => format!("{:.1} KiB", b / 1024.0),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", b / 1048576.0),
        _ => format!("{:.2} GiB", b / 1073741824.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_shown_in_part() {
        let why = format!("the name is {:?}: take another", "ü".repeat(100_000));
        for error in [Error::argument("x", why.as_str()), Error::file("f", why.as_str()), Error::unsupported("f", why)]
        {
            let text = error.to_string();
            assert!(
                text.len() < 1100 && text.contains("the name is \"ü") && text.ends_with("ü\": take another"),
                "{text}"
            );
            assert!(text.contains(" ... (200028 bytes in all) ... "), "{text}");
        }
        assert_eq!(brief(&"a".repeat(1000)), "a".repeat(1000));
    }

    #[test]
    fn issue_2_memory_that_was_refused_is_not_called_missing() {
        let error = |free| Error::OutOfMemory { what: "the cache".into(), needed: 3 << 30, free, device: "CPU".into() };
        let missing = error(1 << 30).to_string();
        assert!(missing.starts_with("the cache needs 3.00 GiB, but CPU has 1.00 GiB free: take"), "{missing}");
        let limited = error(8 << 30).to_string();
        assert!(
            limited.contains("the system refuses it, although CPU has 8.00 GiB free (a limit of this process?): take"),
            "{limited}"
        );
    }
}
