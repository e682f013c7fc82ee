//! The vocabulary: text to token ids and back.
//!
//! libllama does what depends on the model (byte-pair merges, pieces; decision D3). Where special tokens are looked for is
//! decided here, because libllama knows two ways only, everywhere or (user-defined tokens) everywhere nevertheless, and a
//! prompt needs a third: in the template's text but not in the text of a message. So libllama sees a vocabulary whose
//! tokens are all plain, and this module cuts the text at special tokens, by libllama's own rule: longer tokens first.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ffi::CStr;
use std::ops::Range;
use std::path::Path;

use aho_corasick::AhoCorasick;

use crate::error::{Error, Result};
use crate::ggml::vocab::{Metadata, RawVocab};

/// Most bytes of text that are tokenized: far above any context, far below what libllama counts in 32 bits.
pub const MAX_TEXT: usize = 64 << 20;

/// What a family knows of its vocabulary that the files do not say.
#[derive(Debug, Clone, Copy)]
pub struct Dialect {
    /// The name under which libllama knows the family (`gemma4` for DiffusionGemma).
    pub architecture: &'static str,
    /// Tokens that end an answer, by text. The files' own `eos_token_id` names one of them only.
    pub end_texts: &'static [&'static str],
    /// How thought text is marked, where the family thinks.
    pub thought: Option<ThoughtMarkers>,
}

/// The tokens around thought text, by text: their kind in the files is that of ordinary added text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThoughtMarkers {
    /// Opens it.
    pub open: &'static str,
    /// Closes it.
    pub close: &'static str,
    /// A name that stands at its beginning and is no part of it.
    pub name: &'static str,
}

/// [`ThoughtMarkers`] as tokens of a vocabulary.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThoughtTokens {
    pub open: Option<u32>,
    pub close: Option<u32>,
    pub name: &'static str,
}

/// What a token is, as the file says (`tokenizer.ggml.token_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of text (also what the file leaves undefined).
    Normal,
    /// Stands for what the vocabulary cannot express.
    Unknown,
    /// Steers the model; never printed.
    Control,
    /// Added text that is matched before merges. Markers of channels and tools are of this kind, too.
    UserDefined,
    /// A reserved id.
    Unused,
    /// One byte, `<0x41>`.
    Byte,
}

impl TokenKind {
    fn from_code(code: i32) -> Option<Self> {
        Some(match code {
            0 | 1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }

    /// Whether text is searched for the token before merges.
    fn is_special(self) -> bool {
        matches!(self, Self::Unknown | Self::Control | Self::UserDefined)
    }
}

/// The tokenizer's part of a GGUF file, as read; [`Vocab::load`] checks it. Field names are those of `tokenizer.ggml.*`.
#[derive(Debug, Clone, Default)]
pub struct VocabFile<'a> {
    /// Kind of tokenizer: `gemma4` or `gpt2`.
    pub model: &'a str,
    /// How text is cut into words (`gpt2` only).
    pub pre: Option<&'a str>,
    /// Text of each token.
    pub tokens: Vec<&'a str>,
    /// Score of each token; byte-pair tokenizers do not use it.
    pub scores: Option<Vec<f32>>,
    /// Kind of each token.
    pub token_type: Vec<i32>,
    /// Merges, best first, each two texts with a blank between.
    pub merges: Vec<&'a str>,
    /// Begin token.
    pub bos_token_id: Option<u32>,
    /// End token.
    pub eos_token_id: Option<u32>,
    /// End of turn.
    pub eot_token_id: Option<u32>,
    /// End of message.
    pub eom_token_id: Option<u32>,
    /// Unknown token.
    pub unknown_token_id: Option<u32>,
    /// Padding.
    pub padding_token_id: Option<u32>,
    /// Mask token.
    pub mask_token_id: Option<u32>,
    /// Whether a text starts with the begin token.
    pub add_bos_token: Option<bool>,
}

/// A vocabulary, ready to use from any thread.
pub struct Vocab {
    raw: RawVocab,
    texts: Strings,
    pieces: Strings,
    kinds: Vec<TokenKind>,
    bos: Option<u32>,
    eos: Option<u32>,
    mask: Option<u32>,
    eog: Vec<u32>,
    thought: ThoughtTokens,
    add_bos: bool,
    /// Ids of the special tokens, in the order of the patterns of `search`.
    specials: Vec<u32>,
    search: AhoCorasick,
    /// Whether libllama cuts words with a recursive regular expression, which a long word would overflow.
    recursive: bool,
}

impl std::fmt::Debug for Vocab {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocab").field("len", &self.len()).field("bos", &self.bos).field("eog", &self.eog).finish()
    }
}

