//! Batches: files in, files out, resume.

mod common;

use common::{Client, Script};
use serde_json::{Value, json};

fn lines(client: &Client, name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(client.folder.path().join("files").join(name)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

async fn run(client: &mut Client, input: impl AsRef<[u8]>, more: Value) -> Value {
    std::fs::write(client.folder.path().join("files/in.jsonl"), input).unwrap();
    let mut arguments = json!({"input_path": "in.jsonl", "output_path": "out.jsonl", "wait_s": 20});
    arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    client.call("dllm_batch", arguments).await
}

#[tokio::test(flavor = "multi_thread")]
async fn windows_lines_blank_lines_and_a_byte_order_mark_are_no_trouble() {
    let mut client = Client::start(Script::default()).await;
    let reply =
        run(&mut client, "\u{feff}{\"id\":\"ä\",\"x\":1}\r\n\r\n{\"x\":2}", json!({"template": "x={{x}}"})).await;
    assert_eq!(
        (reply["data"]["accepted"].clone(), reply["data"]["state"].clone()),
        (json!(2), json!("done")),
        "{reply}"
    );
    let mut texts: Vec<_> =
        lines(&client, "out.jsonl").iter().map(|line| (line["id"].clone(), line["text"].clone())).collect();
    texts.sort_by_key(|(id, _)| id.to_string());
    assert_eq!(texts, [(json!("line-3"), json!("echo x=2")), (json!("ä"), json!("echo x=1"))]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_items_are_named_with_their_reason() {
    let mut client = Client::start(Script::default()).await;
    let long = "y".repeat(1_100_000);
    let mut input = format!("{{\"id\":\"a\",\"prompt\":\"p\"}}\nnonsense\n{{\"id\":\"a\",\"prompt\":\"q\"}}\n{long}\n")
        .into_bytes();
    input.extend(b"{\"id\":\"u\",\"prompt\":\"\xff\xfe\"}\n");
    input.extend(
        format!("{{\"id\":\"d\",\"prompt\":{}\n{{\"id\":\"b\",\"prompt\":\"p\"}}\n", "[".repeat(10_000)).as_bytes(),
    );
    let reply = run(&mut client, &input, json!({})).await;
    assert_eq!(
        (reply["data"]["accepted"].clone(), reply["data"]["rejected_count"].clone()),
        (json!(2), json!(5)),
        "{reply}"
    );
    let told: Vec<_> =
        reply["data"]["rejected"].as_array().unwrap().iter().map(|r| r["line"].as_u64().unwrap()).collect();
    assert_eq!(told, [2, 3, 4, 5, 6]);
    assert_eq!(lines(&client, "out.jsonl").len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_skips_what_is_ok_and_redoes_the_torn_line_and_failures() {
    let mut client = Client::start(Script::default()).await;
    let done = "{\"id\":\"a\",\"ok\":true,\"text\":\"old\"}\n{\"id\":\"b\",\"ok\":false}\n{\"id\":\"c\",\"ok\":tr";
    std::fs::write(client.folder.path().join("files/out.jsonl"), done).unwrap();
    let input = "{\"id\":\"a\",\"prompt\":\"p\"}\n{\"id\":\"b\",\"prompt\":\"p\"}\n{\"id\":\"c\",\"prompt\":\"p\"}\n";
    let reply = run(&mut client, input, json!({})).await;
    assert_eq!((reply["data"]["accepted"].clone(), reply["data"]["skipped"].clone()), (json!(2), json!(1)), "{reply}");
    let mut ok: Vec<_> = lines(&client, "out.jsonl")
        .into_iter()
        .filter(|l| l["ok"] == true)
        .map(|l| l["id"].as_str().unwrap().to_owned())
        .collect();
    ok.sort();
    assert_eq!(ok, ["a", "b", "c"]);
    // Nothing is left to do, and that is no error.
    let again = run(&mut client, input, json!({})).await;
    assert_eq!(
        (again["data"]["accepted"].clone(), again["data"]["state"].clone()),
        (json!(0), json!("done")),
        "{again}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_miss_the_schema_are_not_ok() {
    let mut client = Client::start(Script::default()).await;
    let reply =
        run(&mut client, "{\"id\":\"a\",\"prompt\":\"p\"}\n", json!({"json_schema": "{\"type\":\"object\"}"})).await;
    assert_eq!(reply["data"]["failed"], 1, "{reply}");
    let line = &lines(&client, "out.jsonl")[0];
    assert_eq!((line["ok"].clone(), line["error"]["type"].clone()), (json!(false), json!("invalid_json")));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_item_that_panics_does_not_end_the_batch() {
    let script = Script { lanes: 1, ..Script::default() };
    let mut client = Client::start(script).await;
    let input =
        "{\"id\":\"a\",\"prompt\":\"p\"}\n{\"id\":\"b\",\"prompt\":\"panic\"}\n{\"id\":\"c\",\"prompt\":\"p\"}\n";
    let reply = run(&mut client, input, json!({})).await;
    assert_eq!((reply["data"]["state"].clone(), reply["data"]["failed"].clone()), (json!("done"), json!(1)), "{reply}");
    assert_eq!(lines(&client, "out.jsonl").len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_jobs_do_not_write_one_file() {
    let mut client = Client::start(Script { steps: 100_000, ..Script::default() }).await;
    let first = run(&mut client, "{\"id\":\"a\",\"prompt\":\"p\"}\n", json!({"wait_s": 0})).await;
    // Not through the first one's input: to change that would end it.
    let arguments = json!({"items_json": [{"id": "b", "prompt": "p"}], "output_path": "out.jsonl"});
    let second = client.call("dllm_batch", arguments).await;
    assert_eq!(
        (&second["error"]["type"], &second["error"]["retryable"]),
        (&json!("path_refused"), &json!(true)),
        "{second}"
    );
    assert!(second["error"]["suggestions"][0].as_str().unwrap().contains("wait for the end"), "{second}");
    let cancelled = client.call("dllm_job", json!({"operation": "cancel", "job_id": first["data"]["job_id"]})).await;
    assert_eq!(cancelled["data"]["state"], "cancelled");
    assert!(lines(&client, "out.jsonl").is_empty(), "what was cancelled is not done");
}

#[tokio::test(flavor = "multi_thread")]
async fn results_come_in_pages() {
    let mut client = Client::start(Script::default()).await;
    let items: String = (0..300).map(|i| format!("{{\"id\":\"i{i}\",\"prompt\":\"long=500 {i}\"}}\n")).collect();
    let job = run(&mut client, &items, json!({})).await["data"]["job_id"].clone();
    client.finish(&job).await;
    let (mut ids, mut cursor) = (std::collections::HashSet::new(), json!(""));
    while !cursor.is_null() {
        let page = client.call("dllm_job", json!({"operation": "results", "job_id": job, "cursor": cursor})).await;
        for line in page["data"]["results"].as_array().unwrap() {
            assert!(ids.insert(line["id"].as_str().unwrap().to_owned()), "doubled {line}");
        }
        cursor = page["data"]["nextCursor"].clone();
    }
    assert_eq!(ids.len(), 300);
}

#[tokio::test(flavor = "multi_thread")]
async fn items_may_come_as_a_value() {
    let mut client = Client::start(Script::default()).await;
    let reply = client.call("dllm_batch", json!({"items_json": [{"id": "a", "prompt": "p"}], "wait_s": 10})).await;
    assert_eq!(
        (reply["data"]["accepted"].clone(), reply["data"]["state"].clone()),
        (json!(1), json!("done")),
        "{reply}"
    );
    let job = reply["data"]["job_id"].clone();
    let page = client.call("dllm_job", json!({"operation": "results", "job_id": job})).await;
    assert_eq!(page["data"]["results"][0]["text"], "echo p");
}
