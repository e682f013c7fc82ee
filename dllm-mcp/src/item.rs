//! From arguments and batch lines to requests.

use dllm_engine::{Message, Prompt, Request};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::backend::Ask;
use crate::error::{Fault, Result};
use crate::format::Format;

/// Numbers up to here survive JavaScript.
const MAX_SEED: i64 = (1 << 53) - 1;
/// Longest prompt, in bytes; the model's context is the real limit.
const MAX_PROMPT: usize = 1024 * 1024;

/// How to generate. Plain values with a "model's own" value each: null unions break hosts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Most tokens of the answer.
    pub max_tokens: u32,
    /// Most denoising steps per canvas; 0 is the model's own.
    pub max_steps: u32,
    /// Entropy in nats that one step may accept; -1 is the model's own.
    pub entropy_bound: f64,
    /// Temperature towards the last step; 0 is the model's own.
    pub t_min: f64,
    /// Temperature at the first step; 0 is the model's own.
    pub t_max: f64,
    /// Seed; -1 draws one. The result names it.
    pub seed: i64,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Whether the model should think first.
    pub thinking: bool,
}

impl Default for Settings {
    fn default() -> Self {
        let stop = Vec::new();
        Self {
            max_tokens: 512,
            max_steps: 0,
            entropy_bound: -1.0,
            t_min: 0.0,
            t_max: 0.0,
            seed: -1,
            stop,
            thinking: false,
        }
    }
}

/// Checks a number against its range, with a message that names both.
///
/// # Errors
/// `BadArgument`.
pub fn in_range<T: PartialOrd + std::fmt::Display>(name: &str, value: T, min: T, max: T) -> Result<()> {
    if value >= min && value <= max {
        Ok(())
    } else {
        Err(Fault::argument(name, format!("{value} is not in {min}..={max}")))
    }
}

impl Settings {
    /// Checks all ranges.
    ///
    /// # Errors
    /// `BadArgument` with the name and the range.
    pub fn check(&self) -> Result<()> {
        in_range("max_tokens", self.max_tokens, 1, 131_072)?;
        in_range("max_steps", self.max_steps, 0, 4096)?;
        if self.entropy_bound != -1.0 {
            in_range("entropy_bound", self.entropy_bound, 0.0, 1000.0)?;
        }
        in_range("t_min", self.t_min, 0.0, 10.0)?;
        in_range("t_max", self.t_max, 0.0, 10.0)?;
        in_range("seed", self.seed, -1, MAX_SEED)?;
        in_range("the number of stop texts", self.stop.len(), 0, 16)?;
        match self.stop.iter().find(|text| text.is_empty() || text.len() > 256) {
            Some(text) => Err(Fault::argument("stop", format!("a text has {} bytes, not 1 to 256", text.len()))),
            None => Ok(()),
        }
    }

    /// A request with these settings.
    ///
    /// # Errors
    /// `BadArgument`.
    pub fn request(&self, prompt: &str, system: &str, format: Option<&Format>) -> Result<Request> {
        self.check()?;
        let bytes = prompt.len().max(system.len());
        if bytes > MAX_PROMPT {
            return Err(Fault::argument("prompt", format!("it has {bytes} bytes, not 1 to {MAX_PROMPT}")));
        }
        let mut messages = Vec::new();
        let instruction = format.map(Format::instruction);
        let system: Vec<&str> =
            [Some(system), instruction.as_deref()].into_iter().flatten().filter(|s| !s.is_empty()).collect();
        if !system.is_empty() {
            messages.push(Message::system(system.join("\n\n")));
        }
        messages.push(Message::user(prompt));
        let mut request =
            Request::new(Prompt::Messages(messages)).max_tokens(self.max_tokens as usize).seed(self.seed());
        request.denoise.max_steps = (self.max_steps > 0).then_some(self.max_steps);
        request.denoise.entropy_bound = (self.entropy_bound >= 0.0).then_some(self.entropy_bound as f32);
        request.denoise.t_min = (self.t_min > 0.0).then_some(self.t_min as f32);
        request.denoise.t_max = (self.t_max > 0.0).then_some(self.t_max as f32);
        dllm_engine::prompt::check(&request.prompt)?;
        request.stop.clone_from(&self.stop);
        request.thinking = self.thinking;
        Ok(request)
    }

