//! Complaints about the life of the real program, with the tiny model inside it.

mod program;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use program::Program;
use serde_json::{Value, json};

fn sums(n: usize) -> String {
    (0..n).map(|i| format!("{{\"id\":\"r{i}\",\"a\":{},\"b\":{}}}\n", 10 + i % 80, 11 + i % 60)).collect()
}

fn results(path: &Path) -> HashMap<String, usize> {
    let mut ok = HashMap::new();
    for line in std::fs::read_to_string(path).unwrap_or_default().lines() {
        if let Ok(value) = serde_json::from_str::<Value>(line)
            && value["ok"] == true
        {
            *ok.entry(value["id"].as_str().unwrap().to_owned()).or_default() += 1;
        }
    }
    ok
}

#[test]
fn the_tiny_model_answers_and_says_who_it_is() {
    let state = tempfile::tempdir().unwrap();
    let mut program = Program::start(state.path(), &[]);
    let reply = program.call("dllm_generate", &json!({"prompt": "86 + 45 =", "seed": 1, "max_tokens": 32}));
    assert_eq!(reply["data"]["text"], "131", "{reply}");
    assert_eq!(reply["data"]["receipt"]["model"], reply["data"]["model"]);
    assert!(reply["message"].as_str().unwrap().contains(reply["data"]["model"].as_str().unwrap()));
}

#[test]
fn c07_c08_end_of_input_while_idle() {
    let state = tempfile::tempdir().unwrap();
    let mut program = Program::start(state.path(), &[]);
    program.input = None;
    assert!(program.ended().success());
}

#[test]
fn c07_c08_end_of_input_while_busy() {
    let state = tempfile::tempdir().unwrap();
    let mut program = Program::start(state.path(), &[]);
    std::fs::write(state.path().join("files/in.jsonl"), sums(10_000)).unwrap();
    program.call("dllm_batch", &json!({"input_path": "in.jsonl", "template": "{{a}} + {{b}} =", "max_tokens": 16}));
    program.call("dllm_generate", &json!({"prompt": "1 + 1 =", "max_tokens": 16}));
    program.input = None;
    assert!(program.ended().success());
}

#[cfg(unix)]
#[test]
fn c07_the_parent_is_killed_and_the_pipe_stays_open() {
    let state = tempfile::tempdir().unwrap();
    // The shell starts the program, tells its id, and is then killed while this test holds both pipes.
    let script = "\"$0\" --state-dir \"$1\" --threads 1 <&3 & echo $!; wait";
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("exec 3<&0; {script}"), env!("CARGO_BIN_EXE_dllm-mcp")]).arg(state.path());
    let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) = (shell.stdin.take().unwrap(), BufReader::new(shell.stdout.take().unwrap()));
    let mut pid = String::new();
    output.read_line(&mut pid).unwrap();
    // Give it the time to see its parent alive.
    std::thread::sleep(Duration::from_millis(1000));
    shell.kill().unwrap();
    shell.wait().unwrap();
    // Blank lines are nothing to the program. They cannot be written any more when it, the last reader, has gone.
    let gone = (0..6000).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        input.write_all(b"\n").is_err()
    });
    assert!(gone, "process {} lives on", pid.trim());
}

#[cfg(unix)]
#[test]
fn c07_a_termination_signal_while_busy() {
    let state = tempfile::tempdir().unwrap();
    let mut program = Program::start(state.path(), &[]);
    std::fs::write(state.path().join("files/in.jsonl"), sums(10_000)).unwrap();
    program.call("dllm_batch", &json!({"input_path": "in.jsonl", "template": "{{a}} + {{b}} =", "max_tokens": 16}));
    let killed = Command::new("kill").arg(program.child.id().to_string()).status().unwrap();
    assert!(killed.success());
    assert!(program.ended().success());
}

#[test]
fn c13_c14_five_hundred_calls_at_trace_with_nobody_reading_standard_error() {
    let state = tempfile::tempdir().unwrap();
    let mut program = Program::start(state.path(), &["--log", "trace"]);
    for n in 0..500 {
        // `line` checks that each line of output is JSON-RPC.
        let reply = if n % 50 == 0 {
            program.call("dllm_generate", &json!({"prompt": "2 + 2 =", "max_tokens": 16}))
        } else if n % 7 == 0 {
            program.call("dllm_models", &json!({"operation": "load", "model": "missing"}))
        } else {
            program.call("dllm_status", &json!({}))
        };
        assert!(reply["message"].is_string());
    }
    let mut noise = String::new();
    program.input = None;
    program.child.stderr.take().unwrap().read_to_string(&mut noise).unwrap();
    assert_eq!(noise, "");
    assert!(state.path().join("log/dllm-mcp.log").metadata().unwrap().len() > 10_000);
}

