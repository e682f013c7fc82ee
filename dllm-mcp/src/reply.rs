//! The one shape of all results: `{success, message, data?, error?}`, small enough for every client.

use rmcp::model::{CallToolResult, ContentBlock, Resource};
use serde_json::{Map, Value, json};

use crate::error::{Fault, Result};

/// Most bytes of a reply's two copies (text block and structured content) together. With the frame around them the line
/// stays under 60 KiB: asyncio readers give up at 64 KiB.
pub const BUDGET: usize = 56 * 1024;

/// What a reply says that had to be shortened.
const CUT: &str =
    "this was cut to fit; the whole is in the pages of dllm_job operation=results, or in the output file of a batch";
/// Texts shorter than this are not cut.
const SHORT: usize = 128;

/// A result before it is written.
#[derive(Debug, Clone)]
pub struct Reply {
    /// One sentence for people and models.
    pub message: String,
    /// The data of the tool.
    pub data: Map<String, Value>,
    /// Where the whole is, when it may not fit.
    pub link: Option<String>,
}

impl Reply {
    /// A reply with data; `data` must be a JSON object.
    pub fn new(message: impl Into<String>, data: Value) -> Self {
        let data = match data {
            Value::Object(map) => map,
            Value::Null => Map::new(),
            other => Map::from_iter([("value".to_owned(), other)]),
        };
        Self { message: message.into(), data, link: None }
    }

    /// Names the resource that holds the whole.
    pub fn link(mut self, uri: impl Into<String>) -> Self {
        self.link = Some(uri.into());
        self
    }
}

/// The result of a tool as the protocol wants it.
pub fn to_result(reply: Result<Reply>) -> CallToolResult {
    let (body, link, failed) = match reply {
        Ok(reply) => {
            let mut body = Map::new();
            body.insert("message".into(), Value::String(reply.message));
            body.insert("success".into(), Value::Bool(true));
            if !reply.data.is_empty() {
                body.insert("data".into(), Value::Object(reply.data));
            }
            (body, reply.link, false)
        }
        Err(fault) => (failure(&fault), None, true),
    };
    let (body, text) = fit(body);
    let mut content = vec![ContentBlock::text(text)];
    if let Some(uri) = link {
        let resource = Resource::new(uri, "results").with_mime_type("application/json");
        content.push(ContentBlock::resource_link(resource));
    }
    let mut result = if failed { CallToolResult::error(content) } else { CallToolResult::success(content) };
    result.structured_content = Some(Value::Object(body));
    result
}

fn failure(fault: &Fault) -> Map<String, Value> {
    let mut body = Map::new();
    body.insert("message".into(), Value::String(fault.message.clone()));
    body.insert("success".into(), Value::Bool(false));
    body.insert("error".into(), fault.json());
    body
}

/// Cuts the longest texts, then the longest lists, until both copies fit, and says so in the body.
fn fit(mut body: Map<String, Value>) -> (Map<String, Value>, String) {
    loop {
        let text = to_text(&body);
        if text.len().saturating_add(escaped_len(&text)) <= BUDGET || !cut_longest(&mut body) {
            return (body, text);
        }
        body.insert("cut".into(), json!(CUT));
    }
}

/// The data of a reply as the text of a resource, cut like a reply. It is sent once.
pub fn to_resource(data: Map<String, Value>) -> String {
    fit(data).1
}

/// The compact JSON; the message comes first, as clients show only the first characters.
fn to_text(body: &Map<String, Value>) -> String {
    serde_json::to_string(body).unwrap_or_else(|_| r#"{"message":"internal","success":false}"#.to_owned())
}

/// Bytes of a text inside a JSON string.
fn escaped_len(text: &str) -> usize {
    text.bytes().map(|b| if matches!(b, b'"' | b'\\') { 2 } else { 1 }).sum()
}

/// Halves the longest text, or where all are short the longest list. `false` where nothing is left to cut.
fn cut_longest(body: &mut Map<String, Value>) -> bool {
    let text = body.values().map(longest_text).max().unwrap_or(0);
    if text > SHORT {
        return body.values_mut().any(|value| cut_one(value, text));
    }
    let list = body.values().map(longest_list).max().unwrap_or(0);
    list > 0 && body.values_mut().any(|value| cut_list(value, list))
}

fn longest_list(value: &Value) -> usize {
    match value {
        Value::Array(items) => items.iter().map(longest_list).max().unwrap_or(0).max(items.len()),
        Value::Object(map) => map.values().map(longest_list).max().unwrap_or(0),
        _ => 0,
    }
}

fn cut_list(value: &mut Value, len: usize) -> bool {
    match value {
        Value::Array(items) if items.len() == len => {
            items.truncate(len / 2);
            true
        }
        Value::Array(items) => items.iter_mut().any(|item| cut_list(item, len)),
        Value::Object(map) => map.values_mut().any(|item| cut_list(item, len)),
        _ => false,
    }
}

fn longest_text(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(longest_text).max().unwrap_or(0),
        Value::Object(map) => map.values().map(longest_text).max().unwrap_or(0),
        _ => 0,
    }
}

fn cut_one(value: &mut Value, len: usize) -> bool {
    match value {
        Value::String(text) if text.len() == len => {
            let end = (0..=len / 2).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
            text.truncate(end);
            text.push('…');
            true
        }
        Value::Array(items) => items.iter_mut().any(|item| cut_one(item, len)),
        Value::Object(map) => map.values_mut().any(|item| cut_one(item, len)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn line(result: &CallToolResult) -> String {
        serde_json::to_string(result).unwrap()
    }

    #[test]
    fn the_text_starts_with_the_message() {
        let result = to_result(Ok(Reply::new("done", json!({"a": 1}))));
        assert_eq!(result.content[0].as_text().unwrap().text, r#"{"message":"done","success":true,"data":{"a":1}}"#);
    }

    #[test]
    fn any_text_fits() {
        for filler in ["x", "\"", "\\", "\n", "ü", "\u{1}"] {
            let result = to_result(Ok(Reply::new(
                "done",
                json!({"text": filler.repeat(400_000), "other": [filler.repeat(9000)]}),
            )));
            assert!(line(&result).len() < 60 * 1024, "{filler:?} {}", line(&result).len());
            assert!(line(&result).contains("this was cut"));
        }
    }

    #[test]
    fn any_list_fits() {
        let short: Vec<Value> = (0..20_000).map(|n| json!({"id": format!("model {n}"), "sizes": [n, n]})).collect();
        let result = to_result(Ok(Reply::new("done", json!({"models": short}))));
        assert!(line(&result).len() < 60 * 1024, "{}", line(&result).len());
        let body = result.structured_content.unwrap();
        assert!(body["cut"].is_string() && body["data"]["models"][0]["id"] == "model 0", "{body:.300}");
    }

    #[test]
    fn a_failure_has_the_same_shape() {
        let result = to_result(Err(Fault::new(Kind::QueueFull, "64 requests wait")));
        assert_eq!(result.is_error, Some(true));
        let body = result.structured_content.unwrap();
        assert_eq!(body["success"], json!(false));
        assert_eq!(body["error"]["type"], json!("queue_full"));
    }
}
