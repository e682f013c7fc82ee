use std::sync::Arc;

use dllm_engine::event::FinishReason;
use dllm_engine::text::Settler;
use dllm_engine::vocab::Vocab;
use proptest::prelude::*;

use crate::common::trained_vocab;

const ALL: usize = usize::MAX;

fn settler(vocab: &Arc<Vocab>, stop: &[&str], max_tokens: usize) -> Settler {
    let stop: Vec<String> = stop.iter().map(|s| s.to_string()).collect();
    Settler::new(vocab.clone(), &[], &stop, max_tokens).unwrap()
}

fn ids(vocab: &Vocab, text: &str) -> Vec<u32> {
    vocab.tokenize(text, true).unwrap()
}

#[test]
fn the_answer_ends_at_the_end_token() {
    let vocab = trained_vocab();
    let answer = ids(&vocab, "131");
    let mut s = settler(&vocab, &[], ALL);
    assert_eq!(s.push(&ids(&vocab, "131<turn|>\n<|turn>rest<pad>")), "131");
    assert_eq!((s.finished(), s.text(), s.tokens()), (Some(FinishReason::Stop), "131", &answer[..]));
    assert_eq!(s.push(&answer), "");
    assert_eq!(s.finish(FinishReason::Length), "");
    assert_eq!((s.finished(), s.text(), s.reasoning()), (Some(FinishReason::Stop), "131", None));
}

#[test]
fn control_tokens_are_not_printed() {
    let vocab = trained_vocab();
    let mut s = settler(&vocab, &[], ALL);
    let canvas = ids(&vocab, "<bos>a<|think|>b<unk><|tool_call>c<pad>");
    assert_eq!(s.push(&canvas), "ab<|tool_call>c");
    assert_eq!((s.tokens(), s.finished()), (&canvas[..], None));
}

#[test]
fn issue_3_end_tokens_between_given_texts_print_nothing() {
    let vocab = trained_vocab();
    let mut s = settler(&vocab, &[], ALL).given(4);
    let canvas = ids(&vocab, "a<turn|><eos>b<turn|>c");
    s.push(&canvas);
    assert_eq!((s.text(), s.finished()), ("ab", Some(FinishReason::Stop)));
    assert_eq!(s.tokens(), &canvas[..4]);
}

#[test]
fn max_tokens_cuts() {
    let vocab = trained_vocab();
    let canvas = ids(&vocab, "1 2 3 4 5");
    let mut s = settler(&vocab, &[], 4);
    s.push(&canvas);
    assert_eq!((s.tokens(), s.finished()), (&canvas[..4], Some(FinishReason::Length)));
    assert_eq!(s.text(), vocab.detokenize(&canvas[..4], false));
}

#[test]
fn thought_text_is_kept_apart_over_canvases() {
    let vocab = trained_vocab();
    let mut s = settler(&vocab, &[], ALL);
    let canvas = ids(&vocab, "<|channel>thought\nfirst I");
    assert_eq!(s.push(&canvas), "");
    assert!(s.in_thought());
    assert_eq!(s.push(&ids(&vocab, " think\n<channel|>It is")), "It is");
    assert!(!s.in_thought());
    assert_eq!(s.push(&ids(&vocab, " 4.<|channel>thought\nmore<channel|><turn|>")), " 4.");
    assert_eq!(s.reasoning().as_deref(), Some("first I think\n\nmore"));
    assert_eq!((s.text(), s.finished()), ("It is 4.", Some(FinishReason::Stop)));
    assert_eq!(vocab.detokenize(&s.tokens()[..canvas.len()], true), "<|channel>thought\nfirst I");
}

#[test]
fn an_unterminated_thought_is_no_answer() {
    let vocab = trained_vocab();
    let mut s = settler(&vocab, &["x"], ALL);
    s.push(&ids(&vocab, "<|channel>thought\nsix <turn|>"));
    assert_eq!((s.text(), s.reasoning().as_deref()), ("", Some("six")));
    let mut s = settler(&vocab, &[], ALL);
    s.push(&ids(&vocab, "<|channel>thought\n<channel|>yes"));
    assert_eq!((s.text(), s.reasoning()), ("yes", None));
}

