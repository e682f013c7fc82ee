//! Batches over JSONL: items are read one by one, results are appended and flushed one by one, and a batch that was killed
//! goes on where it was.

use std::collections::HashSet;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::answer::Answer;
use crate::error::{Fault, Kind, Result};
use crate::item::{Item, Recipe};
use crate::jobs::Job;
use crate::queue::Unit;

/// Longest line of an input file.
const MAX_LINE: u64 = 1024 * 1024;
/// Longest line of an output file; what is longer was written by somebody else.
const MAX_RESULT: u64 = 64 * 1024 * 1024;
/// Rejected items that are told one by one.
const REJECTED_SHOWN: usize = 20;

/// Where the items come from.
#[derive(Debug, Clone)]
pub enum Input {
    /// A JSONL file.
    File(PathBuf),
    /// Lines that came with the call.
    Inline(Arc<str>),
}

impl Input {
    fn open(&self) -> Result<Lines> {
        let reader: Box<dyn Read + Send> = match self {
            Self::File(path) => Box::new(File::open(path).map_err(|e| io_fault("read", path, &e))?),
            Self::Inline(text) => Box::new(io::Cursor::new(Arc::<[u8]>::from(Arc::clone(text)))),
        };
        Ok(Lines { reader: BufReader::new(reader), number: 0 })
    }
}

/// Lines of bounded length.
struct Lines {
    reader: BufReader<Box<dyn Read + Send>>,
    number: u64,
}

impl Lines {
    /// The next line that is not blank, with its number from 1; `Err` inside for one that is too long or no text.
    fn next(&mut self) -> io::Result<Option<(u64, Result<String>)>> {
        loop {
            let mut bytes = Vec::new();
            if (&mut self.reader).take(MAX_LINE + 1).read_until(b'\n', &mut bytes)? == 0 {
                return Ok(None);
            }
            self.number += 1;
            if bytes.len() as u64 > MAX_LINE && bytes.last() != Some(&b'\n') {
                self.skip_line()?;
                return Ok(Some((
                    self.number,
                    Err(Fault::argument("item", format!("the line is longer than {MAX_LINE} bytes"))),
                )));
            }
            let line = String::from_utf8(bytes).map_err(|_| Fault::argument("item", "the line is no UTF-8 text"));
            let line = line.map(|line| line.trim_start_matches('\u{feff}').trim().to_owned());
            if line.as_ref().is_ok_and(String::is_empty) {
                continue;
            }
            return Ok(Some((self.number, line)));
        }
    }

    fn skip_line(&mut self) -> io::Result<()> {
        loop {
            let chunk = self.reader.fill_buf()?;
            let (used, ended) = match chunk.iter().position(|&b| b == b'\n') {
                Some(at) => (at + 1, true),
                None => (chunk.len(), chunk.is_empty()),
            };
            self.reader.consume(used);
            if ended {
                return Ok(());
            }
        }
    }
}

/// What a look through the items found.
#[derive(Debug, Default)]
pub struct Survey {
    /// Items to run.
    pub accepted: u64,
    /// Items that are done already.
    pub skipped: u64,
    /// Items that cannot be run.
    pub rejected: u64,
    /// The first of these: line, id where known, reason.
    pub reasons: Vec<Value>,
}

/// Looks through all items, without keeping them.
///
/// # Errors
/// `PathRefused` where the input cannot be read.
pub fn survey(input: &Input, recipe: &Recipe, done: &HashSet<String>) -> Result<Survey> {
    let mut lines = input.open()?;
    let mut survey = Survey::default();
    let mut seen = HashSet::new();
    while let Some((number, line)) = lines.next().map_err(|e| read_fault(&e))? {
        match line.and_then(|line| recipe.item(number, &line)) {
            Ok(item) if !seen.insert(item.id.clone()) => {
                survey.reject(number, format!("the id {:?} came before", item.id))
            }
            Ok(item) if done.contains(&item.id) => survey.skipped += 1,
            Ok(_) => survey.accepted += 1,
            Err(fault) => survey.reject(number, fault.message),
        }
    }
    Ok(survey)
}

impl Survey {
    fn reject(&mut self, number: u64, why: String) {
        self.rejected += 1;
        if self.reasons.len() < REJECTED_SHOWN {
            self.reasons.push(json!({"line": number, "why": why}));
        }
    }
}

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

