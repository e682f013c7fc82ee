//! Complaint 20: files outside the roots are neither read nor written.

mod common;

use common::{Client, Script};
use dllm_mcp::Kind;
use dllm_mcp::paths::Roots;
use serde_json::json;

fn roots() -> (tempfile::TempDir, Roots) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("roöt with blanks");
    std::fs::create_dir_all(root.join("sub")).unwrap();
    std::fs::write(root.join("in.jsonl"), "{}\n").unwrap();
    std::fs::write(folder.path().join("secret.jsonl"), "{}\n").unwrap();
    std::fs::create_dir_all(folder.path().join("roöt with blanks2")).unwrap();
    std::fs::write(folder.path().join("roöt with blanks2/in.jsonl"), "{}\n").unwrap();
    let roots = Roots::new(&[root]).unwrap();
    (folder, roots)
}

#[test]
fn c20_what_is_outside_is_refused() {
    let (folder, roots) = roots();
    let absolute = |name: &str| folder.path().join(name).display().to_string();
    let bad = [
        "",
        " ",
        "../secret.jsonl",
        "sub/../../secret.jsonl",
        "..\\secret.jsonl",
        "sub/..",
        "/etc/passwd",
        "//server/share/x",
        "\\\\server\\share\\x",
        "\\\\?\\C:\\x",
        "\\\\.\\pipe\\x",
        "in.jsonl:stream",
        "in.jsonl::$DATA",
        "NUL",
        "nul.txt",
        "sub/CON",
        "com1.jsonl",
        "LPT9",
        "aux .txt",
        "COM¹",
        "conin$",
        "a\0b",
    ];
    for path in bad.map(str::to_owned).into_iter().chain([
        absolute("secret.jsonl"),
        absolute("roöt with blanks2/in.jsonl"),
        "x".repeat(5000),
    ]) {
        assert_eq!(roots.input(&path).unwrap_err().kind, Kind::PathRefused, "{path:?} was read");
        assert_eq!(roots.output(&path).unwrap_err().kind, Kind::PathRefused, "{path:?} was written");
    }
}

/// On each system, so that a batch that runs on one runs on the others.
#[test]
fn names_that_some_system_cannot_have_are_refused_for_outputs() {
    let (_folder, roots) = roots();
    for name in [
        "out.",
        "out.jsonl ",
        "out.jsonl. ",
        "sub/out..",
        "a<b",
        "a>b",
        "a\"b",
        "a|b",
        "a?b",
        "a*b",
        "a\\b",
        "a\tb",
        "a:b",
        "new/",
        "new/.",
        "CON.jsonl",
    ] {
        let fault = roots.output(name).unwrap_err();
        assert_eq!(fault.kind, Kind::PathRefused, "{name:?}");
    }
    for name in ["out", ".hidden", "a b.jsonl", "a.b.c", "größe-1.jsonl"] {
        roots.output(name).unwrap();
    }
}

#[cfg(unix)]
#[test]
fn links_that_stay_inside_a_root_may_be_read() {
    let (folder, roots) = roots();
    let root = folder.path().canonicalize().unwrap().join("roöt with blanks");
    std::os::unix::fs::symlink(root.join("in.jsonl"), root.join("inside.jsonl")).unwrap();
    std::os::unix::fs::symlink(root.join("sub"), root.join("folder")).unwrap();
    assert_eq!(roots.input("inside.jsonl").unwrap(), root.join("in.jsonl"));
    assert_eq!(roots.output("folder/new.jsonl").unwrap(), root.join("sub/new.jsonl"));
    assert!(roots.output("inside.jsonl").is_err(), "an output that is a link itself");
}

#[test]
fn c20_what_is_inside_is_allowed() {
    let (folder, roots) = roots();
    let real = folder.path().canonicalize().unwrap().join("roöt with blanks");
    assert_eq!(roots.input("in.jsonl").unwrap(), real.join("in.jsonl"));
    assert_eq!(roots.output("sub/neu größe.jsonl").unwrap(), real.join("sub/neu größe.jsonl"));
    assert_eq!(roots.output("console.jsonl").unwrap(), real.join("console.jsonl"));
    assert!(roots.input("sub").is_err(), "a folder is no file");
    assert!(roots.output("sub").is_err(), "a folder is no file");
    assert!(roots.output("missing/x.jsonl").is_err());
}

#[cfg(unix)]
#[test]
fn c20_links_out_of_the_root_are_refused() {
    use std::os::unix::fs::symlink;
    let (folder, roots) = roots();
    let root = folder.path().join("roöt with blanks");
    symlink(folder.path().join("secret.jsonl"), root.join("link.jsonl")).unwrap();
    symlink(folder.path(), root.join("out")).unwrap();
    symlink("/dev/zero", root.join("zero")).unwrap();
    for path in ["link.jsonl", "out/secret.jsonl", "zero"] {
        assert!(roots.input(path).is_err(), "{path} was read");
        assert!(roots.output(path).is_err(), "{path} was written");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn c20_outputs_are_not_overwritten_unasked() {
    let mut client = Client::start(Script::default()).await;
    let out = client.folder.path().join("files/out.jsonl");
    std::fs::write(&out, "precious\n").unwrap();
    let items = r#"[{"id":"a","prompt":"p"}]"#;
    let arguments = json!({"items_json": items, "output_path": "out.jsonl", "resume": false, "wait_s": 5});
    let reply = client.call("dllm_batch", arguments).await;
    assert_eq!(reply["error"]["type"], "path_refused", "{reply}");
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "precious\n");
    let arguments =
        json!({"items_json": items, "output_path": "out.jsonl", "resume": false, "overwrite": true, "wait_s": 5});
    assert_eq!(client.call("dllm_batch", arguments).await["data"]["state"], "done");
    assert!(std::fs::read_to_string(&out).unwrap().starts_with("{\"id\":\"a\",\"ok\":true"));
}
