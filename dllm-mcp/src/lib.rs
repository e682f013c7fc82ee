//! An MCP server around `dllm-engine`: tools, jobs and batches for agents.
//!
//! One thread owns the engine ([`worker`]); handlers only wait ([`tools`]). Every call answers within about 25 seconds or
//! hands back the id of a job.
#![forbid(unsafe_code)]

pub mod answer;
pub mod backend;
pub mod batch;
pub mod config;
pub mod error;
pub mod format;
pub mod host;
pub mod http;
pub mod item;
pub mod jobs;
pub mod lines;
pub mod lock;
pub mod log;
pub mod output;
pub mod paths;
pub mod progress;
pub mod prompts;
pub mod queue;
pub mod reply;
pub mod resources;
pub mod server;
mod sessions;
pub mod stdio;
pub mod tools;
pub mod worker;

pub use config::Config;
pub use error::{Fault, Kind};
pub use server::Server;
