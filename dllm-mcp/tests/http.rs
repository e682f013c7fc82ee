//! Streamable HTTP: who may call, and what an operator reads who chose an address that cannot be used.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::Script;
use dllm_mcp::http::{self, Limits};

fn command(state: &Path, address: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dllm-mcp"));
    command.arg("--state-dir").arg(state).args(["--threads", "1", "--http", address]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

struct Service {
    child: Child,
    address: String,
    _state: tempfile::TempDir,
}

impl Service {
    fn start(token: &str) -> Self {
        let state = tempfile::tempdir().unwrap();
        let mut child = command(state.path(), "127.0.0.1:0").env("DLLM_HTTP_TOKEN", token).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").and_then(|a| a.strip_suffix("/mcp"));
        let address = address.unwrap_or_else(|| panic!("it said {line:?}")).to_owned();
        Self { child, address, _state: state }
    }

    /// Status and body of a request; `Host` is right where `headers` has none.
    fn ask(&self, method: &str, path: &str, headers: &[&str], body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let host = format!("Host: {}", self.address);
        let own: &[&str] = if headers.iter().any(|header| header.starts_with("Host:")) { &[] } else { &[&host] };
        let fixed =
            ["Connection: close", "Content-Type: application/json", "Accept: application/json, text/event-stream"];
        let lines: Vec<&str> = own.iter().chain(headers).chain(&fixed).copied().collect();
        let head =
            format!("{method} {path} HTTP/1.1\r\n{}\r\nContent-Length: {}\r\n\r\n", lines.join("\r\n"), body.len());
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).unwrap();
        let reply = String::from_utf8_lossy(&reply).into_owned();
        let status = reply.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.unwrap_or_else(|| panic!("no status in {reply:?}")), reply)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const HELLO: &str = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}"#;

#[test]
fn issue_3_callers_without_the_token_are_refused() {
    let service = Service::start("a secret");
    assert_eq!(service.ask("GET", "/health", &[], "").0, 200);
    for wrong in [
        "X-None: 1",
        "Authorization: Bearer",
        "Authorization: Bearer a secre",
        "Authorization: Bearer a secret2",
        "Authorization: a secret",
    ] {
        let (status, reply) = service.ask("POST", "/mcp", &[wrong], HELLO);
        assert_eq!(status, 401, "{wrong}: {reply}");
        assert!(!reply.contains("diffusion-llm-mcp"), "{wrong}: {reply}");
    }
    for right in ["Authorization: Bearer a secret", "Authorization: bearer a secret"] {
        let (status, reply) = service.ask("POST", "/mcp", &[right], HELLO);
        assert!(status == 200 && reply.contains("diffusion-llm-mcp"), "{right}: {reply}");
    }
}

#[test]
fn issue_3_pages_of_other_hosts_are_refused() {
    let service = Service::start("");
    assert_eq!(service.ask("POST", "/mcp", &[], HELLO).0, 200);
    let port = service.address.rsplit(':').next().unwrap();
    for evil in [
        "Host: evil.example",
        &format!("Host: localhost:{port}.evil.com"),
        &format!("Host: localhost.evil.com:{port}"),
        "Host: evil.example@localhost",
        "Origin: http://evil.example",
        "Origin: null",
        "Origin: http://localhost.evil.com",
        "Origin: http://localhost:3000.evil.com",
        "Origin: http://localhost:3000@evil.com",
        "Origin: http://localhost:3000\r\nOrigin: http://evil.example",
    ] {
        assert_eq!(service.ask("POST", "/mcp", &[evil], HELLO).0, 403, "{evil}");
        assert_eq!(service.ask("GET", "/health", &[evil], "").0, 403, "{evil}");
    }
    assert_eq!(service.ask("POST", "/mcp", &[&format!("Host: localhost:{port}")], HELLO).0, 200);
    assert_eq!(service.ask("POST", "/mcp", &["Origin: http://localhost:3000"], HELLO).0, 200);
}

#[test]
fn issue_3_bodies_that_are_no_requests_are_refused_and_harmless() {
    let service = Service::start("");
    for body in ["", "{", "7", "[]", "\u{0}", &"[".repeat(100_000)] {
        let (status, reply) = service.ask("POST", "/mcp", &[], body);
        assert!((400..500).contains(&status), "{body:.40}: {reply}");
    }
    assert_eq!(service.ask("POST", "/mcp", &[], HELLO).0, 200);
}

#[test]
fn issue_3_an_address_that_cannot_be_used_is_a_clear_sentence() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = holder.local_addr().unwrap().to_string();
    for (address, words) in [(taken.as_str(), "give another port"), ("0.0.0.0:10835", "only loopback addresses")] {
        let state = tempfile::tempdir().unwrap();
        let output = command(state.path(), address).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(address) && said.contains(words), "{said}");
    }
}

