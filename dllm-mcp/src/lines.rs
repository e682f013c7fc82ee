//! JSON-RPC over lines, as a transport of the protocol's library. Unlike the library's own it answers each line that is no
//! message, so that a client that wrote one does not wait for ever.

use std::io;
use std::sync::Arc;

use rmcp::ErrorData;
use rmcp::model::RequestId;
use rmcp::service::{RoleServer, RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::sync::Mutex;

/// Longest line; what is longer is answered and passed over.
pub const MAX_LINE: usize = 16 * 1024 * 1024;

/// Both directions.
pub struct Lines<R, W> {
    input: BufReader<R>,
    /// What came of the line so far. Kept here, as waiting for the rest may be broken off at any time.
    line: Vec<u8>,
    /// Whether the line is too long: then it is not kept.
    too_long: bool,
    output: Arc<Mutex<W>>,
    /// An answer that is not sent yet.
    answer: Option<Value>,
}

impl<R: AsyncRead + Unpin + Send, W: AsyncWrite + Unpin + Send + 'static> Lines<R, W> {
    /// A transport over two streams.
    pub fn new(input: R, output: W) -> Self {
        let output = Arc::new(Mutex::new(output));
        Self { input: BufReader::new(input), line: Vec::new(), too_long: false, output, answer: None }
    }

    /// Reads up to the end of a line into `line`; `false` at the end of the input. May be dropped and called again.
    async fn read_line(&mut self) -> io::Result<bool> {
        loop {
            let chunk = self.input.fill_buf().await?;
            if chunk.is_empty() {
                return Ok(false);
            }
            let end = chunk.iter().position(|&byte| byte == b'\n');
            let (text, used) = end.map_or((chunk, chunk.len()), |end| (&chunk[..end], end + 1));
            if self.line.len() + text.len() > MAX_LINE {
                self.too_long = true;
                self.line = Vec::new();
            }
            if !self.too_long {
                self.line.extend_from_slice(text);
            }
            self.input.consume(used);
            if end.is_some() {
                return Ok(true);
            }
        }
    }
}

impl<R: AsyncRead + Unpin + Send, W: AsyncWrite + Unpin + Send + 'static> Transport<RoleServer> for Lines<R, W> {
    type Error = io::Error;

    fn send(&mut self, message: TxJsonRpcMessage<RoleServer>) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let output = Arc::clone(&self.output);
        async move { write(&mut *output.lock().await, &message).await }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        loop {
            if let Some(answer) = self.answer.take() {
                let output = Arc::clone(&self.output);
                // A task of its own: waiting here may be broken off at any time, and half a line must not be written.
                let sent = tokio::spawn(async move { write(&mut *output.lock().await, &answer).await });
                sent.await.ok()?.ok()?;
            }
            match self.read_line().await {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => {
                    tracing::error!("the input cannot be read: {error}");
                    return None;
                }
            }
            let line = std::mem::take(&mut self.line);
            let read = if std::mem::take(&mut self.too_long) {
                let why =
                    format!("the line has more than {MAX_LINE} bytes: large inputs come as files, see dllm_batch");
                Err(Some(refusal(&ErrorData::invalid_request(why, None), None)))
            } else {
                message(&line)
            };
            match read {
                Ok(message) => return Some(message),
                Err(answer) => self.answer = answer,
            }
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        self.output.lock().await.shutdown().await
    }
}

async fn write(output: &mut (impl AsyncWrite + Unpin), message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    output.write_all(&line).await?;
    output.flush().await
}

/// An error as an answer. The library leaves an id out that is not known; JSON-RPC wants it to be null.
fn refusal(error: &ErrorData, id: Option<RequestId>) -> Value {
    json!({"jsonrpc": "2.0", "id": id, "error": error})
}

/// Reads a message. Otherwise what to answer; nothing for what wants no answer.
fn message(line: &[u8]) -> Result<RxJsonRpcMessage<RoleServer>, Option<Value>> {
    let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line).trim_ascii();
    if line.is_empty() {
        return Err(None);
    }
    let wrong = match serde_json::from_slice(line) {
        Ok(message) => return Ok(message),
        Err(error) => error,
    };
    let value: Value = serde_json::from_slice(line)
        .map_err(|e| refusal(&ErrorData::parse_error(format!("the line is no JSON: {e}"), None), None))?;
    let id = match &value["id"] {
        Value::String(id) => Some(RequestId::String(id.as_str().into())),
        Value::Number(id) => id.as_i64().map(RequestId::Number),
        _ => None,
    };
    let method = value["method"].as_str();
    match (method, value.get("id")) {
        // A notification, which is never answered.
        (Some(_), None) => Err(None),
        (Some(method), Some(_)) if id.is_some() && value["jsonrpc"] == "2.0" => {
            let why = format!("the params of {:?} cannot be read: {wrong}", crate::error::shown(method));
            Err(Some(refusal(&ErrorData::invalid_params(why, None), id)))
        }
        _ => {
            let why = "the line is no JSON-RPC 2.0 request: it wants jsonrpc, id, method, and params as an object";
            Err(Some(refusal(&ErrorData::invalid_request(why, None), id)))
        }
    }
}
