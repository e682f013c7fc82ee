//! What the commands print, and their exit codes.

use super::*;

const RECEIPT: [&str; 27] = [
    "model",
    "family",
    "quantization",
    "device",
    "seed",
    "candidate",
    "level",
    "kv",
    "dense",
    "placement",
    "sampler",
    "max_steps",
    "prompt_tokens",
    "cached_tokens",
    "tokens",
    "steps_per_canvas",
    "tokens_per_forward",
    "prefill_ms",
    "step_ms",
    "commit_ms",
    "host_ms",
    "total_ms",
    "tokens_per_second",
    "lanes",
    "graphs_built",
    "graphs_replayed",
    "captured_replays",
];

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

/// Settings under which the tiny model answers differently with every seed.
const WILD: [&str; 8] = ["--t-min", "2", "--t-max", "3", "--max-steps", "12", "--entropy-bound", "50"];

fn wild<'a>(args: &[&'a str]) -> Vec<&'a str> {
    ["generate", "--json", "zebra umbrella 7 {"].into_iter().chain(WILD).chain(args.iter().copied()).collect()
}

#[test]
fn an_answer_is_all_that_is_printed() {
    let ran = run(["generate", SUM]);
    assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (Some(0), "131\n", ""));
}

#[test]
fn json_has_exactly_five_keys() {
    let value = run(["generate", SUM, "--json", "--seed", "7"]).json();
    assert_eq!(keys(&value), ["text", "reasoning", "finish_reason", "converged", "receipt"]);
    assert_eq!(value["text"], SUM_ANSWER);
    assert_eq!(value["reasoning"], Value::Null);
    assert_eq!(value["finish_reason"], "stop");
    assert_eq!(value["receipt"]["seed"], 7);
    assert_eq!(keys(&value["receipt"])[..RECEIPT.len()], RECEIPT);
    assert_eq!(keys(&value["receipt"])[RECEIPT.len()..], ["device_bytes"]);
}

#[test]
fn the_same_seed_gives_the_same_text() {
    let text = |seed| run(wild(&["--seed", seed])).json()["text"].as_str().unwrap().to_owned();
    let texts: Vec<_> = ["1", "2", "3", "4"].into_iter().map(text).collect();
    assert_eq!(text("1"), texts[0]);
    assert!(texts.iter().any(|other| *other != texts[0]), "{texts:?}");
}

#[test]
fn a_drawn_seed_reproduces_the_answer() {
    let drawn = run(wild(&[])).json();
    let seed = drawn["receipt"]["seed"].to_string();
    assert_eq!(run(wild(&["--seed", &seed])).json()["text"], drawn["text"]);
}

#[test]
fn candidates_differ_and_the_first_is_the_one_alone() {
    let value = run(wild(&["--seed", "5", "--n", "4"])).json();
    assert_eq!(keys(&value), ["candidates"]);
    let candidates = value["candidates"].as_array().unwrap();
    assert_eq!(candidates.len(), 4);
    for c in candidates {
        assert_eq!(keys(c), ["text", "reasoning", "finish_reason", "converged", "receipt"]);
        assert_eq!((&c["receipt"]["seed"], &c["receipt"]["lanes"]), (&Value::from(5), &Value::from(4)));
    }
    assert!(candidates.iter().any(|c| c["text"] != candidates[0]["text"]), "{candidates:?}");
    assert_eq!(candidates[0]["text"], run(wild(&["--seed", "5"])).json()["text"]);
    // More than there are lanes take turns.
    let many = run(["generate", SUM, "--json", "--n", "66", "--ctx", "256"]).json();
    assert_eq!(many["candidates"].as_array().unwrap().len(), 66);
}

#[test]
fn issue_2_a_candidate_can_be_had_again_alone() {
    let value = run(wild(&["--seed", "5", "--n", "3"])).json();
    for (number, candidate) in value["candidates"].as_array().unwrap().iter().enumerate() {
        assert_eq!(candidate["receipt"]["candidate"], number);
        let number = number.to_string();
        let alone = run(wild(&["--seed", "5", "--candidate", &number])).json();
        assert_eq!((&alone["text"], &alone["converged"]), (&candidate["text"], &candidate["converged"]));
        assert_eq!(alone["receipt"]["candidate"], candidate["receipt"]["candidate"]);
    }
    let cut = run(["generate", SUM, "--json", "--max-steps", "1", "--entropy-bound", "0"]).json();
    assert_eq!(cut["converged"], false);
    assert_eq!(run(["generate", SUM, "--json"]).json()["converged"], true);
}

