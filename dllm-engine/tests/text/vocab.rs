use std::path::Path;
use std::sync::Arc;

use dllm_engine::Error;
use dllm_engine::text::Settler;
use dllm_engine::vocab::{Dialect, MAX_TEXT, ThoughtMarkers, TokenKind, Vocab, VocabFile};

use crate::common::{Data, load, trained};

/// A merge that no text needs.
const NO_MERGES: [&str; 1] = ["\u{e000} \u{e001}"];

#[test]
fn recorded_cases_give_their_ids() {
    let mut cases = 0;
    for name in ["oracle_nano.json", "oracle_tiny.json", "oracle_small.json"] {
        let data = Data::read(name);
        let vocab = data.vocab();
        for case in &data.cases {
            let mut ids = vec![vocab.bos().unwrap()];
            ids.extend(vocab.tokenize(&case.text, true).unwrap());
            assert_eq!(ids, case.ids, "{name}: {:?}", case.text);
            assert_eq!(vocab.detokenize(&ids[1..], true), case.text, "{name}");
            cases += 1;
        }
    }
    assert_eq!(cases, 12);
}

#[test]
fn the_trained_model_has_the_real_ids() {
    let vocab = trained().vocab();
    assert_eq!(vocab.len(), 1024);
    assert_eq!((vocab.bos(), vocab.eos(), vocab.mask()), (Some(2), Some(1), Some(4)));
    assert_eq!(vocab.eog(), [1, 50, 106]);
    assert!(vocab.add_bos() && vocab.is_eog(50) && !vocab.is_eog(49));
    assert_eq!(vocab.find("<|channel>").map(|id| vocab.text(id)), Some("<|channel>"));
    assert_eq!(vocab.find("no such token"), None);
    let kinds = [1, 3, 5, 48].map(|id| vocab.kind(id).unwrap());
    assert_eq!(kinds, [TokenKind::Control, TokenKind::Unknown, TokenKind::Normal, TokenKind::UserDefined]);
    assert_eq!(vocab.kind(vocab.find("<0x41>").unwrap()), Some(TokenKind::Byte));
    assert_eq!(vocab.piece(vocab.find("<0x41>").unwrap()), b"A");
    assert_eq!(vocab.piece(5), b" ");
    assert_eq!((vocab.kind(1024), vocab.piece(u32::MAX), vocab.text(1024)), (None, &b""[..], ""));
}

#[test]
fn special_text_is_text_unless_asked_for() {
    let vocab = trained().vocab();
    let turn = vocab.find("<|turn>").unwrap();
    let channel = vocab.find("<|channel>").unwrap();
    let text = "a<|turn>b<|channel><unk><turn|>";
    let parsed = vocab.tokenize(text, true).unwrap();
    assert!(parsed.contains(&turn) && parsed.contains(&channel) && parsed.contains(&106));
    let plain = vocab.tokenize(text, false).unwrap();
    let steering = |id: &&u32| !matches!(vocab.kind(**id), Some(TokenKind::Normal | TokenKind::Byte));
    assert_eq!(plain.iter().find(steering), None);
    assert_eq!(vocab.detokenize(&plain, false), text);
    assert_eq!(vocab.detokenize(&parsed, false), "ab<|channel>");
}

#[test]
fn longer_special_tokens_win_and_inert_ones_are_found_in_any_text() {
    let mut data = trained();
    for (id, text) in [(800, "<table>"), (801, "<table><"), (802, "|>x<table")] {
        data.tokens[id] = text.into();
        data.token_type[id] = 4;
    }
    data.merges = NO_MERGES.map(str::to_owned).to_vec(); // the others may name the texts that were replaced
    let vocab = data.vocab();
    assert_eq!(vocab.tokenize("<table>", false).unwrap(), [800]);
    assert_eq!(vocab.tokenize("<table><table>", false).unwrap()[0], 801);
    assert_eq!(vocab.tokenize("<table>\n<table>", true).unwrap(), [800, 107, 800]);
    assert!(vocab.tokenize("<turn|>x<table>", true).unwrap().contains(&802), "longer than <turn|> and <table>");
}

#[test]
fn text_beyond_the_vocabulary_is_kept_in_bytes() {
    let vocab = trained().vocab();
    for text in ["\0", "a\0b", "日本語 😀", "\u{e000}", "tab\tand\r\nlines\n\n\n\n\n\n\n\n\n\n\n", "  two   three"]
    {
        let ids = vocab.tokenize(text, true).unwrap();
        assert_eq!(vocab.detokenize(&ids, false), text);
    }
    assert!(vocab.tokenize("", true).unwrap().is_empty());
}

#[test]
fn a_megabyte_of_anything_is_tokenized() {
    let vocab = trained().vocab();
    for unit in [" ", "\n", "a", "<|turn>", "<turn|>x", "é", "a ", "\0"] {
        let text = unit.repeat((1 << 20) / unit.len());
        let ids = vocab.tokenize(&text, true).unwrap();
        assert_eq!(vocab.detokenize(&ids, true), text, "{unit:?}");
    }
    let too_long = " ".repeat(MAX_TEXT + 1);
    assert!(matches!(vocab.tokenize(&too_long, true), Err(Error::BadArgument { name: "prompt", .. })));
}