#[test]
fn c15_two_servers_at_once() {
    let state = tempfile::tempdir().unwrap();
    let (mut first, mut second) = (Program::start(state.path(), &[]), Program::start(state.path(), &[]));
    for program in [&mut first, &mut second] {
        assert_eq!(program.request("tools/list", &json!({}))["result"]["tools"].as_array().unwrap().len(), 8);
    }
    let question = json!({"prompt": "2 + 2 =", "max_tokens": 16});
    assert_eq!(first.call("dllm_generate", &question)["success"], true);
    let busy = second.call("dllm_generate", &question);
    assert_eq!(
        (busy["error"]["type"].clone(), busy["error"]["retryable"].clone()),
        (json!("gpu_busy"), json!(true)),
        "{busy}"
    );
    assert!(busy["message"].as_str().unwrap().contains(&first.child.id().to_string()), "{busy}");
    first.call("dllm_models", &json!({"operation": "unload"}));
    assert_eq!(second.call("dllm_generate", &question)["success"], true);
}

/// A file with a hole takes no room on the disk.
#[cfg(unix)]
#[test]
fn c05_listing_with_a_model_of_18_gib() {
    let state = tempfile::tempdir().unwrap();
    let big = state.path().join("big.gguf");
    std::fs::File::create(&big).unwrap().set_len(18 << 30).unwrap();
    let mut program = Program::start(state.path(), &["--model", big.to_str().unwrap()]);
    assert_eq!(program.request("tools/list", &json!({}))["result"]["tools"].as_array().unwrap().len(), 8);
    assert_eq!(program.call("dllm_generate", &json!({"prompt": "p"}))["error"]["type"], "load_failed");
    let list = program.call("dllm_models", &json!({"operation": "list"}));
    assert!(list["data"]["models"][0]["problem"].as_str().unwrap().contains("big.gguf"), "{list}");
}

#[test]
fn c05_c16_a_model_path_with_blanks_and_umlauts_that_is_missing_or_damaged() {
    let state = tempfile::tempdir().unwrap();
    let folder = state.path().join("Größe mit Leerzeichen");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("kaputt ä.gguf"), b"GGUFnonsense").unwrap();
    std::fs::copy(
        concat!(env!("CARGO_MANIFEST_DIR"), "/../dllm-engine/assets/dllm-tiny-q8_0.gguf"),
        folder.join("tiny ö.gguf"),
    )
    .unwrap();
    let missing = folder.join("fehlt.gguf");
    let mut program =
        Program::start(state.path(), &["--model", missing.to_str().unwrap(), "--model-dir", folder.to_str().unwrap()]);
    assert_eq!(program.request("tools/list", &json!({}))["result"]["tools"].as_array().unwrap().len(), 8);
    let reply = program.call("dllm_generate", &json!({"prompt": "p"}));
    assert_eq!(reply["error"]["type"], "load_failed", "{reply}");
    let damaged = program.call("dllm_models", &json!({"operation": "load", "model": "kaputt ä"}));
    assert_eq!(damaged["error"]["type"], "load_failed", "{damaged}");
    let list = program.call("dllm_models", &json!({"operation": "list"}));
    assert!(
        list["data"]["models"].as_array().unwrap().iter().any(|m| m["id"] == "tiny ö" && m["fits"] == true),
        "{list}"
    );
    assert_eq!(program.call("dllm_models", &json!({"operation": "load", "model": "tiny ö"}))["success"], true);
    assert_eq!(
        program.call("dllm_generate", &json!({"prompt": "86 + 45 =", "seed": 1, "max_tokens": 32}))["data"]["text"],
        "131"
    );
}