    /// The seed, or one drawn small enough for every client.
    fn seed(&self) -> u64 {
        u64::try_from(self.seed).unwrap_or_else(|_| uuid::Uuid::new_v4().as_u64_pair().1 & MAX_SEED as u64)
    }
}

/// What all items of a batch share.
#[derive(Debug)]
pub struct Recipe {
    /// Text with `{{name}}` where an item's fields go; empty where items bring their prompt.
    pub template: String,
    /// Settings of items that have none.
    pub settings: Settings,
    /// What the answers must look like; the job owns the check.
    pub instruction: String,
}

/// One item of a batch.
#[derive(Debug)]
pub struct Item {
    /// Its id; the line's number where it brings none.
    pub id: String,
    /// What to ask.
    pub ask: Ask,
}

impl Recipe {
    /// Reads an item from its line; `number` counts from 1.
    ///
    /// # Errors
    /// Why it cannot be used, in words.
    pub fn item(&self, number: u64, line: &str) -> Result<Item> {
        let value: Value =
            serde_json::from_str(line).map_err(|e| Fault::argument("item", format!("it is no JSON: {e}")))?;
        let Value::Object(mut fields) = value else {
            return Err(Fault::argument("item", "it is no JSON object"));
        };
        let id = match fields.remove("id") {
            None => format!("line-{number}"),
            Some(Value::String(id)) if !id.is_empty() && id.len() <= 256 => id,
            Some(Value::Number(id)) if id.is_i64() || id.is_u64() => id.to_string(),
            // Its digits are lost: two of them may look the same.
            Some(Value::Number(id)) => {
                return Err(Fault::argument("id", format!("{id} is no integer of 64 bits: give it as text")));
            }
            Some(other) => {
                return Err(Fault::argument("id", format!("{} is no text of 1 to 256 bytes", short(&other))));
            }
        };
        let settings = match fields.remove("overrides") {
            None => self.settings.clone(),
            Some(overrides) => self.overridden(overrides)?,
        };
        let mut system = take_text(&mut fields, "system")?;
        if !self.instruction.is_empty() {
            system =
                if system.is_empty() { self.instruction.clone() } else { format!("{system}\n\n{}", self.instruction) };
        }
        let prompt = if self.template.is_empty() {
            let prompt = take_text(&mut fields, "prompt")?;
            if let Some(unknown) = fields.keys().next() {
                return Err(Fault::argument(unknown, "it is unknown; give a template to use it as a variable"));
            }
            prompt
        } else {
            fields.insert("id".to_owned(), Value::String(id.clone()));
            fill(&self.template, &fields)?
        };
        let request = settings.request(&prompt, &system, None)?;
        Ok(Item { id, ask: Ask::new(request) })
    }

    /// The batch's settings with an item's on top.
    fn overridden(&self, overrides: Value) -> Result<Settings> {
        let wrong = |e: serde_json::Error| Fault::argument("overrides", e);
        let Value::Object(overrides) = overrides else {
            return Err(Fault::argument("overrides", "it is no JSON object"));
        };
        let mut merged = serde_json::to_value(&self.settings).map_err(wrong)?;
        if let Value::Object(base) = &mut merged {
            base.extend(overrides);
        }
        serde_json::from_value(merged).map_err(wrong)
    }
}

