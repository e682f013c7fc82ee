//! The file that a batch's results go to. Nothing of a file is lost that is not ours, and nothing before the batch begins.

use std::collections::HashSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::batch::hash;
use crate::error::{Fault, Kind, Result, shown};

/// Longest line of an output file; what is longer was written by somebody else.
const MAX_RESULT: u64 = 64 * 1024 * 1024;

/// What to do about an output file that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// Keep it, and skip the items that it has with `ok`.
    Resume,
    /// Empty it.
    Overwrite,
    /// Refuse.
    Refuse,
}

/// An output file that was looked at, locked where it exists, and not touched yet.
#[derive(Debug)]
pub struct Prepared {
    path: PathBuf,
    /// `None` where there is no such file yet.
    file: Option<File>,
    found: Found,
}

/// What an output file has.
#[derive(Debug, Default)]
struct Found {
    /// Ids that it has with `ok`.
    done: HashSet<String>,
    /// Bytes to keep: its whole lines.
    keep: u64,
    /// Whether only the end of the last line is missing.
    unended: bool,
    /// Its length.
    len: u64,
    /// A hash of each whole line.
    lines: Vec<u64>,
}

impl Prepared {
    /// Looks at a file and takes its lock. It stays as it is.
    ///
    /// # Errors
    /// `PathRefused` where it may not be written, is being written by another batch, or, for `Resume`, has anything but
    /// results.
    pub fn new(path: PathBuf, existing: Existing) -> Result<Self> {
        if existing == Existing::Refuse {
            return match path.symlink_metadata() {
                Ok(_) => Err(exists(&path)),
                Err(_) => Ok(Self { path, file: None, found: Found::default() }),
            };
        }
        let mut file = match options().open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Ok(Self { path, file: None, found: Found::default() });
            }
            Err(e) => return Err(Fault::io("write", &path, &e)),
        };
        lock(&file, &path)?;
        let found = if existing == Existing::Resume { look(&mut file, &path)? } else { Found::default() };
        Ok(Self { path, file: Some(file), found })
    }

    /// Ids that the file has with `ok`.
    pub fn done(&self) -> &HashSet<String> {
        &self.found.done
    }

    /// Makes the file ready to be written: here a torn line is cut off, an overwritten file emptied, a new one created.
    ///
    /// # Errors
    /// `PathRefused`, or `Internal` where the machine is at fault.
    pub fn begin(self) -> Result<(Output, HashSet<String>)> {
        let Self { path, file, found } = self;
        let fault = |e: &io::Error| Fault::io("write", &path, e);
        let mut file = match file {
            Some(file) if found.len > 0 && file.metadata().map_err(|e| fault(&e))?.len() != found.len => {
                return Err(busy(&path, "another program"));
            }
            Some(file) => file,
            None => {
                let created = options().create_new(true).open(&path).map_err(|e| match e.kind() {
                    io::ErrorKind::AlreadyExists => exists(&path),
                    _ => fault(&e),
                })?;
                lock(&created, &path)?;
                created
            }
        };
        let mut len = found.keep;
        file.set_len(len).and_then(|()| file.seek(SeekFrom::End(0))).map_err(|e| fault(&e))?;
        if found.unended {
            file.write_all(b"\n").map_err(|e| fault(&e))?;
            len += 1;
        }
        Ok((Output { file, path, len, lines: found.lines, written: 0, broken: None }, found.done))
    }
}

fn exists(path: &Path) -> Fault {
    Fault::new(Kind::PathRefused, format!("{} exists already", path.display()))
        .advise("say resume=true to go on with it, resume=false and overwrite=true to empty it, or name another file")
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    // Not in append mode: that forbids cutting a torn line on some systems. There is one writer.
    options.read(true).write(true);
    #[cfg(windows)]
    {
        use std::os::windows::fs::OpenOptionsExt;
        // Others may read it, but neither write, rename nor remove it meanwhile (FILE_SHARE_READ).
        options.share_mode(1);
    }
    options
}

