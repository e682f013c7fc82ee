//! The log goes to a file, never to a stream that the host may leave full.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::Mutex;

use tracing_subscriber::EnvFilter;

/// Above this the log of earlier runs is moved aside at the start.
const ROTATE_BYTES: u64 = 8 * 1024 * 1024;

/// Opens the log file in a folder for appending; several processes may share it.
///
/// # Errors
/// Where the folder or file cannot be written.
pub fn open(folder: &Path) -> io::Result<File> {
    std::fs::create_dir_all(folder)?;
    let path = folder.join("dllm-mcp.log");
    if path.metadata().is_ok_and(|meta| meta.len() > ROTATE_BYTES) {
        // Another process may be doing the same; then the log goes on in the old file.
        let _ = std::fs::rename(&path, folder.join("dllm-mcp.old.log"));
    }
    OpenOptions::new().create(true).append(true).open(path)
}

/// Sends `tracing` to a file.
///
/// # Errors
/// Why the filter cannot be used.
pub fn init(file: File, filter: &str) -> Result<(), String> {
    let filter = EnvFilter::try_new(filter).map_err(|e| format!("bad --log {filter:?}: {e}"))?;
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(Mutex::new(file));
    subscriber.try_init().map_err(|e| format!("cannot start the log: {e}"))
}
