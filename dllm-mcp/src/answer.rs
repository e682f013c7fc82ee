//! What one request produced, as it is told to callers.

use serde_json::{Map, Value, json};

/// The answer to one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// Thought text, if any.
    pub reasoning: Option<String>,
    /// The contents of the gaps of an infill request, in order.
    pub filled: Vec<String>,
    /// Tokens of the answer.
    pub tokens: usize,
    /// Denoising steps over all canvases.
    pub steps: u64,
    /// Why it ended: `stop`, `length`, `cancelled`.
    pub finish_reason: &'static str,
    /// The seed that reproduces it.
    pub seed: u64,
    /// The model that answered.
    pub model: String,
    /// Wall time in seconds.
    pub seconds: f64,
    /// The engine's receipt.
    pub receipt: Value,
}

impl Answer {
    /// Whether the request ended early because it was cancelled.
    pub fn cancelled(&self) -> bool {
        self.finish_reason == "cancelled"
    }

    /// The answer as the data of a reply.
    pub fn data(&self) -> Map<String, Value> {
        let mut data = Map::new();
        data.insert("text".into(), json!(self.text));
        if let Some(reasoning) = &self.reasoning {
            data.insert("reasoning".into(), json!(reasoning));
        }
        if !self.filled.is_empty() {
            data.insert("filled".into(), json!(self.filled));
        }
        data.insert("model".into(), json!(self.model));
        data.insert("tokens_used".into(), json!(self.tokens));
        data.insert("time_taken".into(), json!(self.seconds));
        data.insert("finish_reason".into(), json!(self.finish_reason));
        data.insert("seed".into(), json!(self.seed));
        data.insert("receipt".into(), self.receipt.clone());
        data
    }
}

/// A check of answers against a JSON schema.
#[derive(Debug)]
pub struct Format {
    source: String,
    validator: jsonschema::Validator,
}

impl Format {
    /// Compiles a schema, given as JSON text.
    ///
    /// # Errors
    /// Why the text is no JSON or no schema.
    pub fn new(schema: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(schema).map_err(|e| format!("it is no JSON: {e}"))?;
        let validator = jsonschema::validator_for(&value).map_err(|e| format!("it is no JSON schema: {e}"))?;
        Ok(Self { source: value.to_string(), validator })
    }

    /// What the model is told.
    pub fn instruction(&self) -> String {
        format!("Answer with one JSON value and nothing else. It must match this JSON schema: {}", self.source)
    }

    /// The JSON value of an answer.
    ///
    /// # Errors
    /// Why the text holds no value that matches.
    pub fn parse(&self, text: &str) -> Result<Value, String> {
        let body = unfence(text);
        let value: Value = serde_json::from_str(body).map_err(|e| format!("the answer is no JSON: {e}"))?;
        self.validator.validate(&value).map_err(|e| format!("the answer does not match json_schema: {e}"))?;
        Ok(value)
    }
}

/// The inside of a Markdown fence, which models like to put around JSON.
fn unfence(text: &str) -> &str {
    let text = text.trim();
    let Some(inner) = text.strip_prefix("```").and_then(|t| t.strip_suffix("```")) else {
        return text;
    };
    inner.strip_prefix("json").unwrap_or(inner).trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_checked_against_the_schema() {
        let format =
            Format::new(r#"{"type":"object","required":["n"],"properties":{"n":{"type":"integer"}}}"#).unwrap();
        assert_eq!(format.parse("```json\n{\"n\": 3}\n```").unwrap(), json!({"n": 3}));
        assert!(format.parse("{\"n\": \"3\"}").unwrap_err().contains("does not match"));
        assert!(format.parse("three").unwrap_err().contains("no JSON"));
        assert!(Format::new("{").unwrap_err().contains("no JSON"));
        assert!(Format::new(r#"{"type": 7}"#).unwrap_err().contains("no JSON schema"));
    }
}