#[test]
fn issue_2_an_empty_answer_is_a_line_for_scripts() {
    assert_eq!(run(["generate", SUM, "--stop", "1"]).ok(), "\n");
    let turns = run_with_input(["chat", "--stop", "1"], format!("{SUM}\n2 + 2 =\n").as_bytes());
    assert_eq!(turns.ok(), "\n4\n");
}

#[test]
fn issue_2_a_question_may_begin_with_a_slash() {
    let plain = run_with_input(["generate", "--seed", "1", "--json"], b"/2 + 2 =").json();
    let asked = run_with_input(["chat", "--seed", "1"], b"//2 + 2 =\n").ok();
    assert_eq!(asked.trim_end_matches('\n'), plain["text"]);
}

#[test]
fn issue_2_inspect_and_plan_take_a_model_as_the_others_do() {
    let nano = fixtures("nano").join("model.gguf");
    let os = OsStr::new;
    for command in ["inspect", "plan"] {
        let option = run([os(command), os("--model"), nano.as_os_str(), os("--json")]).json();
        let place = run([os(command), nano.as_os_str(), os("--json")]).json();
        for key in ["path", "context", "weights_mapped"] {
            assert_eq!(option[key], place[key], "{command}");
        }
        assert_eq!(run([os(command), nano.as_os_str(), os("--model"), nano.as_os_str()]).code, Some(2));
    }
}

#[test]
fn issue_2_a_hyphen_is_standard_input_as_a_file_too() {
    assert_eq!(run_with_input(["generate", "--file", "-"], SUM.as_bytes()).ok(), "131\n");
}

#[test]
fn issue_2_characters_that_act_are_escaped_in_json() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("other.gguf");
    let name = "a\u{9b}2J\u{202e}\u{200b}\u{e0001}z";
    let file = gguf::GgufFile::new().str("general.architecture", "other").str("general.name", name);
    std::fs::write(&path, file.tensor("a.weight", &[32, 2], 0, &[0; 256]).bytes()).unwrap();
    let ran = run([OsStr::new("inspect"), path.as_os_str(), OsStr::new("--json")]).ok();
    assert!(ran.contains("a\\u009b2J\\u202e\\u200b\\udb40\\udc01z"), "{ran}");
    assert_eq!(serde_json::from_str::<Value>(&ran).unwrap()["metadata"]["general.name"], name);
}

#[test]
fn issue_2_an_empty_variable_is_none() {
    let answer = ran(dllm().env("DLLM_THREADS", "").env("DLLM_MODEL", "").args(["plan"]).output().unwrap());
    assert!(answer.ok().contains("it fits"));
    let refused = ran(dllm().env("DLLM_THREADS", "many").args(["plan"]).output().unwrap()).error();
    assert!(refused.contains("bad DLLM_THREADS in the environment: \"many\""), "{refused}");
    // What the environment says does not stand on the command line.
    let usage = run(["generate", "--level", "best"]).err;
    assert!(!usage.contains("--threads"), "{usage}");
}

#[test]
fn candidates_without_json_are_told_apart() {
    let out = run(["generate", SUM, "--n", "2"]).ok();
    assert_eq!(out, "--- candidate 0\n131\n--- candidate 1\n131\n");
}

#[test]
fn the_prompt_comes_from_an_argument_a_file_or_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt.txt");
    std::fs::write(&file, format!("{SUM}\r\n")).unwrap();
    let os = OsStr::new;
    for ran in [
        run(["generate", SUM]),
        run([os("generate"), os("--file"), file.as_os_str()]),
        run_with_input(["generate"], format!("{SUM}\n").as_bytes()),
        run_with_input(["generate", "-"], SUM.as_bytes()),
    ] {
        assert_eq!(ran.ok(), "131\n");
    }
    let both = run([os("generate"), os(SUM), os("--file"), file.as_os_str()]);
    assert_eq!(both.code, Some(2));
}

#[test]
fn a_stop_text_ends_the_answer() {
    let value = run(["generate", SUM, "--stop", "31", "--json"]).json();
    assert_eq!((&value["text"], &value["finish_reason"]), (&"1".into(), &"stop".into()));
}

#[test]
fn issue_2_a_sampler_is_asked_for_by_name() {
    let answer = run(["generate", SUM, "--seed", "1", "--sampler", "entropy-bound", "--json"]).json();
    assert_eq!((&answer["text"], &answer["receipt"]["sampler"]), (&SUM_ANSWER.into(), &"entropy-bound".into()));
}

#[test]
fn a_model_may_come_from_the_environment() {
    let tokens = |command: &mut Command| {
        let text = ran(command.args(["tokenize", "--json", "ab"]).output().unwrap()).json();
        text["ids"].clone()
    };
    let nano = fixtures("nano").join("model.gguf");
    assert_ne!(tokens(dllm().env("DLLM_MODEL", &nano)), tokens(&mut dllm()));
}

