//! What only a real model can show, with the tiny one inside the program.

mod program;

use program::Program;
use serde_json::{Value, json};

const RECORD: &str = "Make a JSON record for Lena, age 41, city Ottawa.";
const TEMPLATE: &str = r#"{"name": "[[fill:1]]", "age":[[fill:3]], "city": "[[fill:1]]"}"#;

#[test]
fn issue_3_gaps_are_filled_between_given_texts() {
    let state = tempfile::tempdir().unwrap();
    let mut program = Program::start(state.path(), &[]);
    let whole = program.call("dllm_generate", &json!({"prompt": RECORD, "seed": 1, "max_tokens": 64}));
    assert_eq!(whole["data"]["text"], r#"{"name": "Lena", "age": 41, "city": "Ottawa"}"#, "{whole}");
    let filled = program.call("dllm_infill", &json!({"prompt": RECORD, "template": TEMPLATE, "seed": 1}));
    assert_eq!(filled["data"]["text"], whole["data"]["text"], "{filled}");
    assert_eq!(filled["data"]["filled"], json!(["Lena", " 41", "Ottawa"]), "{filled}");
}

#[test]
fn issue_3_each_denoising_step_of_a_traced_answer_can_be_read() {
    let state = tempfile::tempdir().unwrap();
    let mut program = Program::start(state.path(), &[]);
    let reply =
        program.call("dllm_generate", &json!({"prompt": "86 + 45 =", "seed": 1, "max_tokens": 32, "trace": true}));
    let job = reply["data"]["job_id"].as_str().unwrap();
    assert_eq!(reply["data"]["frames_per_canvas"], reply["data"]["receipt"]["steps_per_canvas"], "{reply}");
    let steps = reply["data"]["frames_per_canvas"][0].as_u64().unwrap();
    let mut frame = |step: u64| {
        program.request("resources/read", &json!({"uri": format!("dllm://jobs/{job}/canvas/0/frame/{step}")}))
    };
    for step in 1..=steps {
        let reply = frame(step);
        let text = reply["result"]["contents"][0]["text"].as_str().unwrap_or_else(|| panic!("{reply}"));
        let frame: Value = serde_json::from_str(text).unwrap();
        assert_eq!((frame["step"].clone(), frame["stop"].clone()), (json!(step), json!(step == steps)), "{frame}");
        assert!(step < steps || frame["text"].as_str().unwrap().starts_with("131"), "{frame}");
    }
    for missing in [0, steps + 1] {
        assert!(frame(missing)["error"]["message"].as_str().unwrap().contains("no such frame"));
    }
}

#[test]
fn issue_3_memory_is_told_while_a_model_is_loaded() {
    let state = tempfile::tempdir().unwrap();
    let mut program = Program::start(state.path(), &[]);
    assert_eq!(program.call("dllm_status", &json!({}))["data"]["memory"], Value::Null);
    program.call("dllm_models", &json!({"operation": "load", "model": "dllm-tiny"}));
    let status = program.call("dllm_status", &json!({}));
    let bytes = |name: &str| status["data"]["memory"][name].as_u64().unwrap_or_else(|| panic!("{status}"));
    assert!(bytes("used") > 1 << 20 && bytes("free") > 0, "{status}");
    assert!(bytes("used") + bytes("free") <= bytes("total"), "{status}");
}

#[test]
fn gaps_longer_than_the_room_are_refused() {
    let state = tempfile::tempdir().unwrap();
    let mut program = Program::start(state.path(), &[]);
    for template in ["A [[fill:4096]] B [[fill:4096]] C", "[[fill:3000]] B [[fill:3000]]", "[[fill:4090]] THE END"] {
        let reply = program.call("dllm_infill", &json!({"template": template, "seed": 1}));
        assert_eq!(reply["error"]["type"], "bad_argument", "{reply}");
        let told = reply["message"].as_str().unwrap();
        assert!(told.contains("fit behind a prompt of") && told.contains("(context 4096)"), "{reply}");
    }
}
