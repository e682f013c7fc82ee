//! From what a client sent to typed arguments, and the schemas that clients are shown.

use std::sync::Arc;
use std::time::Duration;

use rmcp::model::JsonObject;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::error::{Fault, Result};
use crate::item::in_range;

/// Longest wait of a call: the strictest hosts give up after 30 s.
const MAX_WAIT_S: f64 = 25.0;

/// Reads arguments. Unknown ones are refused: a misspelt name would otherwise do nothing, silently.
///
/// # Errors
/// `BadArgument` that names the argument.
pub fn parse<T: DeserializeOwned>(arguments: JsonObject) -> Result<T> {
    serde_path_to_error::deserialize(Value::Object(arguments)).map_err(|e| {
        let path = e.path().to_string();
        let name = if path == "." { "arguments" } else { path.as_str() };
        Fault::argument(name, e.inner())
    })
}

/// Reads JSON that was asked for as text. Models, and clients that parse what looks like JSON, send it as a value.
///
/// # Errors
/// What the deserializer reports.
pub fn json_text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(match Value::deserialize(deserializer)? {
        Value::String(text) => text,
        Value::Null => String::new(),
        value => value.to_string(),
    })
}

/// How long a call may wait.
///
/// # Errors
/// `BadArgument`.
pub fn wait(wait_s: f64) -> Result<Duration> {
    in_range("wait_s", wait_s, 0.0, MAX_WAIT_S)?;
    Ok(Duration::from_secs_f64(wait_s))
}

/// How long a job may run.
///
/// # Errors
/// `BadArgument`.
pub fn max_run(max_run_s: f64) -> Result<Duration> {
    in_range("max_run_s", max_run_s, 0.001, 86_400.0)?;
    Ok(Duration::from_secs_f64(max_run_s))
}

/// The schema of arguments: flat, without references, unions or formats that strict clients do not know.
pub fn schema<T: JsonSchema>() -> Arc<JsonObject> {
    let settings = SchemaSettings::draft07().with(|settings| settings.inline_subschemas = true);
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    simplify(&mut schema);
    match schema {
        Value::Object(mut map) => {
            map.remove("$schema");
            map.remove("title");
            map.remove("description");
            map.entry("properties").or_insert_with(|| Value::Object(JsonObject::new()));
            Arc::new(map)
        }
        _ => Arc::default(),
    }
}

fn simplify(value: &mut Value) {
    match value {
        Value::Object(map) => {
            if map.get("format").is_some_and(Value::is_string) {
                map.remove("format");
            }
            map.values_mut().for_each(simplify);
        }
        Value::Array(items) => items.iter_mut().for_each(simplify),
        _ => {}
    }
}
