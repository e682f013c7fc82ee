//! Batch lines with anything in them: a request that the engine would take up, or a refusal with its reason.

use dllm_mcp::Kind;
use dllm_mcp::item::{Recipe, Settings};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<String>().prop_map(Value::from),
        "[a-z {}]{0,12}".prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-2.0..12.0f64).prop_map(Value::from),
        Just(Value::Null),
        Just(json!(["a", ""])),
        Just(json!({"max_tokens": 0})),
        Just(json!({"t_min": 0.5, "t_max": 0.1, "stop": [""]})),
        Just(json!({"seed": 7})),
    ]
}

fn line() -> impl Strategy<Value = String> {
    let names = ["id", "prompt", "system", "overrides", "a", "b"];
    let field = (prop::sample::select(names.to_vec()), value());
    let object = vec(field, 0..5).prop_map(|fields| {
        Value::Object(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()).to_string()
    });
    prop_oneof![8 => object, 1 => any::<String>()]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn issue_2_any_line_is_a_request_or_a_refusal(line in line(), template in "(\\{\\{a\\}\\} x|\\{\\{|)") {
        let recipe = Recipe { template, settings: Settings::default(), instruction: String::new() };
        match recipe.item(3, &line) {
            Ok(item) => {
                prop_assert!(!item.id.is_empty());
                prop_assert!(dllm_engine::prompt::check(&item.ask.request.prompt).is_ok());
                prop_assert!(item.ask.request.max_tokens > 0 && item.ask.request.seed.is_some());
            }
            Err(fault) => {
                prop_assert_eq!(fault.kind, Kind::BadArgument);
                prop_assert!(fault.message.starts_with("bad "), "{}", fault.message);
            }
        }
    }
}
