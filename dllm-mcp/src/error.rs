//! One error type, told apart by what the caller can do next. It reaches the caller inside the tool's result.

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
            Self::BadArgument => "correct the argument; dllm_help topic=limits lists the ranges",
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
}

impl Fault {
    /// A failure of a kind.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// A wrong argument: names it, its value and the range.
    pub fn argument(name: &str, why: impl std::fmt::Display) -> Self {
        Self::new(Kind::BadArgument, format!("bad {name}: {why}"))
    }

    /// The `error` object of a reply.
    pub fn json(&self) -> Value {
        json!({"type": self.kind.name(), "retryable": self.kind.retryable(), "suggestions": [self.kind.suggestion()]})
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
