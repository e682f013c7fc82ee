//! The log goes to a file, never to a stream that the host may leave full. A log that cannot be written fails nothing else.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tracing_subscriber::EnvFilter;

/// Above this the log of earlier runs is moved aside at the start.
const ROTATE_BYTES: u64 = 8 * 1024 * 1024;

/// The log's file, and the stream to complain to when it cannot be written.
#[derive(Debug)]
pub struct Log {
    file: File,
    path: PathBuf,
    /// The standard error that the program was started with: later it may point to the log.
    complaints: Option<File>,
}

impl Log {
    /// Opens the log file in a folder for appending; several processes may share it.
    ///
    /// # Errors
    /// Where the folder or file cannot be written.
    pub fn open(folder: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let path = folder.join("dllm-mcp.log");
        if path.metadata().is_ok_and(|meta| meta.len() > ROTATE_BYTES) {
            // Another process may be doing the same; then the log goes on in the old file.
            let _ = std::fs::rename(&path, folder.join("dllm-mcp.old.log"));
        }
        let file = OpenOptions::new().create(true).append(true).open(&path)?;
        Ok(Self { file, path, complaints: standard_error().ok() })
    }

    /// The file, for what writes to it by other ways.
    ///
    /// # Errors
    /// What the system refuses.
    pub fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Sends `tracing` to it.
    ///
    /// # Errors
    /// Why the filter cannot be used.
    pub fn init(self, filter: &str) -> Result<(), String> {
        check_words(filter)?;
        let filter = EnvFilter::try_new(filter).map_err(|e| format!("bad --log {filter:?}: {e}"))?;
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_ansi(false)
            // It would print its own failures, and panic where it cannot.
            .log_internal_errors(false)
            .with_writer(Mutex::new(self));
        subscriber.try_init().map_err(|e| format!("cannot start the log: {e}"))
    }
}

/// Refuses a misspelt level: the filter would take it for the name of a module, and nothing would be logged.
fn check_words(filter: &str) -> Result<(), String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let level = |word: &str| LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    match filter.split(',').map(str::trim).find(|word| !word.is_empty() && !word.contains(['=', '[']) && !level(word)) {
        Some(word) => Err(format!(
            "bad --log {filter:?}: {word:?} is none of {}; for one module write as dllm_mcp=debug",
            LEVELS.join(", ")
        )),
        None => Ok(()),
    }
}

impl Write for Log {
    /// Never fails: what cannot be logged is lost, and that is said once.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Err(error) = self.file.write_all(bytes)
            && let Some(mut complaints) = self.complaints.take()
        {
            // Nobody may be listening.
            let _ = writeln!(
                complaints,
                "dllm-mcp: cannot write the log {}: {error}; requests go on without it",
                self.path.display()
            );
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(unix)]
fn standard_error() -> io::Result<File> {
    use std::os::fd::AsFd;
    Ok(File::from(io::stderr().as_fd().try_clone_to_owned()?))
}

#[cfg(windows)]
fn standard_error() -> io::Result<File> {
    use std::os::windows::io::AsHandle;
    Ok(File::from(io::stderr().as_handle().try_clone_to_owned()?))
}