/// Puts fields into a template. Texts go in as they are, other values as JSON.
fn fill(template: &str, fields: &Map<String, Value>) -> Result<String> {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some((before, after)) = rest.split_once("{{") {
        out.push_str(before);
        let Some((name, after)) = after.split_once("}}") else {
            return Err(Fault::argument("template", "a {{ has no }}"));
        };
        match fields.get(name.trim()) {
            Some(Value::String(text)) => out.push_str(text),
            Some(other) => out.push_str(&other.to_string()),
            None if matches!(name.trim(), "system" | "overrides") => {
                return Err(Fault::argument("template", format!("{} is a setting of items, no variable", name.trim())));
            }
            None => return Err(Fault::argument(name.trim(), "the template wants it, the item has none")),
        }
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

fn take_text(fields: &mut Map<String, Value>, name: &str) -> Result<String> {
    match fields.remove(name) {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(Fault::argument(name, format!("{} is no text", short(&other)))),
    }
}

fn short(value: &Value) -> String {
    value.to_string().chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(template: &str) -> Recipe {
        Recipe {
            template: template.into(),
            settings: Settings { max_tokens: 9, ..Settings::default() },
            instruction: String::new(),
        }
    }

    fn prompt(item: &Item) -> &str {
        let Prompt::Messages(messages) = &item.ask.request.prompt else { panic!() };
        &messages[0].content
    }

    #[test]
    fn variables_go_into_the_template() {
        let item = recipe("{{a}} + {{ b }} =").item(1, r#"{"id":"x","a":86,"b":"45"}"#).unwrap();
        assert_eq!((item.id.as_str(), prompt(&item)), ("x", "86 + 45 ="));
        let missing = recipe("{{a}} {{c}}").item(1, r#"{"a":1}"#).unwrap_err();
        assert!(missing.message.starts_with("bad c:"), "{missing}");
    }

    #[test]
    fn a_number_as_id_keeps_its_digits_or_is_refused() {
        let id = |number: &str| recipe("").item(1, &format!(r#"{{"id":{number},"prompt":"p"}}"#)).map(|item| item.id);
        for number in ["0", "-7", "12345678901234567890", "18446744073709551615", "-9223372036854775808"] {
            assert_eq!(id(number).unwrap(), number);
        }
        for number in ["12345678901234567890123", "18446744073709551616", "1.5", "1e3", "-0.0"] {
            assert!(id(number).unwrap_err().message.starts_with("bad id:"), "{number}");
        }
    }

    #[test]
    fn the_id_is_a_variable_and_settings_are_none() {
        let line = r#"{"id":"7","x":1,"system":"s"}"#;
        let item = recipe("{{id}} + {{x}} =").item(1, line).unwrap();
        assert_eq!(item.ask.request.prompt, recipe("7 + {{x}} =").item(1, line).unwrap().ask.request.prompt);
        assert_eq!(prompt(&recipe("{{id}}").item(3, "{}").unwrap()), "line-3");
        assert!(recipe("{{system}}").item(1, line).unwrap_err().message.contains("no variable"));
    }

    #[test]
    fn an_item_without_id_is_named_by_its_line() {
        assert_eq!(recipe("").item(7, r#"{"prompt":"hello"}"#).unwrap().id, "line-7");
    }

    #[test]
    fn overrides_are_laid_over_the_batch() {
        let item = recipe("").item(1, r#"{"prompt":"p","overrides":{"seed":5}}"#).unwrap();
        assert_eq!((item.ask.request.max_tokens, item.ask.request.seed), (9, Some(5)));
        assert!(recipe("").item(1, r#"{"prompt":"p","overrides":{"sed":5}}"#).unwrap_err().message.contains("sed"));
        assert!(
            recipe("").item(1, r#"{"prompt":"p","overrides":{"t_min":99}}"#).unwrap_err().message.contains("t_min")
        );
    }

    #[test]
    fn what_is_no_item_is_refused_with_its_reason() {
        for line in [
            "[1]",
            "{",
            r#"{"prompt":3}"#,
            r#"{"id":{},"prompt":"p"}"#,
            r#"{"prompt":"p","typo":1}"#,
            r#"{"prompt":" "}"#,
        ] {
            assert!(recipe("").item(1, line).is_err(), "{line}");
        }
    }

    #[test]
    fn drawn_seeds_survive_javascript() {
        for _ in 0..100 {
            assert!(Settings::default().seed() <= MAX_SEED as u64);
        }
    }
}
