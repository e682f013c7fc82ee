//! Tokens of finished canvases become the answer: thought text apart, cut at its end, settled piece by piece.

use std::sync::Arc;

use crate::denoise::Settle;
use crate::error::{Error, Result};
use crate::event::FinishReason;
use crate::vocab::{ThoughtTokens, Vocab};

/// Most stop texts, and most bytes of one.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;

/// Turns canvases into text.
///
/// What is pushed may be cut into canvases anyhow; text, reasoning, tokens and finish reason do not depend on it. The answer
/// ends before the first of: an end-of-generation token, the stop text that is complete first (of those complete at the
/// same byte the longest; only the answer is searched, not thought text), `max_tokens` tokens.
#[derive(Debug)]
pub struct Settler {
    vocab: Arc<Vocab>,
    markers: ThoughtTokens,
    stops: Vec<Vec<u8>>,
    max_tokens: usize,
    /// Tokens up to the last given one, which end tokens do not end.
    given: usize,
    /// The answer's tokens, and for each how many bytes of the answer stood before it.
    tokens: Vec<u32>,
    starts: Vec<usize>,
    in_thought: bool,
    /// Bytes of the answer up to a stop text, and how many of them are in `text`.
    answer: Vec<u8>,
    settled: usize,
    text: String,
    /// Each channel's bytes, its name included.
    thoughts: Vec<Vec<u8>>,
    finished: Option<FinishReason>,
}

impl Settle for Settler {
    fn settle(&mut self, tokens: &[u32], last: bool, text: &mut String) -> Option<usize> {
        text.push_str(self.push(tokens));
        if self.finished == Some(FinishReason::Stop) {
            return Some(self.tokens.len());
        }
        if last {
            // The loop knows why the answer ends; it only matters here that it does.
            text.push_str(self.finish(FinishReason::Length));
        }
        None
    }

    fn reasoning(&mut self) -> Option<String> {
        Settler::reasoning(self)
    }
}

impl Settler {
    /// An empty answer to `prompt`, whose tokens tell whether the template has opened the thought channel already.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for `max_tokens` 0 and for stop texts that are empty, too long, or too many.
    pub fn new(vocab: Arc<Vocab>, prompt: &[u32], stop: &[String], max_tokens: usize) -> Result<Self> {
        if max_tokens == 0 {
            return Err(Error::argument("max_tokens", "0 leaves nothing to generate: ask for at least 1"));
        }
        if stop.len() > MAX_STOPS {
            return Err(Error::argument("stop", format!("{} texts are more than {MAX_STOPS}: give fewer", stop.len())));
        }
        for (i, text) in stop.iter().enumerate() {
            if text.is_empty() || text.len() > MAX_STOP_BYTES {
                let why = format!("text {i} has {} bytes; 1 to {MAX_STOP_BYTES} are possible: change it", text.len());
                return Err(Error::argument("stop", why));
            }
        }
        let markers = vocab.thought();
        let mut settler = Self {
            vocab,
            markers,
            stops: stop.iter().map(|s| s.as_bytes().to_vec()).collect(),
            max_tokens,
            given: 0,
            tokens: Vec::new(),
            starts: Vec::new(),
            in_thought: false,
            answer: Vec::new(),
            settled: 0,
            text: String::new(),
            thoughts: Vec::new(),
            finished: None,
        };
        settler.continue_prompt(prompt);
        Ok(settler)
    }

    /// The answer has at least `n` tokens: end tokens before do not end it, and print nothing.
    pub fn given(mut self, n: usize) -> Self {
        self.given = n;
        self
    }

    /// Adds the tokens of a finished canvas and returns the text of the answer that is final now. Held back is what may be
    /// the beginning of a stop text or of a character. Tokens after the end are ignored.
    pub fn push(&mut self, canvas: &[u32]) -> &str {
        for &id in canvas {
            if self.finished.is_some() {
                break;
            }
            self.add(id);
        }
        let end = match self.finished {
            Some(_) => self.answer.len(),
            None => self.answer.len() - self.held_back(),
        };
        self.settle(end)
    }

    /// Ends the answer and returns the text that was held back. `reason` counts only where nothing ended it before.
    pub fn finish(&mut self, reason: FinishReason) -> &str {
        self.finished.get_or_insert(reason);
        self.settle(self.answer.len())
    }

    /// Why the answer ended; `None` while it goes on.
    pub fn finished(&self) -> Option<FinishReason> {
        self.finished
    }