/// A server in this process with small limits; its address.
async fn limited(limits: Limits) -> (String, tempfile::TempDir) {
    let state = tempfile::tempdir().unwrap();
    let config = dllm_mcp::Config::in_folder(state.path());
    let server = dllm_mcp::Server::new(config, std::sync::Arc::new(Script::default())).unwrap();
    let listener = http::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(http::serve(server, listener, None, limits, std::future::pending()));
    (address, state)
}

/// All that comes until the server hangs up, which it must.
fn until_hung_up(mut stream: TcpStream) -> String {
    stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    let mut reply = Vec::new();
    if let Err(error) = stream.read_to_end(&mut reply) {
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "it does not hang up: {error}");
    }
    String::from_utf8_lossy(&reply).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_say_nothing_or_little_are_closed() {
    let (address, _state) = limited(Limits { read: Duration::from_millis(200), connections: 64, sessions: 64 }).await;
    let host = format!("Host: {address}");
    for (said, status) in [
        (String::new(), None),
        ("GET /health HT".into(), None),
        (format!("GET /health HTTP/1.1\r\n{host}\r\nX-Slow: "), None),
        (format!("POST /mcp HTTP/1.1\r\n{host}\r\nContent-Length: 1000\r\n\r\n{{"), Some("HTTP/1.1 408")),
        // Idle after a request.
        (format!("GET /health HTTP/1.1\r\n{host}\r\n\r\n"), Some("HTTP/1.1 200")),
    ] {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(said.as_bytes()).unwrap();
        let reply = tokio::task::spawn_blocking(move || until_hung_up(stream)).await.unwrap();
        assert!(status.is_none_or(|status| reply.starts_with(status)), "{said:?}: {reply:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_limited_and_a_place_comes_free() {
    let (address, _state) = limited(Limits { read: Duration::from_secs(30), connections: 2, sessions: 64 }).await;
    let mut held: Vec<TcpStream> = (0..2).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let mut third = TcpStream::connect(&address).unwrap();
    third
        .write_all(format!("GET /health HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes())
        .unwrap();
    third.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(third.read(&mut [0]).is_err(), "it was served as the third of two");
    held.pop();
    let reply = tokio::task::spawn_blocking(move || until_hung_up(third)).await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply:?}");
}

#[test]
fn a_token_that_nobody_can_send_is_a_sentence_at_the_start() {
    for token in [" ", "a\tb", "tökén"] {
        let state = tempfile::tempdir().unwrap();
        let output = command(state.path(), "127.0.0.1:0").env("DLLM_HTTP_TOKEN", token).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("DLLM_HTTP_TOKEN"), "{token:?}: {said}");
    }
}

#[test]
fn bodies_that_are_no_request_get_the_codes_of_the_protocol() {
    let service = Service::start("");
    for (body, code) in [
        ("{", -32700),
        ("hello", -32700),
        (r#"{"jsonrpc":"2.0","id":1e400,"method":"ping"}"#, -32700),
        ("[]", -32600),
        (r#"{"jsonrpc":"2.0","id":null,"method":"ping"}"#, -32600),
        (r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":[]}"#, -32602),
    ] {
        let (status, reply) = service.ask("POST", "/mcp", &[], body);
        let answer: serde_json::Value = serde_json::from_str(reply.split("\r\n\r\n").nth(1).unwrap()).unwrap();
        assert_eq!((status, &answer["error"]["code"]), (400, &serde_json::json!(code)), "{body}: {reply}");
    }
    assert_eq!(service.ask("POST", "/mcp", &[], "").0, 400);
    assert_eq!(service.ask("POST", "/mcp", &[], HELLO).0, 200);
}

/// A request of a session, or without one; status and reply.
fn post(address: &str, session: Option<&str>, body: &str) -> (u16, String) {
    let session = session.map_or(String::new(), |id| format!("Mcp-Session-Id: {id}\r\n"));
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!(
        "POST /mcp HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Accept: application/json, text/event-stream\r\n{session}Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    let reply = until_hung_up(stream);
    (reply.split(' ').nth(1).unwrap().parse().unwrap(), reply)
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_only_began_are_limited_and_one_in_use_stays() {
    let limits = Limits { read: Duration::from_secs(30), connections: 8, sessions: 3 };
    let (address, _state) = limited(limits).await;
    let callers = move || {
        const LIST: &str = r#"{"jsonrpc":"2.0","id":2,"method":"tools/list"}"#;
        let begin = || {
            let (status, reply) = post(&address, None, HELLO);
            let id = reply.lines().find_map(|line| line.strip_prefix("mcp-session-id: "));
            assert_eq!(status, 200, "{reply}");
            id.unwrap_or_else(|| panic!("{reply}")).to_owned()
        };
        let used = begin();
        assert_eq!(post(&address, Some(&used), LIST).0, 200);
        let others: Vec<String> = (0..6).map(|_| begin()).collect();
        let status: Vec<u16> = others.iter().map(|id| post(&address, Some(id), LIST).0).collect();
        assert_eq!(status, [404, 404, 404, 404, 200, 200]);
        assert_eq!(post(&address, Some(&used), LIST).0, 200, "the session in use was ended");
    };
    tokio::task::spawn_blocking(callers).await.unwrap();
}
