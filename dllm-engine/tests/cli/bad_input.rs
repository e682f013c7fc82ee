//! What a user may get wrong: one line that names the value and what to do, exit code 2.

use super::*;

#[track_caller]
fn refused(args: &[&str], words: &[&str]) {
    let error = run(args).error();
    for word in words {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
}

#[track_caller]
fn refused_answer(option: &str, value: &str, words: &[&str]) {
    // With an equals sign, so that a value may begin with a hyphen.
    refused(&["generate", SUM, &format!("{option}={value}")], words);
}

#[test]
fn numbers_out_of_range() {
    refused_answer("--max-tokens", "0", &["bad --max-tokens: 0", "at least 1"]);
    refused_answer("--max-steps", "0", &["bad --max-steps: 0", "1..=4096"]);
    refused_answer("--max-steps", "4097", &["bad --max-steps: 4097", "1..=4096"]);
    refused_answer("--n", "0", &["bad -n: 0", "at least one"]);
    for bad in ["nan", "inf", "-inf", "-1"] {
        refused_answer("--t-min", bad, &["bad --t-min"]);
        refused_answer("--t-max", bad, &["bad --t-max"]);
        refused_answer("--entropy-bound", bad, &["bad --entropy-bound"]);
    }
    refused_answer("--stop", "", &["bad --stop", "0 bytes"]);
    refused_answer("--sampler", "magic", &["bad --sampler: \"magic\"", "entropy-bound"]);
    refused_answer("--threads", "18446744073709551615", &["bad --threads: 18446744073709551615", "processors"]);
    refused(&["bench", "--repetitions", "0"], &["bad --repetitions: 0"]);
    refused(&["bench", "--prompt-tokens", "0"], &["bad --prompt-tokens: 0"]);
    refused(&["bench", "--steps", "0"], &["bad --steps: 0", "1..=4096"]);
    refused(&["plan", "--lanes", "0"], &["bad --lanes: 0", "1..=64"]);
    refused(&["plan", "--lanes", "65"], &["bad --lanes: 65", "1..=64"]);
    refused(&["plan", "--ctx", "1000000000000"], &["bad --ctx: 1000000000000"]);
    refused_answer("--ctx", "18446744073709551615", &["bad --ctx: 18446744073709551615"]);
}

#[test]
fn what_is_no_number_is_refused_before_anything_is_loaded() {
    for (option, value) in [("--max-tokens", "many"), ("--seed", "1.5"), ("--t-min", "warm"), ("--level", "best")] {
        let ran = run(["generate", SUM, option, value]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""));
        assert!(ran.err.starts_with("error: ") && ran.err.contains(value) && ran.err.contains(option), "{}", ran.err);
    }
}

#[test]
fn issue_2_messages_name_the_range_and_the_right_action() {
    refused_answer("--n", "1025", &["bad -n: 1025", "1..=1024", "fewer"]);
    refused(&["bench", "-r", "10001"], &["bad --repetitions: 10001", "1..=10000", "fewer"]);
    refused_answer(
        "--t-min",
        "0.9",
        &["bad --t-min: 0.9", "--t-max, which is 0.8 where it is not given", "give --t-max"],
    );
    let said = |args: &[&str]| {
        let ran = run(args);
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""));
        ran.err
    };
    for (option, value) in [("--seed", "-1"), ("--n", "1.5"), ("--max-tokens", "18446744073709551616"), ("--ctx", "-3")]
    {
        let error = said(&["generate", SUM, option, value]);
        let range = "no whole number in 0..=18446744073709551615";
        assert!(error.contains(value) && error.contains(option) && error.contains(range), "{error}");
    }
    let large = said(&["generate", SUM, "--entropy-bound", "1e39"]);
    assert!(large.contains("1e39") && large.contains("beyond 3.4"), "{large}");
}

