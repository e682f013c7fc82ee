//! Batches over JSONL: items are read one by one, results are appended and flushed one by one, and a batch that was killed
//! goes on where it was.

use std::collections::HashSet;
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::answer::Answer;
use crate::error::{Fault, Kind, Result};
use crate::item::{Item, Recipe};
use crate::jobs::Job;
use crate::output::{Output, Prepared};
use crate::queue::Unit;

/// Longest line of an input file.
const MAX_LINE: u64 = 1024 * 1024;
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
            Self::File(path) => Box::new(File::open(path).map_err(|e| Fault::io("read", path, &e))?),
            Self::Inline(text) => Box::new(io::Cursor::new(Arc::<[u8]>::from(Arc::clone(text)))),
        };
        Ok(Lines { reader: BufReader::new(reader), number: 0 })
    }

    fn fault(&self, error: &io::Error) -> Fault {
        match self {
            Self::File(path) => Fault::io("read", path, error),
            Self::Inline(_) => Fault::io("read", Path::new("items_json"), error),
        }
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
    /// A hash of each line to run, in order: what is read again later must be the same.
    lines: Vec<u64>,
}

/// A hash to tell a line from another one, within this process.
pub(crate) fn hash(line: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(line);
    hasher.finish()
}

/// Looks through all items, without keeping them.
///
/// # Errors
/// `PathRefused` or `Internal` where the input cannot be read.
pub fn survey(input: &Input, recipe: &Recipe, done: &HashSet<String>) -> Result<Survey> {
    let mut lines = input.open()?;
    let mut survey = Survey::default();
    let mut seen = HashSet::new();
    while let Some((number, line)) = lines.next().map_err(|e| input.fault(&e))? {
        match line.and_then(|line| Ok((hash(line.as_bytes()), recipe.item(number, &line)?))) {
            Ok((_, item)) if !seen.insert(item.id.clone()) => {
                survey.reject(number, format!("the id {:?} came before", item.id))
            }
            Ok((_, item)) if done.contains(&item.id) => survey.skipped += 1,
            Ok((hash, _)) => {
                survey.accepted += 1;
                survey.lines.push(hash);
            }
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

/// A batch that runs.
pub struct BatchRun {
    job: Arc<Job>,
    input: Input,
    lines: Lines,
    recipe: Recipe,
    /// Ids that are done, or were started.
    seen: HashSet<String>,
    /// Hashes of the lines to run, as they were when the job was accepted.
    expected: std::vec::IntoIter<u64>,
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
    /// A batch from its beginning: the items that the survey accepted. The output is touched here.
    ///
    /// # Errors
    /// `PathRefused` or `Internal` where the input cannot be read or the output not be written.
    pub fn new(job: Arc<Job>, input: Input, recipe: Recipe, survey: &mut Survey, output: Prepared) -> Result<Self> {
        let lines = input.open()?;
        let (output, seen) = output.begin()?;
        let expected = std::mem::take(&mut survey.lines).into_iter();
        let exhausted = expected.len() == 0;
        Ok(Self { job, input, lines, recipe, seen, expected, output, in_flight: 0, exhausted, fault: None })
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
        while !self.exhausted {
            if let Some(fault) = self.job.over() {
                self.fail(fault);
                return None;
            }
            if self.expected.len() == 0 {
                // What was added to the file since it was looked through belongs to the next batch.
                self.exhausted = true;
                return None;
            }
            match self.lines.next() {
                Ok(Some((number, line))) => {
                    // What the survey rejected is passed over here.
                    let item = line.and_then(|line| Ok((hash(line.as_bytes()), self.recipe.item(number, &line)?)));
                    if let Ok((hash, Item { id, ask })) = item
                        && self.seen.insert(id.clone())
                    {
                        if self.expected.next() != Some(hash) {
                            self.fail(self.changed(&format!("line {number} is another one")));
                            return None;
                        }
                        self.in_flight += 1;
                        return Some(Unit { job: Arc::clone(&self.job), part: 0, item: Some(id), ask });
                    }
                }
                Ok(None) => self.fail(self.changed("it is shorter")),
                Err(e) => self.fail(self.input.fault(&e)),
            }
        }
        None
    }

    fn changed(&self, how: &str) -> Fault {
        let Self { job, expected, .. } = self;
        let total = job.view().total;
        let begun = total.saturating_sub(expected.len() as u64);
        let why = format!("the input changed while the batch ran ({how}): about {begun} of {total} items were run");
        Fault::new(Kind::PathRefused, why)
            .advise("leave the input alone while a batch runs; call dllm_batch again with resume=true for the rest")
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

    /// Whether all its items have ended.
    pub fn complete(&mut self) -> bool {
        if !self.exhausted
            && let Some(fault) = self.job.over()
        {
            self.fail(fault);
        }
        self.exhausted && self.in_flight == 0
    }

    /// Ends the job. Whoever hears of it can write the same output at once: its lock goes first.
    pub fn end(self) {
        let Self { job, mut output, fault, .. } = self;
        let fault = fault.or_else(|| output.verify().err()).or_else(|| job.over());
        drop(output);
        job.finish(fault);
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
