//! What the model reads: a [`Prompt`] becomes token ids.

use crate::chat::ChatTemplate;
use crate::error::{Error, Result};
use crate::params::Prompt;
use crate::vocab::{MAX_TEXT, Vocab};

/// The tokens of a prompt.
///
/// Messages go through the template, and text and messages start with the begin token where the vocabulary wants one:
/// once, also when the template or the text writes it. Ids are taken as they are.
///
/// # Errors
/// [`Error::BadArgument`] for an empty or oversized prompt and for ids that are no tokens, [`Error::Template`] from the
/// template. Whether the prompt fits the context is for the caller to check.
pub fn encode(prompt: &Prompt, vocab: &Vocab, template: Option<&ChatTemplate>, thinking: bool) -> Result<Vec<u32>> {
    check(prompt)?;
    match prompt {
        Prompt::Messages(messages) => {
            let template = template.ok_or_else(|| {
                Error::Template("this model has none, so it takes no messages: give it the prompt as raw text".into())
            })?;
            Ok(with_bos(template.render_for_answer(messages, thinking)?.tokenize(vocab)?, vocab))
        }
        Prompt::Raw(text) => Ok(with_bos(vocab.tokenize(text, true)?, vocab)),
        Prompt::Tokens(ids) => check_ids(ids, vocab).map(|()| ids.clone()),
    }
}

/// What can be said of a prompt without a model, for callers that want to know before they load or queue.
///
/// A prompt must say something: raw text, and of messages the last one, must have more than blanks (white space of any
/// kind). Earlier messages may be empty, and ids are not looked into.
///
/// # Errors
/// [`Error::BadArgument`] for a prompt that is empty, nothing but blanks, or oversized.
pub fn check(prompt: &Prompt) -> Result<()> {
    let refuse = |why: String| Err(Error::argument("prompt", why));
    let (last, bytes) = match prompt {
        Prompt::Tokens(ids) if ids.is_empty() => return refuse("it has no tokens: give it one".into()),
        Prompt::Tokens(_) => return Ok(()),
        Prompt::Raw(text) => (text, text.len()),
        Prompt::Messages(messages) => match messages.last() {
            None => return refuse("it has no messages: give it one".into()),
            // Not `sum`: what comes from outside must not overflow a count.
            Some(last) => (&last.content, messages.iter().fold(0, |n: usize, m| n.saturating_add(m.content.len()))),
        },
    };
    match last.trim() {
        _ if bytes > MAX_TEXT => refuse(format!("{bytes} bytes of text are more than {MAX_TEXT}: shorten it")),
        "" if last.is_empty() => refuse("it is empty: write something".into()),
        "" => refuse("it is nothing but blanks: write something".into()),
        _ => Ok(()),
    }
}

/// A prompt's text from bytes of a file or a pipe, less the byte order mark that some editors begin a file with.
///
/// # Errors
/// [`Error::BadArgument`] that names the place of the first byte that is no UTF-8.
pub fn text_from_bytes(bytes: &[u8]) -> Result<&str> {
    std::str::from_utf8(bytes).map(|text| text.strip_prefix('\u{feff}').unwrap_or(text)).map_err(|e| {
        let at = e.valid_up_to();
        let byte = bytes.get(at).copied().unwrap_or_default();
        Error::argument("prompt", format!("byte {at} (0x{byte:02X}) is no UTF-8: convert the text to UTF-8"))
    })
}

fn check_ids(ids: &[u32], vocab: &Vocab) -> Result<()> {
    match ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab.len()) {
        Some((at, id)) => {
            let why = format!("token {id} at position {at} is not in 0..{}: take ids of this model", vocab.len());
            Err(Error::argument("prompt", why))
        }
        None => Ok(()),
    }
}

fn with_bos(mut ids: Vec<u32>, vocab: &Vocab) -> Vec<u32> {
    if let Some(bos) = vocab.bos().filter(|bos| vocab.add_bos() && ids.first() != Some(bos)) {
        ids.insert(0, bos);
    }
    ids
}