impl Vocab {
    /// Checks the contents of a file and loads them. `path` is for messages.
    ///
    /// # Errors
    /// [`Error::BadFile`] for contents that do not fit together, [`Error::Unsupported`] for another kind of tokenizer.
    pub fn load(path: &Path, file: &VocabFile, dialect: &Dialect) -> Result<Self> {
        let kinds = check(file).map_err(|why| Error::file(path, format!("{why}: get an intact file")))?;
        if !matches!(file.model, "gemma4" | "gpt2") {
            let why = format!(
                "tokenizer.ggml.model is {:?}; this engine knows \"gemma4\" and \"gpt2\": take a file with one of these",
                file.model
            );
            return Err(Error::unsupported(path, why));
        }
        // Special tokens are found here (see above), so for libllama they are ordinary ones.
        let types: Vec<i32> =
            file.token_type.iter().zip(&kinds).map(|(&code, kind)| if kind.is_special() { 1 } else { code }).collect();
        let raw = RawVocab::load(&Metadata {
            architecture: dialect.architecture,
            model: file.model,
            pre: file.pre,
            tokens: &file.tokens,
            scores: file.scores.as_deref(),
            types: &types,
            merges: &file.merges,
            ids: &special_ids(file).filter_map(|(key, id)| Some((key, id?))).collect::<Vec<_>>(),
            add_bos: file.add_bos_token,
        })
        .map_err(|why| {
            Error::unsupported(
                path,
                format!("libllama refuses the vocabulary: {}. Take a file that llama.cpp can read", why),
            )
        })?;
        if raw.len() != file.tokens.len() {
            let why = format!("libllama read {} of {} tokens", raw.len(), file.tokens.len());
            return Err(Error::unsupported(path, why));
        }
        Self::finish(path, file, dialect, kinds, raw)
    }

    fn finish(path: &Path, file: &VocabFile, dialect: &Dialect, kinds: Vec<TokenKind>, raw: RawVocab) -> Result<Self> {
        let add_bos = raw.add_bos();
        if add_bos && file.bos_token_id.is_none() {
            return Err(Error::file(
                path,
                "tokenizer.ggml.bos_token_id is missing, but every text starts with it: get an intact file",
            ));
        }
        let ids = 0..file.tokens.len() as u32;
        let text = |id: u32| file.tokens.get(id as usize).copied().unwrap_or_default();
        let is_end = |id: u32| file.eos_token_id == Some(id) || dialect.end_texts.contains(&text(id)) || raw.is_eog(id);
        let find = |text: &str| ids.clone().find(|&id| file.tokens.get(id as usize).is_some_and(|t| *t == text));
        let thought = ThoughtTokens {
            open: dialect.thought.and_then(|t| find(t.open)),
            close: dialect.thought.and_then(|t| find(t.close)),
            name: dialect.thought.map_or("", |t| t.name),
        };
        let is_special = |id: u32| kinds.get(id as usize).is_some_and(|k| k.is_special()) && !text(id).is_empty();
        let specials: Vec<u32> = ids.clone().filter(|&id| is_special(id)).collect();
        let search = AhoCorasick::new(specials.iter().map(|&id| text(id)))
            .map_err(|e| Error::unsupported(path, format!("too many special tokens ({}): {e}", specials.len())))?;
        Ok(Self {
            texts: file.tokens.iter().map(|t| t.as_bytes()).collect(),
            pieces: ids.clone().map(|id| raw.piece(id)).collect(),
            eog: ids.clone().filter(|&id| is_end(id)).collect(),
            thought,
            recursive: file.model == "gpt2" && !matches!(file.pre, Some("gpt-2" | "qwen2" | "qwen35" | "llama-bpe")),
            bos: file.bos_token_id,
            eos: file.eos_token_id,
            mask: file.mask_token_id,
            kinds,
            add_bos,
            specials,
            search,
            raw,
        })
    }