#[test]
fn a_fleet_host_gets_two_hundred_rows() {
    let state = tempfile::tempdir().unwrap();
    let mut program = Program::start(state.path(), &["--lanes", "8"]);
    std::fs::write(state.path().join("files/rows.jsonl"), sums(200)).unwrap();
    let batch = program.call("dllm_batch", &json!({"input_path": "rows.jsonl", "output_path": "out.jsonl", "template": "{{a}} + {{b}} =", "max_tokens": 16}));
    assert_eq!(batch["data"]["accepted"], 200, "{batch}");
    let id = batch["data"]["job_id"].clone();
    loop {
        let poll = program.call("dllm_job", &json!({"operation": "wait", "job_id": id, "wait_s": 20}));
        if poll["data"]["state"] == "done" {
            break;
        }
        assert_eq!(poll["data"]["state"], "running", "{poll}");
    }
    let ok = results(&state.path().join("files/out.jsonl"));
    assert!(ok.len() == 200 && ok.values().all(|n| *n == 1), "{}", ok.len());
    program.child.kill().unwrap();
}

/// Every item once with `ok`.
fn complete(out: &Path, items: usize) {
    let ok = results(out);
    assert!(ok.values().all(|n| *n == 1), "doubled: {ok:?}");
    assert_eq!(ok.len(), items);
}

#[test]
fn a_batch_killed_at_random_moments_is_completed() {
    const ITEMS: usize = 200;
    let state = tempfile::tempdir().unwrap();
    let out = state.path().join("files/out.jsonl");
    let arguments =
        json!({"input_path": "in.jsonl", "output_path": "out.jsonl", "template": "{{a}} + {{b}} =", "max_tokens": 16});
    std::fs::create_dir_all(state.path().join("files")).unwrap();
    std::fs::write(state.path().join("files/in.jsonl"), sums(ITEMS)).unwrap();
    let kills = std::env::var("DLLM_TEST_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(100_u64);
    let mut round = 0;
    while round < kills {
        let mut program = Program::start(state.path(), &["--lanes", "4"]);
        let reply = program.call("dllm_batch", &arguments);
        assert_eq!(reply["success"], true, "{reply}");
        if reply["data"]["accepted"] == 0 {
            // A kill must find work to disturb: begin again.
            complete(&out, ITEMS);
            std::fs::remove_file(&out).unwrap();
            continue;
        }
        // Moments spread without a pattern; which ones they are does not matter.
        std::thread::sleep(Duration::from_millis(20 + (round * 7919) % 230));
        program.child.kill().unwrap();
        program.child.wait().unwrap();
        round += 1;
    }
    let mut program = Program::start(state.path(), &["--lanes", "4"]);
    let id = program.call("dllm_batch", &arguments)["data"]["job_id"].clone();
    while program.call("dllm_job", &json!({"operation": "wait", "job_id": id}))["data"]["state"] == "running" {}
    complete(&out, ITEMS);
}

#[cfg(target_os = "linux")]
#[test]
fn memory_threads_and_descriptors_stay_flat() {
    let state = tempfile::tempdir().unwrap();
    let mut program = Program::start(state.path(), &[]);
    let proc = std::path::PathBuf::from(format!("/proc/{}", program.child.id()));
    let measure = || {
        let status = std::fs::read_to_string(proc.join("status")).unwrap();
        let field = |name: &str| {
            status
                .lines()
                .find_map(|l| l.strip_prefix(name))
                .unwrap()
                .split_whitespace()
                .next()
                .unwrap()
                .parse::<u64>()
                .unwrap()
        };
        (field("VmRSS:"), field("Threads:"), std::fs::read_dir(proc.join("fd")).unwrap().count() as u64)
    };
    let calls = std::env::var("DLLM_TEST_CALLS").ok().and_then(|n| n.parse().ok()).unwrap_or(1000_u64);
    let question = |seed: u64| json!({"prompt": "2 + 2 =", "max_tokens": 4, "seed": seed});
    // The table of jobs must be full before the first measurement.
    for seed in 0..250 {
        assert_eq!(program.call("dllm_generate", &question(seed))["success"], true);
    }
    let (memory, threads, files) = measure();
    for seed in 0..calls {
        assert_eq!(program.call("dllm_generate", &question(seed))["success"], true);
    }
    let (memory_after, threads_after, files_after) = measure();
    assert!(memory_after <= memory + memory / 50, "{memory} kB became {memory_after} kB");
    assert!(
        threads_after <= threads + 1 && files_after <= files,
        "threads {threads}..{threads_after}, files {files}..{files_after}"
    );
}
