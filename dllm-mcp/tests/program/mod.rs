//! The real program, as a host starts it.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

/// The program, spoken to as a fleet host does: a line reader that gives up at 64 KiB, and an undrained standard error.
pub struct Program {
    pub child: Child,
    pub input: Option<ChildStdin>,
    pub output: Option<BufReader<ChildStdout>>,
    next_id: u64,
}

impl Program {
    pub fn start(state: &Path, arguments: &[&str]) -> Self {
        Self::launch(Command::new(env!("CARGO_BIN_EXE_dllm-mcp")), state, arguments)
    }

    /// Starts it by a command that hands its arguments on.
    pub fn launch(mut command: Command, state: &Path, arguments: &[&str]) -> Self {
        // Almost no environment, as SDK hosts do.
        command.env_clear().args(arguments).arg("--state-dir").arg(state).args(["--threads", "1"]);
        for name in ["SystemRoot", "PATH"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), child.stdout.take().map(BufReader::new));
        let mut program = Self { child, input, output, next_id: 0 };
        let hello = json!({"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "fleet", "version": "1"}});
        let reply = program.request("initialize", &hello);
        assert_eq!(reply["result"]["protocolVersion"], "2024-11-05");
        program.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        program
    }

    pub fn send(&mut self, message: &Value) {
        writeln!(self.input.as_mut().unwrap(), "{message}").unwrap();
    }

    pub fn line(&mut self) -> Value {
        let mut line = String::new();
        assert!(self.output.as_mut().unwrap().read_line(&mut line).unwrap() > 0, "the program hung up");
        assert!(line.len() < 64 * 1024, "a 64 KiB reader would fail");
        let value: Value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert_eq!(value["jsonrpc"], "2.0");
        value
    }

    pub fn request(&mut self, method: &str, params: &Value) -> Value {
        self.next_id += 1;
        let id = self.next_id;
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
        loop {
            let line = self.line();
            if line["id"] == json!(id) {
                return line;
            }
        }
    }

    pub fn call(&mut self, tool: &str, arguments: &Value) -> Value {
        let reply = self.request("tools/call", &json!({"name": tool, "arguments": arguments}));
        let text = reply["result"]["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{reply}"));
        serde_json::from_str(text).unwrap()
    }

    /// Waits for the end and tells how it ended. It should come within a second; the limit is for busy machines.
    pub fn ended(&mut self) -> std::process::ExitStatus {
        for _ in 0..6000 {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the program lives on");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
