//! Batches whose files are changed by others while they run, and files with several names.

mod common;

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Client, Log, Script};
use serde_json::{Value, json};

const ITEMS: usize = 2000;

fn items(n: std::ops::Range<usize>) -> String {
    n.map(|i| {
        format!("{{\"id\":\"i{i}\",\"prompt\":\"item {i} steps=1 of a prompt that fills the reader's buffer\"}}\n")
    })
    .collect()
}

/// A batch over `in.jsonl` that has begun, and its two files.
async fn begun() -> (Client, Value, PathBuf, PathBuf, Arc<Log>) {
    let script = Script { lanes: 1, step: Duration::from_micros(500), ..Script::default() };
    let log = script.log.clone();
    let mut client = Client::start(script).await;
    let files = client.folder.path().join("files");
    let (input, output) = (files.join("in.jsonl"), files.join("out.jsonl"));
    std::fs::write(&input, items(0..ITEMS)).unwrap();
    let reply = client.call("dllm_batch", json!({"input_path": "in.jsonl", "output_path": "out.jsonl"})).await;
    assert_eq!(reply["data"]["accepted"], ITEMS, "{reply}");
    while log.steps.load(Ordering::SeqCst) < 5 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    (client, reply["data"]["job_id"].clone(), input, output, log)
}

#[tokio::test(flavor = "multi_thread")]
async fn issue_3_an_input_that_shrinks_is_told() {
    let (mut client, job, input, ..) = begun().await;
    OpenOptions::new().write(true).open(&input).unwrap().set_len(100).unwrap();
    let end = client.finish(&job).await;
    assert_eq!(
        (end["data"]["state"].clone(), end["data"]["fault"]["type"].clone()),
        (json!("failed"), json!("path_refused"))
    );
    assert!(end["data"]["fault"]["message"].as_str().unwrap().contains("the input changed"), "{end}");
}

#[tokio::test(flavor = "multi_thread")]
async fn issue_3_lines_added_to_the_input_wait_for_the_next_batch() {
    let (mut client, job, input, output, _) = begun().await;
    let mut file = OpenOptions::new().append(true).open(&input).unwrap();
    file.write_all(items(ITEMS..ITEMS + 7).as_bytes()).unwrap();
    let end = client.finish(&job).await;
    assert_eq!((end["data"]["state"].clone(), end["data"]["done"].clone()), (json!("done"), json!(ITEMS)), "{end}");
    assert_eq!(std::fs::read_to_string(&output).unwrap().lines().count(), ITEMS);
    let rest =
        client.call("dllm_batch", json!({"input_path": "in.jsonl", "output_path": "out.jsonl", "wait_s": 20})).await;
    assert_eq!((rest["data"]["accepted"].clone(), rest["data"]["skipped"].clone()), (json!(7), json!(ITEMS)), "{rest}");
}

/// Windows refuses to move a file that is written.
#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn issue_3_an_output_that_was_moved_away_ends_the_batch() {
    let (mut client, job, _, output, log) = begun().await;
    std::fs::rename(&output, output.with_extension("moved")).unwrap();
    let end = client.finish(&job).await;
    assert_eq!(end["data"]["state"], "failed", "{end}");
    assert!(end["data"]["fault"]["message"].as_str().unwrap().contains("was replaced or removed"), "{end}");
    assert!(log.steps.load(Ordering::SeqCst) < ITEMS as u64, "it went on for nobody");
}

/// Windows refuses to open a file for writing that is written by another.
#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_others_change_ends_the_batch() {
    for change in ["emptied", "shortened", "lengthened"] {
        let (mut client, job, _, output, log) = begun().await;
        while std::fs::metadata(&output).unwrap().len() < 300 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let file = OpenOptions::new().write(true).open(&output).unwrap();
        match change {
            "emptied" => file.set_len(0).unwrap(),
            "shortened" => file.set_len(100).unwrap(),
            _ => file.set_len(1 << 20).unwrap(),
        }
        let end = client.finish(&job).await;
        let told = end["data"]["fault"]["message"].as_str().unwrap_or_default();
        assert_eq!(
            (end["data"]["state"].as_str(), &end["data"]["fault"]["type"]),
            (Some("failed"), &json!("path_refused"))
        );
        assert!(told.contains("changed by another program") && told.contains(" results of it"), "{change}: {told}");
        assert!(log.steps.load(Ordering::SeqCst) < ITEMS as u64, "it went on for nobody");
        if change == "emptied" {
            assert_eq!(std::fs::metadata(&output).unwrap().len(), 0, "nothing is written into a changed file");
        }
    }
}