/// Takes the lock that other servers ask for. On Windows it would keep readers out, too, and is not needed.
fn lock(file: &File, path: &Path) -> Result<()> {
    match if cfg!(unix) { file.try_lock() } else { Ok(()) } {
        Err(TryLockError::WouldBlock) => Err(busy(path, "another batch")),
        // A file system without locks: then there is one server at a time, or the check of each append tells.
        Err(TryLockError::Error(e)) => {
            tracing::warn!("{} cannot be locked: {e}", path.display());
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// A file that a batch writes now.
pub fn busy(path: &Path, by: &str) -> Fault {
    Fault::new(Kind::PathRefused, format!("{} is being written by {by}", path.display()))
        .advise("wait for the end of that batch, or name another output_path")
        .passing()
}

/// Finds the results that a file has. Anything else in it is an error: it is somebody else's file.
fn look(file: &mut File, path: &Path) -> Result<Found> {
    let mut found = Found::default();
    let mut line = Vec::new();
    let mut reader = BufReader::new(file);
    for number in 1_u64.. {
        line.clear();
        let read = read_result(&mut reader, &mut line).map_err(|e| Fault::io("read", path, &e))?;
        if read == 0 {
            break;
        }
        let ended = line.last() == Some(&b'\n');
        found.len += read as u64;
        let record: Option<Value> = serde_json::from_slice(&line).ok().filter(is_result);
        match record {
            Some(record) => {
                found.keep += read as u64;
                found.unended = !ended;
                found.lines.push(hash(without_end(&line)));
                if let (Some(id), Some(true)) = (record["id"].as_str(), record["ok"].as_bool()) {
                    found.done.insert(id.to_owned());
                }
            }
            None if !ended && is_torn(&line) => break,
            None => return Err(foreign(path, number, &line)),
        }
    }
    Ok(found)
}

fn foreign(path: &Path, number: u64, line: &[u8]) -> Fault {
    let line = String::from_utf8_lossy(line.get(..256).unwrap_or(line));
    let why = format!("{} has more than results: line {number} is {:?}", path.display(), shown(line.trim_end()));
    Fault::new(Kind::PathRefused, why)
        .advise("name another output_path, or say resume=false and overwrite=true if the file may be emptied")
}

fn is_result(value: &Value) -> bool {
    value["id"].is_string() && value["ok"].is_boolean()
}

/// Whether a line could be the beginning of one that `batch` writes: `{"id":"...","ok":true` and so on.
fn is_torn(line: &[u8]) -> bool {
    let Some(rest) = after(line, b"{\"id\":\"") else { return false };
    let mut escaped = false;
    let end = rest.iter().position(|&byte| {
        let end = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        end
    });
    let Some(rest) = end.and_then(|end| rest.get(end + 1..)) else { return true };
    let Some(rest) = after(rest, b",\"ok\":") else { return false };
    [&b"true,"[..], b"false,"].iter().any(|word| after(rest, word).is_some())
}

/// What comes after a beginning; nothing where the text ends within it.
fn after<'a>(text: &'a [u8], beginning: &[u8]) -> Option<&'a [u8]> {
    text.strip_prefix(beginning).or_else(|| beginning.starts_with(text).then_some(&[]))
}

/// A file that results are added to, watched: what is written to a file that was moved away, removed or changed by others
/// would be lost.
#[derive(Debug)]
pub struct Output {
    file: File,
    path: PathBuf,
    /// Its length, when nobody else writes it.
    len: u64,
    /// A hash of each of its lines.
    lines: Vec<u64>,
    written: u64,
    /// Why nothing more may be added.
    broken: Option<Fault>,
}

impl Output {
    /// Adds a line in one write, so that a kill leaves at most one torn line. After a failure nothing more is added.
    ///
    /// # Errors
    /// `PathRefused` where others touched the file, `Internal` where the machine is at fault.
    pub fn append(&mut self, line: &[u8]) -> Result<()> {
        if let Some(fault) = &self.broken {
            return Err(fault.clone());
        }
        let result = self.check().and_then(|()| {
            self.file.write_all(line).map_err(|e| {
                // What was written of the line goes again, where that is possible.
                let _ = self.file.set_len(self.len);
                Fault::io("write", &self.path, &e).and(&format!("{} results were written before", self.written))
            })
        });
        match &result {
            Ok(()) => {
                (self.len, self.written) = (self.len + line.len() as u64, self.written + 1);
                self.lines.push(hash(without_end(line)));
            }
            Err(fault) => self.broken = Some(fault.clone()),
        }
        result
    }

    /// Looks whether the file is still the one that was written, and all of it.
    ///
    /// # Errors
    /// `PathRefused` with what happened to it.
    pub fn check(&self) -> Result<()> {
        let system = |e: io::Error| Fault::io("look at", &self.path, &e);
        if self.moved().map_err(system)? {
            return Err(self.lost("replaced or removed"));
        }
        let len = self.file.metadata().map_err(system)?.len();
        if len != self.len {
            return Err(self.lost(&format!("changed by another program ({len} bytes, not {})", self.len)));
        }
        Ok(())
    }

    /// Looks also whether each line is still what was there before or was written. Reads the whole file: for the end.
    ///
    /// # Errors
    /// `PathRefused` with what happened to it.
    pub fn verify(&mut self) -> Result<()> {
        self.check()?;
        let system = |e: io::Error| Fault::io("read", &self.path, &e);
        (&self.file).seek(SeekFrom::Start(0)).map_err(system)?;
        let (mut reader, mut line) = (BufReader::new(&self.file), Vec::new());
        for (number, expected) in (1_u64..).zip(&self.lines) {
            line.clear();
            reader.read_until(b'\n', &mut line).map_err(system)?;
            if hash(without_end(&line)) != *expected {
                return Err(self.lost(&format!("changed by another program (line {number})")));
            }
        }
        Ok(())
    }

    fn lost(&self, what: &str) -> Fault {
        let why =
            format!("{} was {what} while the batch ran; it had {} results of it", self.path.display(), self.written);
        Fault::new(Kind::PathRefused, why).advise(
            "keep other programs off the output, then call dllm_batch again: with resume=true what it still has is kept",
        )
    }

    /// Without opening it again: that can fail for reasons of its own.
    #[cfg(unix)]
    fn moved(&self) -> io::Result<bool> {
        use std::os::unix::fs::MetadataExt;
        let here = match std::fs::symlink_metadata(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(true),
            other => other?,
        };
        let ours = self.file.metadata()?;
        Ok((here.dev(), here.ino()) != (ours.dev(), ours.ino()))
    }

    /// The system refuses to move or remove a file that is opened as this one is.
    #[cfg(not(unix))]
    fn moved(&self) -> io::Result<bool> {
        Ok(false)
    }
}

/// A page of results from a file: whole lines from byte `cursor` on, at most `limit` and about `budget` bytes. Also tells
/// where the next page begins, and whether there is more now.
///
/// # Errors
/// `PathRefused` or `Internal` where the file cannot be read; `BadArgument` for a cursor behind its end or inside a line.
pub fn page(path: &Path, cursor: u64, limit: usize, budget: usize) -> Result<(Vec<Value>, u64, bool)> {
    let fault = |e: io::Error| Fault::io("read", path, &e);
    let mut file = File::open(path).map_err(fault)?;
    let len = file.metadata().map_err(fault)?.len();
    if cursor > len {
        return Err(Fault::argument("cursor", format!("{cursor} is behind the end at {len}")));
    }
    // A cursor inside a line is none that was given out.
    let mut before = [b'\n'];
    file.seek(SeekFrom::Start(cursor.saturating_sub(1))).map_err(fault)?;
    if cursor > 0 {
        file.read_exact(&mut before).map_err(fault)?;
    }
    if before != [b'\n'] {
        return Err(Fault::argument("cursor", format!("no line begins at {cursor}")));
    }
    let mut reader = BufReader::new(file);
    let (mut items, mut at, mut size) = (Vec::new(), cursor, 0_usize);
    let mut line = Vec::new();
    while items.len() < limit {
        line.clear();
        let read = read_result(&mut reader, &mut line).map_err(fault)?;
        if line.last() != Some(&b'\n') {
            // The end, or a line that is being written.
            return Ok((items, at, false));
        }
        if !items.is_empty() && size + read > budget {
            break;
        }
        // Not left out: whoever counts the results would miss it without a word.
        items.push(serde_json::from_slice(&line).unwrap_or_else(|e| unreadable(at, &e)));
        (at, size) = (at + read as u64, size + read);
    }
    Ok((items, at, at < len))
}

/// Stands in a page for a line that is no JSON.
fn unreadable(at: u64, error: &serde_json::Error) -> Value {
    let message = format!("the line at byte {at} of the output is no result ({error}): another program changed it");
    json!({"ok": false, "error": {"type": "path_refused", "message": message}})
}

fn without_end(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\n").unwrap_or(line)
}

/// A line of an output file, its end included. One that is too long comes without its end, in pieces.
fn read_result(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<usize> {
    reader.take(MAX_RESULT).read_until(b'\n', line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_beginnings_of_results_are_torn() {
        let whole = br#"{"id":"a \"b\\","ok":false,"error":{}}"#;
        for end in 1..whole.len() {
            assert!(is_torn(&whole[..end]), "{}", String::from_utf8_lossy(&whole[..end]));
        }
        for other in [
            &b"x"[..],
            b"{\"name\"",
            b"{ \"id\"",
            b"{\"id\":7",
            b"{\"id\":\"a\"}",
            b"{\"id\":\"a\",\"x\":1",
            b"{\"id\":\"a\",\"ok\":1",
            b"fn main() {",
        ] {
            assert!(!is_torn(other), "{}", String::from_utf8_lossy(other));
        }
    }
}