#[test]
fn a_huge_number_of_tokens_is_no_more_than_the_context_holds() {
    assert_eq!(run(["generate", SUM, "--max-tokens", "18446744073709551615"]).ok().trim_end(), SUM_ANSWER);
}

#[test]
fn prompts_that_say_nothing() {
    refused(&["generate", ""], &["bad prompt", "empty"]);
    refused(&["generate", "--raw", ""], &["bad prompt", "empty"]);
    refused(&["bench", "--prompt", "   "], &["bad prompt", "blanks"]);
    refused(&["generate", "--raw", " \t"], &["bad prompt", "blanks"]);
    refused(&["generate", "--system", "Be brief.", " "], &["bad prompt", "blanks"]);
    refused(&["bench", "--prompt", " "], &["bad prompt", "blanks"]);
    let blanks = vec![b' '; 1 << 20];
    let error = run_with_input(["generate", "-"], &blanks).error();
    assert!(error.contains("bad prompt") && error.contains("blanks"), "{error}");
    let error = run_with_input(["generate"], b"").error();
    assert!(error.contains("bad prompt") && error.contains("empty"), "{error}");
}

#[test]
fn a_prompt_that_is_too_long_is_told_what_fits() {
    let long = "word ".repeat(20_000);
    let error = run_with_input(["generate", "--ctx", "512"], long.as_bytes()).error();
    assert!(error.contains("448 fit") && error.contains("context 512"), "{error}");
    let mut blanks_with_a_word = vec![b' '; 1 << 20];
    blanks_with_a_word.extend(b"word");
    let error = run_with_input(["generate", "--raw"], &blanks_with_a_word).error();
    assert!(error.contains("fit (context"), "{error}");
}

#[test]
fn text_that_is_no_utf_8() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("latin1.txt");
    std::fs::write(&file, b"na\xEFve").unwrap();
    let error = run([OsStr::new("generate"), OsStr::new("--file"), file.as_os_str()]).error();
    assert!(error.contains("byte 2 (0xEF)"), "{error}");
    let error = run_with_input(["tokenize"], b"ab\xFF").error();
    assert!(error.contains("byte 2 (0xFF)"), "{error}");
    let error = run_with_input(["chat"], b"\xFF\n").error();
    assert!(error.contains("byte 0 (0xFF)"), "{error}");
}

#[test]
fn files_that_are_no_prompt() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing.txt");
    let error = run([OsStr::new("generate"), OsStr::new("--file"), missing.as_os_str()]).error();
    assert!(error.contains("cannot open") && error.contains("missing.txt"), "{error}");
    let error = run([OsStr::new("generate"), OsStr::new("--file"), dir.path().as_os_str()]).error();
    assert!(error.contains("cannot"), "{error}");
}

#[test]
fn a_trace_that_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("no such folder").join("trace.jsonl");
    let error = run([OsStr::new("generate"), OsStr::new(SUM), OsStr::new("--trace"), trace.as_os_str()]).error();
    assert!(error.contains("cannot create") && error.contains("trace.jsonl"), "{error}");
}

/// A trace to `path`, with more arguments: the error, where the file must be as it was.
#[track_caller]
fn refused_trace(path: &std::path::Path, args: &[&OsStr]) -> String {
    let before = std::fs::read(path).ok();
    let trace = [OsStr::new("generate"), OsStr::new("--trace"), path.as_os_str()];
    let error = run(trace.iter().chain(args)).error();
    assert!(std::fs::read(path).ok() == before, "{} has changed: {error}", path.display());
    error
}

