//! The one place that maps files into memory.

use std::fs::File;
use std::io;

use memmap2::{Mmap, MmapOptions};

/// Maps `len` bytes of `file` from byte `offset`, read only. The address is congruent to `offset` modulo the page size.
///
/// What this covers and what not:
/// - The map belongs to the open file, not to its path: a file that is renamed over, unlinked or replaced by a download
///   tool leaves the mapped one as it was.
/// - A file that is shorter than `offset + len` now is refused here.
/// - A file that another process rewrites in place shows its new bytes. They are only ever read as numbers, so the result
///   is wrong output, never a wrong pointer or length: all lengths come from headers that were read before, by `read`.
/// - A file that another process truncates in place later ends this process with SIGBUS on Unix when a lost page is
///   touched. No check can close that window; Windows refuses such a truncation.
///
/// # Errors
/// What the operating system says, or `UnexpectedEof` for a file that is too short.
pub(crate) fn map_read_only(file: &File, offset: u64, len: usize) -> io::Result<Mmap> {
    let end = offset.checked_add(len as u64).ok_or(io::ErrorKind::InvalidInput)?;
    if file.metadata()?.len() < end {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter while it was read"));
    }
    // SAFETY: the map is read only and private to this process's address space; `offset + len` lies inside the file as
    // just checked, and the Mmap keeps its pages alive for as long as any slice of it. The bytes are handed out as `u8`
    // and never hold a length, an offset, a pointer or text that is trusted, so a writer on the other side of the file
    // can change numbers but break no invariant. Truncation is described above. Any thread may read.
    unsafe { MmapOptions::new().offset(offset).len(len).map(file) }
}