/// Opens the output for appending, and tells which ids it has with `ok`. A torn last line is cut off.
///
/// # Errors
/// `PathRefused`.
pub fn open_output(path: &Path, existing: Existing) -> Result<(File, HashSet<String>)> {
    let fault = |e: &io::Error| io_fault("write", path, e);
    let mut options = OpenOptions::new();
    // Not in append mode: that forbids cutting a torn line on some systems. There is one writer.
    options.read(true).write(true);
    #[cfg(windows)]
    {
        use std::os::windows::fs::OpenOptionsExt;
        // Others may read it, but neither write, rename nor remove it meanwhile (FILE_SHARE_READ).
        options.share_mode(1);
    }
    match existing {
        Existing::Refuse => options.create_new(true),
        Existing::Resume | Existing::Overwrite => options.create(true),
    };
    let mut file = options.open(path).map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => {
            Fault::new(Kind::PathRefused, format!("{} exists: say resume=true or overwrite=true", path.display()))
        }
        _ => fault(&e),
    })?;
    // Elsewhere locks are only for those who ask, which other servers do. On Windows they would keep readers out, too.
    if cfg!(unix)
        && let Err(TryLockError::WouldBlock) = file.try_lock()
    {
        let why = format!("{} is being written by another batch: wait for its end", path.display());
        return Err(Fault::new(Kind::PathRefused, why));
    }
    if existing == Existing::Overwrite {
        file.set_len(0).map_err(|e| fault(&e))?;
    }
    let done = done_ids(&mut file).map_err(|e| fault(&e))?;
    Ok((file, done))
}

fn done_ids(file: &mut File) -> io::Result<HashSet<String>> {
    let mut done = HashSet::new();
    let mut whole = 0;
    file.seek(SeekFrom::Start(0))?;
    let mut reader = BufReader::new(&mut *file);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = read_result(&mut reader, &mut line)?;
        if read == 0 || line.last() != Some(&b'\n') {
            break;
        }
        whole += read as u64;
        let value: Value = serde_json::from_slice(&line).unwrap_or_default();
        if let (Some(id), Some(true)) = (value["id"].as_str(), value["ok"].as_bool()) {
            done.insert(id.to_owned());
        }
    }
    file.set_len(whole)?;
    file.seek(SeekFrom::End(0))?;
    Ok(done)
}

/// The file that results go to, watched: what is written to a file that was moved away or removed would be lost.
struct Output {
    file: File,
    path: PathBuf,
    identity: Option<same_file::Handle>,
}

impl Output {
    fn new(file: File, path: PathBuf) -> Self {
        let identity = file.try_clone().and_then(same_file::Handle::from_file).ok();
        Self { file, path, identity }
    }

    /// Adds a line in one write, so that a kill leaves at most one torn line.
    fn append(&mut self, line: &[u8]) -> Result<()> {
        if self.identity.as_ref() != same_file::Handle::from_path(&self.path).ok().as_ref() {
            let why = format!("{} was replaced or removed while the batch ran", self.path.display());
            return Err(Fault::new(Kind::PathRefused, why));
        }
        // Its end may have moved: somebody may have emptied it.
        let end = self.file.seek(SeekFrom::End(0));
        end.and_then(|_| self.file.write_all(line)).map_err(|e| io_fault("write", &self.path, &e))
    }
}

/// A batch that runs.
pub struct BatchRun {
    job: Arc<Job>,
    lines: Lines,
    recipe: Recipe,
    /// Ids that are done, or were started.
    seen: HashSet<String>,
    /// Items that were started; the job's total was counted before.
    started: u64,
    output: Output,
    in_flight: usize,
    exhausted: bool,
    fault: Option<Fault>,
}

impl std::fmt::Debug for BatchRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchRun")
            .field("job", &self.job.id)
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

impl BatchRun {
    /// A batch from its beginning; items in `done` are passed over.
    ///
    /// # Errors
    /// `PathRefused` where the input cannot be read.
    pub fn new(job: Arc<Job>, input: &Input, recipe: Recipe, output: File, done: HashSet<String>) -> Result<Self> {
        let nothing = job.view().total == 0;
        let output = Output::new(output, job.output.clone().unwrap_or_default());
        Ok(Self {
            job,
            lines: input.open()?,
            recipe,
            seen: done,
            started: 0,
            output,
            in_flight: 0,
            exhausted: nothing,
            fault: None,
        })
    }

    /// Its job.
    pub fn job(&self) -> &Arc<Job> {
        &self.job
    }

    /// Whether all items were started.
    pub fn exhausted(&self) -> bool {
        self.exhausted
    }