#[test]
fn a_trace_destroys_nothing() {
    let os = OsStr::new;
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (old, question, model, link) = (at("old.jsonl"), at("question.txt"), at("model.gguf"), at("link.gguf"));
    std::fs::write(&old, "a trace of yesterday\n").unwrap();
    std::fs::write(&question, SUM).unwrap();
    std::fs::copy(fixtures("nano").join("model.gguf"), &model).unwrap();
    std::fs::hard_link(&model, &link).unwrap();
    let names = |error: String| assert!(error.contains("bad --trace") && error.contains("name a new file"), "{error}");
    names(refused_trace(&old, &[os(SUM)]));
    names(refused_trace(&question, &[os("--file"), question.as_os_str()]));
    names(refused_trace(&model, &[os("--model"), model.as_os_str(), os(SUM)]));
    names(refused_trace(&link, &[os("--model"), model.as_os_str(), os(SUM)]));
    let folder = refused_trace(dir.path(), &[os(SUM)]);
    assert!(folder.contains("bad --trace") && folder.contains("is a folder"), "{folder}");
    refused(&["generate", SUM, "--trace", "-"], &["bad --trace: \"-\"", "name a file"]);
}

#[test]
fn a_refused_request_leaves_no_trace() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.jsonl");
    let error = refused_trace(&trace, &[OsStr::new(SUM), OsStr::new("--max-steps"), OsStr::new("0")]);
    assert!(error.contains("--max-steps: 0") && !trace.exists(), "{error}");
    let long = "word ".repeat(20_000);
    let error = refused_trace(&trace, &[OsStr::new(&long)]);
    assert!(error.contains("4032 fit") && !trace.exists(), "{error}");
    // An empty file holds nothing that could be lost.
    std::fs::write(&trace, "").unwrap();
    assert_eq!(
        run([OsStr::new("generate"), OsStr::new(SUM), OsStr::new("--trace"), trace.as_os_str()]).ok().trim(),
        SUM_ANSWER
    );
    assert!(std::fs::read_to_string(&trace).unwrap().starts_with("{\"event\":\"start\""));
}

#[test]
fn memory_that_is_less_than_a_byte_is_not_no_limit() {
    for value in ["0", "1e-10", "1e-45", "-1", "nan", "1e7"] {
        let ran = run(["plan", &format!("--memory={value}")]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{value}");
        assert!(ran.err.contains("--memory") && ran.err.contains("from 1e-9 to 1e6"), "{}", ran.err);
    }
}

#[test]
fn sizes_of_the_context_are_told_as_they_are() {
    refused(&["plan", "--ctx", "64"], &["bad --ctx: 64 tokens are not in 65..=4096", "one more than a canvas"]);
}

#[test]
fn settings_that_would_do_nothing_are_refused() {
    let ran = run(["generate", SUM, "--raw", "--think"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""));
    assert!(ran.err.contains("--raw") && ran.err.contains("--think"), "{}", ran.err);
}

#[test]
fn words_that_are_no_option_get_no_empty_tip() {
    let ran = run(["generate", "--nosuch", "x"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""));
    assert!(ran.err.contains("--nosuch") && !ran.err.contains("--n <N>"), "{}", ran.err);
    assert!(ran.err.lines().all(|line| line.trim() != "tip:"), "{}", ran.err);
    let ran = run(["help", "nosuch"]);
    assert!(ran.code == Some(2) && ran.err.contains("nosuch") && !ran.err.contains("dllm generate"), "{}", ran.err);
}

#[test]
fn a_full_conversation_is_told_how_to_begin_anew() {
    // The second question's tokens fit, but not behind the first question and its answer.
    let question = format!("{SUM} {}", "and ".repeat(40));
    let ran =
        run_with_input(["chat", "--ctx", "200", "-k", "1"], format!("{question}\n{question}\n{question}\n").as_bytes());
    assert_eq!(ran.code, Some(2), "{} {}", ran.out, ran.err);
    assert!(ran.err.contains("the conversation and this question have") && ran.err.contains("/new"), "{}", ran.err);
}

#[test]
fn a_device_that_is_not_there() {
    refused_answer("--device", "CUDA77", &["no device \"CUDA77\"", "CPU"]);
    refused(&["plan", "--device", ""], &["no device \"\"", "CPU"]);
    refused(
        &["plan", "--device", "CPU,CPU"],
        &["bad --device", "\"CPU,CPU\"", "--host-experts or --host-layers", "GPUs only"],
    );
    refused(&["plan", "--device", "CPU", "--host-experts", "2"], &["bad --host-experts: 2", "needs a GPU", "--device"]);
    refused(&["plan", "--device", "CPU", "--dense", "half"], &["bad --dense", "CUDA", "auto"]);
    refused(&["plan", "--device", "CPU", "--host-layers", "2"], &["bad --host-layers: 2", "needs a GPU", "--device"]);
}

/// The commands that read a model, with one at `path`.
fn readers(path: &std::path::Path) -> Vec<Ran> {
    let path = path.as_os_str();
    let os = OsStr::new;
    vec![
        run([os("generate"), os(SUM), os("--model"), path]),
        run([os("inspect"), path]),
        run([os("plan"), path]),
        run([os("tokenize"), os("a"), os("--model"), path]),
        run([os("bench"), os("--model"), path]),
        run_with_input([os("chat"), os("--model"), path], b"hello\n"),
    ]
}

#[test]
fn model_files_that_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let whole = std::fs::read(fixtures("nano").join("model.gguf")).unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let files = [
        write("empty.gguf", b""),
        write("text.gguf", b"this is no model, but a text of some length\n"),
        write("truncated.gguf", &whole[..whole.len() - 1000]),
        write("header.gguf", &whole[..100]),
        dir.path().join("missing.gguf"),
        dir.path().to_owned(),
    ];
    for file in files {
        for ran in readers(&file) {
            let error = ran.error();
            assert!(error.contains(&*file.to_string_lossy()), "{error}");
        }
    }
}

