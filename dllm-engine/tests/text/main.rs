//! From messages to tokens and from tokens to text, on the vocabularies of the test models (`tests/data/text`, taken from
//! their GGUF files).

mod chat;
mod common;
mod prompt;
mod settler;
mod vocab;