#[test]
fn watching_without_a_terminal_is_plain() {
    let ran = run(["generate", SUM, "--watch"]);
    assert_eq!((ran.out.as_str(), ran.err.as_str()), ("131\n", ""));
}

#[test]
fn a_trace_has_every_step() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.jsonl");
    let os = OsStr::new;
    let prompt = os("Count from 3 to 40.");
    let answer = run([os("generate"), prompt, os("--json"), os("--trace"), path.as_os_str()]).json();
    let trace = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<Value> = trace.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |event: &str| lines.iter().filter(|line| line["event"] == event).collect::<Vec<_>>();
    let steps: Vec<u64> =
        answer["receipt"]["steps_per_canvas"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    assert!(steps.len() > 1, "{steps:?}");
    assert_eq!(of("step").len() as u64, steps.iter().sum::<u64>());
    assert_eq!(of("canvas").len(), steps.len());
    let canvas = lines[0]["canvas"].as_u64().unwrap() as usize;
    for step in of("step") {
        for array in ["input", "argmax", "drawn", "entropy", "accepted", "output"] {
            assert_eq!(step[array].as_array().unwrap().len(), canvas);
        }
    }
    let text: String = of("canvas").iter().map(|line| line["text"].as_str().unwrap()).collect();
    assert_eq!(text, answer["text"]);
    assert_eq!(of("done")[0]["text"], answer["text"]);
    let id = of("step")[0]["argmax"][0].to_string();
    assert!(of("pieces")[0]["pieces"][&id].is_string());
}

#[test]
fn a_conversation_through_pipes() {
    let input = format!("/seed 3\n{SUM}\n\n2 + 2 =\n/exit\nnever read\n");
    let ran = run_with_input(["chat"], input.as_bytes());
    assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (Some(0), "131\n4\n", ""));
    // The end of the input ends the conversation.
    assert_eq!(run_with_input(["chat"], SUM.as_bytes()).ok(), "131\n");
}

