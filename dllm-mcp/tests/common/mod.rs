//! A scripted engine and a client that speaks raw JSON-RPC, so that nothing is hidden by a library.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dllm_engine::Prompt;
use dllm_mcp::answer::Answer;
use dllm_mcp::backend::{Ask, Backend, Frame, Host, Loaded, Memory, ModelCard, Tick};
use dllm_mcp::{Config, Fault, Kind, Server};
use rmcp::ServiceExt;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, Lines, ReadHalf, WriteHalf};

/// How the scripted engine behaves. Prompts steer it too: `steps=9`, `long=1000` (bytes of text), `say=...` (the text), `panic`.
#[derive(Clone)]
pub struct Script {
    pub lanes: usize,
    pub load: Duration,
    pub load_fault: Option<Fault>,
    pub step: Duration,
    pub steps: u64,
    /// Whether asking for the models panics.
    pub no_models: bool,
    pub log: Arc<Log>,
}

/// What the scripted engine did.
#[derive(Default)]
pub struct Log {
    pub admitted: Mutex<Vec<String>>,
    pub steps: AtomicU64,
    pub loads: AtomicU64,
}

impl Default for Script {
    fn default() -> Self {
        let (load, step) = (Duration::ZERO, Duration::from_millis(1));
        Self { lanes: 4, load, load_fault: None, step, steps: 4, no_models: false, log: Arc::default() }
    }
}

impl Host for Script {
    fn backend(&self) -> Box<dyn Backend> {
        Box::new(Scripted { script: self.clone(), lanes: Vec::new() })
    }

    fn default_model(&self) -> String {
        "scripted".into()
    }

    fn models(&self) -> Vec<ModelCard> {
        assert!(!self.no_models, "injected");
        let card = |id: &str| ModelCard {
            id: id.into(),
            path: String::new(),
            family: "scripted".into(),
            quantization: "F16".into(),
            bytes: 18 << 30,
            fits: true,
            problem: String::new(),
        };
        vec![card("scripted"), card("other")]
    }

    fn memory(&self) -> Option<Memory> {
        Some(Memory { used: 1, free: 2, total: 3 })
    }
}

struct Scripted {
    script: Script,
    lanes: Vec<Option<Run>>,
}

struct Run {
    prompt: String,
    step: u64,
    steps: u64,
    trace: bool,
    cancelled: bool,
}

fn frame(run: &Run) -> Frame {
    let (text, step) = (format!("draft {}", run.step), run.step as u32);
    Frame { canvas: 0, step, text, accepted: 1, positions: 2, mean_entropy: 0.5, temperature: 0.8, stop: false }
}

fn number(prompt: &str, name: &str) -> Option<u64> {
    let (_, rest) = prompt.split_once(name)?;
    rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok()
}

pub fn prompt_of(ask: &Ask) -> String {
    match &ask.request.prompt {
        Prompt::Messages(messages) => messages.last().unwrap().content.clone(),
        other => format!("{other:?}"),
    }
}

impl Backend for Scripted {
    fn load(&mut self, id: &str, progress: &mut dyn FnMut(u64, u64)) -> dllm_mcp::error::Result<Loaded> {
        self.script.log.loads.fetch_add(1, Ordering::SeqCst);
        for part in 0..10 {
            std::thread::sleep(self.script.load / 10);
            progress(part, 10);
        }
        if id == "missing" {
            return Err(Fault::new(Kind::LoadFailed, "there is no model \"missing\""));
        }
        if let Some(fault) = &self.script.load_fault {
            return Err(fault.clone());
        }
        self.lanes = (0..self.script.lanes).map(|_| None).collect();
        let text = |t: &str| t.to_owned();
        let (lanes, bytes) = (self.script.lanes, 1);
        Ok(Loaded {
            id: text(id),
            model: text(id),
            family: text("scripted"),
            quantization: text("F16"),
            device: text("CPU"),
            lanes,
            context: 999,
            bytes,
            details: json!({}),
        })
    }

    fn unload(&mut self) {
        self.lanes.clear();
    }

    fn admit(&mut self, ask: &Ask) -> dllm_mcp::error::Result<usize> {
        let prompt = prompt_of(ask);
        self.script.log.admitted.lock().unwrap().push(prompt.clone());
        let lane = self.lanes.iter().position(Option::is_none).expect("a lane is free");
        let steps = number(&prompt, "steps=").unwrap_or(self.script.steps);
        self.lanes[lane] = Some(Run { prompt, step: 0, steps, trace: ask.trace, cancelled: false });
        Ok(lane)
    }

    fn step(&mut self, on_tick: &mut dyn FnMut(usize, Tick)) -> Vec<(usize, dllm_mcp::error::Result<Answer>)> {
        std::thread::sleep(self.script.step);
        let mut ended = Vec::new();
        for (lane, slot) in self.lanes.iter_mut().enumerate() {
            let Some(run) = slot else { continue };
            assert!(!run.prompt.contains("panic"), "injected");
            if !run.cancelled {
                run.step += 1;
                self.script.log.steps.fetch_add(1, Ordering::SeqCst);
                let frame = run.trace.then(|| frame(run));
                on_tick(lane, Tick { steps: run.step, total: run.steps, frame });
            }
            if run.cancelled || run.step >= run.steps {
                ended.push((lane, Ok(answer(run))));
                *slot = None;
            }
        }
        ended
    }

    fn cancel(&mut self, lane: usize) {
        if let Some(Some(run)) = self.lanes.get_mut(lane) {
            run.cancelled = true;
        }
    }

    fn free(&self) -> usize {
        self.lanes.iter().filter(|lane| lane.is_none()).count()
    }
}

