//! What turns messages into tokens and tokens into text: the part of a model that works without its weights.

use std::sync::Arc;

use crate::chat::ChatTemplate;
use crate::engine::load_vocab;
use crate::error::{Error, Result};
use crate::family;
use crate::gguf::Gguf;
use crate::params::Prompt;
use crate::prompt;
use crate::vocab::Vocab;

/// Vocabulary, chat template and end tokens of a file. Loading takes no tensor data.
pub struct Tokenizer {
    vocab: Arc<Vocab>,
    template: ChatTemplate,
    eog: Arc<[u32]>,
}

impl Tokenizer {
    /// Reads it from an open file.
    ///
    /// # Errors
    /// `BadFile`, `Unsupported` for the file, `Template` for a chat template that does not compile.
    pub fn load(file: &Gguf) -> Result<Self> {
        let family = family::load(file)?;
        let vocab = Arc::new(load_vocab(file, &family.dialect())?);
        let rows = family.dims().vocab;
        if vocab.len() != rows {
            let why = format!("{} tokens, but {rows} rows of token_embd.weight: get an intact file", vocab.len());
            return Err(Error::file(file.path(), why));
        }
        let source = file.meta().str_opt("tokenizer.chat_template")?.unwrap_or(family.chat_template());
        let template = ChatTemplate::new(source, &vocab)?;
        let eog = vocab.eog().into();
        Ok(Self { vocab, template, eog })
    }

    /// The vocabulary.
    pub fn vocab(&self) -> &Arc<Vocab> {
        &self.vocab
    }

    /// The tokens that end an answer.
    pub fn eog(&self) -> &Arc<[u32]> {
        &self.eog
    }

    /// The tokens that a prompt becomes. `thinking` asks the template to let the model think first.
    ///
    /// # Errors
    /// `BadArgument`, `Template`.
    pub fn encode(&self, prompt: &Prompt, thinking: bool) -> Result<Vec<u32>> {
        prompt::encode(prompt, &self.vocab, Some(&self.template), thinking)
    }
}
