//! What must hold for any bytes: for the fuzz target, and for `tests/corpus.rs` with every file of the corpus.

use std::sync::OnceLock;

use dllm_engine::denoise::DenoiseSettings;
use dllm_engine::{DenoiseOverrides, Engine, Message, ModelSource, Prompt, Tokenizer};

/// Bytes as a request's parts: messages or settings as JSON, or raw text. Texts become ids of the vocabulary, no message
/// can open a turn, and settings that are accepted are in range.
pub fn check(data: &[u8]) {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    let tokenizer = TOKENIZER.get_or_init(|| {
        let file = Engine::open(&ModelSource::Embedded).expect("the embedded model");
        Tokenizer::load(&file).expect("its tokenizer")
    });
    let vocab = tokenizer.vocab();
    let known = |ids: &[u32]| ids.iter().all(|id| (*id as usize) < vocab.len());
    if let Ok(messages) = serde_json::from_slice::<Vec<Message>>(data) {
        let turns = messages.len() + 1; // the model's own comes last
        let ids = tokenizer.encode(&Prompt::Messages(messages), data.len().is_multiple_of(2)).unwrap_or_default();
        let open = vocab.find("<|turn>");
        assert!(known(&ids) && ids.iter().filter(|id| Some(**id) == open).count() <= turns, "{ids:?}");
    } else if let Ok(overrides) = serde_json::from_slice::<DenoiseOverrides>(data) {
        let Ok(settings) = DenoiseSettings::default().with(&overrides) else { return };
        assert!(settings.t_min > 0.0 && settings.t_min <= settings.t_max && settings.t_max <= 10.0, "{settings:?}");
        assert!(settings.max_steps > 0 && settings.entropy_bound >= 0.0, "{settings:?}");
    } else if let Ok(text) = std::str::from_utf8(data) {
        let ids = tokenizer.encode(&Prompt::Raw(text.to_owned()), false).unwrap_or_default();
        assert!(known(&ids));
        // The same text as tokens without special ones comes back as it was.
        let plain = vocab.tokenize(text, false).unwrap_or_default();
        assert_eq!(vocab.detokenize(&plain, true), text);
    }
}