#[test]
fn the_prompt_may_have_opened_the_thought() {
    let vocab = trained_vocab();
    let start = |prompt: &str| Settler::new(vocab.clone(), &ids(&vocab, prompt), &[], ALL).unwrap();
    let mut s = start("<|turn>model\n<|channel>thought\n");
    s.push(&ids(&vocab, "hm<channel|>yes"));
    assert_eq!((s.text(), s.reasoning().as_deref()), ("yes", Some("hm")));
    for closed in ["<|turn>model\n<|channel>thought\n<channel|>", "<|channel>thought\nold<turn|>\n<|turn>model\n", ""] {
        let mut s = start(closed);
        assert_eq!(s.push(&ids(&vocab, "yes")), "yes", "{closed}");
    }
}

#[test]
fn stop_texts_are_found_over_tokens_and_canvases() {
    let vocab = trained_vocab();
    let mut s = settler(&vocab, &["END OF"], ALL);
    assert_eq!(s.push(&ids(&vocab, "one E")), "one ");
    assert_eq!(s.push(&ids(&vocab, "ND")), "");
    assert_eq!(s.push(&ids(&vocab, " OR END O")), "END OR ");
    assert_eq!(s.push(&ids(&vocab, "F all")), "");
    assert_eq!((s.text(), s.finished()), ("one END OR ", Some(FinishReason::Stop)));
    let kept = vocab.detokenize(s.tokens(), true);
    assert!(kept.starts_with("one END OR") && !kept.contains("END OF"), "{kept}");

    let mut s = settler(&vocab, &["END"], ALL);
    assert_eq!(s.push(&ids(&vocab, "an EN")), "an ");
    assert_eq!(s.finish(FinishReason::Cancelled), "EN");
    assert_eq!((s.text(), s.finished()), ("an EN", Some(FinishReason::Cancelled)));
}

#[test]
fn the_stop_text_that_is_complete_first_counts() {
    let vocab = trained_vocab();
    for (stops, expected) in [
        (&["abcd", "bc"][..], "xa"),
        (&["bc", "abc"], "x"),
        (&["d", "zzz"], "xabc"),
        (&["\n", "e"], "xabcd"),
        (&["x"], ""),
    ] {
        let mut s = settler(&vocab, stops, ALL);
        s.push(&ids(&vocab, "xabcde"));
        assert_eq!(s.text(), expected, "{stops:?}");
    }
}

#[test]
fn a_stop_text_at_the_start_leaves_the_thought_tokens() {
    let vocab = trained_vocab();
    let thought = ids(&vocab, "<|channel>thought\nhm<channel|>");
    let mut s = settler(&vocab, &["no"], ALL);
    s.push(&thought);
    s.push(&ids(&vocab, "no more"));
    assert_eq!((s.text(), s.tokens()), ("", &thought[..]));
}

#[test]
fn characters_are_not_split() {
    let vocab = trained_vocab();
    let bytes = ids(&vocab, "😀é");
    assert!(bytes.len() >= 6, "written in bytes");
    let mut s = settler(&vocab, &[], ALL);
    let texts: Vec<String> = bytes.iter().map(|&id| s.push(&[id]).to_owned()).collect();
    assert_eq!(texts, ["", "", "", "😀", "", "é"]);
    let mut s = settler(&vocab, &[], ALL);
    assert_eq!(s.push(&bytes[..3]), "");
    assert_eq!(s.finish(FinishReason::Length), "\u{fffd}");
}

