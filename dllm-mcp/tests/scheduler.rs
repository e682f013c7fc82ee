//! Continuous batching: who gets a lane, and when.

mod common;

use std::fmt::Write as _;
use std::time::Duration;

use common::{Client, Script};
use serde_json::json;

fn items(n: usize) -> String {
    let mut lines = String::new();
    for i in 0..n {
        writeln!(lines, r#"{{"id":"i{i}","prompt":"batch {i} steps=2"}}"#).unwrap();
    }
    lines
}

async fn with_batch(script: Script, n: usize) -> (Client, serde_json::Value) {
    let mut client = Client::start(script).await;
    let file = client.folder.path().join("files/in.jsonl");
    std::fs::write(&file, items(n)).unwrap();
    let batch = client.call("dllm_batch", json!({"input_path": "in.jsonl", "output_path": "out.jsonl"})).await;
    assert_eq!(batch["data"]["accepted"], n, "{batch}");
    (client, batch["data"]["job_id"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interactive_request_is_not_stuck_behind_ten_thousand_items() {
    let script = Script { lanes: 2, step: Duration::from_millis(1), ..Script::default() };
    let log = script.log.clone();
    let (mut client, job) = with_batch(script, 10_000).await;
    while log.admitted.lock().unwrap().len() < 10 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let reply = client.call("dllm_generate", json!({"prompt": "urgent"})).await;
    assert_eq!(reply["data"]["text"], "echo urgent");
    assert!(log.admitted.lock().unwrap().len() < 5000, "the batch went first");
    client.call("dllm_job", json!({"operation": "cancel", "job_id": job})).await;
    assert_eq!(client.finish(&job).await["data"]["state"], "cancelled");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_does_not_starve_behind_interactive_requests() {
    let script = Script { lanes: 1, ..Script::default() };
    let log = script.log.clone();
    let (mut client, job) = with_batch(script, 8).await;
    for n in 0..24 {
        client.call("dllm_generate", json!({"prompt": format!("chat {n} steps=2"), "wait_s": 0})).await;
    }
    assert_eq!(client.finish(&job).await["data"]["state"], "done");
    let admitted = log.admitted.lock().unwrap().clone();
    let last_batch = admitted.iter().rposition(|prompt| prompt.starts_with("batch")).unwrap();
    let chats_before = admitted[..last_batch].iter().filter(|prompt| prompt.starts_with("chat")).count();
    assert!(chats_before <= 24, "{admitted:?}");
    for run in admitted[..last_batch].chunk_by(|a, b| a.starts_with("chat") == b.starts_with("chat")) {
        assert!(!run[0].starts_with("chat") || run.len() <= 3, "{admitted:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_batches_take_turns() {
    let script = Script { lanes: 1, ..Script::default() };
    let log = script.log.clone();
    let mut client = Client::start(script).await;
    let list = |name: &str, n: usize| {
        json!((0..n).map(|i| json!({"id": i, "prompt": format!("{name}{i} steps=30")})).collect::<Vec<_>>()).to_string()
    };
    let a = client.call("dllm_batch", json!({"items_json": list("a", 20)})).await["data"]["job_id"].clone();
    let b = client.call("dllm_batch", json!({"items_json": list("b", 5)})).await["data"]["job_id"].clone();
    client.finish(&b).await;
    client.finish(&a).await;
    let admitted = log.admitted.lock().unwrap().clone();
    let last_b = admitted.iter().rposition(|prompt| prompt.starts_with('b')).unwrap();
    assert!(admitted[last_b..].len() > 5, "b waited for a: {admitted:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn lanes_are_refilled_at_once() {
    let script = Script { lanes: 4, step: Duration::from_millis(5), ..Script::default() };
    let log = script.log.clone();
    let mut client = Client::start(script).await;
    // One long item and many short ones: the short ones pass by.
    let mut list = vec![json!({"id": "long", "prompt": "steps=40"})];
    list.extend((0..20).map(|i| json!({"id": format!("s{i}"), "prompt": format!("short {i} steps=2")})));
    let job = client.call("dllm_batch", json!({"items_json": json!(list).to_string()})).await["data"]["job_id"].clone();
    client.finish(&job).await;
    let page = client.call("dllm_job", json!({"operation": "results", "job_id": job})).await;
    let results = page["data"]["results"].as_array().unwrap();
    assert_eq!(results.len(), 21);
    assert_eq!(results.last().unwrap()["id"], "long");
    assert_eq!(log.admitted.lock().unwrap().len(), 21);
}