    /// The next item to run.
    pub fn take_next(&mut self) -> Option<Unit> {
        let total = self.job.view().total;
        while !self.exhausted {
            if let Some(fault) = self.job.over() {
                self.fail(fault);
                return None;
            }
            if self.started == total {
                // What was added to the file since it was looked through belongs to the next batch.
                self.exhausted = true;
                return None;
            }
            match self.lines.next() {
                Ok(Some((number, line))) => {
                    // What the survey rejected is passed over here.
                    let item = line.and_then(|line| self.recipe.item(number, &line));
                    if let Ok(Item { id, ask }) = item
                        && self.seen.insert(id.clone())
                    {
                        (self.in_flight, self.started) = (self.in_flight + 1, self.started + 1);
                        return Some(Unit { job: Arc::clone(&self.job), part: 0, item: Some(id), ask });
                    }
                }
                Ok(None) => {
                    let why =
                        format!("the input changed while the batch ran: {} of {total} items were found", self.started);
                    self.fail(Fault::new(Kind::PathRefused, why));
                }
                Err(e) => self.fail(read_fault(&e)),
            }
        }
        None
    }

    /// Writes the line of an item. One that was cancelled has no line: it is run again on resume.
    pub fn finish_item(&mut self, unit: Unit, result: Result<Answer>) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if let Err(fault) = &result
            && matches!(fault.kind, Kind::Cancelled | Kind::Deadline)
        {
            return;
        }
        let line = item_line(unit.item.as_deref().unwrap_or(""), &result, &self.job);
        let ok = line["ok"] == json!(true);
        let mut bytes = line.to_string().into_bytes();
        bytes.push(b'\n');
        match self.output.append(&bytes) {
            Ok(()) => self.job.count(!ok),
            Err(fault) => {
                self.fail(fault);
                self.job.cancel.cancel();
            }
        }
    }

    /// Starts no more items.
    pub fn fail(&mut self, fault: Fault) {
        self.exhausted = true;
        self.fault.get_or_insert(fault);
    }

    /// Ends the job when all its items have ended.
    pub fn end_if_complete(&mut self) -> bool {
        if !self.exhausted
            && let Some(fault) = self.job.over()
        {
            self.fail(fault);
        }
        let complete = self.exhausted && self.in_flight == 0;
        if complete {
            self.job.finish(self.fault.take().or_else(|| self.job.over()));
        }
        complete
    }
}

fn item_line(id: &str, result: &Result<Answer>, job: &Job) -> Value {
    let mut line = Map::new();
    line.insert("id".into(), json!(id));
    let answer = match result {
        Ok(answer) => answer,
        Err(fault) => {
            line.insert("ok".into(), json!(false));
            line.insert("error".into(), json!({"type": fault.kind.name(), "message": fault.message}));
            return Value::Object(line);
        }
    };
    match job.format.as_ref().map(|format| format.parse(&answer.text)) {
        None => {
            line.insert("ok".into(), json!(true));
            line.insert("text".into(), json!(answer.text));
        }
        Some(Ok(value)) => {
            line.insert("ok".into(), json!(true));
            line.insert("json".into(), value);
        }
        Some(Err(why)) => {
            line.insert("ok".into(), json!(false));
            line.insert("text".into(), json!(answer.text));
            line.insert("error".into(), json!({"type": "invalid_json", "message": why}));
        }
    }
    line.insert("tokens_used".into(), json!(answer.tokens));
    line.insert("steps".into(), json!(answer.steps));
    line.insert("time_taken".into(), json!(answer.seconds));
    line.insert("finish_reason".into(), json!(answer.finish_reason));
    line.insert("seed".into(), json!(answer.seed));
    line.insert("model".into(), json!(answer.model));
    Value::Object(line)
}

/// A page of results from a file: whole lines from byte `cursor` on, at most `limit` and about `budget` bytes. Also tells
/// where the next page begins, and whether there is more now.
///
/// # Errors
/// `Internal` where the file cannot be read; `BadArgument` for a cursor behind its end.
pub fn page(path: &Path, cursor: u64, limit: usize, budget: usize) -> Result<(Vec<Value>, u64, bool)> {
    let fault = |e: io::Error| Fault::new(Kind::Internal, format!("cannot read {}: {e}", path.display()));
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
        if read == 0 || line.last() != Some(&b'\n') || (!items.is_empty() && size + read > budget) {
            break;
        }
        (at, size) = (at + read as u64, size + read);
        if let Ok(value) = serde_json::from_slice(&line) {
            items.push(value);
        }
    }
    Ok((items, at, at < len))
}

/// A whole line of an output file, its end included.
fn read_result(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<usize> {
    let read = reader.take(MAX_RESULT).read_until(b'\n', line)?;
    if read as u64 == MAX_RESULT {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a line has {MAX_RESULT} bytes or more")));
    }
    Ok(read)
}

fn io_fault(action: &str, path: &Path, error: &io::Error) -> Fault {
    Fault::new(Kind::PathRefused, format!("cannot {action} {}: {error}", path.display()))
}

fn read_fault(error: &io::Error) -> Fault {
    Fault::new(Kind::PathRefused, format!("cannot read the items: {error}"))
}
