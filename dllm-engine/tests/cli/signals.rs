//! Ctrl-C and a terminal that goes away.

use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::*;

/// Longer than any test may take.
const PATIENCE: Duration = Duration::from_secs(60);

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Waits until the trace has a step of this canvas, so that the answer is under way.
fn wait_for_canvas(trace: &Path, canvas: usize) {
    let begin = Instant::now();
    let word = format!("\"event\":\"canvas\",\"candidate\":0,\"canvas\":{canvas}");
    while !std::fs::read_to_string(trace).unwrap_or_default().contains(&word) {
        assert!(begin.elapsed() < PATIENCE, "canvas {canvas} never came");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A long answer at a slow pace, with a signal after its first canvas.
fn interrupted(args: &[&str], kind: Signal) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.jsonl");
    let mut command = dllm();
    command.args(["generate", COUNT, "--trace"]).arg(&trace).args(SLOW).args(args);
    let child = command.spawn().unwrap();
    wait_for_canvas(&trace, 0);
    signal(&child, kind);
    ran(child.wait_with_output().unwrap())
}

#[test]
fn ctrl_c_keeps_what_is_finished() {
    let whole = run(["generate", COUNT]).ok();
    let ran = interrupted(&[], Signal::INT);
    assert_eq!((ran.code, ran.err.as_str()), (Some(130), ""));
    let text = ran.out.trim_end();
    assert!(
        !text.is_empty() && text.len() < whole.trim_end().len() && whole.starts_with(text),
        "{text:?} of {whole:?}"
    );
}

#[test]
fn ctrl_c_gives_json_its_end() {
    let ran = interrupted(&["--json"], Signal::INT);
    assert_eq!(ran.code, Some(130), "{}", ran.err);
    let value: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(value["finish_reason"], "cancelled");
    assert!(!value["text"].as_str().unwrap().is_empty(), "{value}");
}

#[test]
fn requests_to_end_and_closed_terminals_end_it() {
    for kind in [Signal::TERM, Signal::HUP] {
        assert_eq!(interrupted(&[], kind).code, Some(130));
    }
}

#[test]
fn issue_2_a_closed_terminal_ends_as_interrupted_also_where_nothing_can_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.jsonl");
    let mut child = dllm().args(["generate", COUNT, "--trace"]).arg(&trace).args(SLOW).spawn().unwrap();
    wait_for_canvas(&trace, 0);
    drop(child.stdout.take());
    signal(&child, Signal::HUP);
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn issue_2_a_second_ctrl_c_ends_it_at_once_and_whole() {
    // At other moments of the work each time: loading, reading the prompt, steps.
    for delay in 0..16 {
        let child = dllm().args(["generate", COUNT, "-n", "4", "--max-tokens", "2000"]).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(150 + 20 * delay));
        signal(&child, Signal::INT);
        std::thread::sleep(Duration::from_millis(delay % 4));
        signal(&child, Signal::INT);
        let ran = ran(child.wait_with_output().unwrap());
        assert!(matches!(ran.code, Some(0 | 130)), "{delay}: {:?} {}", ran.code, ran.err);
    }
}

#[test]
fn ctrl_c_drops_the_candidates_that_wait() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.jsonl");
    let mut command = dllm();
    command.args(["generate", COUNT, "--json", "-n", "130", "--trace"]).arg(&trace).args(SLOW);
    let child = command.spawn().unwrap();
    let begin = Instant::now();
    while !std::fs::read_to_string(&trace).unwrap_or_default().contains("\"event\":\"step\",\"candidate\":63") {
        assert!(begin.elapsed() < PATIENCE, "the first candidates never ran");
        std::thread::sleep(Duration::from_millis(10));
    }
    signal(&child, Signal::INT);
    let ran = ran(child.wait_with_output().unwrap());
    assert_eq!(ran.code, Some(130), "{}", ran.err);
    assert!(ran.err.contains("66 candidates had not begun"), "{}", ran.err);
    let value: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(value["candidates"].as_array().unwrap().len(), 64);
}

#[test]
fn ctrl_c_ends_a_scripted_conversation() {
    let mut child = dllm().arg("chat").args(SLOW).stdin(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(format!("{COUNT}\n").as_bytes()).unwrap();
    let mut first = [0; 1];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
    signal(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(input);
}

#[test]
fn waiting_for_input_ends_at_once() {
    let mut child = dllm().arg("chat").stdin(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(format!("{SUM}\n").as_bytes()).unwrap();
    let mut answer = [0; 4];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut answer).unwrap();
    assert_eq!(&answer, b"131\n");
    signal(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(input);
}
