//! Ready-made prompts that lead a model to the right tool.

use rmcp::ErrorData;
use rmcp::model::{GetPromptResult, JsonObject, Prompt, PromptArgument, PromptMessage, Role};

use crate::error::shown;

struct Entry {
    name: &'static str,
    about: &'static str,
    arguments: &'static [(&'static str, &'static str)],
    text: &'static str,
}

/// They come back inside the prompt, and control characters grow sixfold on the wire: some readers give up at 64 KiB.
const MAX_ARGUMENTS: usize = 8 * 1024;

/// `{name}` stands for an argument.
const ENTRIES: &[Entry] = &[
    Entry {
        name: "synth_jsonl",
        about: "Make synthetic data: many rows from one description, as JSONL",
        arguments: &[
            ("topic", "What the rows are about"),
            ("rows", "How many rows"),
            ("json_schema", "JSON schema of a row"),
        ],
        text: "Make {rows} rows of synthetic data about: {topic}.\n\nThink of {rows} different short situations. Call dllm_batch with \
               items_json = a JSON array of objects {\"id\": ..., \"situation\": ...}, template = \"Write one JSON object about \
               {topic}. Situation: {{situation}}\", and json_schema = {json_schema}. Then call dllm_job operation=wait until state is \
               done, and dllm_job operation=results for the rows. Rows with ok=false did not match the schema: leave them out.",
    },
    Entry {
        name: "infill_code",
        about: "Fill a gap in code between a prefix and a suffix",
        arguments: &[("prefix", "Code before the gap"), ("suffix", "Code after the gap")],
        text: "Call dllm_infill with these exact texts, then show the filled part and check that it compiles in your head.\n\nprefix:\n\
               {prefix}\n\nsuffix:\n{suffix}",
    },
    Entry {
        name: "extract_json",
        about: "Extract fields from a text as JSON",
        arguments: &[("text", "The text"), ("json_schema", "JSON schema of the result")],
        text: "Call dllm_generate with json_schema = {json_schema} and prompt = \"Extract the data from this text as JSON.\" followed \
               by the text below. Use data.json of the result.\n\n{text}",
    },
];

/// All prompts.
pub fn list() -> Vec<Prompt> {
    let argument =
        |(name, about): &(&str, &str)| PromptArgument::new(*name).with_description(*about).with_required(true);
    let prompt = |entry: &Entry| {
        Prompt::new(entry.name, Some(entry.about), Some(entry.arguments.iter().map(argument).collect()))
    };
    ENTRIES.iter().map(prompt).collect()
}

/// One prompt with its arguments put in.
///
/// # Errors
/// `invalid_params` for an unknown prompt or a missing argument.
pub fn get(name: &str, arguments: &JsonObject) -> Result<GetPromptResult, ErrorData> {
    let Some(entry) = ENTRIES.iter().find(|entry| entry.name == name) else {
        return Err(ErrorData::invalid_params(format!("there is no prompt {:?}", shown(name)), None));
    };
    let sent: usize = arguments.values().map(|value| value.as_str().map_or(0, str::len)).sum();
    if sent > MAX_ARGUMENTS {
        let why = format!(
            "the arguments have {sent} bytes, at most {MAX_ARGUMENTS}: put long texts into a file for dllm_batch"
        );
        return Err(ErrorData::invalid_params(why, None));
    }
    let mut text = String::new();
    let mut rest = entry.text;
    // Arguments are put in one pass, so that braces inside them stay as they are.
    while let Some((start, name, end)) = next_argument(rest, entry) {
        let value = arguments.get(name).and_then(|value| value.as_str());
        let value = value
            .ok_or_else(|| ErrorData::invalid_params(format!("the argument {name:?} is missing or no text"), None))?;
        text.push_str(rest.get(..start).unwrap_or(""));
        text.push_str(value);
        rest = rest.get(end..).unwrap_or("");
    }
    text.push_str(rest);
    Ok(GetPromptResult::new(vec![PromptMessage::new_text(Role::User, text)]).with_description(entry.about))
}

fn next_argument<'a>(text: &str, entry: &'a Entry) -> Option<(usize, &'a str, usize)> {
    let found = entry.arguments.iter().filter_map(|(name, _)| {
        let mark = format!("{{{name}}}");
        text.find(&mark).map(|start| (start, *name, start + mark.len()))
    });
    found.min_by_key(|(start, ..)| *start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_are_put_in_once() {
        let arguments = json!({"text": "a {json_schema} b", "json_schema": "{}"});
        let result = get("extract_json", arguments.as_object().unwrap()).unwrap();
        let text = serde_json::to_string(&result).unwrap();
        assert!(text.contains("json_schema = {} and") && text.contains("a {json_schema} b"), "{text}");
        assert!(get("extract_json", &JsonObject::new()).is_err());
        assert!(get("other", &JsonObject::new()).is_err());
        let long = json!({"text": "x".repeat(9000), "json_schema": "{}"});
        assert!(get("extract_json", long.as_object().unwrap()).unwrap_err().message.contains("at most 8192"));
    }

    #[test]
    fn every_argument_is_used() {
        for entry in ENTRIES {
            for (name, _) in entry.arguments {
                assert!(entry.text.contains(&format!("{{{name}}}")), "{} {name}", entry.name);
            }
        }
    }
}