#[test]
fn senseless_settings_are_refused() {
    let vocab = trained_vocab();
    let new = |stop: Vec<String>, n| Settler::new(vocab.clone(), &[], &stop, n).unwrap_err().to_string();
    assert!(new(vec![], 0).starts_with("bad max_tokens: 0"));
    assert!(new(vec!["a".into(), String::new()], 1).starts_with("bad stop: text 1 has 0 bytes"));
    assert!(new(vec!["a".repeat(1025)], 1).contains("1025 bytes"));
    assert!(new(vec!["a".into(); 65], 1).contains("65 texts"));
}

/// What a settler has to give, computed in the plainest way: all at once, on the whole text.
fn expected(vocab: &Vocab, tokens: &[u32], stops: &[&str], max_tokens: usize) -> (String, Option<FinishReason>) {
    let end = tokens.iter().position(|&id| vocab.is_eog(id)).unwrap_or(tokens.len());
    let mut reason = (end < tokens.len()).then_some(FinishReason::Stop);
    let kept = &tokens[..end.min(max_tokens)];
    if end >= max_tokens {
        reason = Some(FinishReason::Length);
    }
    let (open, close) = (vocab.find("<|channel>"), vocab.find("<channel|>"));
    let mut thinking = false;
    let mut bytes = Vec::new();
    for &id in kept {
        if Some(id) == open || Some(id) == close {
            thinking = Some(id) == open;
        } else if !thinking && !vocab.is_hidden(id) {
            bytes.extend_from_slice(vocab.piece(id));
        }
    }
    let complete = |end: usize| stops.iter().filter(|s| bytes[..end].ends_with(s.as_bytes())).map(|s| s.len()).max();
    let cut = (0..=bytes.len()).find_map(|end| Some(end - complete(end)?));
    if cut.is_some() {
        reason = Some(FinishReason::Stop);
    }
    (String::from_utf8_lossy(&bytes[..cut.unwrap_or(bytes.len())]).into_owned(), reason)
}

/// Tokens that print little, so that stop texts come up, with bytes, markers and an end now and then.
fn stream() -> impl Strategy<Value = Vec<u32>> {
    let vocab = trained_vocab();
    let mut some: Vec<u32> =
        ["abab", "ba", " ", "\n", "😀", "é", "a<|think|>"].iter().flat_map(|t| ids(&vocab, t)).collect();
    some.extend(["<0xFF>", "<0x80>", "<0xE2>", "<|channel>", "<channel|>"].map(|t| vocab.find(t).unwrap()));
    let end = vec![vocab.find("<turn|>").unwrap()];
    let token = prop_oneof![60 => proptest::sample::select(some), 1 => proptest::sample::select(end)];
    proptest::collection::vec(token, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn canvases_do_not_matter(
        tokens in stream(),
        cuts in proptest::collection::vec(0usize..60, 0..10),
        stops in proptest::collection::vec(proptest::sample::select(vec!["ab", "ba", "aba", "é", "b\n", "😀a", "aab"]), 0..3),
        max_tokens in prop_oneof![3 => Just(ALL), 1 => 1usize..60],
    ) {
        let vocab = trained_vocab();
        let (text, reason) = expected(&vocab, &tokens, &stops, max_tokens);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(tokens.len())).chain([0, tokens.len()]).collect();
        cuts.sort_unstable();
        let mut split = settler(&vocab, &stops, max_tokens);
        let mut settled = String::new();
        for pair in cuts.windows(2) {
            settled.push_str(split.push(&tokens[pair[0]..pair[1]]));
            prop_assert!(text.starts_with(&settled), "settled {:?} of {:?}", settled, text);
        }
        prop_assert_eq!(split.finished(), reason);
        settled.push_str(split.finish(FinishReason::Cancelled));
        prop_assert_eq!(&settled, &text);
        prop_assert_eq!(split.text(), &text);
        let mut whole = settler(&vocab, &stops, max_tokens);
        whole.push(&tokens);
        prop_assert_eq!(whole.tokens(), split.tokens());
        prop_assert_eq!(whole.reasoning(), split.reasoning());
    }
}
