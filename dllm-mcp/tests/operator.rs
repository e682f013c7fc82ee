//! What an operator sets wrong, and a machine that runs out of something: said clearly, and nothing else breaks.

mod program;

use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use program::Program;
use serde_json::json;

/// Starts the program with nothing to read, and returns how it ended.
fn ended(state: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dllm-mcp"));
    command.args(arguments).arg("--state-dir").arg(state).stdin(Stdio::null());
    command.output().unwrap()
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// `/dev/full` takes no byte, as a full disk.
#[cfg(target_os = "linux")]
#[test]
fn a_log_that_cannot_be_written_fails_nothing_else() {
    let state = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(state.path().join("log")).unwrap();
    std::os::unix::fs::symlink("/dev/full", state.path().join("log/dllm-mcp.log")).unwrap();
    let mut program = Program::start(state.path(), &["--log", "trace"]);
    let sum = json!({"prompt": "86 + 45 =", "seed": 1, "max_tokens": 32});
    for _ in 0..3 {
        assert_eq!(program.call("dllm_generate", &sum)["data"]["text"], "131");
        let missing = program.call("dllm_models", &json!({"operation": "load", "model": "missing"}));
        assert_eq!(missing["error"]["type"], "load_failed", "{missing}");
    }
    let batch = json!({"items_json": [{"id": "a", "prompt": "2 + 2 ="}], "max_tokens": 16, "wait_s": 25});
    assert_eq!(program.call("dllm_batch", &batch)["data"]["state"], "done");
    program.input = None;
    assert!(program.ended().success());
    let mut said = String::new();
    program.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said.matches("cannot write the log").count(), 1, "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn a_log_that_cannot_be_opened_is_a_sentence_at_the_start() {
    let state = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(state.path().join("log/dllm-mcp.log")).unwrap();
    let output = ended(state.path(), &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(words(&output).contains("cannot write the log in") && words(&output).contains("--state-dir"));
}

#[test]
fn numbers_out_of_range_are_refused_at_the_start() {
    let state = tempfile::tempdir().unwrap();
    for (flag, value, range) in [
        ("--queue", "0", "1..=10000"),
        ("--queue", "10001", "1..=10000"),
        ("--queue", "many", "invalid digit"),
        ("--lanes", "0", "1..=64"),
        ("--lanes", "65", "1..=64"),
        ("--threads", "1025", "0..=1024"),
        ("--context", "1048577", "0..=1048576"),
        ("--idle-minutes", "-1", "--idle-minutes"),
        ("--idle-minutes", "inf", "0..=525600"),
        ("--idle-minutes", "NaN", "0..=525600"),
        ("--http", "127.0.0.1:65536", "--http"),
    ] {
        let output = ended(state.path(), &[&format!("{flag}={value}")]);
        assert_eq!(output.status.code(), Some(2), "{flag} {value}");
        assert!(words(&output).contains(range) && words(&output).contains(flag), "{flag} {value}: {}", words(&output));
    }
}

#[test]
fn a_root_or_a_filter_that_is_wrong_is_a_sentence_at_the_start() {
    let state = tempfile::tempdir().unwrap();
    let missing = state.path().join("missing").display().to_string();
    let file = state.path().join("file").display().to_string();
    std::fs::write(&file, "").unwrap();
    for (arguments, said) in [
        (["--root", missing.as_str()], "missing cannot be used"),
        (["--root", file.as_str()], "it is no folder"),
        (["--log", "dllm_mcp=loud"], "bad --log"),
    ] {
        let output = ended(state.path(), &arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(words(&output).contains(said), "{arguments:?}: {}", words(&output));
    }
}

#[test]
fn a_model_that_is_missing_is_a_warning_and_told_by_status() {
    let state = tempfile::tempdir().unwrap();
    let missing = state.path().join("fehlt.gguf").display().to_string();
    for (arguments, said) in [
        (["--model", missing.as_str()], "fehlt.gguf cannot be opened"),
        (["--model", "other"], "neither a .gguf file nor in the model folder"),
        (["--model-dir", missing.as_str()], "cannot be read"),
    ] {
        let mut program = Program::start(state.path(), &arguments);
        let status = program.call("dllm_status", &json!({}));
        assert!(status["data"]["problems"][0].as_str().unwrap().contains(said), "{status}");
        assert!(status["message"].as_str().unwrap().contains(said), "{status}");
        program.input = None;
        assert!(program.ended().success());
        let mut warned = String::new();
        program.child.stderr.take().unwrap().read_to_string(&mut warned).unwrap();
        assert!(warned.starts_with("dllm-mcp: warning: ") && warned.contains(said), "{warned}");
    }
}

#[test]
fn help_shows_how_to_start_it() {
    let output = Command::new(env!("CARGO_BIN_EXE_dllm-mcp")).arg("--help").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for words in ["Examples:", "mcpServers", "--http 127.0.0.1:10835", "DLLM_HTTP_TOKEN", "1 to 10000"] {
        assert!(said.contains(words), "{words:?} is missing in\n{said}");
    }
}

/// Each batch that runs holds two files, and the process may have few.
#[cfg(target_os = "linux")]
#[test]
fn too_many_open_files_are_not_blamed_on_the_output() {
    let state = tempfile::tempdir().unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -n 40; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_dllm-mcp")]);
    let mut program = Program::launch(shell, state.path(), &[]);
    let sum = json!({"prompt": "86 + 45 =", "seed": 1, "max_tokens": 32});
    assert_eq!(program.call("dllm_generate", &sum)["data"]["text"], "131");
    let items: String = (0..20_000).map(|i| format!("{{\"id\":\"i{i}\",\"prompt\":\"86 + 45 =\"}}\n")).collect();
    std::fs::write(state.path().join("files/in.jsonl"), items).unwrap();
    let refused = (0..16).find_map(|n| {
        let batch = json!({"input_path": "in.jsonl", "output_path": format!("o{n}.jsonl"), "max_tokens": 16});
        let reply = program.call("dllm_batch", &batch);
        (reply["success"] == false).then_some(reply)
    });
    let refused = refused.expect("40 files were enough");
    assert_eq!(
        (&refused["error"]["type"], &refused["error"]["retryable"]),
        (&json!("internal"), &json!(true)),
        "{refused}"
    );
    assert!(refused["message"].as_str().unwrap().contains("os error 24"), "{refused}");
    // What was taken before goes on, and can be told.
    let jobs = program.call("dllm_job", &json!({"operation": "list"}));
    assert!(jobs["data"]["jobs"].as_array().unwrap().iter().any(|job| job["state"] == "running"), "{jobs}");
}

/// The limit of file sizes: the system would end the program by a signal.
#[cfg(target_os = "linux")]
#[test]
fn a_limit_of_file_sizes_ends_a_batch_and_not_the_program() {
    let state = tempfile::tempdir().unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -f 8; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_dllm-mcp")]);
    let mut program = Program::launch(shell, state.path(), &["--log", "trace"]);
    let items: String = (0..60).map(|i| format!("{{\"id\":\"i{i}\",\"prompt\":\"{i} + 1 =\"}}\n")).collect();
    std::fs::write(state.path().join("files/in.jsonl"), items).unwrap();
    let arguments = json!({"input_path": "in.jsonl", "output_path": "out.jsonl", "max_tokens": 8});
    let batch = program.call("dllm_batch", &arguments);
    let wait = json!({"operation": "wait", "job_id": batch["data"]["job_id"], "wait_s": 25});
    let end = loop {
        let end = program.call("dllm_job", &wait);
        if !matches!(end["data"]["state"].as_str(), Some("queued" | "running")) {
            break end;
        }
    };
    assert_eq!((&end["data"]["state"], &end["data"]["fault"]["type"]), (&json!("failed"), &json!("internal")), "{end}");
    let text = std::fs::read_to_string(state.path().join("files/out.jsonl")).unwrap();
    assert!(text.lines().count() > 3 && text.ends_with('\n'), "no torn line: {text}");
    assert_eq!(program.call("dllm_status", &json!({}))["success"], true);
    program.input = None;
    assert!(program.ended().success());
    let mut said = String::new();
    program.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(said.matches("cannot write the log").count(), 1, "{said}");
}

#[test]
fn a_misspelt_level_is_a_sentence_at_the_start() {
    let state = tempfile::tempdir().unwrap();
    for filter in ["wran", "warn,wran", "dllm_mcp"] {
        let output = ended(state.path(), &["--log", filter]);
        assert_eq!(output.status.code(), Some(1), "{filter}");
        assert!(
            words(&output).contains("bad --log") && words(&output).contains("dllm_mcp=debug"),
            "{}",
            words(&output)
        );
    }
    for filter in ["off", "WARN", "warn,dllm_mcp=debug"] {
        assert!(ended(state.path(), &["--log", filter]).status.success(), "{filter}");
    }
}

#[test]
fn an_empty_variable_counts_as_none() {
    let state = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_dllm-mcp"));
    for name in
        ["MODEL", "MODEL_DIR", "ROOTS", "DEVICE", "LANES", "CONTEXT", "THREADS", "IDLE_MINUTES", "QUEUE", "HTTP", "LOG"]
    {
        command.env(format!("DLLM_{name}"), "");
    }
    // Not the state folder: without one the program would write below the user's.
    let output = command.arg("--state-dir").arg(state.path()).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", words(&output));
}
