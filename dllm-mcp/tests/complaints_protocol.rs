//! Complaints about what goes over the wire.

mod common;

use std::time::Duration;

use common::{Client, Script, body};
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread")]
async fn c05_listing_needs_no_model() {
    // The load would take longer than the test may.
    let script = Script { load: Duration::from_secs(3600), ..Script::default() };
    let log = script.log.clone();
    let mut client = Client::start(script).await;
    let id = client.request("tools/list", json!({})).await;
    assert_eq!(client.reply(id).await["result"]["tools"].as_array().unwrap().len(), 8);
    assert_eq!(log.loads.load(std::sync::atomic::Ordering::SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn c06_discover_then_initialize() {
    let mut client = Client::connect(Script::default(), |_| {}).await;
    let meta = json!({"_meta": {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "0"}, "io.modelcontextprotocol/clientCapabilities": {}}});
    let id = client.request("server/discover", meta).await;
    let reply = client.reply(id).await;
    assert!(reply["result"]["supportedVersions"].as_array().unwrap().contains(&json!("2026-07-28")), "{reply}");
    let reply = client.initialize("2025-06-18").await;
    assert_eq!(reply["result"]["protocolVersion"], "2025-06-18", "{reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn c06_ping_first() {
    let mut client = Client::connect(Script::default(), |_| {}).await;
    let id = client.request("ping", json!({})).await;
    assert!(client.reply(id).await.get("result").is_some());
    assert_eq!(client.initialize("2024-11-05").await["result"]["serverInfo"]["name"], "diffusion-llm-mcp");
}

#[tokio::test(flavor = "multi_thread")]
async fn c06_junk_version() {
    let mut client = Client::connect(Script::default(), |_| {}).await;
    let reply = client.initialize("banana").await;
    assert!(reply["result"]["protocolVersion"].as_str().is_some_and(|version| version.starts_with("20")), "{reply}");
    assert_eq!(client.call("dllm_status", json!({})).await["success"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn c11_a_huge_result_is_cut_and_linked() {
    let mut client = Client::start(Script::default()).await;
    let id =
        client.request("tools/call", json!({"name": "dllm_generate", "arguments": {"prompt": "long=500000"}})).await;
    let reply = client.reply(id).await;
    let body = body(&reply);
    assert!(body["cut"].is_string());
    assert_eq!(reply["result"]["content"][1]["type"], "resource_link");
    let job = body["data"]["job_id"].clone();
    let (mut whole, mut cursor) = (String::new(), json!(""));
    loop {
        let page = client.call("dllm_job", json!({"operation": "results", "job_id": job, "cursor": cursor})).await;
        whole.push_str(page["data"]["results"][0]["text"].as_str().unwrap());
        cursor = page["data"]["nextCursor"].clone();
        if cursor.is_null() {
            break;
        }
    }
    assert_eq!(whole, "wörd \"x\"\n".repeat(50_001));
}

#[tokio::test(flavor = "multi_thread")]
async fn c12_the_largest_reply_of_each_kind_fits_a_64_kib_reader() {
    let mut client = Client::start(Script::default()).await;
    for method in ["tools/list", "resources/list", "resources/templates/list", "prompts/list"] {
        let id = client.request(method, json!({})).await;
        assert!(client.reply(id).await.get("result").is_some(), "{method}");
    }
    client.call("dllm_generate", json!({"prompt": "long=200000", "n": 16})).await;
    let items: Vec<Value> = (0..32).map(|i| json!({"id": i, "prompt": "long=9000"})).collect();
    let job = client.call("dllm_batch", json!({"items_json": json!(items).to_string(), "wait_s": 20})).await["data"]["job_id"].clone();
    let page = client.call("dllm_job", json!({"operation": "results", "job_id": job, "limit": 200})).await;
    assert!(page["data"]["nextCursor"].is_string());
    for i in 0..210 {
        client.call("dllm_generate", json!({"prompt": format!("{i} steps=1")})).await;
    }
    client.call("dllm_job", json!({"operation": "list", "limit": 200})).await;
    let id = client.request("resources/list", json!({})).await;
    client.reply(id).await;
    let id = client
        .request("resources/read", json!({"uri": format!("dllm://jobs/{}/results", job.as_str().unwrap())}))
        .await;
    assert!(client.reply(id).await.get("result").is_some());
    for topic in ["routing", "limits", "files", "errors", "examples"] {
        assert_eq!(client.call("dllm_help", json!({"topic": topic})).await["success"], true, "{topic}");
    }
    // `line` has checked each of them.
    assert!(client.longest > 30_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn c17_a_small_reply_comes_while_input_stays_open() {
    let mut client = Client::start(Script::default()).await;
    assert_eq!(client.call("dllm_status", json!({})).await["success"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn c18_names_are_short_and_plain() {
    let mut client = Client::start(Script::default()).await;
    let id = client.request("tools/list", json!({})).await;
    for tool in client.reply(id).await["result"]["tools"].as_array().unwrap() {
        let name = tool["name"].as_str().unwrap();
        assert!(
            "mcp__dllm__".len() + name.len() <= 60 && name.chars().all(|c| c.is_ascii_lowercase() || c == '_'),
            "{name}"
        );
    }
}

fn no_unions(value: &Value, at: &str) {
    match value {
        Value::Object(map) => {
            for (key, inner) in map {
                assert!(
                    !["$ref", "anyOf", "oneOf", "allOf", "$defs", "definitions"].contains(&key.as_str()),
                    "{key} at {at}"
                );
                assert!(key != "type" || !inner.is_array(), "type array at {at}");
                no_unions(inner, &format!("{at}/{key}"));
            }
        }
        Value::Array(items) => items.iter().for_each(|item| no_unions(item, at)),
        _ => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn c21_schemas_are_flat() {
    let mut client = Client::start(Script::default()).await;
    let id = client.request("tools/list", json!({})).await;
    for tool in client.reply(id).await["result"]["tools"].as_array().unwrap() {
        let (name, input) = (tool["name"].as_str().unwrap(), &tool["inputSchema"]);
        no_unions(input, name);
        assert_eq!(
            (input["type"].clone(), input["additionalProperties"].clone()),
            (json!("object"), json!(false)),
            "{name}"
        );
        for (argument, schema) in input["properties"].as_object().unwrap() {
            assert!(schema["type"].is_string() && schema["description"].is_string(), "{name}.{argument}: {schema}");
            let required = input["required"].as_array().is_some_and(|names| names.contains(&json!(argument)));
            assert!(required || schema.get("default").is_some(), "{name}.{argument} has no default");
        }
        assert!(tool["annotations"]["readOnlyHint"].is_boolean() && tool["outputSchema"]["type"] == "object", "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn c22_every_error_has_the_shape_of_results() {
    let mut client = Client::start(Script::default()).await;
    let cases = [
        ("dllm_generate", json!({}), "bad_argument", "prompt"),
        ("dllm_generate", json!({"prompt": "p", "max_token": 5}), "bad_argument", "max_token"),
        ("dllm_generate", json!({"prompt": "p", "max_tokens": 0}), "bad_argument", "1..=131072"),
        ("dllm_generate", json!({"prompt": "p", "max_tokens": -4}), "bad_argument", "max_tokens"),
        ("dllm_generate", json!({"prompt": "p", "max_tokens": "many"}), "bad_argument", "max_tokens"),
        ("dllm_generate", json!({"prompt": " "}), "bad_argument", "prompt"),
        ("dllm_generate", json!({"prompt": "p", "n": 17}), "bad_argument", "1..=16"),
        ("dllm_generate", json!({"prompt": "p", "wait_s": 26}), "bad_argument", "wait_s"),
        ("dllm_generate", json!({"prompt": "p", "t_max": 11}), "bad_argument", "t_max"),
        ("dllm_generate", json!({"prompt": "p", "entropy_bound": -2}), "bad_argument", "entropy_bound"),
        ("dllm_generate", json!({"prompt": "p", "seed": -2}), "bad_argument", "seed"),
        ("dllm_generate", json!({"prompt": "p", "stop": [""]}), "bad_argument", "stop"),
        ("dllm_generate", json!({"prompt": "p", "json_schema": "{"}), "bad_argument", "json_schema"),
        ("dllm_generate", json!({"prompt": "p", "stream": true}), "wrong_server", "llm_generation_tool"),
        ("dllm_infill", json!({}), "bad_argument", "template"),
        ("dllm_infill", json!({"template": "no gap"}), "bad_argument", "gaps"),
        ("dllm_batch", json!({}), "bad_argument", "items_json"),
        ("dllm_batch", json!({"items_json": "[]"}), "bad_argument", "items_json"),
        ("dllm_batch", json!({"items_json": "[1]"}), "bad_argument", "items"),
        ("dllm_batch", json!({"items_json": "[{}]", "overwrite": true}), "bad_argument", "overwrite"),
        ("dllm_batch", json!({"input_path": "nowhere.jsonl"}), "path_refused", "nowhere"),
        ("dllm_job", json!({"operation": "get", "job_id": "x"}), "unknown_job", "\"x\""),
        ("dllm_job", json!({"operation": "dance"}), "bad_argument", "dance"),
        ("dllm_job", json!({"operation": "list", "cursor": "zz"}), "bad_argument", "cursor"),
        ("dllm_job", json!({"operation": "list", "limit": 0}), "bad_argument", "limit"),
        ("dllm_models", json!({"operation": "load"}), "bad_argument", "model"),
        ("dllm_models", json!({"operation": "load", "model": "missing"}), "load_failed", "missing"),
        ("dllm_models", json!({"operation": "x"}), "bad_argument", "operation"),
        ("dllm_benchmark", json!({"preset": "x"}), "bad_argument", "preset"),
        ("dllm_help", json!({"topic": "x"}), "bad_argument", "topic"),
        ("dllm_status", json!({"verbose": true}), "bad_argument", "verbose"),
    ];
    for (tool, arguments, kind, words) in cases {
        let reply = client.call(tool, arguments.clone()).await;
        assert_eq!(reply["error"]["type"], kind, "{tool} {arguments}: {reply}");
        assert!(reply["message"].as_str().unwrap().contains(words), "{tool} {arguments}: {reply}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_tool_is_an_error_of_the_protocol() {
    let mut client = Client::start(Script::default()).await;
    let id = client.request("tools/call", json!({"name": "other", "arguments": {}})).await;
    assert!(client.reply(id).await["error"]["message"].as_str().unwrap().contains("dllm_generate"));
}

#[tokio::test(flavor = "multi_thread")]
async fn resources_prompts_and_completion_answer() {
    let mut client = Client::start(Script::default()).await;
    let job = client.call("dllm_generate", json!({"prompt": "p"})).await["data"]["job_id"].as_str().unwrap().to_owned();
    for uri in [
        "dllm://config".to_owned(),
        "dllm://models/other".into(),
        format!("dllm://jobs/{job}"),
        format!("dllm://jobs/{job}/results"),
    ] {
        let id = client.request("resources/read", json!({"uri": uri})).await;
        let reply = client.reply(id).await;
        let text = reply["result"]["contents"][0]["text"].as_str().unwrap_or_else(|| panic!("{uri}: {reply}"));
        assert!(serde_json::from_str::<Value>(text).unwrap().is_object(), "{uri}");
    }
    let id = client.request("resources/read", json!({"uri": "dllm://jobs/none"})).await;
    assert!(client.reply(id).await.get("error").is_some());
    let id = client
        .request("prompts/get", json!({"name": "infill_code", "arguments": {"prefix": "a", "suffix": "b"}}))
        .await;
    assert!(
        client.reply(id).await["result"]["messages"][0]["content"]["text"].as_str().unwrap().contains("dllm_infill")
    );
    let id = client.request("completion/complete", json!({"ref": {"type": "ref/resource", "uri": "dllm://models/{id}"}, "argument": {"name": "id", "value": "ot"}})).await;
    assert_eq!(client.reply(id).await["result"]["completion"]["values"], json!(["other"]));
}