#[cfg(unix)]
#[test]
fn a_model_that_may_not_be_read() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("secret.gguf");
    std::fs::copy(fixtures("nano").join("model.gguf"), &path).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
    let ran = run([OsStr::new("plan"), path.as_os_str()]);
    // The superuser may read everything.
    if std::fs::File::open(&path).is_ok() {
        assert!(ran.ok().contains("it fits"));
    } else {
        let error = ran.error();
        assert!(error.contains("cannot open") && error.contains("secret.gguf"), "{error}");
    }
}

#[test]
fn fixtures_that_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let error = run([OsStr::new("parity"), dir.path().as_os_str()]).error();
    assert!(error.contains("fixtures.json"), "{error}");
    let nano = fixtures("nano");
    let error = run([OsStr::new("parity"), nano.as_os_str(), OsStr::new("--file"), OsStr::new("other.gguf")]).error();
    assert!(error.contains("other.gguf"), "{error}");
}

#[test]
fn a_wrong_line_ends_a_scripted_conversation() {
    for (input, word) in
        [("/nonsense\n", "/nonsense"), ("/seed x\n", "bad seed"), ("/think maybe\n", "maybe"), ("/exit now\n", "now")]
    {
        let error = run_with_input(["chat"], input.as_bytes()).error();
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn special_tokens_in_a_users_text_stay_text() {
    let ids = |args: &[&str]| {
        let value = run(args.iter().chain(&["--json"])).json();
        let ids = value["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect::<Vec<_>>();
        assert_eq!(ids.len(), value["pieces"].as_array().unwrap().len());
        ids
    };
    let turn_end = ids(&["tokenize", "--special", "<turn|>"]);
    assert_eq!(turn_end.len(), 1, "{turn_end:?}");
    let plain = ids(&["tokenize", "<turn|>"]);
    assert!(plain.len() > 1 && !plain.contains(&turn_end[0]), "{plain:?}");
    let ends = |text| ids(&["tokenize", "--chat", text]).iter().filter(|id| **id == turn_end[0]).count();
    assert_eq!(ends("a<turn|>b"), ends("ab"));
    assert!(ends("ab") > 0);
}