    /// Number of tokens; ids are below it.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Whether there are no tokens, which [`Vocab::load`] refuses.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// The begin token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The end token that the file names.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The mask token that the file names.
    pub fn mask(&self) -> Option<u32> {
        self.mask
    }

    /// All tokens that end an answer, ascending: the file's own, those the family knows by text, and libllama's.
    pub fn eog(&self) -> &[u32] {
        &self.eog
    }

    /// Whether the token ends an answer.
    pub fn is_eog(&self, id: u32) -> bool {
        self.eog.binary_search(&id).is_ok()
    }

    /// The tokens around thought text.
    pub(crate) fn thought(&self) -> ThoughtTokens {
        self.thought
    }

    /// Whether a text starts with the begin token.
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// The token with exactly this text, whatever its kind. Looks at every token: for loading, not for loops.
    pub fn find(&self, text: &str) -> Option<u32> {
        (0..self.len() as u32).find(|&id| self.texts.get(id) == text.as_bytes())
    }

    /// The kind of a token; `None` for an id out of range.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// A token's text in the file: `▁the`, `<|turn>`, `<0x41>`. Empty for an id out of range.
    pub fn text(&self, id: u32) -> &str {
        std::str::from_utf8(self.texts.get(id)).unwrap_or_default()
    }

    /// What a token prints, special tokens included: ` the`, `<|turn>`, `A`. Not always whole UTF-8 characters. Empty for
    /// an id out of range.
    pub fn piece(&self, id: u32) -> &[u8] {
        self.pieces.get(id)
    }

    /// Whether the token is left out of printed text: control, unknown and reserved tokens.
    pub fn is_hidden(&self, id: u32) -> bool {
        matches!(self.kind(id), None | Some(TokenKind::Control | TokenKind::Unknown | TokenKind::Unused))
    }

