//! Where the bytes of one file come from, and the promise that they are still those whose header was read.

use std::fs::{File, Metadata, OpenOptions};
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;

use memmap2::Mmap;

use super::reader::Header;
use crate::error::{Error, Result};
use crate::ggml::mmap::map_read_only;

/// One file of a model.
#[derive(Debug)]
pub(super) struct Part {
    path: PathBuf,
    /// First byte of the data section.
    data_start: u64,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    /// Compiled into the program.
    Static(&'static [u8]),
    /// An open file. The map is made from this handle, so nothing that happens to the path changes what is read.
    File { file: File, len: u64, modified: Option<SystemTime>, map: OnceLock<Mmap> },
}

impl Part {
    /// Opens a file and reads its header through an ordinary handle.
    pub(super) fn open(path: &Path) -> Result<(Self, Header)> {
        // Opening a pipe would wait for its writer, hence the look before.
        refuse_non_file(path, &std::fs::metadata(path).map_err(|e| Error::io("open", path, e))?)?;
        let file = open_read_only(path).map_err(|e| Error::io("open", path, e))?;
        let metadata = file.metadata().map_err(|e| Error::io("read", path, e))?;
        refuse_non_file(path, &metadata)?;
        let len = metadata.len();
        let buffer = usize::try_from(len).unwrap_or(usize::MAX).clamp(1, 1 << 18);
        let header = Header::read(BufReader::with_capacity(buffer, &file), len, path)?;
        let bytes = Bytes::File { file, len, modified: metadata.modified().ok(), map: OnceLock::new() };
        let part = Self { path: path.to_owned(), data_start: header.data_start, bytes };
        part.check_unchanged()?;
        Ok((part, header))
    }

    /// A file inside the program; `name` stands for its path.
    pub(super) fn from_static(bytes: &'static [u8], name: &str) -> Result<(Self, Header)> {
        let path = PathBuf::from(name);
        let header = Header::read(bytes, bytes.len() as u64, &path)?;
        if !(bytes.as_ptr().addr() as u64).wrapping_add(header.data_start).is_multiple_of(32) {
            let why = "the embedded bytes do not lie at a multiple of 32: put them into a static with repr(align(64))";
            return Err(Error::file(path, why));
        }
        Ok((Self { path, data_start: header.data_start, bytes: Bytes::Static(bytes) }, header))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn data_start(&self) -> u64 {
        self.data_start
    }

    /// The whole data section. Maps it at the first call.
    pub(super) fn data(&self) -> Result<&[u8]> {
        let (file, len, map) = match &self.bytes {
            Bytes::Static(bytes) => return Ok(bytes.get(self.data_start as usize..).unwrap_or_default()),
            Bytes::File { file, len, map, .. } => (file, *len, map),
        };
        if let Some(map) = map.get() {
            return Ok(map);
        }
        let data = len.saturating_sub(self.data_start);
        if data == 0 {
            return Ok(&[]);
        }
        self.check_unchanged()?;
        let data = usize::try_from(data)
            .map_err(|_| Error::unsupported(&self.path, format!("{data} bytes of weights do not fit this machine")))?;
        let fresh = map_read_only(file, self.data_start, data).map_err(|e| Error::io("map", &self.path, e))?;
        // Two threads may both have mapped; the loser's map is dropped.
        Ok(map.get_or_init(|| fresh))
    }

    /// Refuses a file that was written to since its header was read.
    pub(super) fn check_unchanged(&self) -> Result<()> {
        let Bytes::File { file, len, modified, .. } = &self.bytes else { return Ok(()) };
        let now = file.metadata().map_err(|e| Error::io("read", &self.path, e))?;
        let change = if now.len() != *len {
            format!("had {len} bytes when it was opened and has {} now", now.len())
        } else if now.modified().ok() != *modified {
            "was written to since it was opened".into()
        } else {
            return Ok(());
        };
        Err(Error::file(&self.path, format!("the file {change}: load the model again when it is complete")))
    }
}

fn refuse_non_file(path: &Path, metadata: &Metadata) -> Result<()> {
    if metadata.is_dir() {
        return Err(Error::file(path, "this is a folder: name a .gguf file in it"));
    }
    if !metadata.is_file() {
        return Err(Error::file(path, "this is no ordinary file: copy the model to a disk and name that copy"));
    }
    Ok(())
}

#[cfg(not(windows))]
fn open_read_only(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).open(path)
}

/// Windows can keep others from writing to the file while it is open here; deleting and renaming stay possible.
#[cfg(windows)]
fn open_read_only(path: &Path) -> std::io::Result<File> {
    use std::os::windows::fs::OpenOptionsExt;
    const FILE_SHARE_READ: u32 = 1;
    const FILE_SHARE_DELETE: u32 = 4;
    OpenOptions::new().read(true).share_mode(FILE_SHARE_READ | FILE_SHARE_DELETE).open(path)
}
