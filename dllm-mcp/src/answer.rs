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