    /// The text of tokens; bytes that are no UTF-8 become U+FFFD. `special` prints control tokens, too.
    pub fn detokenize(&self, ids: &[u32], special: bool) -> String {
        let shown = ids.iter().filter(|&&id| special || !self.is_hidden(id));
        let bytes: Vec<u8> = shown.flat_map(|&id| self.piece(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The tokens of a text, without begin token. `parse_special` finds special tokens in it; else text that looks like one
    /// stays text.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for a text of more than [`MAX_TEXT`] bytes.
    pub fn tokenize(&self, text: &str, parse_special: bool) -> Result<Vec<u32>> {
        self.tokenize_where(text, |id, _| parse_special || !self.is_marker(id))
    }

    /// The tokens of a text in which some bytes, ascending, are quoted: a special token with such a byte stays text.
    pub(crate) fn tokenize_quoted(&self, text: &str, quoted: &[usize]) -> Result<Vec<u32>> {
        let has_quoted = |range: Range<usize>| {
            quoted.get(quoted.partition_point(|&at| at < range.start)).is_some_and(|&at| at < range.end)
        };
        self.tokenize_where(text, |id, range| !self.is_marker(id) || !has_quoted(range))
    }

    /// Texts of the tokens that text from outside must not become.
    pub(crate) fn markers(&self) -> impl Iterator<Item = &str> {
        self.specials.iter().filter(|&&id| self.is_marker(id)).map(|&id| self.text(id))
    }

    /// Whether a special token steers the model. User-defined tokens do when they look like it; the others (`<table>`,
    /// runs of blanks or line ends) are a way to write text, and are found in any text as libllama does.
    fn is_marker(&self, id: u32) -> bool {
        let text = self.text(id);
        match self.kind(id) {
            Some(TokenKind::UserDefined) => self.is_eog(id) || text.starts_with("<|") || text.ends_with("|>"),
            Some(kind) => kind.is_special(),
            None => false,
        }
    }

    fn tokenize_where(&self, text: &str, wanted: impl Fn(u32, Range<usize>) -> bool) -> Result<Vec<u32>> {
        if text.len() > MAX_TEXT {
            let why = format!("{} bytes of text are more than {MAX_TEXT}: shorten it", text.len());
            return Err(Error::argument("prompt", why));
        }
        let mut ids = Vec::new();
        let mut at = 0;
        for (range, id) in self.find_specials(text, wanted) {
            self.tokenize_plain(&text[at..range.start], &mut ids)?;
            ids.push(id);
            at = range.end;
        }
        self.tokenize_plain(&text[at..], &mut ids)?;
        Ok(ids)
    }

    /// Where special tokens stand. Of tokens that overlap the longer wins, of equally long ones the lower id, then the first.
    fn find_specials(&self, text: &str, wanted: impl Fn(u32, Range<usize>) -> bool) -> Vec<(Range<usize>, u32)> {
        let mut found: Vec<(Range<usize>, u32)> = self
            .search
            .find_overlapping_iter(text)
            .filter_map(|m| Some((m.range(), *self.specials.get(m.pattern().as_usize())?)))
            .filter(|(range, id)| wanted(*id, range.clone()))
            .collect();
        found.sort_by_key(|(range, id)| (Reverse(range.len()), *id, range.start));
        let mut taken = vec![false; if found.is_empty() { 0 } else { text.len() }];
        found.retain(|(range, _)| {
            // Nothing taken so far is shorter, so what overlaps covers one of the two ends.
            let free = !taken[range.start] && !taken[range.end - 1];
            if free {
                taken[range.clone()].fill(true);
            }
            free
        });
        found.sort_by_key(|(range, _)| range.start);
        found
    }

    fn tokenize_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let most = if self.recursive { 4096 } else { usize::MAX };
        let mut rest = text;
        while !rest.is_empty() {
            let (head, tail) = rest.split_at(cut_before_word(rest, most));
            self.raw.tokenize(head, ids).map_err(|why| Error::argument("prompt", why))?;
            rest = tail;
        }
        Ok(())
    }
}

/// A place at or before `most` bytes (at least one character) where a word begins, else any place: byte-pair tokens of the
/// `gpt2` kind do not cross the start of a word, so cutting there changes nothing.
fn cut_before_word(text: &str, most: usize) -> usize {
    if text.len() <= most {
        return text.len();
    }
    let bytes = text.as_bytes();
    let word = (1..=most).rev().find(|&at| bytes[at] == b' ' && !bytes[at - 1].is_ascii_whitespace());
    word.unwrap_or_else(|| (1..=most).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(text.len()))
}

fn special_ids(file: &VocabFile) -> impl Iterator<Item = (&'static CStr, Option<u32>)> {
    [
        (c"tokenizer.ggml.bos_token_id", file.bos_token_id),
        (c"tokenizer.ggml.eos_token_id", file.eos_token_id),
        (c"tokenizer.ggml.eot_token_id", file.eot_token_id),
        (c"tokenizer.ggml.eom_token_id", file.eom_token_id),
        (c"tokenizer.ggml.unknown_token_id", file.unknown_token_id),
        (c"tokenizer.ggml.padding_token_id", file.padding_token_id),
        (c"tokenizer.ggml.mask_token_id", file.mask_token_id),
    ]
    .into_iter()
}

/// Everything that libllama asserts or takes for granted, so that a damaged file ends in a message.
fn check(file: &VocabFile) -> Result<Vec<TokenKind>, String> {
    let n = file.tokens.len();
    if n == 0 || n > 1 << 24 {
        return Err(format!("tokenizer.ggml.tokens has {n} entries; 1 to 16777216 can be read"));
    }
    if file.token_type.len() != n {
        return Err(format!("tokenizer.ggml.token_type has {} entries for {n} tokens", file.token_type.len()));
    }
    if let Some(scores) = file.scores.as_ref().filter(|s| s.len() != n) {
        return Err(format!("tokenizer.ggml.scores has {} entries for {n} tokens", scores.len()));
    }
    for (key, id) in special_ids(file) {
        if let Some(id) = id.filter(|&id| id as usize >= n) {
            return Err(format!("{} is {id}, but there are {n} tokens", key.to_string_lossy()));
        }
    }
    for text in [Some(file.model), file.pre].into_iter().flatten() {
        if text.contains('\0') {
            return Err(format!("tokenizer name {text:?} contains a NUL character"));
        }
    }
    check_merges(&file.merges)?;
    let kinds = check_kinds(file)?;
    check_texts(&file.tokens)?;
    if file.model == "gemma4" {
        check_bytes(&file.tokens)?;
    }
    Ok(kinds)
}

fn check_kinds(file: &VocabFile) -> Result<Vec<TokenKind>, String> {
    let rows = file.token_type.iter().zip(&file.tokens).enumerate();
    rows.map(|(id, (&code, text))| {
        let kind = TokenKind::from_code(code).ok_or_else(|| format!("token {id} has type {code}; 0 to 6 are known"))?;
        match kind == TokenKind::Byte && byte_of(text).is_none() {
            true => Err(format!("token {id} is a byte, but its text is {text:?} instead of <0x00> to <0xFF>")),
            false => Ok(kind),
        }
    })
    .collect()
}

fn byte_of(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    // libllama looks for upper case only.
    let plain = hex.len() == 2 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'A'..=b'F'));
    u8::from_str_radix(hex, 16).ok().filter(|_| plain)
}

