//! What `dllm_job` says of each kind of job, and that every error says what to do about this very error.

mod common;

use std::time::Duration;

use common::{Client, PATIENCE, Script};
use serde_json::{Value, json};

async fn job(client: &mut Client, operation: &str, id: &Value) -> Value {
    client.call("dllm_job", json!({"operation": operation, "job_id": id, "wait_s": 25})).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_is_cancelled_before_it_begins_and_refused_afterwards() {
    let script = Script { load: Duration::from_millis(800), steps: 1_000_000, ..Script::default() };
    let log = script.log.clone();
    let mut client = Client::start(script).await;
    let busy = client.call("dllm_generate", json!({"prompt": "p", "wait_s": 0})).await["data"]["job_id"].clone();
    while log.steps.load(std::sync::atomic::Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for arguments in
        [json!({"operation": "load", "model": "other", "wait_s": 0}), json!({"operation": "unload", "wait_s": 0})]
    {
        let waits = client.call("dllm_models", arguments).await["data"]["job_id"].clone();
        assert_eq!(job(&mut client, "get", &waits).await["data"]["state"], "queued");
        assert_eq!(job(&mut client, "cancel", &waits).await["data"]["state"], "cancelled");
    }
    // What ran goes on with the old model, and nothing else was loaded.
    assert_eq!(job(&mut client, "get", &busy).await["data"]["state"], "running");
    assert_eq!(job(&mut client, "cancel", &busy).await["data"]["state"], "cancelled");
    assert_eq!(log.loads.load(std::sync::atomic::Ordering::SeqCst), 1);
    let load = client.call("dllm_models", json!({"operation": "load", "model": "other", "wait_s": 0})).await;
    let load = load["data"]["job_id"].clone();
    while job(&mut client, "get", &load).await["data"]["state"] == "queued" {}
    let refused = job(&mut client, "cancel", &load).await;
    assert_eq!(refused["error"]["type"], "bad_argument", "{refused}");
    assert!(refused["message"].as_str().unwrap().contains("cannot be interrupted"), "{refused}");
    assert!(refused["error"]["suggestions"][0].as_str().unwrap().contains("unload"), "{refused}");
    assert_eq!(job(&mut client, "wait", &load).await["data"]["state"], "done");
    let late = job(&mut client, "cancel", &load).await;
    assert!(
        late["data"]["state"] == "done" && late["message"].as_str().unwrap().contains("had ended before"),
        "{late}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_behind_a_load_is_cancelled_and_ended_by_its_time() {
    let script = Script { load: Duration::from_secs(3600), ..Script::default() };
    let mut client = Client::start(script).await;
    let first = client.call("dllm_generate", json!({"prompt": "p", "wait_s": 0})).await["data"]["job_id"].clone();
    assert_eq!(job(&mut client, "cancel", &first).await["data"]["state"], "cancelled");
    let late = client.call("dllm_generate", json!({"prompt": "p", "max_run_s": 0.05, "wait_s": 20})).await;
    assert_eq!(late["error"]["type"], "deadline", "{late}");
    let polled = client.call("dllm_generate", json!({"prompt": "p", "max_run_s": 0.05, "wait_s": 0})).await;
    let end = tokio::time::timeout(PATIENCE, client.finish(&polled["data"]["job_id"])).await.unwrap();
    assert_eq!(end["data"]["fault"]["type"], "deadline", "{end}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_has_no_results() {
    let mut client = Client::start(Script::default()).await;
    for arguments in [json!({"operation": "load", "model": "other"}), json!({"operation": "unload"})] {
        let id = client.call("dllm_models", arguments).await["data"]["job_id"].clone();
        let reply = job(&mut client, "results", &id).await;
        assert_eq!(reply["error"]["type"], "bad_argument", "{reply}");
        assert!(reply["message"].as_str().unwrap().contains("no results"), "{reply}");
    }
}

/// All pages of a job's results; there must be an end.
async fn pages(client: &mut Client, id: &Value) -> Vec<Value> {
    let (mut all, mut cursor) = (Vec::new(), json!(""));
    for _ in 0..100 {
        let page = client.call("dllm_job", json!({"operation": "results", "job_id": id, "cursor": cursor})).await;
        all.extend(page["data"]["results"].as_array().unwrap_or_else(|| panic!("{page}")).clone());
        cursor = page["data"]["nextCursor"].clone();
        if cursor.is_null() {
            return all;
        }
    }
    panic!("the pages have no end: {all:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn candidates_are_told_apart() {
    let mut client = Client::start(Script::default()).await;
    let reply = client.call("dllm_generate", json!({"prompt": "p", "n": 3, "seed": 1})).await;
    let of = |list: &[Value]| -> Vec<(Value, Value)> {
        list.iter().map(|c| (c["candidate"].clone(), c["seed"].clone())).collect()
    };
    let expected = [0, 1, 2].map(|n| (json!(n), json!(1)));
    assert_eq!(of(reply["data"]["candidates"].as_array().unwrap()), expected);
    assert_eq!(of(&pages(&mut client, &reply["data"]["job_id"]).await), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_job_has_an_end_of_results() {
    let mut client = Client::start(Script { steps: 1_000_000, ..Script::default() }).await;
    let id = client.call("dllm_generate", json!({"prompt": "p", "n": 2, "wait_s": 0})).await["data"]["job_id"].clone();
    job(&mut client, "cancel", &id).await;
    let all = pages(&mut client, &id).await;
    assert!(all.len() == 2 && all.iter().all(|entry| entry["error"]["type"] == "cancelled"), "{all:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn results_with_a_torn_end_have_an_end() {
    let mut client = Client::start(Script::default()).await;
    let items = json!([{"id": "a", "prompt": "p"}]);
    let reply = client.call("dllm_batch", json!({"items_json": items, "output_path": "o.jsonl", "wait_s": 20})).await;
    let path = client.folder.path().join("files/o.jsonl");
    let text = std::fs::read_to_string(&path).unwrap() + "{\"id\":\"b\",\"o";
    std::fs::write(&path, text).unwrap();
    assert_eq!(pages(&mut client, &reply["data"]["job_id"]).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_report_of_a_benchmark_that_nobody_waited_for_can_be_read() {
    let mut client = Client::start(Script::default()).await;
    for preset in ["quick", "standard"] {
        let id = client.call("dllm_benchmark", json!({"preset": preset, "wait_s": 0})).await["data"]["job_id"].clone();
        for operation in ["wait", "get"] {
            let reply = job(&mut client, operation, &id).await;
            assert!(reply["data"]["tokens_per_second"].as_f64().unwrap() > 0.0, "{operation}: {reply}");
            assert_eq!((&reply["data"]["preset"], &reply["data"]["state"]), (&json!(preset), &json!("done")));
        }
        let all = pages(&mut client, &id).await;
        assert!(all.len() == 1 && all[0]["tokens_per_second"].is_number(), "{all:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_larger_than_the_queue_runs_when_nobody_waits() {
    let mut client = Client::connect(Script::default(), |config| (config.queue, config.lanes) = (2, 8)).await;
    client.initialize("2025-06-18").await;
    let reply = client.call("dllm_generate", json!({"prompt": "p", "n": 16})).await;
    assert_eq!(reply["data"]["candidates"].as_array().map(Vec::len), Some(16), "{reply}");
    assert_eq!(client.call("dllm_benchmark", json!({"preset": "standard"})).await["data"]["requests"], 16);
}

/// Type, whether the same call may succeed later, and words of the next action.
#[tokio::test(flavor = "multi_thread")]
async fn errors_say_what_to_do_about_them() {
    let mut client = Client::start(Script { lanes: 1, steps: 1_000_000, ..Script::default() }).await;
    let files = client.folder.path().join("files");
    std::fs::write(files.join("there.jsonl"), "").unwrap();
    std::fs::write(files.join("other.txt"), "words\n").unwrap();
    let item = json!([{"id": "a", "prompt": "p"}]);
    let running = client.call("dllm_batch", json!({"items_json": item, "output_path": "busy.jsonl"})).await;
    assert_eq!(running["success"], true, "{running}");
    let to = |name: &str, resume: bool| json!({"items_json": item, "output_path": name, "resume": resume});
    let cases = [
        ("dllm_batch", to("there.jsonl", false), "path_refused", false, "resume=true"),
        ("dllm_batch", to("other.txt", true), "path_refused", false, "another output_path"),
        ("dllm_batch", to("busy.jsonl", true), "path_refused", true, "wait for the end"),
        ("dllm_batch", to("missing/x.jsonl", true), "path_refused", false, "folder is missing"),
        ("dllm_batch", to("x.", true), "path_refused", false, "a name that each system can have"),
        ("dllm_batch", to("/elsewhere/x", true), "path_refused", false, ""),
        ("dllm_batch", to("../x", true), "path_refused", false, "roots"),
        ("dllm_batch", json!({"input_path": "missing.jsonl"}), "path_refused", false, "missing"),
        ("dllm_generate", json!({"prompt": "p", "n": 0}), "bad_argument", false, "limits"),
        ("dllm_generate", json!({"prompt": "p", "stream": true}), "wrong_server", false, "llm_generation_tool"),
        ("dllm_generate", json!({"prompt": "p", "max_run_s": 0.05}), "deadline", true, "max_run_s"),
        ("dllm_job", json!({"operation": "get", "job_id": "x"}), "unknown_job", false, "list"),
    ];
    for (tool, arguments, kind, retryable, words) in cases {
        let reply = client.call(tool, arguments.clone()).await;
        let error = &reply["error"];
        assert_eq!((&error["type"], &error["retryable"]), (&json!(kind), &json!(retryable)), "{arguments}: {reply}");
        assert!(error["suggestions"][0].as_str().unwrap().contains(words), "{arguments}: {reply}");
    }
    client.call("dllm_job", json!({"operation": "cancel", "job_id": running["data"]["job_id"]})).await;
}
