//! The test vocabularies.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use dllm_engine::vocab::{Dialect, ThoughtMarkers, Vocab, VocabFile};
use serde::Deserialize;

#[derive(Deserialize)]
pub struct Data {
    pub model: String,
    pub pre: Option<String>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unknown: Option<u32>,
    pub padding: Option<u32>,
    pub mask: Option<u32>,
    pub add_bos: Option<bool>,
    pub chat_template: Option<String>,
    pub tokens: Vec<String>,
    pub token_type: Vec<i32>,
    pub merges: Vec<String>,
    pub cases: Vec<Case>,
    pub rendered: Vec<Rendered>,
}

#[derive(Deserialize)]
pub struct Case {
    pub text: String,
    pub ids: Vec<u32>,
}

#[derive(Deserialize)]
pub struct Rendered {
    pub prompt: String,
    pub rendered: String,
    pub ids: Vec<u32>,
}

impl Data {
    pub fn read(name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests").join("data").join("text").join(name);
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    pub fn file(&self) -> VocabFile<'_> {
        VocabFile {
            model: &self.model,
            pre: self.pre.as_deref(),
            tokens: self.tokens.iter().map(String::as_str).collect(),
            scores: Some(vec![-1000.0; self.tokens.len()]),
            token_type: self.token_type.clone(),
            merges: self.merges.iter().map(String::as_str).collect(),
            bos_token_id: self.bos,
            eos_token_id: self.eos,
            unknown_token_id: self.unknown,
            padding_token_id: self.padding,
            mask_token_id: self.mask,
            add_bos_token: self.add_bos,
            ..VocabFile::default()
        }
    }

    pub fn vocab(&self) -> Vocab {
        load(&self.file()).unwrap()
    }
}

pub fn load(file: &VocabFile) -> dllm_engine::Result<Vocab> {
    let dialect = match file.model {
        "gpt2" => Dialect { architecture: "llada-moe", end_texts: &[], thought: None },
        _ => Dialect {
            architecture: "gemma4",
            end_texts: &["<eos>", "<turn|>", "<|tool_response>"],
            thought: Some(ThoughtMarkers { open: "<|channel>", close: "<channel|>", name: "thought" }),
        },
    };
    Vocab::load(Path::new("test.gguf"), file, &dialect)
}

pub fn trained() -> Data {
    Data::read("tiny_trained.json")
}

pub fn trained_vocab() -> Arc<Vocab> {
    static VOCAB: OnceLock<Arc<Vocab>> = OnceLock::new();
    VOCAB.get_or_init(|| Arc::new(trained().vocab())).clone()
}