fn answer(run: &Run) -> Answer {
    let text = match (number(&run.prompt, "long="), run.prompt.split_once("say=")) {
        (Some(len), _) => "wörd \"x\"\n".repeat(len as usize / 10 + 1),
        (None, Some((_, text))) => text.to_owned(),
        (None, None) => format!("echo {}", run.prompt),
    };
    let finish_reason = if run.cancelled { "cancelled" } else { "stop" };
    let receipt = json!({"step_ms": 1.0, "steps_per_canvas": [run.step]});
    let (tokens, steps, seconds) = (3, run.step, 0.1);
    Answer {
        text,
        reasoning: None,
        filled: vec![],
        tokens,
        steps,
        finish_reason,
        seed: 1,
        model: "scripted".into(),
        seconds,
        receipt,
    }
}

/// A client that keeps every line it got.
pub struct Client {
    write: WriteHalf<DuplexStream>,
    lines: Lines<BufReader<ReadHalf<DuplexStream>>>,
    pub seen: Vec<Value>,
    pub longest: usize,
    next_id: u64,
    pub server: Server,
    pub folder: tempfile::TempDir,
}

/// A guard against tests that hang; nothing is measured with it.
pub const PATIENCE: Duration = Duration::from_secs(60);

impl Client {
    /// A client with a session of the fleet's old protocol.
    pub async fn start(script: Script) -> Self {
        let mut client = Self::connect(script, |_| {}).await;
        client.initialize("2024-11-05").await;
        client
    }

    /// Connects without a word.
    pub async fn connect(script: Script, set: impl FnOnce(&mut Config)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = Config::in_folder(folder.path());
        config.heartbeat = Duration::from_millis(400);
        set(&mut config);
        let server = Server::new(config, Arc::new(script)).unwrap();
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let serving = server.clone();
        tokio::spawn(async move {
            let (read, write) = tokio::io::split(theirs);
            if let Ok(running) = serving.serve(dllm_mcp::lines::Lines::new(read, write)).await {
                let _ = running.waiting().await;
            }
        });
        let (read, write) = tokio::io::split(ours);
        Self { write, lines: BufReader::new(read).lines(), seen: Vec::new(), longest: 0, next_id: 1, server, folder }
    }

    pub async fn initialize(&mut self, version: &str) -> Value {
        let params =
            json!({"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}});
        let id = self.request("initialize", params).await;
        let reply = self.reply(id).await;
        self.send(json!({"jsonrpc": "2.0", "method": "notifications/initialized"})).await;
        reply
    }

    pub async fn send(&mut self, message: Value) {
        self.write.write_all(format!("{message}\n").as_bytes()).await.unwrap();
    }

    pub async fn send_line(&mut self, line: &[u8]) {
        self.write.write_all(line).await.unwrap();
        self.write.write_all(b"\n").await.unwrap();
    }

    pub async fn request(&mut self, method: &str, params: Value) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.send(json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})).await;
        id
    }

    /// The next line. Every line must be JSON-RPC and short enough for a 64 KiB reader.
    pub async fn line(&mut self) -> Value {
        let line = tokio::time::timeout(PATIENCE, self.lines.next_line())
            .await
            .expect("no line came")
            .unwrap()
            .expect("the server hung up");
        assert!(line.len() < 60 * 1024, "a line of {} bytes", line.len());
        self.longest = self.longest.max(line.len());
        let value: Value = serde_json::from_str(&line).expect("every line is JSON");
        assert_eq!(value["jsonrpc"], "2.0");
        self.seen.push(value.clone());
        value
    }

    pub async fn reply(&mut self, id: u64) -> Value {
        loop {
            let line = self.line().await;
            if line["id"] == json!(id) {
                return line;
            }
        }
    }

    /// Calls a tool and returns its structured content.
    pub async fn call(&mut self, tool: &str, arguments: Value) -> Value {
        let id = self.request("tools/call", json!({"name": tool, "arguments": arguments})).await;
        let reply = self.reply(id).await;
        body(&reply)
    }

    /// Calls a tool with a progress token; returns the request's id.
    pub async fn begin(&mut self, tool: &str, arguments: Value, token: &str) -> u64 {
        self.request("tools/call", json!({"name": tool, "arguments": arguments, "_meta": {"progressToken": token}}))
            .await
    }

    pub fn notifications(&self) -> Vec<&Value> {
        self.seen.iter().filter(|line| line["method"] == "notifications/progress").collect()
    }

    /// Asks for a job until it has ended.
    pub async fn finish(&mut self, job_id: &Value) -> Value {
        loop {
            let body = self.call("dllm_job", json!({"operation": "get", "job_id": job_id, "wait_s": 1})).await;
            if !matches!(body["data"]["state"].as_str(), Some("queued" | "running")) {
                return body;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// The structured content of a reply, which must be the same as its text block.
pub fn body(reply: &Value) -> Value {
    let result = &reply["result"];
    let text = result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text in {reply}"));
    assert!(text.starts_with("{\"message\":"), "{text:.80}");
    let parsed: Value = serde_json::from_str(text).unwrap();
    assert_eq!(parsed, result["structuredContent"]);
    // The output schema must hold for errors too.
    assert!(parsed["message"].is_string() && parsed["success"].is_boolean(), "{parsed}");
    assert_eq!(parsed["success"] == json!(false), result["isError"] == json!(true));
    if parsed["success"] == json!(false) {
        let error = &parsed["error"];
        assert!(
            error["type"].is_string() && error["retryable"].is_boolean() && error["suggestions"].is_array(),
            "{parsed}"
        );
    }
    parsed
}