    /// The settled text of the answer.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Thought text so far, several thoughts with an empty line between; `None` where there was none.
    pub fn reasoning(&self) -> Option<String> {
        let thoughts: Vec<String> =
            self.thoughts.iter().map(|t| thought_text(t, self.markers.name)).filter(|t| !t.is_empty()).collect();
        (!thoughts.is_empty()).then(|| thoughts.join("\n\n"))
    }

    /// Whether the answer is inside thought text now.
    pub fn in_thought(&self) -> bool {
        self.in_thought
    }

    /// The answer's tokens, thought text included, without the end-of-generation token. Where a stop text cut the answer,
    /// the last token may print more than what was left.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// A template may end the prompt inside a channel, or close it at once to ask for no thoughts.
    fn continue_prompt(&mut self, prompt: &[u32]) {
        let last = prompt.iter().rposition(|&id| Some(id) == self.markers.open || Some(id) == self.markers.close);
        let Some((at, &id)) = last.and_then(|at| Some((at, prompt.get(at)?))) else { return };
        let after = prompt.get(at + 1..).unwrap_or_default();
        if Some(id) == self.markers.open && !after.iter().any(|&id| self.vocab.is_eog(id)) {
            self.in_thought = true;
            self.thoughts.push(after.iter().flat_map(|&id| self.vocab.piece(id)).copied().collect());
        }
    }

    fn add(&mut self, id: u32) {
        let end = self.vocab.is_eog(id);
        if end && self.tokens.len() >= self.given {
            self.finished = Some(FinishReason::Stop);
            return;
        }
        self.tokens.push(id);
        self.starts.push(self.answer.len());
        if Some(id) == self.markers.open {
            self.in_thought = true;
            self.thoughts.push(Vec::new());
        } else if Some(id) == self.markers.close {
            self.in_thought = false;
        } else if !end && !self.vocab.is_hidden(id) {
            self.add_piece(id);
        }
        if self.finished.is_none() && self.tokens.len() >= self.max_tokens {
            self.finished = Some(FinishReason::Length);
        }
    }

    fn add_piece(&mut self, id: u32) {
        let piece = self.vocab.piece(id);
        match self.thoughts.last_mut().filter(|_| self.in_thought) {
            Some(thought) => thought.extend_from_slice(piece),
            None => {
                for &byte in piece {
                    self.answer.push(byte);
                    let stop = self.stops.iter().filter(|s| self.answer.ends_with(s)).map(Vec::len).max();
                    if let Some(len) = stop {
                        self.cut(len);
                        break;
                    }
                }
            }
        }
    }

    /// Ends the answer before the stop text that it ends with, and drops the tokens that belong to that text alone.
    fn cut(&mut self, stop_len: usize) {
        let end = self.answer.len().saturating_sub(stop_len);
        self.answer.truncate(end);
        // The last token that begins at or before the cut prints the stop text's first byte.
        let last = self.starts.partition_point(|&start| start <= end).saturating_sub(1);
        let kept = last + usize::from(self.starts.get(last).is_some_and(|&start| start < end));
        self.tokens.truncate(kept);
        self.starts.truncate(kept);
        self.finished = Some(FinishReason::Stop);
    }

    /// Bytes at the end of the answer that are not final.
    fn held_back(&self) -> usize {
        let open = self.answer.get(self.settled..).unwrap_or_default();
        let longest_prefix = |stop: &Vec<u8>| {
            let most = open.len().min(stop.len() - 1);
            (1..=most).rev().find(|&n| open.ends_with(&stop[..n])).unwrap_or(0)
        };
        let stop = self.stops.iter().map(longest_prefix).max().unwrap_or(0);
        stop.max(unfinished_character(open))
    }

    fn settle(&mut self, end: usize) -> &str {
        let before = self.text.len();
        if let Some(bytes) = self.answer.get(self.settled..end) {
            self.text.push_str(&String::from_utf8_lossy(bytes));
            self.settled = end;
        }
        self.text.get(before..).unwrap_or_default()
    }
}

/// Bytes at the end of `bytes` that begin a UTF-8 character and lack its rest.
fn unfinished_character(bytes: &[u8]) -> usize {
    let lengths = 1..=bytes.len().min(3);
    lengths
        .rev()
        .find(|&n| {
            let tail = &bytes[bytes.len() - n..];
            std::str::from_utf8(tail).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
        })
        .unwrap_or(0)
}

/// A channel's text without its name and the white space around.
fn thought_text(channel: &[u8], name: &str) -> String {
    let text = channel.strip_prefix(name.as_bytes()).unwrap_or(channel);
    String::from_utf8_lossy(text).trim().to_owned()
}
