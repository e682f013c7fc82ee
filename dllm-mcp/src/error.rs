//! One error type, told apart by what the caller can do next. It reaches the caller inside the tool's result.

use std::io;
use std::path::Path;

use serde_json::{Value, json};

/// The crate's result.
pub type Result<T, E = Fault> = std::result::Result<T, E>;

/// What went wrong, by what to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An argument is unknown, out of range or contradictory.
    BadArgument,
    /// The path is outside the roots, is no plain file, or exists already.
    PathRefused,
    /// No model is loaded, and the call does not load one.
    NotLoaded,
    /// The model cannot be loaded.
    LoadFailed,
    /// The model does not fit into the device's memory.
    OutOfVram,
    /// Another process holds the device.
    GpuBusy,
    /// Too many requests wait.
    QueueFull,
    /// `max_run_s` is over.
    Deadline,
    /// The caller, or the end of the server, cancelled it.
    Cancelled,
    /// There is no such job (any more).
    UnknownJob,
    /// Another server is meant for this.
    WrongServer,
    /// A defect of this program or of the backend.
    Internal,
}

impl Kind {
    /// The name in replies.
    pub fn name(self) -> &'static str {
        match self {
            Self::BadArgument => "bad_argument",
            Self::PathRefused => "path_refused",
            Self::NotLoaded => "not_loaded",
            Self::LoadFailed => "load_failed",
            Self::OutOfVram => "out_of_vram",
            Self::GpuBusy => "gpu_busy",
            Self::QueueFull => "queue_full",
            Self::Deadline => "deadline",
            Self::Cancelled => "cancelled",
            Self::UnknownJob => "unknown_job",
            Self::WrongServer => "wrong_server",
            Self::Internal => "internal",
        }
    }

    /// Whether the same call can succeed later.
    pub fn retryable(self) -> bool {
        matches!(self, Self::GpuBusy | Self::QueueFull | Self::Deadline | Self::Internal | Self::NotLoaded)
    }

    fn suggestion(self) -> &'static str {
        match self {
            Self::BadArgument => {
                "correct the argument: dllm_help topic=limits lists the ranges, topic=examples shows calls"
            }
            Self::PathRefused => "use a path under one of the roots that dllm_status lists",
            Self::NotLoaded => "call dllm_models operation=load first",
            Self::LoadFailed => "dllm_models operation=list shows which files can be loaded",
            Self::OutOfVram => "free memory, or load a smaller quantization",
            Self::GpuBusy => "use the server that holds the device, or end it and call again",
            Self::QueueFull => "call again later, or hand many prompts to dllm_batch at once",
            Self::Deadline => "raise max_run_s, or ask for less",
            Self::Cancelled => "call again if the result is still wanted",
            Self::UnknownJob => "dllm_job operation=list shows the jobs; they are kept for 1 hour",
            Self::WrongServer => "use local-llm-mcp's llm_generation_tool for streaming chat",
            Self::Internal => "call again; the server's log has the details",
        }
    }
}

/// What a caller sent, short enough to be told back to it.
pub fn shown(text: &str) -> String {
    let mut shown: String = text.chars().take(64).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    shown
}

/// A failure that the caller can read and act on.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// What to do next depends on this.
    pub kind: Kind,
    /// Lower case; names the wrong value.
    pub message: String,
    /// The next action, where the kind's own does not fit.
    advice: Option<String>,
    /// Whether the same call can succeed later, where the kind's own answer does not fit.
    retryable: Option<bool>,
}

impl Fault {
    /// A failure of a kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), advice: None, retryable: None }
    }

    /// The same with a next action of its own.
    pub fn advise(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    /// The same with more to say.
    pub fn and(mut self, more: &str) -> Self {
        self.message = format!("{}; {more}", self.message);
        self
    }

    /// The same for what passes by itself: the same call can succeed later.
    pub fn passing(mut self) -> Self {
        self.retryable = Some(true);
        self
    }

    /// What the system said about a file. The path is to blame for some of it only: a full disk or too many open files
    /// are the machine's.
    pub fn io(action: &str, path: &Path, error: &io::Error) -> Self {
        use io::ErrorKind as E;
        let message = format!("cannot {action} {}: {error}", path.display());
        match error.kind() {
            E::NotFound => {
                Self::new(Kind::PathRefused, message).advise("check the path: the file or its folder is missing")
            }
            E::PermissionDenied | E::ReadOnlyFilesystem => Self::new(Kind::PathRefused, message)
                .advise("use a path that the server may read or write, or have its rights changed"),
            E::AlreadyExists | E::NotADirectory | E::IsADirectory | E::InvalidFilename | E::InvalidInput => {
                Self::new(Kind::PathRefused, message)
            }
            E::StorageFull | E::QuotaExceeded | E::FileTooLarge => {
                Self::new(Kind::Internal, message).advise("free space for the server's files, then call again")
            }
            _ => Self::new(Kind::Internal, message)
                .advise("the machine is at fault, not the path: look at what the system said, then call again"),
        }
    }

    /// A wrong argument: names it, its value and the range.
    pub fn argument(name: &str, why: impl std::fmt::Display) -> Self {
        Self::new(Kind::BadArgument, format!("bad {name}: {why}"))
    }

    /// The `error` object of a reply.
    pub fn json(&self) -> Value {
        let advice = self.advice.as_deref().unwrap_or_else(|| self.kind.suggestion());
        let retryable = self.retryable.unwrap_or_else(|| self.kind.retryable());
        json!({"type": self.kind.name(), "retryable": retryable, "suggestions": [advice]})
    }
}

impl From<dllm_engine::Error> for Fault {
    fn from(error: dllm_engine::Error) -> Self {
        use dllm_engine::Error as E;
        let kind = match &error {
            E::BadArgument { .. } | E::PromptTooLong { .. } | E::Template(_) => Kind::BadArgument,
            E::BadFile { .. } | E::Unsupported { .. } | E::Io { .. } | E::NoDevice { .. } => Kind::LoadFailed,
            E::OutOfMemory { .. } => Kind::OutOfVram,
            _ => Kind::Internal,
        };
        Self::new(kind, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_not_blamed_on_the_path() {
        let of = |error: io::Error| {
            let fault = Fault::io("write", Path::new("out.jsonl"), &error);
            (fault.kind, fault.json()["retryable"] == true, fault.message)
        };
        let path = [io::ErrorKind::NotFound, io::ErrorKind::PermissionDenied, io::ErrorKind::NotADirectory];
        for kind in path {
            let (told, retryable, message) = of(kind.into());
            assert!(told == Kind::PathRefused && !retryable, "{kind}: {message}");
        }
        let (told, retryable, _) = of(io::ErrorKind::StorageFull.into());
        assert!(told == Kind::Internal && retryable);
        #[cfg(unix)]
        {
            // Too many open files, in this process.
            let (told, retryable, message) = of(io::Error::from_raw_os_error(24));
            assert!(told == Kind::Internal && retryable && message.contains("os error 24"), "{message}");
        }
    }
}