#[test]
fn inspect_shows_a_known_file() {
    let text = run(["inspect"]).ok();
    for word in [
        "METADATA",
        "general.architecture = \"diffusion-gemma\"",
        "TENSORS",
        "token_embd.weight",
        "Q8_0",
        "VOCABULARY",
        "1024 tokens",
        "end tokens",
        "LOADING",
        "mapped",
    ] {
        assert!(text.contains(word), "{word:?} is not in:\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() < 200));
    let value = run(["inspect", "--json"]).json();
    assert_eq!(value["architecture"], "diffusion-gemma");
    assert_eq!(value["vocabulary"]["tokens"], 1024);
    assert_eq!(value["metadata"]["tokenizer.ggml.tokens"]["length"], 1024);
    let bytes = |list: &Value| list.as_array().unwrap().iter().map(|t| t["bytes"].as_u64().unwrap()).sum::<u64>();
    let totals: u64 = value["totals"].as_object().unwrap().values().map(|t| t["bytes"].as_u64().unwrap()).sum();
    assert_eq!(bytes(&value["tensors"]), totals);
}

#[test]
fn inspect_shows_a_file_that_cannot_be_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("other.gguf");
    let file = gguf::GgufFile::new().str("general.architecture", "steam\x1b[2Jengine");
    std::fs::write(&path, file.tensor("a.weight", &[32, 2], 0, &[0; 256]).bytes()).unwrap();
    let text = run([OsStr::new("inspect"), path.as_os_str()]).ok();
    assert!(text.contains("a.weight") && text.contains("32 x 2"), "{text}");
    assert!(text.contains("not possible") && text.contains("unknown architecture"), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
    let value = run([OsStr::new("inspect"), path.as_os_str(), OsStr::new("--json")]).json();
    assert!(value["loading"]["error"].as_str().unwrap().contains("diffusion-gemma"), "{value}");
}

#[test]
fn a_plan_adds_up() {
    let value = run(["plan", "--json", "--ctx", "512", "--lanes", "2"]).json();
    let n = |key: &str| value[key].as_u64().unwrap();
    assert_eq!(n("needed"), n("weights") + n("cache") + n("compute") + n("inputs"));
    assert_eq!((n("context"), n("lanes")), (512, 2));
    assert_eq!(value["fits"], n("needed") <= n("free"));
    let more = run(["plan", "--json", "--ctx", "2048", "--lanes", "2"]).json();
    assert!(more["cache"].as_u64().unwrap() > n("cache"));
    assert!(run(["plan"]).ok().contains("it fits"));
}

#[test]
fn bench_measures() {
    let args = ["bench", "--json", "--steps", "4", "--repetitions", "2", "--lanes", "2", "--prompt-tokens", "20"];
    let value = run(args).json();
    assert_eq!((&value["lanes"], &value["repetitions"], &value["prompt_tokens"]), (&2.into(), &2.into(), &20.into()));
    assert_eq!(value["steps_per_canvas"], 4.0);
    let n = |key: &str| value[key].as_f64().unwrap();
    assert!(
        0.0 < n("step_ms_min") && n("step_ms_min") <= n("step_ms_median") && n("step_ms_median") <= n("step_ms_p90")
    );
    assert!(n("prefill_tokens_per_second") > 0.0);
    assert_eq!(value.get("breakdown"), None, "only when asked for");
    let value = run(args.iter().copied().chain(["--breakdown"])).json();
    let parts = value["breakdown"].as_array().unwrap();
    let ms: Vec<f64> = parts.iter().map(|part| part["ms"].as_f64().unwrap()).collect();
    assert!(ms.is_sorted_by(|a, b| a >= b) && ms.iter().sum::<f64>() > 0.0, "{ms:?}");
    let nodes = |name: &str| {
        parts.iter().find(|part| part["part"] == name).unwrap_or_else(|| panic!("{name}"))["nodes"].clone()
    };
    assert_eq!(nodes("PositionStats"), 1);
    assert_eq!(nodes("MUL layer_output_scale"), 12, "one a layer");
    let text = run(["bench", "--repetitions", "1", "--prompt", SUM]).ok();
    assert!(text.contains("steps per canvas") && text.contains("tok/s"), "{text}");
}

#[test]
fn parity_says_yes_and_no() {
    let nano = fixtures("nano");
    let yes = run([OsStr::new("parity"), nano.as_os_str()]);
    assert_eq!(yes.code, Some(0), "{}{}", yes.out, yes.err);
    assert!(yes.out.ends_with(" checks, 0 missed\n"), "{}", yes.out);
    assert!(yes.out.lines().all(|line| line.starts_with("ok ") || line.ends_with("missed")), "{}", yes.out);

    let dir = tempfile::tempdir().unwrap();
    for name in ["fixtures.json", "fixtures.safetensors", "model.gguf"] {
        std::fs::copy(nano.join(name), dir.path().join(name)).unwrap();
    }
    std::fs::write(dir.path().join("tokenizer_cases.json"), r#"{"cases": [{"text": "ab", "ids": [0]}]}"#).unwrap();
    let no = run([OsStr::new("parity"), dir.path().as_os_str()]);
    assert_eq!(no.code, Some(1), "{}{}", no.out, no.err);
    assert!(no.out.contains("MISS tokens of \"ab\"") && no.out.ends_with(", 1 missed\n"), "{}", no.out);
}

#[test]
fn issue_2_misses_of_half_precision_files_at_level_fused_are_explained() {
    let nano = fixtures("nano");
    let os = OsStr::new;
    let ran = run([os("parity"), nano.as_os_str(), os("--level"), os("fused"), os("--file"), os("model-f16.gguf")]);
    assert_eq!(ran.code, Some(1), "{}{}", ran.out, ran.err);
    assert!(ran.err.contains("for F32 files"), "{}", ran.err);
}

#[test]
fn help_teaches() {
    for command in ["generate", "chat", "inspect", "plan", "tokenize", "bench", "parity"] {
        let help = run([command, "--help"]).ok();
        assert!(help.contains("Examples:") && help.contains(&format!("dllm {command}")), "{help}");
    }
    let help = run(["--help"]).ok();
    assert!(help.contains("Exit codes") && help.contains("canvas"), "{help}");
    assert!(run(["generate", "--help"]).ok().contains("DLLM_MODEL"));
    assert_eq!(run(["dance"]).code, Some(2));
    let tip = run(["86 + 45 ="]).err;
    assert!(tip.contains("dllm generate \"86 + 45 =\""), "{tip}");
    let unknown = run(["generate", "--nosuch"]).err;
    assert!(unknown.contains("--nosuch") && !unknown.contains("'--n'"), "{unknown}");
    assert_eq!(run(Vec::<&str>::new()).code, Some(2));
}

#[test]
fn a_reader_that_leaves_ends_it_quietly() {
    let mut child = dllm().args(["generate", SUM, "--pace", "300"]).spawn().unwrap();
    drop(child.stdout.take());
    let ran = ran(child.wait_with_output().unwrap());
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
}

#[cfg(target_os = "linux")]
#[test]
fn issue_2_help_that_cannot_be_written_is_a_failure() {
    for args in [&["--help"][..], &["--version"], &["generate", "--help"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let error = ran(dllm().args(args).stdout(full).output().unwrap()).error();
        assert!(error.contains("cannot write to standard output"), "{error}");
    }
}
