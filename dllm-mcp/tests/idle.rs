//! The model is unloaded after a time without work, and only then.

mod common;

use std::sync::atomic::Ordering;

use common::{Client, PATIENCE, Script};
use dllm_mcp::worker::Engine;
use serde_json::json;

/// 60 ms.
const MINUTES: f64 = 0.001;

async fn unloaded(client: &Client) {
    let mut engine = client.server.app().worker.watch_engine();
    let unloaded = engine.wait_for(|engine| matches!(engine, Engine::Unloaded));
    tokio::time::timeout(PATIENCE, unloaded).await.expect("the model stays").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn issue_3_an_idle_model_is_unloaded_and_loaded_again() {
    let script = Script::default();
    let log = script.log.clone();
    let mut client = Client::connect(script, |config| config.idle_minutes = MINUTES).await;
    client.initialize("2025-06-18").await;
    for loads in 1..=2 {
        assert_eq!(client.call("dllm_generate", json!({"prompt": "p"})).await["success"], true);
        assert_eq!(log.loads.load(Ordering::SeqCst), loads);
        unloaded(&client).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn issue_3_a_model_that_works_is_not_unloaded() {
    // 500 steps of a millisecond are longer than the idle time.
    let script = Script { steps: 500, ..Script::default() };
    let log = script.log.clone();
    let mut client = Client::connect(script, |config| config.idle_minutes = MINUTES).await;
    client.initialize("2025-06-18").await;
    assert_eq!(client.call("dllm_generate", json!({"prompt": "p"})).await["data"]["text"], "echo p");
    assert_eq!(log.loads.load(Ordering::SeqCst), 1);
}