fn check_merges(merges: &[&str]) -> Result<(), String> {
    if merges.is_empty() {
        // Every text would fall apart into characters, which no model was trained on.
        return Err("tokenizer.ggml.merges is missing or empty".into());
    }
    for (i, merge) in merges.iter().enumerate() {
        // The first text may itself start with a blank, hence the second character.
        let parts = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| merge.split_at(at));
        // The second may be a blank, but not contain one.
        let whole = |second: &str| second == " " || !second.is_empty() && !second.contains(' ');
        if merge.contains('\0') || !parts.is_some_and(|(_, rest)| whole(&rest[1..])) {
            return Err(format!("merge {i} is {merge:?} instead of two texts with a blank between"));
        }
    }
    Ok(())
}

fn check_texts(tokens: &[&str]) -> Result<(), String> {
    let mut seen = HashSet::with_capacity(tokens.len());
    for (id, &text) in tokens.iter().enumerate() {
        if text.contains('\0') {
            return Err(format!("token {id} ({text:?}) contains a NUL character"));
        }
        // libllama gives an empty token this name.
        let name = if text.is_empty() { format!("[EMPTY_{id}]").into() } else { std::borrow::Cow::Borrowed(text) };
        if let Some(twice) = seen.replace(name) {
            return Err(format!("the text {twice:?} of token {id} occurs twice"));
        }
    }
    Ok(())
}

/// Text that no token expresses is written in bytes; a byte without a token would be lost without a word.
fn check_bytes(tokens: &[&str]) -> Result<(), String> {
    let present: HashSet<u8> = tokens.iter().filter_map(|text| byte_of(text)).collect();
    match (0..=255u8).find(|byte| !present.contains(byte)) {
        Some(byte) => Err(format!("there is no token <0x{byte:02X}>, so text with this byte cannot be expressed")),
        None => Ok(()),
    }
}

/// Many byte strings in one allocation.
struct Strings {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Strings {
    fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let start = id.checked_sub(1).map_or(Some(0), |before| self.ends.get(before).copied());
        let range = start.zip(self.ends.get(id).copied());
        range.and_then(|(start, end)| self.bytes.get(start..end)).unwrap_or_default()
    }
}

impl<T: AsRef<[u8]>> FromIterator<T> for Strings {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let mut strings = Self { bytes: Vec::new(), ends: Vec::new() };
        for item in items {
            strings.bytes.extend_from_slice(item.as_ref());
            strings.ends.push(strings.bytes.len());
        }
        strings
    }
}
