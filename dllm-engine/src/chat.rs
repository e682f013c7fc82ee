//! Chat templates: a conversation becomes the text that the model was trained on.
//!
//! Templates are Jinja, in the dialect and with the variables of Hugging Face's `apply_chat_template`. A model without a
//! system role says so itself: its template either raises an error, which is returned, or folds the system text into the
//! first turn. Nothing is folded in here.
//!
//! # Text of messages stays text
//!
//! A user may write `<|turn>`; that must not become a turn. So whoever tokenizes the rendered text has to know which of it
//! came from messages. Frames around the contents would not do: templates trim, cut and measure contents, and a frame is
//! in their way. Instead every character of the contents that occurs in special tokens is replaced, one character for one,
//! by private-use characters that occur nowhere else, and put back after rendering. Their places are then known, whatever
//! the template did to the text around them, and a special token may not touch them: neither one written in a message, nor
//! one that a template completes by a filter or by what it puts before, behind or around a message.
//!
//! A template may look into contents (to drop old thoughts, say) or change their letters. Then the text comes out
//! differently with them replaced, which a second rendering without any replacement shows. In this case only the characters
//! at which special tokens begin and end (`<` and `>`) are replaced, and where the template looks for these, only the first
//! character of whole special tokens: the template sees everything except those. A template that does this and also writes
//! both ends around a message (`<{{ content | lower }}>`) is taken at its word.
//!
//! Text between special tokens is tokenized as a whole, as in Hugging Face's tokenizers: where a message begins in it makes
//! no difference.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

use aho_corasick::AhoCorasick;
use minijinja::value::{Kwargs, Value};
use minijinja::{AutoEscape, Environment, ErrorKind, context};

use crate::bounded::{self, Charged};
use crate::error::{Error, Result};
use crate::params::{Message, Role};
use crate::vocab::{MAX_TEXT, Vocab};

/// Instructions that a template may run: some hundred times what the longest conversations need, about a second.
const FUEL: u64 = 20_000_000;

/// The name under which the template lies in its environment.
const NAME: &str = "chat template";

/// A conversation as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text, special tokens of the template included.
    pub text: String,
    /// Byte places, ascending, of characters that came from messages and that a special token must not touch.
    pub quoted: Vec<usize>,
}

impl Rendered {
    /// The tokens: special tokens of the template are found, those in messages stay text.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for a text that is too long to be tokenized.
    pub fn tokenize(&self, vocab: &Vocab) -> Result<Vec<u32>> {
        vocab.tokenize_quoted(&self.text, &self.quoted)
    }
}

/// A chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
    /// All characters of the special tokens, but for blanks.
    letters: Vec<char>,
    /// First and last characters of the special tokens.
    edges: Vec<char>,
    /// The special tokens as text.
    markers: AhoCorasick,
}

impl ChatTemplate {
    /// Compiles the file's `tokenizer.chat_template`, or the family's own where the file has none.
    ///
    /// # Errors
    /// [`Error::Template`] with the line and the reason.
    pub fn new(source: &str, vocab: &Vocab) -> Result<Self> {
        bounded::check(NAME, source)?;
        let texts: Vec<&str> = vocab.markers().collect();
        // Blanks are left alone: templates trim them.
        let letters = distinct(texts.iter().flat_map(|t| t.chars()).filter(|c| !c.is_whitespace()));
        let edges = distinct(texts.iter().flat_map(|t| [t.chars().next(), t.chars().last()]).flatten());
        let markers = AhoCorasick::new(&texts).map_err(|e| Error::Template(format!("too many special tokens: {e}")))?;
        let text = |id: Option<u32>| id.map_or_else(String::new, |id| vocab.text(id).to_owned());
        Ok(Self {
            env: environment(),
            source: source.to_owned(),
            bos: text(vocab.bos()),
            eos: text(vocab.eos()),
            letters,
            edges,
            markers,
        })
    }

    /// Renders a conversation up to the point where the model's next turn begins. `thinking` is what the template sees as
    /// `enable_thinking`.
    ///
    /// # Errors
    /// [`Error::Template`] with the template's own reason (`raise_exception`), for one that does not end, or for one whose
    /// text grows beyond what can be tokenized.
    pub fn render(&self, messages: &[Message], thinking: bool) -> Result<Rendered> {
        let contents: Vec<&str> = messages.iter().map(|m| m.content.as_str()).collect();
        let plain = self.run(messages, &contents, thinking)?;
        for chars in [&self.letters, &self.edges] {
            let marks = Marks::choose(chars, &plain, &contents)?;
            let quoted = contents.iter().map(|c| marks.put(c)).collect::<Vec<_>>();
            if let Ok(text) = self.run(messages, &quoted, thinking) {
                let rendered = marks.take(&text);
                if rendered.text == plain {
                    return Ok(rendered);
                }
            }
        }
        let marks = Marks::choose(&self.edges, &plain, &contents)?;
        let quoted = contents.iter().map(|c| marks.put_at(c, &self.markers)).collect::<Vec<_>>();
        Ok(marks.take(&self.run(messages, &quoted, thinking)?))
    }

    /// As [`Self::render`], for a template that has to show the model what was said last.
    ///
    /// # Errors
    /// As [`Self::render`]; [`Error::Template`] for one whose text does not depend on the last message.
    pub fn render_for_answer(&self, messages: &[Message], thinking: bool) -> Result<Rendered> {
        let rendered = self.render(messages, thinking)?;
        let Some((last, before)) = messages.split_last() else { return Ok(rendered) };
        if rendered.text.contains(last.content.trim()) {
            return Ok(rendered);
        }
        // It may have changed the text; then it changes another text to something else.
        let other = Message { role: last.role, content: "0".repeat(last.content.len() % 7 + 8) };
        let all: Vec<Message> = before.iter().cloned().chain([other]).collect();
        match self.render(&all, thinking) {
            Ok(other) if other.text == rendered.text => {
                let why = "it leaves the last message out: get a file with an intact template, or give the prompt as raw text";
                Err(Error::Template(why.into()))
            }
            _ => Ok(rendered),
        }
    }