/// Between the last result and the end of the job, too.
#[cfg(unix)]
#[test]
fn an_output_that_is_removed_after_its_last_line_is_told() {
    use dllm_mcp::output::{Existing, Prepared};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.jsonl");
    let (mut output, _) = Prepared::new(path.clone(), Existing::Resume).unwrap().begin().unwrap();
    output.append(b"{\"id\":\"a\",\"ok\":true}\n").unwrap();
    output.check().unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(output.check().unwrap_err().message.contains("it had 1 results of it"));
}

/// Of the same length and in place, so that only the text tells.
#[tokio::test(flavor = "multi_thread")]
async fn an_input_that_is_rewritten_is_never_answered_under_an_old_id() {
    let (mut client, job, input, output, log) = begun().await;
    let text = std::fs::read_to_string(&input).unwrap();
    let mut file = OpenOptions::new().write(true).open(&input).unwrap();
    file.write_all(text.replace("of a prompt", "of another").as_bytes()).unwrap();
    let end = client.finish(&job).await;
    let told = end["data"]["fault"]["message"].as_str().unwrap_or_default();
    assert!(end["data"]["state"] == "failed" && told.contains("the input changed"), "{end}");
    assert!(log.admitted.lock().unwrap().iter().all(|prompt| prompt.contains("of a prompt")));
    let text = std::fs::read_to_string(&output).unwrap();
    assert!(!text.is_empty() && text.lines().all(|line| line.contains("of a prompt")), "{text:.300}");
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_leaves_files_of_others_as_they_are() {
    let mut client = Client::start(Script::default()).await;
    let out = client.folder.path().join("files/out.jsonl");
    let good = "{\"id\":\"a\",\"ok\":true,\"text\":\"t\"}\n";
    for text in [
        "a letter",
        "a letter\nto someone\nwithout an end",
        "fn main() {\n    println!(\"x\");\n}\n",
        "{\"name\": \"package\",\n \"version\": 1}\n",
        "{\"id\":\"a\",\"prompt\":\"p\"}\n",
        "{\"id\":7,\"ok\":true}\n",
        "{\"id\":\"a\"}",
        "[1, 2, 3]",
        "\n\n",
        "\u{feff}",
        &format!("{good}a letter"),
        &format!("{good}{{\"id\":\"b\",\"prompt\":\"p\"}}\n{good}"),
        &format!("{good}{{\"id\":\"c\",\"ok\":tr\n{good}"),
    ] {
        std::fs::write(&out, text).unwrap();
        let arguments = json!({"items_json": [{"id": "x", "prompt": "p"}], "output_path": "out.jsonl", "wait_s": 20});
        let reply = client.call("dllm_batch", arguments).await;
        assert_eq!(reply["error"]["type"], "path_refused", "{text:?}: {reply}");
        assert!(reply["message"].as_str().unwrap().contains("line "), "{reply}");
        assert_eq!(std::fs::read_to_string(&out).unwrap(), text);
    }
    // An empty file, a torn result, and one that lacks only its end are ours.
    for (text, kept) in
        [("", 0), ("{\"id\":\"ä", 0), (good, 1), (good.trim_end(), 1), (&format!("{good}{{\"id\":\"c\",\"ok\":tr"), 1)]
    {
        std::fs::write(&out, text).unwrap();
        let arguments = json!({"items_json": [{"id": "x", "prompt": "p"}], "output_path": "out.jsonl", "wait_s": 20});
        let reply = client.call("dllm_batch", arguments).await;
        assert_eq!(reply["data"]["state"], "done", "{text:?}: {reply}");
        let lines: Vec<Value> =
            std::fs::read_to_string(&out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!((lines.len(), lines.last().unwrap()["id"].clone()), (kept + 1, json!("x")), "{text:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn overwrite_loses_nothing_where_the_batch_is_not_taken() {
    let mut client = Client::start(Script { lanes: 1, steps: 1_000_000, ..Script::default() }).await;
    let files = client.folder.path().join("files");
    std::fs::write(files.join("out.jsonl"), "precious").unwrap();
    let overwrite = |name: &str, more: Value| {
        let mut arguments = json!({"items_json": [{"id": "a", "prompt": "p"}], "output_path": name, "resume": false, "overwrite": true});
        arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        arguments
    };
    for (more, kind) in [
        (json!({"items_json": [{"id": "a"}]}), "bad_argument"),
        (json!({"json_schema": "{"}), "bad_argument"),
        (json!({"wait_s": 99}), "bad_argument"),
        (json!({"items_json": "", "input_path": "missing.jsonl"}), "path_refused"),
    ] {
        let reply = client.call("dllm_batch", overwrite("out.jsonl", more)).await;
        assert_eq!(reply["error"]["type"], kind, "{reply}");
        assert_eq!(std::fs::read_to_string(files.join("out.jsonl")).unwrap(), "precious");
    }
    for n in 0..16 {
        assert_eq!(client.call("dllm_batch", overwrite(&format!("o{n}.jsonl"), json!({}))).await["success"], true);
    }
    let full = client.call("dllm_batch", overwrite("out.jsonl", json!({}))).await;
    assert_eq!((&full["error"]["type"], &full["error"]["retryable"]), (&json!("queue_full"), &json!(true)), "{full}");
    assert_eq!(std::fs::read_to_string(files.join("out.jsonl")).unwrap(), "precious");
    // Neither is a file made for a batch that was not taken.
    let full = client.call("dllm_batch", overwrite("new.jsonl", json!({}))).await;
    assert_eq!(full["error"]["type"], "queue_full", "{full}");
    assert!(!files.join("new.jsonl").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_batch_frees_its_output_first() {
    let mut client = Client::start(Script { steps: 1, ..Script::default() }).await;
    for n in 0..100 {
        let arguments =
            json!({"items_json": [{"id": format!("i{n}"), "prompt": "p"}], "output_path": "out.jsonl", "wait_s": 20});
        let reply = client.call("dllm_batch", arguments).await;
        assert_eq!(reply["data"]["state"], "done", "batch {n}: {reply}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn issue_3_two_servers_do_not_write_one_file() {
    let (mut first, job, _, output, _) = begun().await;
    let files = output.parent().unwrap().to_owned();
    let mut second = Client::connect(Script::default(), |config| config.roots = vec![files]).await;
    second.initialize("2025-06-18").await;
    let arguments = json!({"input_path": "in.jsonl", "output_path": "out.jsonl", "wait_s": 20});
    let refused = second.call("dllm_batch", arguments.clone()).await;
    assert_eq!(refused["error"]["type"], "path_refused", "{refused}");
    first.call("dllm_job", json!({"operation": "cancel", "job_id": job})).await;
    first.finish(&job).await;
    let ended = second.call("dllm_batch", arguments).await;
    assert_eq!(ended["data"]["state"], "done", "{ended}");
    let text = std::fs::read_to_string(&output).unwrap();
    let ids: std::collections::HashSet<_> =
        text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["id"].clone()).collect();
    assert_eq!((ids.len(), text.lines().count()), (ITEMS, ITEMS));
}

#[tokio::test(flavor = "multi_thread")]
async fn issue_3_an_input_is_not_emptied_under_another_name() {
    let mut client = Client::start(Script::default()).await;
    let files = client.folder.path().join("files");
    std::fs::write(files.join("in.jsonl"), items(0..3)).unwrap();
    std::fs::hard_link(files.join("in.jsonl"), files.join("other.jsonl")).unwrap();
    let arguments = json!({"input_path": "in.jsonl", "output_path": "other.jsonl", "resume": false, "overwrite": true});
    let reply = client.call("dllm_batch", arguments).await;
    assert_eq!(reply["error"]["type"], "bad_argument", "{reply}");
    assert_eq!(std::fs::read_to_string(files.join("in.jsonl")).unwrap(), items(0..3));
}

#[tokio::test(flavor = "multi_thread")]
async fn issue_3_a_cursor_inside_a_line_is_refused() {
    let mut client = Client::start(Script::default()).await;
    let reply = client.call("dllm_batch", json!({"items_json": [{"id": "a", "prompt": "p"}], "wait_s": 20})).await;
    let page = json!({"operation": "results", "job_id": reply["data"]["job_id"], "cursor": "3"});
    let reply = client.call("dllm_job", page).await;
    assert_eq!(reply["error"]["type"], "bad_argument", "{reply}");
}

#[tokio::test(flavor = "multi_thread")]
async fn issue_3_a_result_longer_than_a_page_is_cut_everywhere() {
    let mut client = Client::start(Script::default()).await;
    let items = json!([{"id": "a", "prompt": "long=500000"}, {"id": "b", "prompt": "p"}]);
    let reply = client.call("dllm_batch", json!({"items_json": items, "wait_s": 20})).await;
    let job = reply["data"]["job_id"].clone();
    // `line` refuses what a 64 KiB reader cannot read.
    let id = client
        .request("resources/read", json!({"uri": format!("dllm://jobs/{}/results", job.as_str().unwrap())}))
        .await;
    let text = client.reply(id).await["result"]["contents"][0]["text"].clone();
    assert!(text.as_str().unwrap().contains("\"cut\""), "{text:.200}");
    let (mut cursor, mut ids) = (json!(""), Vec::new());
    while !cursor.is_null() {
        let page = client.call("dllm_job", json!({"operation": "results", "job_id": job, "cursor": cursor})).await;
        ids.extend(page["data"]["results"].as_array().unwrap().iter().map(|line| line["id"].clone()));
        assert!(page["data"]["output_path"].is_string(), "where the whole is: {page:.300}");
        cursor = page["data"]["nextCursor"].clone();
    }
    ids.sort_by_key(Value::to_string);
    assert_eq!(ids, [json!("a"), json!("b")]);
}

/// Of the same length and in place, so that only the text tells.
#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_is_rewritten_ends_the_batch_as_failed_and_the_line_is_named() {
    let (mut client, job, _, output, _) = begun().await;
    while std::fs::metadata(&output).unwrap().len() < 300 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    OpenOptions::new().write(true).open(&output).unwrap().write_all(&[b'X'; 20]).unwrap();
    let end = client.finish(&job).await;
    let told = end["data"]["fault"]["message"].as_str().unwrap_or_default();
    assert!(end["data"]["state"] == "failed" && told.contains("changed by another program (line 1)"), "{end}");
    let page = client.call("dllm_job", json!({"operation": "results", "job_id": job, "limit": 3})).await;
    let first = &page["data"]["results"][0];
    assert_eq!((&first["ok"], &first["error"]["type"]), (&json!(false), &json!("path_refused")), "{page}");
    assert!(first["error"]["message"].as_str().unwrap().contains("at byte 0"), "{page}");
    assert_eq!(page["data"]["results"][1]["id"], "i1", "{page}");
}

/// What was there before a resumed batch counts, too.
#[cfg(unix)]
#[test]
fn an_earlier_result_that_is_rewritten_is_told() {
    use dllm_mcp::output::{Existing, Prepared};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.jsonl");
    for end in ["\n", "", "\n{\"id\":\"torn"] {
        std::fs::write(&path, format!("{{\"id\":\"a\",\"ok\":true}}{end}")).unwrap();
        let (mut output, _) = Prepared::new(path.clone(), Existing::Resume).unwrap().begin().unwrap();
        output.append(b"{\"id\":\"b\",\"ok\":true}\n").unwrap();
        output.verify().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\"a\"", "\"x\"")).unwrap();
        assert!(output.verify().unwrap_err().message.contains("(line 1)"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_without_a_variable_is_refused_before_the_output_is_emptied() {
    let mut client = Client::start(Script::default()).await;
    let out = client.folder.path().join("files/out.jsonl");
    std::fs::write(&out, "{\"id\":\"a\",\"ok\":true}\n").unwrap();
    for template in ["{topic} + 45 =", "5 + 5 ="] {
        let arguments = json!({"items_json": [{"id": "1", "topic": 86}], "template": template, "output_path": "out.jsonl", "resume": false, "overwrite": true});
        let reply = client.call("dllm_batch", arguments).await;
        assert_eq!(reply["error"]["type"], "bad_argument", "{reply}");
        assert!(reply["message"].as_str().unwrap().contains("bad template"), "{reply}");
        assert_eq!(std::fs::read_to_string(&out).unwrap(), "{\"id\":\"a\",\"ok\":true}\n");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn paths_outside_the_roots_do_not_tell_what_exists() {
    let mut client = Client::start(Script::default()).await;
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("present.jsonl"), "{}").unwrap();
    let mut refusal = async |name: &str| {
        let path = outside.path().join(name).display().to_string();
        let reply = client.call("dllm_batch", json!({"input_path": path})).await;
        assert_eq!(reply["error"]["type"], "path_refused", "{reply}");
        reply.to_string().replace(name, "NAME")
    };
    let there = refusal("present.jsonl").await;
    assert!(there.contains("is not under"), "{there}");
    for missing in ["missing.jsonl", "no/folder.jsonl", "present.jsonl/below"] {
        assert_eq!(refusal(missing).await, there, "{missing}");
    }
    let inside = client.call("dllm_batch", json!({"input_path": "missing.jsonl"})).await;
    assert!(inside["message"].as_str().unwrap().contains("cannot use missing.jsonl"), "{inside}");
}
