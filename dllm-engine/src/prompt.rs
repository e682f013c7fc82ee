//! What the model reads: a [`Prompt`] becomes token ids.

use crate::chat::ChatTemplate;
use crate::error::{Error, Result};
use crate::params::{Message, Prompt};
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
    match prompt {
        Prompt::Messages(messages) => {
            check_messages(messages)?;
            let template = template.ok_or_else(|| {
                Error::Template("this model has none, so it takes no messages: give it the prompt as raw text".into())
            })?;
            Ok(with_bos(template.render(messages, thinking)?.tokenize(vocab)?, vocab))
        }
        Prompt::Raw(text) if text.is_empty() => Err(Error::argument("prompt", "it is empty: write something")),
        Prompt::Raw(text) => Ok(with_bos(vocab.tokenize(text, true)?, vocab)),
        Prompt::Tokens(ids) => check_ids(ids, vocab).map(|()| ids.clone()),
    }
}

/// A prompt's text from bytes of a file or a pipe.
///
/// # Errors
/// [`Error::BadArgument`] that names the place of the first byte that is no UTF-8.
pub fn text_from_bytes(bytes: &[u8]) -> Result<&str> {
    std::str::from_utf8(bytes).map_err(|e| {
        let at = e.valid_up_to();
        let byte = bytes.get(at).copied().unwrap_or_default();
        Error::argument("prompt", format!("byte {at} (0x{byte:02X}) is no UTF-8: convert the text to UTF-8"))
    })
}

fn check_messages(messages: &[Message]) -> Result<()> {
    // Not `sum`: what comes from outside must not overflow a count.
    let bytes = messages.iter().fold(0usize, |n, m| n.saturating_add(m.content.len()));
    match bytes {
        0 if messages.is_empty() => Err(Error::argument("prompt", "it has no messages: give it one")),
        0 => Err(Error::argument("prompt", "all messages are empty: write something")),
        bytes if bytes > MAX_TEXT => {
            let why = format!("{bytes} bytes of text are more than {MAX_TEXT}: shorten it");
            Err(Error::argument("prompt", why))
        }
        _ => Ok(()),
    }
}

fn check_ids(ids: &[u32], vocab: &Vocab) -> Result<()> {
    if ids.is_empty() {
        return Err(Error::argument("prompt", "it has no tokens: give it one"));
    }
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