    fn run<S: AsRef<str>>(&self, messages: &[Message], contents: &[S], thinking: bool) -> Result<String> {
        let messages: Vec<Value> = messages
            .iter()
            .zip(contents)
            .map(|(m, content)| context! { role => role_name(m.role), content => content.as_ref() })
            .collect();
        let none = Value::from(());
        let variables = context! {
            messages, add_generation_prompt => true, enable_thinking => thinking,
            bos_token => self.bos, eos_token => self.eos, tools => none, documents => none,
        };
        let text = bounded::render(&self.env, NAME, &self.source, &variables)?;
        match text.len() {
            0..=MAX_TEXT => Ok(text),
            _ => Err(Error::Template(format!("its text is longer than {MAX_TEXT} bytes: shorten the messages"))),
        }
    }
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
    }
}

/// The dialect of Hugging Face's `apply_chat_template`. There is no loader, so a template can read no file.
fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_auto_escape_callback(|_| AutoEscape::None);
    bounded::install(&mut env);
    env.set_fuel(Some(FUEL));
    env.add_function("raise_exception", |why: Value| -> Result<Value, minijinja::Error> {
        let why = match bounded::beginning(&why) {
            empty if empty.is_empty() => "it raises an exception without a text".to_owned(),
            why => why,
        };
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, why))
    });
    env.add_function("strftime_now", |format: &str| {
        jiff::fmt::strtime::format(format, &jiff::Zoned::now())
            .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
    });
    env.add_filter("tojson", to_json);
    env
}

fn distinct(chars: impl Iterator<Item = char>) -> Vec<char> {
    let mut chars: Vec<char> = chars.collect();
    chars.sort_unstable();
    chars.dedup();
    chars
}

/// Which character stands for which while a template runs.
struct Marks {
    marks: HashMap<char, char>,
    back: HashMap<char, char>,
}

impl Marks {
    /// Private-use characters that occur neither in the contents nor in what the template makes of them.
    fn choose(chars: &[char], plain: &str, contents: &[&str]) -> Result<Self> {
        let used = contents.iter().flat_map(|c| c.chars()).chain(plain.chars());
        let used: HashSet<char> = used.filter(|c| is_private(*c)).collect();
        let free = ('\u{e000}'..='\u{f8ff}').chain('\u{f0000}'..='\u{ffffd}').filter(|c| !used.contains(c));
        let marks: HashMap<char, char> = chars.iter().copied().zip(free).collect();
        match marks.len() == chars.len() {
            true => Ok(Self { back: marks.iter().map(|(c, mark)| (*mark, *c)).collect(), marks }),
            false => Err(Error::argument("prompt", "it uses every private-use character there is: leave some out")),
        }
    }

    fn mark(&self, c: char) -> Option<char> {
        self.marks.get(&c).copied()
    }

    /// Replaces every character that has a mark.
    fn put(&self, content: &str) -> String {
        content.chars().map(|c| self.mark(c).unwrap_or(c)).collect()
    }

    /// Replaces the first character of every special token.
    fn put_at(&self, content: &str, markers: &AhoCorasick) -> String {
        let starts: HashSet<usize> = markers.find_overlapping_iter(content).map(|m| m.start()).collect();
        let mark_at = |at: usize, c: char| self.mark(c).filter(|_| starts.contains(&at)).unwrap_or(c);
        content.char_indices().map(|(at, c)| mark_at(at, c)).collect()
    }

    /// Puts the characters back and tells where they are.
    fn take(&self, text: &str) -> Rendered {
        let mut rendered = Rendered { text: String::with_capacity(text.len()), quoted: Vec::new() };
        for c in text.chars() {
            match self.back.get(&c) {
                Some(from_message) => {
                    rendered.quoted.push(rendered.text.len());
                    rendered.text.push(*from_message);
                }
                None => rendered.text.push(c),
            }
        }
        rendered
    }
}

fn is_private(c: char) -> bool {
    matches!(c, '\u{e000}'..='\u{f8ff}' | '\u{f0000}'..='\u{ffffd}')
}

/// `tojson` as Hugging Face defines it: Python's `json.dumps` without escapes for HTML or for letters beyond ASCII.
fn to_json(value: &Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    let failed = |e: serde_json::Error| match e.is_io() {
        true => ErrorKind::WriteFailure.into(),
        false => minijinja::Error::new(ErrorKind::InvalidOperation, format!("tojson: {e}")),
    };
    let indent: Option<usize> = options.get("indent")?;
    let mut out = Vec::new();
    match indent {
        Some(width) => {
            let indent = " ".repeat(width.min(16));
            let format = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            write_json(value, &mut out, format).map_err(failed)?;
        }
        None => write_json(value, &mut out, PythonFormatter).map_err(failed)?,
    }
    Ok(Value::from(String::from_utf8_lossy(&out)))
}

fn write_json(value: &Value, out: &mut Vec<u8>, format: impl serde_json::ser::Formatter) -> serde_json::Result<()> {
    serde::Serialize::serialize(value, &mut serde_json::Serializer::with_formatter(Charged::new(out), format))
}

/// One line, with a blank after commas and colons.
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
