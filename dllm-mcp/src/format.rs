//! Answers in a JSON format: the check against a caller's schema.
//!
//! A schema comes from outside, and checking one that refers to itself can take all the stack or all the time there is. So
//! only schemas that end are taken: following every reference from the top must stay below fixed limits.

use serde_json::Value;

use crate::error::shown;

/// Deepest nesting of a schema, references followed.
const MAX_DEPTH: usize = 64;
/// Most values in a schema, references followed.
const MAX_PARTS: usize = 20_000;

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
        follow(&value, &value, 0, &mut MAX_PARTS.clone())?;
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

/// Walks through a schema as a check would, with the parts that may still be visited.
fn follow(root: &Value, part: &Value, depth: usize, parts: &mut usize) -> Result<(), String> {
    if depth > MAX_DEPTH {
        return Err(format!(
            "it nests or refers deeper than {MAX_DEPTH} levels; schemas that refer to themselves cannot be used"
        ));
    }
    *parts = parts.checked_sub(1).ok_or(format!("it has more than {MAX_PARTS} parts with all references followed"))?;
    match part {
        Value::Object(map) => map.iter().try_for_each(|(key, inner)| match (key.as_str(), inner) {
            // Data, not schemas.
            ("const" | "enum" | "default" | "examples", _) => Ok(()),
            ("$ref" | "$dynamicRef" | "$recursiveRef", Value::String(target)) => {
                follow(root, referred(root, target)?, depth + 1, parts)
            }
            // It would give the references below it another meaning.
            ("$id" | "id", Value::String(id)) if depth > 0 => {
                Err(format!("{key} {:?} is only possible at the top", shown(id)))
            }
            _ => follow(root, inner, depth + 1, parts),
        }),
        Value::Array(items) => items.iter().try_for_each(|inner| follow(root, inner, depth + 1, parts)),
        _ => Ok(()),
    }
}

fn referred<'a>(root: &'a Value, target: &str) -> Result<&'a Value, String> {
    let pointer = target.strip_prefix('#').filter(|pointer| pointer.is_empty() || pointer.starts_with('/'));
    let found = pointer.and_then(|pointer| root.pointer(pointer));
    found.ok_or_else(|| {
        format!("the reference {:?} leads to no part of it; only those as #/$defs/name can be used", shown(target))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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

    #[test]
    fn issue_3_only_schemas_that_end_are_taken() {
        // Each would take the stack, or double at each of 40 levels.
        let mut doubling = serde_json::Map::new();
        for n in 0..40 {
            let next = json!({"$ref": format!("#/$defs/{}", n + 1)});
            doubling.insert(n.to_string(), json!({"allOf": [next, next]}));
        }
        doubling.insert("40".into(), json!({}));
        for bad in [
            json!({"$ref": "#"}),
            json!({"$dynamicRef": "#"}),
            json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
            json!({"properties": {"next": {"$ref": "#"}}}),
            json!({"$defs": doubling, "$ref": "#/$defs/0"}),
            json!({"$ref": "https://example.com/a"}),
            json!({"$ref": "#/nowhere"}),
            json!({"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}),
            json!({"properties": {"a": {"$id": "http://x/", "$ref": "#"}}}),
            json!({"type": "string", "pattern": "(((a{1000}){1000}){1000}){1000}"}),
        ] {
            assert!(Format::new(&bad.to_string()).is_err(), "{bad:.200}");
        }
        let good = json!({
            "$id": "http://x/", "$defs": {"name": {"type": "string", "default": {"$ref": "#"}}},
            "properties": {"id": {"$ref": "#/$defs/name"}, "other": {"$ref": "#/$defs/name"}, "$ref": {"type": "null"}}
        });
        let good = Format::new(&good.to_string()).unwrap();
        assert!(good.parse(r#"{"id": "x", "other": "y"}"#).is_ok() && good.parse(r#"{"id": 1}"#).is_err());
    }
}
