//! The `dllm` command as its user meets it.

mod bad_input;
#[path = "../common/gguf.rs"]
mod gguf;
mod limits;
mod results;
#[cfg(unix)]
mod signals;
#[cfg(unix)]
mod terminal;

use std::ffi::OsStr;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

/// What the model inside the program knows.
const SUM: &str = "86 + 45 =";
const SUM_ANSWER: &str = "131";

/// A question whose answer takes two canvases, and settings that let each take twelve steps and a while.
#[cfg(unix)]
const COUNT: &str = "Count from 3 to 40.";
#[cfg(unix)]
const SLOW: [&str; 8] = ["--t-min", "3", "--t-max", "4", "--max-steps", "12", "--pace", "150"];

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    #[track_caller]
    fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{}", self.err);
        self.out
    }

    /// The one JSON object on standard output.
    #[track_caller]
    fn json(self) -> Value {
        let out = self.ok();
        assert_eq!(out.lines().count(), 1, "{out}");
        serde_json::from_str(&out).unwrap()
    }

    /// The one line of an error: exit code 2, and nothing on standard output.
    #[track_caller]
    fn error(self) -> String {
        assert_eq!((self.code, self.out.as_str()), (Some(2), ""), "{}", self.err);
        assert_eq!(self.err.lines().count(), 1, "{}", self.err);
        self.err.trim_end().strip_prefix("error: ").expect("a line that begins with error:").to_owned()
    }
}

/// The command with nothing of this process's environment that it would look at, and no terminal.
fn dllm() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dllm"));
    // One thread: many of these run at a time.
    command.env_remove("DLLM_MODEL").env_remove("NO_COLOR").env("DLLM_THREADS", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn ran(output: std::process::Output) -> Ran {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ran {
    ran(dllm().args(args).output().unwrap())
}

fn run_with_input<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>, input: &[u8]) -> Ran {
    let mut child = dllm().args(args).stdin(Stdio::piped()).spawn().unwrap();
    // A program that refuses its arguments reads nothing, which is an error of this pipe and not of the test.
    let _ = child.stdin.take().unwrap().write_all(input);
    ran(child.wait_with_output().unwrap())
}

fn fixtures(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/oracle").join(name)
}
