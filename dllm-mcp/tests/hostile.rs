//! Clients that are clumsy or hostile: what can be answered is answered, and the session goes on.

mod common;
mod program;

use common::{Client, Script};
use program::Program;
use serde_json::{Value, json};

async fn still_works(client: &mut Client) {
    assert_eq!(client.call("dllm_status", json!({})).await["success"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn issue_3_junk_lines_do_not_end_the_session() {
    let mut client = Client::start(Script::default()).await;
    let deep = [
        "[".repeat(300_000),
        format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\",\"params\":{}", "{\"a\":".repeat(9000)),
    ];
    let huge = vec![b'x'; 17 << 20];
    let lines: Vec<&[u8]> = vec![
        b"",
        b"{",
        b"\xff\xfe\x00\x80",
        b"7",
        b"null",
        b"[]",
        b"\"x\"",
        b"Content-Length: 5\r",
        b"{\"jsonrpc\":\"1.0\",\"id\":1,\"method\":\"ping\"}",
        b"{\"jsonrpc\":\"2.0\"}",
        br#"{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":"\ud800"}}"#,
        b"{\"jsonrpc\":\"2.0\",\"id\":{},\"method\":\"ping\"}",
        b"{\"jsonrpc\":\"2.0\",\"method\":\"notifications/unknown\",\"params\":7}",
        b"{\"jsonrpc\":\"2.0\",\"id\":99,\"result\":{}}",
        deep[0].as_bytes(),
        deep[1].as_bytes(),
        &huge,
    ];
    for line in lines {
        client.send_line(line).await;
        still_works(&mut client).await;
    }
}

/// A client that waits for an answer to each line gets one; notifications have none.
#[tokio::test(flavor = "multi_thread")]
async fn lines_that_are_no_requests_are_answered() {
    let mut client = Client::start(Script::default()).await;
    let huge = vec![b'x'; (16 << 20) + 1];
    let deep = "[".repeat(300_000);
    let lines: Vec<(&[u8], i64, Value)> = vec![
        (b"{", -32700, Value::Null),
        (b"hello", -32700, Value::Null),
        (b"\xff\xfe\x00\x80", -32700, Value::Null),
        (b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"", -32700, Value::Null),
        (deep.as_bytes(), -32700, Value::Null),
        (&huge, -32600, Value::Null),
        (b"7", -32600, Value::Null),
        (b"null", -32600, Value::Null),
        (b"[]", -32600, Value::Null),
        (b"\"x\"", -32600, Value::Null),
        (b"{}", -32600, Value::Null),
        (b"{\"jsonrpc\":\"2.0\"}", -32600, Value::Null),
        (b"{\"jsonrpc\":\"1.0\",\"id\":71,\"method\":\"ping\"}", -32600, json!(71)),
        (b"{\"jsonrpc\":\"2.0\",\"id\":{},\"method\":\"ping\"}", -32600, Value::Null),
        (br#"{"jsonrpc":"2.0","id":72,"method":"tools/call","params":7}"#, -32602, json!(72)),
        (br#"{"jsonrpc":"2.0","id":"s","method":"tools/call","params":{"name":7}}"#, -32602, json!("s")),
        (br#"{"jsonrpc":"2.0","id":73,"method":"nothing/here"}"#, -32601, json!(73)),
    ];
    for (line, code, id) in lines {
        client.send_line(line).await;
        let reply = client.line().await;
        let text = String::from_utf8_lossy(line);
        assert_eq!((&reply["error"]["code"], &reply["id"]), (&json!(code), &id), "{text:.80}: {reply}");
        assert!(reply.get("id").is_some(), "an error without an id has id null: {reply}");
        still_works(&mut client).await;
    }
    for line in [&b""[..], b"   ", b"{\"jsonrpc\":\"2.0\",\"method\":\"notifications/unknown\",\"params\":7}"] {
        let lines = client.seen.len();
        client.send_line(line).await;
        still_works(&mut client).await;
        assert_eq!(client.seen.len(), lines + 1, "{}", String::from_utf8_lossy(line));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_of_the_protocol_have_the_codes_of_the_specification() {
    for (version, missing) in [("2024-11-05", -32002), ("2025-11-25", -32002)] {
        let mut client = Client::connect(Script::default(), |_| {}).await;
        client.initialize(version).await;
        for (method, params, code) in [
            ("tools/call", json!({"name": "other"}), -32602),
            ("tools/call", json!({}), -32602),
            ("tools/call", json!({"name": "dllm_status", "arguments": []}), -32602),
            ("prompts/get", json!({"name": "other"}), -32602),
            ("prompts/get", json!({"name": "infill_code", "arguments": {"prefix": "a"}}), -32602),
            ("resources/read", json!({"uri": "dllm://nothing"}), missing),
            ("resources/read", json!({"uri": "file:///etc/passwd"}), missing),
            ("resources/read", json!({"uri": "dllm://jobs/none"}), missing),
            ("resources/read", json!({"uri": "dllm://models/none"}), missing),
            ("resources/read", json!({}), -32602),
            ("completion/complete", json!({"ref": 7}), -32602),
            ("other/method", json!({}), -32601),
        ] {
            let id = client.request(method, params.clone()).await;
            let reply = client.reply(id).await;
            assert_eq!(reply["error"]["code"], code, "{version} {method} {params}: {reply}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn issue_3_wrong_types_are_errors_of_the_call() {
    let mut client = Client::start(Script::default()).await;
    for params in [
        Value::Null,
        json!([]),
        json!({}),
        json!({"name": 7}),
        json!({"name": "dllm_status", "arguments": "x"}),
        json!({"name": "dllm_status", "arguments": []}),
        json!({"name": "x".repeat(200_000), "arguments": {}}),
    ] {
        let id = client.request("tools/call", params.clone()).await;
        // What does not have the shape of a request is refused by the protocol's library without the id.
        let mut reply = client.line().await;
        while reply["id"] != json!(id) && !reply["id"].is_null() {
            reply = client.line().await;
        }
        assert!(reply["error"]["message"].is_string(), "{params:.80}: {reply}");
    }
    for arguments in [
        json!({"prompt": ["p"]}),
        json!({"prompt": "p", "seed": 1e300}),
        json!({"prompt": "p", "max_tokens": 1.5}),
        json!({"prompt": "p", "wait_s": "soon"}),
        json!({"prompt": "p", "x".repeat(100_000): 1}),
        json!({"prompt": "p".repeat(1_100_000)}),
        json!({"prompt": "p", "stop": "x"}),
    ] {
        let reply = client.call("dllm_generate", arguments).await;
        assert_eq!(reply["error"]["type"], "bad_argument", "{reply}");
    }
    let id = client.request("resources/read", json!({"uri": "dllm://".to_owned() + &"x".repeat(200_000)})).await;
    assert!(client.reply(id).await["error"]["message"].as_str().unwrap().contains("there is no resource"));
    let id = client.request("prompts/get", json!({"name": "x".repeat(200_000)})).await;
    assert!(client.reply(id).await["error"]["message"].as_str().unwrap().contains("there is no prompt"));
}

#[tokio::test(flavor = "multi_thread")]
async fn issue_3_cancels_of_all_kinds_leave_nothing_running() {
    let mut client = Client::start(Script { steps: 1_000_000, ..Script::default() }).await;
    let cancel =
        |id: Value| json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}});
    client.send(cancel(json!(12345))).await;
    client.send(cancel(json!(null))).await;
    client.send(cancel(json!({"a": 1}))).await;
    let mut ids = Vec::new();
    for n in 0..20 {
        ids.push(client.begin("dllm_generate", json!({"prompt": format!("p{n}")}), &format!("t{n}")).await);
    }
    while client.call("dllm_job", json!({"operation": "list"})).await["data"]["total"] != 20 {}
    for id in ids.iter().rev().chain(&ids) {
        client.send(cancel(json!(id))).await;
    }
    let jobs = client.call("dllm_job", json!({"operation": "list"})).await["data"]["jobs"].clone();
    for job in jobs.as_array().unwrap() {
        assert_eq!(client.finish(&job["job_id"]).await["data"]["state"], "cancelled");
    }
    let next = client.call("dllm_generate", json!({"prompt": "steps=1"})).await;
    assert_eq!(next["data"]["text"], "echo steps=1", "{next}");
}

#[tokio::test(flavor = "multi_thread")]
async fn issue_3_schemas_that_loop_or_point_elsewhere_are_harmless() {
    let mut client = Client::start(Script::default()).await;
    for (schema, answer) in [
        (r##"{"$ref": "#"}"##, "1"),
        (r##"{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}"##, "1"),
        (r#"{"$ref": "https://example.com/schema.json"}"#, "1"),
        (r#"{"$ref": "file:///etc/passwd"}"#, "1"),
        (r#"{"type": "string", "pattern": "^(?=(a+)+$)a"}"#, "\"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!\""),
        (r#"{"type": "string", "pattern": "(a{1000}){1000}"}"#, "\"a\""),
    ] {
        let reply =
            client.call("dllm_generate", json!({"prompt": format!("say={answer}"), "json_schema": schema})).await;
        let refused = reply["error"]["type"] == "bad_argument" || reply["data"]["json_error"].is_string();
        assert!(refused || reply["data"]["json"].is_number(), "{schema}: {reply}");
    }
    let deep = format!("{}1{}", "[".repeat(5000), "]".repeat(5000));
    let reply = client.call("dllm_generate", json!({"prompt": format!("say={deep}"), "json_schema": "{}"})).await;
    assert!(reply["data"]["json_error"].is_string(), "{reply:.300}");
}

#[test]
fn issue_3_a_host_that_closes_its_ear_ends_the_program() {
    let state = tempfile::tempdir().unwrap();
    let mut program = Program::start(state.path(), &[]);
    program.output = None;
    // Its input stays open; the first reply that cannot be written is the sign.
    program.send(&json!({"jsonrpc": "2.0", "id": 7, "method": "ping"}));
    assert!(program.ended().success());
}

/// The library would take each of these for the end of the session.
#[tokio::test(flavor = "multi_thread")]
async fn what_comes_before_initialize_and_is_no_request_is_passed_over() {
    let mut client = Client::connect(Script::default(), |_| {}).await;
    let id = client.request("tools/list", json!({})).await;
    assert_eq!(client.reply(id).await["error"]["code"], -32602);
    for line in [
        json!({"jsonrpc": "2.0", "method": "notifications/initialized"}),
        json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}),
        json!({"jsonrpc": "2.0", "method": "notifications/unknown"}),
        json!({"jsonrpc": "2.0", "id": 5, "result": {}}),
        json!({"jsonrpc": "2.0", "id": 5, "error": {"code": 1, "message": "m"}}),
    ] {
        client.send(line).await;
    }
    assert_eq!(client.initialize("2025-06-18").await["result"]["protocolVersion"], "2025-06-18");
    still_works(&mut client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_initialize_leaves_the_connection_as_the_reply_says() {
    let mut client = Client::start(Script::default()).await;
    assert_eq!(client.initialize("2026-07-28").await["result"]["protocolVersion"], "2025-11-25");
    let id = client.request("ping", json!({})).await;
    let reply = client.reply(id).await;
    assert!(reply.get("result").is_some(), "{reply}");
    let id = client.request("tools/list", json!({})).await;
    let reply = client.reply(id).await;
    assert!(reply["result"]["tools"].is_array() && reply["result"].get("resultType").is_none(), "{reply}");
    for params in [json!({}), json!({"protocolVersion": 7}), json!({"protocolVersion": "2025-06-18"})] {
        let id = client.request("initialize", params.clone()).await;
        let reply = client.reply(id).await;
        assert_eq!(reply["error"]["code"], -32602, "{params}: {reply}");
        assert!(reply["error"]["message"].as_str().unwrap().contains("initialize"), "{reply}");
    }
    still_works(&mut client).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_in_use_is_refused_and_the_first_call_answered() {
    let script = Script { step: std::time::Duration::from_millis(5), ..Script::default() };
    let mut client = Client::start(script).await;
    let call = |prompt: &str| json!({"jsonrpc": "2.0", "id": 7777, "method": "tools/call", "params": {"name": "dllm_generate", "arguments": {"prompt": prompt}}});
    client.send(call("steps=60")).await;
    client.send(json!({"jsonrpc": "2.0", "id": 7777, "method": "ping"})).await;
    assert_eq!(client.reply(7777).await["error"]["code"], -32600);
    let first = client.reply(7777).await;
    assert_eq!(first["result"]["structuredContent"]["success"], true, "{first}");
    // An id is free after its answer, and after its cancellation.
    client.send(call("steps=100000")).await;
    let cancelled = json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7777}});
    client.send(cancelled).await;
    client.send(json!({"jsonrpc": "2.0", "id": 7777, "method": "ping"})).await;
    assert_eq!(client.reply(7777).await["result"], json!({}));
}

#[tokio::test(flavor = "multi_thread")]
async fn completion_tells_models_from_jobs() {
    let mut client = Client::start(Script::default()).await;
    let job = client.call("dllm_generate", json!({"prompt": "p"})).await["data"]["job_id"].clone();
    let mut complete = async |of: Value| {
        let params = json!({"ref": of, "argument": {"name": "id", "value": ""}});
        let id = client.request("completion/complete", params).await;
        client.reply(id).await
    };
    let resource = |uri: &str| json!({"type": "ref/resource", "uri": uri});
    let values = |reply: Value| reply["result"]["completion"]["values"].clone();
    assert_eq!(values(complete(resource("dllm://models/{id}")).await), json!(["scripted", "other"]));
    for uri in ["dllm://jobs/{id}", "dllm://jobs/{id}/results"] {
        assert_eq!(values(complete(resource(uri)).await), json!([job]), "{uri}");
    }
    for prompt in ["infill_code", "nope"] {
        assert_eq!(values(complete(json!({"type": "ref/prompt", "name": prompt})).await), json!([]), "{prompt}");
    }
    for unknown in [resource("nope"), resource("dllm://jobs/{id}/nope")] {
        assert_eq!(complete(unknown.clone()).await["error"]["code"], -32602, "{unknown}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_model_that_is_named_is_unloaded() {
    let mut client = Client::start(Script::default()).await;
    let change = |operation: &str, model: &str| json!({"operation": operation, "model": model, "wait_s": 20});
    assert_eq!(client.call("dllm_models", change("load", "other")).await["success"], true);
    let refused = client.call("dllm_models", change("unload", "nope")).await;
    assert_eq!(refused["error"]["type"], "bad_argument", "{refused}");
    assert!(refused["message"].as_str().unwrap().contains("\"nope\" is not loaded (\"other\" is)"), "{refused}");
    assert_eq!(client.call("dllm_models", json!({"operation": "list"})).await["data"]["loaded"], "other");
    let done = client.call("dllm_models", change("unload", "other")).await;
    assert_eq!(done["data"]["engine"]["state"], "unloaded", "{done}");
}
