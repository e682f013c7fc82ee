//! Complaints about hangs, timeouts, progress and cancelling, each as a test with a slow scripted engine.

mod common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Client, Script, body};
use serde_json::{Value, json};

fn slow() -> Script {
    Script { step: Duration::from_millis(20), steps: 100, ..Script::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn c01_a_long_job_under_a_short_client_timeout() {
    let mut client = Client::start(slow()).await;
    let first = client.call("dllm_generate", json!({"prompt": "p", "wait_s": 0.2})).await;
    assert_eq!(first["success"], true);
    assert!(first["data"]["job_id"].is_string() && first["data"].get("text").is_none(), "{first}");
    let id = first["data"]["job_id"].clone();
    let done = client.call("dllm_job", json!({"operation": "wait", "job_id": id, "wait_s": 25})).await;
    assert_eq!(done["data"]["text"], "echo p");
}

#[tokio::test(flavor = "multi_thread")]
async fn c02_polling_finishes_and_the_next_call_works() {
    let mut client = Client::start(slow()).await;
    let first = client.call("dllm_generate", json!({"prompt": "p", "wait_s": 0})).await;
    let done = client.finish(&first["data"]["job_id"]).await;
    assert_eq!(done["data"]["state"], "done");
    let next = client.call("dllm_generate", json!({"prompt": "steps=1"})).await;
    assert_eq!(next["data"]["finish_reason"], "stop");
}

#[tokio::test(flavor = "multi_thread")]
async fn c03_no_token_no_notifications() {
    let mut client = Client::start(slow()).await;
    client.call("dllm_generate", json!({"prompt": "steps=50"})).await;
    assert!(client.notifications().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn c04_signs_of_life_during_a_long_load() {
    // A twelfth of the real times: a load of 3.3 s, a heartbeat each 0.4 s.
    let script = Script { load: Duration::from_millis(3300), ..Script::default() };
    let mut client = Client::start(script).await;
    let id = client.begin("dllm_generate", json!({"prompt": "p"}), "t").await;
    let reply = client.reply(id).await;
    assert_eq!(body(&reply)["success"], true);
    let notes = client.notifications();
    assert!(notes.len() >= 4, "{} notifications", notes.len());
    assert!(notes.iter().any(|note| note["params"]["message"].as_str().unwrap().starts_with("loading scripted")));
    let values: Vec<f64> = notes.iter().map(|note| note["params"]["progress"].as_f64().unwrap()).collect();
    assert!(values.is_sorted_by(|a, b| a < b), "{values:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn progress_increases_and_ends_before_the_reply() {
    let mut client = Client::start(slow()).await;
    let id = client.begin("dllm_generate", json!({"prompt": "p", "n": 3}), "t").await;
    let reply = client.reply(id).await;
    assert_eq!(body(&reply)["data"]["candidates"].as_array().unwrap().len(), 3);
    let count = client.notifications().len();
    let values: Vec<f64> = client.notifications().iter().map(|n| n["params"]["progress"].as_f64().unwrap()).collect();
    assert!(count > 1 && values.is_sorted_by(|a, b| a < b), "{values:?}");
    assert!(client.notifications().iter().all(|n| n["params"]["total"].as_f64().is_none_or(|total| total <= 300.0)));
    client.call("dllm_status", json!({})).await;
    assert_eq!(client.notifications().len(), count);
}

#[tokio::test(flavor = "multi_thread")]
async fn c09_cancel_stops_the_engine_within_a_step() {
    let script = Script { step: Duration::from_millis(50), steps: 100_000, ..Script::default() };
    let log = script.log.clone();
    let mut client = Client::start(script).await;
    let id = client.begin("dllm_generate", json!({"prompt": "p"}), "t").await;
    while client.notifications().len() < 2 {
        client.line().await;
    }
    client.send(json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}})).await;
    // The server has read the cancel when it answers this.
    client.call("dllm_status", json!({})).await;
    let job = client.call("dllm_job", json!({"operation": "list"})).await["data"]["jobs"][0]["job_id"].clone();
    let at_cancel = log.steps.load(Ordering::SeqCst);
    let ended = client.finish(&job).await;
    assert_eq!(ended["data"]["state"], "cancelled");
    assert!(log.steps.load(Ordering::SeqCst) <= at_cancel + 1);
    let (notes, lines) = (client.notifications().len(), client.seen.len());
    tokio::time::sleep(Duration::from_millis(700)).await;
    client.call("dllm_status", json!({})).await;
    assert_eq!((client.notifications().len(), client.seen.len()), (notes, lines + 1));
    assert!(client.seen.iter().all(|line| line["id"] != json!(id)), "a cancelled call has no reply");
}

#[tokio::test(flavor = "multi_thread")]
async fn c10_max_run_s_ends_what_nobody_cancels() {
    let mut client = Client::start(Script { steps: 1_000_000, ..Script::default() }).await;
    let reply = client.call("dllm_generate", json!({"prompt": "p", "max_run_s": 0.3})).await;
    assert_eq!(reply["error"]["type"], "deadline");
    let next = client.call("dllm_generate", json!({"prompt": "steps=1"})).await;
    assert_eq!(next["success"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn c19_a_panic_is_an_answer() {
    let mut client = Client::start(Script::default()).await;
    let reply = client.call("dllm_generate", json!({"prompt": "panic"})).await;
    assert_eq!((reply["success"].clone(), reply["error"]["type"].clone()), (json!(false), json!("internal")));
    let next = client.call("dllm_generate", json!({"prompt": "p"})).await;
    assert_eq!(next["data"]["text"], "echo p");
}

/// In a handler, on a thread for blocking work, and behind a resource.
#[tokio::test(flavor = "multi_thread")]
async fn c19_a_panic_outside_of_the_engine_is_an_answer_too() {
    let mut client = Client::start(Script { no_models: true, ..Script::default() }).await;
    let list = client.call("dllm_models", json!({"operation": "list"})).await;
    assert_eq!(list["error"]["type"], "internal", "{list}");
    let id = client.request("resources/read", json!({"uri": "dllm://models/other"})).await;
    assert_eq!(client.reply(id).await["error"]["code"], -32603);
    let argument =
        json!({"ref": {"type": "ref/resource", "uri": "dllm://models/{id}"}, "argument": {"name": "id", "value": ""}});
    let id = client.request("completion/complete", argument).await;
    assert_eq!(client.reply(id).await["result"]["completion"]["values"], json!([]));
    assert_eq!(client.call("dllm_generate", json!({"prompt": "p"})).await["data"]["text"], "echo p");
}

#[tokio::test(flavor = "multi_thread")]
async fn c23_wait_is_a_long_poll_with_an_estimate() {
    let mut client = Client::start(slow()).await;
    let first = client.call("dllm_generate", json!({"prompt": "p", "wait_s": 0})).await;
    let id = first["data"]["job_id"].clone();
    let poll = client.call("dllm_job", json!({"operation": "wait", "job_id": id, "wait_s": 0.5})).await;
    assert_eq!(poll["data"]["state"], "running");
    assert!(poll["data"]["eta_s"].as_f64().unwrap() > 0.0, "{poll}");
    let done = client.call("dllm_job", json!({"operation": "wait", "job_id": id, "wait_s": 25})).await;
    assert_eq!(done["data"]["text"], "echo p");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_says_so() {
    let script = Script { lanes: 1, steps: 100_000, ..Script::default() };
    let mut client = Client::connect(script, |config| config.queue = 2).await;
    client.initialize("2025-06-18").await;
    let mut last = Value::Null;
    for _ in 0..5 {
        last = client.call("dllm_generate", json!({"prompt": "p", "wait_s": 0})).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!((last["error"]["type"].clone(), last["error"]["retryable"].clone()), (json!("queue_full"), json!(true)));
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_switched_while_requests_wait() {
    let mut client = Client::start(slow()).await;
    let first = client.call("dllm_generate", json!({"prompt": "p", "wait_s": 0})).await;
    let load = client.call("dllm_models", json!({"operation": "load", "model": "other"})).await;
    assert_eq!(load["data"]["engine"]["loaded"]["id"], "other", "{load}");
    // What ran was finished first.
    assert_eq!(client.finish(&first["data"]["job_id"]).await["data"]["state"], "done");
    let missing = client.call("dllm_models", json!({"operation": "load", "model": "missing"})).await;
    assert_eq!(missing["error"]["type"], "load_failed");
    let unload = client.call("dllm_models", json!({"operation": "unload"})).await;
    assert_eq!(unload["data"]["engine"]["state"], "unloaded");
    let next = client.call("dllm_generate", json!({"prompt": "steps=1"})).await;
    assert_eq!(next["success"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_load_is_told_and_tried_again() {
    let fault = dllm_mcp::Fault::new(dllm_mcp::Kind::OutOfVram, "the model needs 18 GiB but CUDA0 has 4 GiB free");
    let script = Script { load_fault: Some(fault), ..Script::default() };
    let log = script.log.clone();
    let mut client = Client::start(script).await;
    for n in 1..=2 {
        let reply = client.call("dllm_generate", json!({"prompt": "p"})).await;
        assert_eq!(reply["error"]["type"], "out_of_vram");
        assert!(reply["message"].as_str().unwrap().contains("18 GiB"));
        assert_eq!(log.loads.load(Ordering::SeqCst), n);
    }
}
