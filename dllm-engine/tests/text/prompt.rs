use dllm_engine::Error;
use dllm_engine::chat::ChatTemplate;
use dllm_engine::params::{Message, Prompt};
use dllm_engine::prompt::{check, encode, text_from_bytes};
use dllm_engine::vocab::{MAX_TEXT, Vocab};

use crate::common::trained;

fn model() -> (Vocab, ChatTemplate) {
    let data = trained();
    let vocab = data.vocab();
    let template = ChatTemplate::new(data.chat_template.as_deref().unwrap(), &vocab).unwrap();
    (vocab, template)
}

#[test]
fn recorded_prompts_give_their_ids() {
    let data = trained();
    let (vocab, template) = model();
    assert_eq!(data.rendered.len(), 12);
    for case in &data.rendered {
        let prompt = Prompt::from(case.prompt.as_str());
        assert_eq!(encode(&prompt, &vocab, Some(&template), false).unwrap(), case.ids);
        assert_eq!(encode(&Prompt::Raw(case.rendered.clone()), &vocab, None, false).unwrap(), case.ids);
        assert_eq!(encode(&Prompt::Tokens(case.ids.clone()), &vocab, None, false).unwrap(), case.ids);
    }
}

#[test]
fn the_begin_token_comes_once() {
    let (vocab, template) = model();
    let raw = |text: &str| encode(&Prompt::Raw(text.into()), &vocab, None, false).unwrap();
    assert_eq!(raw("hi"), raw("<bos>hi"));
    assert_eq!(raw("hi")[0], 2);
    let none = ChatTemplate::new("{{ messages[0].content }}", &vocab).unwrap();
    let ids = encode(&Prompt::from("<bos>hi"), &vocab, Some(&none), false).unwrap();
    assert_eq!(ids[0], 2);
    assert_eq!(vocab.detokenize(&ids, true), "<bos><bos>hi", "the second one is the message's text");
    assert_eq!(ids.iter().filter(|&&id| id == 2).count(), 1);
    let ids = encode(&Prompt::from("<bos>"), &vocab, Some(&template), false).unwrap();
    assert_eq!(ids.iter().filter(|&&id| id == 2).count(), 1);
    assert_eq!(encode(&Prompt::Tokens(vec![7, 8]), &vocab, None, false).unwrap(), [7, 8]);
}

#[test]
fn what_cannot_be_a_prompt_is_refused() {
    let (vocab, template) = model();
    let bad = [
        (Prompt::Messages(vec![]), "no messages"),
        (Prompt::Messages(vec![Message::system(""), Message::user("")]), "it is empty"),
        (Prompt::Raw(String::new()), "it is empty"),
        (Prompt::Tokens(vec![]), "no tokens"),
        (Prompt::Tokens(vec![5, 1024]), "token 1024 at position 1 is not in 0..1024"),
        (Prompt::Raw(" ".repeat(MAX_TEXT + 1)), "shorten it"),
        (Prompt::from(" ".repeat(MAX_TEXT + 1)), "shorten it"),
    ];
    for (prompt, reason) in bad {
        let error = encode(&prompt, &vocab, Some(&template), false).unwrap_err();
        assert!(
            matches!(error, Error::BadArgument { name: "prompt", .. }) && error.to_string().contains(reason),
            "{error}"
        );
    }
    let error = encode(&Prompt::from("hi"), &vocab, None, false).unwrap_err();
    assert!(matches!(error, Error::Template(_)), "{error}");
}

/// One rule for the library, the command and the server: the last message, or the raw text, says something.
#[test]
fn issue_2_a_prompt_of_blanks_is_refused_everywhere_alike() {
    let (vocab, template) = model();
    for blanks in [" ", "\n\t ", "\u{3000}\u{a0}", &" ".repeat(1 << 20)] {
        let prompts = [
            Prompt::Raw(blanks.into()),
            Prompt::from(blanks),
            Prompt::Messages(vec![Message::system("Be brief."), Message::user(blanks)]),
            Prompt::Messages(vec![Message::user("hi"), Message::assistant("hello"), Message::user(blanks)]),
        ];
        for prompt in prompts {
            let error = check(&prompt).unwrap_err().to_string();
            assert!(error.contains("nothing but blanks"), "{error}");
            assert_eq!(encode(&prompt, &vocab, Some(&template), false).unwrap_err().to_string(), error);
        }
    }
    for good in [vec![Message::user(" a ")], vec![Message::assistant(""), Message::user("a")]] {
        check(&Prompt::Messages(good)).unwrap();
    }
}

#[test]
fn bytes_must_be_utf8() {
    assert_eq!(text_from_bytes("grüße\0".as_bytes()).unwrap(), "grüße\0");
    assert_eq!(text_from_bytes(b"\xef\xbb\xbf2 + 2 =").unwrap(), "2 + 2 =", "a byte order mark is no text");
    assert_eq!(text_from_bytes("a\u{feff}".as_bytes()).unwrap(), "a\u{feff}");
    let error = text_from_bytes(b"abc\xff").unwrap_err().to_string();
    assert!(error.contains("byte 3 (0xFF) is no UTF-8"), "{error}");
    let error = text_from_bytes("ü".as_bytes().split_last().unwrap().1).unwrap_err().to_string();
    assert!(error.contains("byte 0 (0xC3)"), "{error}");
}

#[test]
fn odd_but_possible_prompts_keep_their_text() {
    let (vocab, template) = model();
    for text in [" ".repeat(1 << 20) + "a", "a\0b".into(), "\u{e000}<|turn>\u{e001}".into(), "<".repeat(1 << 18)] {
        let ids = encode(&Prompt::from(text.clone()), &vocab, Some(&template), false).unwrap();
        let expected = format!("<bos><|turn>user\n{text}<turn|>\n<|turn>model\n");
        assert_eq!(vocab.detokenize(&ids, true), expected);
        assert_eq!(ids.iter().filter(|&&id| id == 105).count(), 2, "two turns, both of the template");
    }
}

#[test]
fn issue_2_a_template_that_leaves_the_message_out_is_no_template() {
    let (vocab, _) = model();
    let ids = |source: &str, text: &str| {
        let template = ChatTemplate::new(source, &vocab).unwrap();
        encode(&Prompt::from(text), &vocab, Some(&template), false).map_err(|e| e.to_string())
    };
    for source in ["", "<|turn>user\nhello<turn|>\n<|turn>model\n", "{{ messages | length }}"] {
        for text in ["86 + 45 =", "00000000", "{"] {
            let error = ids(source, text).unwrap_err();
            assert!(error.contains("leaves the last message out"), "{source:?} {text:?}: {error}");
        }
    }
    // Changed is not left out.
    for source in
        ["{{ messages[0].content | upper }}", "{{ messages[0].content | length }}", "{{ messages[0].content[:2] }}"]
    {
        assert!(ids(source, "what is it?").is_ok(), "{source}");
    }
}
