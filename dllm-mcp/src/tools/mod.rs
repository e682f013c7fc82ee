//! The eight tools. Each file holds a tool's arguments and what it does.

mod args;
pub mod batch;
pub mod benchmark;
pub mod generate;
pub mod help;
pub mod infill;
pub mod job;
pub mod models;
pub mod status;

use std::sync::{Arc, OnceLock};

use rmcp::model::{JsonObject, Tool, ToolAnnotations};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::error::{Fault, Result};
use crate::progress::Notifier;
use crate::reply::Reply;
use crate::server::App;
use args::schema;

/// The tools' names, in the order of the list.
pub const NAMES: [&str; 8] = [
    "dllm_generate",
    "dllm_infill",
    "dllm_batch",
    "dllm_job",
    "dllm_status",
    "dllm_models",
    "dllm_benchmark",
    "dllm_help",
];

/// A call on its way.
pub struct Call {
    /// What all calls share.
    pub app: Arc<App>,
    /// Trips when the caller gives up.
    pub cancel: CancellationToken,
    /// For callers that want to hear of progress.
    pub notifier: Option<Notifier>,
}

/// Calls a tool.
///
/// # Errors
/// What the caller can read and act on.
pub async fn call(name: &str, arguments: JsonObject, call: &Call) -> Result<Reply> {
    match name {
        "dllm_generate" => generate::run(args::parse(arguments)?, call).await,
        "dllm_infill" => infill::run(args::parse(arguments)?, call).await,
        "dllm_batch" => batch::run(args::parse(arguments)?, call).await,
        "dllm_job" => job::run(args::parse(arguments)?, call).await,
        "dllm_status" => status::run(args::parse(arguments)?, call),
        "dllm_models" => models::run(args::parse(arguments)?, call).await,
        "dllm_benchmark" => benchmark::run(args::parse(arguments)?, call).await,
        "dllm_help" => help::run(&args::parse(arguments)?, &call.app),
        _ => Err(Fault::argument("tool", format!("{name:?} is unknown"))),
    }
}

/// The tools as clients see them.
pub fn list() -> Vec<Tool> {
    static TOOLS: OnceLock<Vec<Tool>> = OnceLock::new();
    TOOLS.get_or_init(build).clone()
}

/// What a tool does to its surroundings.
enum Effect {
    /// Nothing.
    Reads,
    /// Adds results.
    Adds,
    /// May remove something.
    Removes,
}

fn build() -> Vec<Tool> {
    let tool = |name: &'static str, title: &str, about: &'static str, input: Arc<JsonObject>, effect: Effect| {
        let notes = ToolAnnotations::from_raw(
            Some(title.to_owned()),
            Some(matches!(effect, Effect::Reads)),
            Some(matches!(effect, Effect::Removes)),
            Some(matches!(effect, Effect::Reads)),
            Some(false),
        );
        Tool::new(name, about, input).with_title(title).with_raw_output_schema(output_schema()).with_annotations(notes)
    };
    vec![
        tool("dllm_generate", "Generate text", generate::ABOUT, schema::<generate::Args>(), Effect::Adds),
        tool("dllm_infill", "Fill gaps in a text", infill::ABOUT, schema::<infill::Args>(), Effect::Adds),
        tool("dllm_batch", "Run a batch", batch::ABOUT, schema::<batch::Args>(), Effect::Removes),
        tool("dllm_job", "Look after jobs", job::ABOUT, schema::<job::Args>(), Effect::Removes),
        tool("dllm_status", "Show the state", status::ABOUT, schema::<status::Args>(), Effect::Reads),
        tool("dllm_models", "List and load models", models::ABOUT, schema::<models::Args>(), Effect::Adds),
        tool("dllm_benchmark", "Measure the speed", benchmark::ABOUT, schema::<benchmark::Args>(), Effect::Adds),
        tool("dllm_help", "Explain this server", help::ABOUT, schema::<help::Args>(), Effect::Reads),
    ]
}

/// Met by errors too: some clients check failures against it.
fn output_schema() -> Arc<JsonObject> {
    let schema = json!({
        "type": "object",
        "properties": {
            "message": {"type": "string", "description": "One sentence about the result"},
            "success": {"type": "boolean"},
            "data": {"type": "object", "description": "The result; depends on the tool"},
            "error": {
                "type": "object",
                "properties": {
                    "type": {"type": "string"},
                    "retryable": {"type": "boolean"},
                    "suggestions": {"type": "array", "items": {"type": "string"}}
                },
                "required": ["type", "retryable", "suggestions"]
            },
            "cut": {"type": "string", "description": "Present when texts were shortened to fit"}
        },
        "required": ["success", "message"]
    });
    match schema {
        Value::Object(map) => Arc::new(map),
        _ => Arc::default(),
    }
}
