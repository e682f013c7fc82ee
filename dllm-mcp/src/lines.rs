//! JSON-RPC over lines, as a transport of the protocol's library. Unlike the library's own it answers each line that is no
//! message, so that a client that wrote one does not wait for ever.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Mutex as Guard, PoisonError};

use rmcp::ErrorData;
use rmcp::model::{
    ClientNotification, ClientRequest, GetMeta, JsonRpcMessage, JsonRpcRequest, ProtocolVersion, RequestId,
};
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
    /// Whether a request has begun the session. Before it the library takes a message without an id for the end.
    begun: bool,
    /// Requests without an answer so far.
    open: Arc<Guard<HashSet<RequestId>>>,
}

impl<R: AsyncRead + Unpin + Send, W: AsyncWrite + Unpin + Send + 'static> Lines<R, W> {
    /// A transport over two streams.
    pub fn new(input: R, output: W) -> Self {
        let output = Arc::new(Mutex::new(output));
        let (input, open) = (BufReader::new(input), Arc::default());
        Self { input, line: Vec::new(), too_long: false, output, answer: None, begun: false, open }
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

    /// Looks at a message before the library does. `None` passes it over, an error is its answer.
    fn admit(&mut self, message: RxJsonRpcMessage<RoleServer>) -> Result<Option<RxJsonRpcMessage<RoleServer>>, Value> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        match message {
            JsonRpcMessage::Request(mut request) => {
                if !open.insert(request.id.clone()) {
                    let why = "a request with this id is not answered yet: give each request an id of its own";
                    return Err(refusal(&ErrorData::invalid_request(why, None), Some(request.id)));
                }
                self.begun |= begins(&mut request);
                Ok(Some(JsonRpcMessage::Request(request)))
            }
            _ if !self.begun => Ok(None),
            JsonRpcMessage::Notification(told) => {
                // The library answers a request no more that was cancelled.
                if let ClientNotification::CancelledNotification(cancelled) = &told.notification
                    && let Some(id) = &cancelled.params.request_id
                {
                    open.remove(id);
                }
                Ok(Some(JsonRpcMessage::Notification(told)))
            }
            other => Ok(Some(other)),
        }
    }
}

/// Whether the library begins a session with a request: `initialize`, or one that brings what `initialize` would tell.
fn begins(request: &mut JsonRpcRequest<ClientRequest>) -> bool {
    match &mut request.request {
        ClientRequest::InitializeRequest(initialize) => {
            // A protocol without this request cannot be agreed on by it. The library would say so, and yet speak it.
            if !initialize.params.protocol_version.has_initialize() {
                initialize.params.protocol_version = ProtocolVersion::LATEST_WITH_INITIALIZE;
            }
            true
        }
        ClientRequest::PingRequest(_) | ClientRequest::DiscoverRequest(_) => false,
        other => {
            let meta = other.get_meta();
            meta.missing_required_keys(&ProtocolVersion::NO_INITIALIZE).is_empty()
                && meta.protocol_version().is_some_and(|version| ProtocolVersion::KNOWN_VERSIONS.contains(&version))
        }
    }
}

impl<R: AsyncRead + Unpin + Send, W: AsyncWrite + Unpin + Send + 'static> Transport<RoleServer> for Lines<R, W> {
    type Error = io::Error;

    fn send(&mut self, message: TxJsonRpcMessage<RoleServer>) -> impl Future<Output = io::Result<()>> + Send + 'static {
        let output = Arc::clone(&self.output);
        let answered = match &message {
            JsonRpcMessage::Response(response) => Some(&response.id),
            JsonRpcMessage::Error(error) => error.id.as_ref(),
            _ => None,
        };
        if let Some(id) = answered {
            self.open.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
        }
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
                Ok(message) => match self.admit(message) {
                    Ok(Some(message)) => return Some(message),
                    Ok(None) => tracing::debug!("a message before the session began is passed over"),
                    Err(answer) => self.answer = Some(answer),
                },
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
pub(crate) fn message(line: &[u8]) -> Result<RxJsonRpcMessage<RoleServer>, Option<Value>> {
    let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line).trim_ascii();
    if line.is_empty() {
        return Err(None);
    }
    let wrong = match serde_json::from_slice(line) {
        Ok(message) => return Ok(message),
        Err(error) => error,
    };
    let value: Value = serde_json::from_slice(line)
        .map_err(|e| refusal(&ErrorData::parse_error(format!("this is no JSON: {e}"), None), None))?;
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
            let why = "this is no JSON-RPC 2.0 request: it wants jsonrpc, id, method, and params as an object";
            Err(Some(refusal(&ErrorData::invalid_request(why, None), id)))
        }
    }
}