#[test]
fn a_word_that_would_overflow_a_recursive_expression_is_cut() {
    let vocab = Data::read("llada_moe.json").vocab();
    for unit in [" ", "e", "te ", "\n", "7"] {
        let text = unit.repeat((1 << 20) / unit.len());
        let ids = vocab.tokenize(&text, true).unwrap();
        assert_eq!(vocab.detokenize(&ids, true), text, "{unit:?}");
    }
    // Cut before words the tokens are those of the pieces.
    let words = "the tea is on the table ".repeat(400);
    let twice: Vec<u32> = [0, 1].iter().flat_map(|_| vocab.tokenize(&words, true).unwrap()).collect();
    let at_once = vocab.tokenize(&words.repeat(2), true).unwrap();
    assert_eq!(vocab.detokenize(&at_once, true), vocab.detokenize(&twice, true));
}

#[test]
fn every_thread_may_tokenize() {
    let vocab = trained().vocab();
    let expected = vocab.tokenize("Count from 3 to 40.", true).unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..4).map(|_| scope.spawn(|| vocab.tokenize("Count from 3 to 40.", true).unwrap())).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), expected);
        }
    });
}

#[test]
fn damaged_files_are_refused_with_the_reason() {
    type Damage = fn(&mut VocabFile);
    let damages: [(Damage, &str); 21] = [
        (|f| f.tokens.clear(), "tokens has 0 entries"),
        (|f| f.token_type.truncate(7), "token_type has 7 entries for 1024 tokens"),
        (|f| f.token_type.clear(), "token_type has 0 entries"),
        (|f| f.scores = Some(vec![0.0]), "scores has 1 entries"),
        (|f| f.token_type[9] = 7, "token 9 has type 7"),
        (|f| f.token_type[9] = -1, "token 9 has type -1"),
        (|f| f.token_type[9] = 6, "token 9 is a byte"),
        (|f| f.tokens[9] = f.tokens[10], "occurs twice"),
        (|f| (f.tokens[9], f.tokens[10]) = ("", "[EMPTY_9]"), "occurs twice"),
        (|f| f.tokens[9] = "a\0b", "token 9 (\"a\\0b\") contains a NUL"),
        (|f| f.merges[3] = "ab", "merge 3 is \"ab\""),
        (|f| f.merges[3] = "a ", "merge 3 is \"a \""),
        (|f| f.merges[3] = "", "merge 3 is \"\""),
        (|f| f.merges[3] = "a b c", "merge 3 is \"a b c\""),
        (|f| f.merges.clear(), "tokenizer.ggml.merges is missing"),
        (|f| f.bos_token_id = Some(1024), "bos_token_id is 1024, but there are 1024 tokens"),
        (|f| f.eos_token_id = Some(u32::MAX), "eos_token_id is 4294967295"),
        (|f| f.mask_token_id = Some(5000), "mask_token_id is 5000"),
        (|f| f.bos_token_id = None, "bos_token_id is missing"),
        (|f| f.model = "bert", "tokenizer.ggml.model is \"bert\""),
        (|f| (f.model, f.pre) = ("gpt2", Some("no such")), "libllama refuses the vocabulary: "),
    ];
    let data = trained();
    for (i, (damage, reason)) in damages.iter().enumerate() {
        let mut file = data.file();
        damage(&mut file);
        let message = load(&file).unwrap_err().to_string();
        assert!(message.starts_with("test.gguf: ") && message.contains(reason), "damage {i}: {message}");
    }
}

#[test]
fn a_missing_byte_token_is_refused() {
    let mut data = trained();
    let id = data.tokens.iter().position(|t| t == "<0x41>").unwrap();
    data.tokens[id] = "<0x4a>".into();
    data.token_type[id] = 1;
    let message = load(&data.file()).unwrap_err().to_string();
    assert!(message.contains("there is no token <0x41>"), "{message}");
}
#[test]
fn an_empty_token_does_no_harm() {
    let mut data = trained();
    data.tokens[900] = String::new();
    data.token_type[900] = 4;
    data.merges = NO_MERGES.map(str::to_owned).to_vec();
    let vocab = data.vocab();
    assert_eq!(vocab.detokenize(&vocab.tokenize("plain", true).unwrap(), true), "plain");
}

/// End tokens and markers of thought text are the family's words: a vocabulary alone knows neither.
#[test]
fn issue_2_end_texts_and_markers_come_from_the_family() {
    let data = trained();
    let load = |dialect: &Dialect| Arc::new(Vocab::load(Path::new("test.gguf"), &data.file(), dialect).unwrap());
    let plain = Dialect { architecture: "gemma4", end_texts: &[], thought: None };
    let markers = ThoughtMarkers { open: "<|tool_call>", close: "<tool_call|>", name: "tool" };
    let other = load(&Dialect { end_texts: &["<|channel>"], thought: Some(markers), ..plain });
    let channel = other.find("<|channel>").unwrap();
    assert!(other.is_eog(channel) && !load(&plain).is_eog(channel));
    let canvas = other.tokenize("a<|tool_call>tool b<tool_call|>c<|channel>d", true).unwrap();
    let mut settler = Settler::new(other, &[], &[], usize::MAX).unwrap();
    settler.push(&canvas);
    assert_eq!((settler.text(), settler.reasoning().as_deref()), ("ac", Some("b")));
}
