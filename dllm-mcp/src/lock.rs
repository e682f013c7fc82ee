//! One process at a time loads a model onto a device: a named lock file that the system releases however the process ends.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::Path;

use crate::error::{Fault, Kind, Result};

/// The lock of a device, held until dropped.
#[derive(Debug)]
pub struct DeviceLock {
    _file: File,
}

impl DeviceLock {
    /// Takes the lock of a device in a folder that all processes share.
    ///
    /// # Errors
    /// `GpuBusy` with the holder's process id; `LoadFailed` where the folder cannot be written.
    pub fn take(folder: &Path, device: &str) -> Result<Self> {
        let name: String = device.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let path = folder.join(format!("{name}.lock"));
        // The holder's id has a file of its own: on Windows nobody else can read a locked file.
        let pid_path = folder.join(format!("{name}.pid"));
        let io = |e: std::io::Error| {
            Fault::new(Kind::LoadFailed, format!("cannot lock {}: {e}", path.display()))
                .advise("the operator must make that folder writable, or start the server with another --state-dir")
        };
        std::fs::create_dir_all(folder).map_err(io)?;
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {
                std::fs::write(&pid_path, std::process::id().to_string()).map_err(io)?;
                Ok(Self { _file: file })
            }
            Err(TryLockError::WouldBlock) => {
                let pid = std::fs::read_to_string(&pid_path).unwrap_or_default();
                let pid = if pid.is_empty() { "unknown" } else { pid.trim() };
                Err(Fault::new(Kind::GpuBusy, format!("device {device} is in use by the dllm-mcp process {pid}")))
            }
            Err(TryLockError::Error(e)) => Err(io(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_holds_it() {
        let folder = tempfile::tempdir().unwrap();
        let first = DeviceLock::take(folder.path(), "CUDA0").unwrap();
        let fault = DeviceLock::take(folder.path(), "CUDA0").unwrap_err();
        assert_eq!(fault.kind, Kind::GpuBusy);
        assert!(fault.message.contains(&std::process::id().to_string()), "{fault}");
        DeviceLock::take(folder.path(), "CUDA1").unwrap();
        drop(first);
        DeviceLock::take(folder.path(), "CUDA0").unwrap();
    }
}
