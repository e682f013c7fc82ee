//! Limits of memory, files and texts, as the command meets them.

use super::{fixtures, run, run_with_input};

#[test]
fn a_limit_of_memory_is_named_where_it_is_too_small() {
    let error = run(["generate", "--memory", "0.001", "-s", "1", "hi"]).error();
    assert!(error.contains("within the limit of `memory` (--memory) has 1.0 MiB free"), "{error}");
    assert!(error.contains(" and 1 lane needs"), "{error}");
    let plan = run(["plan", "--memory", "0.001"]);
    assert!(plan.code == Some(1) && plan.out.contains("1.0 MiB   the limit of --memory"), "{}", plan.out);
    let json = run(["plan", "--memory", "0.001", "--json"]);
    let value: serde_json::Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!((&value["limited"], &value["free"]), (&true.into(), &1_073_741.into()));
    assert_eq!(run(["plan", "--json"]).json()["limited"], false);
}

#[test]
#[cfg(target_os = "linux")]
fn a_system_that_does_not_tell_its_memory_is_an_error() {
    let mut said = false;
    // How many files are open already is the caller's affair, so one of these is the last that the program opens.
    for files in 4..16 {
        let mut command = std::process::Command::new("sh");
        let line = format!("ulimit -n {files}; exec \"$0\" plan");
        command.args(["-c", &line, env!("CARGO_BIN_EXE_dllm")]).env_remove("DLLM_MODEL");
        let ran = super::ran(command.output().unwrap());
        // 127: too few for the system to start it.
        assert!(matches!(ran.code, Some(0 | 2 | 127)), "{files} files: {:?} {}", ran.code, ran.err);
        said |= ran.code == Some(2) && ran.err.contains("cannot read the free memory") && ran.err.contains("ulimit -n");
    }
    assert!(said);
}

#[test]
fn a_byte_order_mark_is_no_part_of_a_prompt() {
    let ids = |input: &[u8]| run_with_input(["tokenize", "--json"], input).json()["ids"].clone();
    assert_eq!(ids(b"\xef\xbb\xbf2 + 2 =\r\n"), ids(b"2 + 2 ="));
}

/// Offset of an array's first value in a safetensors file.
fn place_of(bytes: &[u8], array: &str) -> usize {
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let index: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    8 + header + index[array]["data_offsets"][0].as_u64().unwrap() as usize
}

#[test]
fn a_damaged_recording_is_not_blamed_on_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let nano = fixtures("nano");
    for entry in std::fs::read_dir(&nano).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let path = dir.path().join("fixtures.safetensors");
    let intact = std::fs::read(&path).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&std::fs::read(nano.join("fixtures.json")).unwrap()).unwrap();
    let case = index["forward_cases"].as_object().unwrap().keys().next().unwrap();
    for (array, value, says) in [
        (format!("fwd.{case}.dec0.logits"), f32::NAN.to_le_bytes(), "has NaN at place 0"),
        (format!("fwd.{case}.prompt"), [0xff; 4], "has the token -1 at place 0"),
    ] {
        let mut bytes = intact.clone();
        let at = place_of(&bytes, &array);
        bytes[at..at + 4].copy_from_slice(&value);
        std::fs::write(&path, bytes).unwrap();
        let ran = run(["parity".as_ref(), dir.path().as_os_str()]);
        assert_eq!(ran.code, Some(2), "{}", ran.err);
        let named = ran.err.contains("fixtures.safetensors") && ran.err.contains(&array) && ran.err.contains(says);
        assert!(named, "{}", ran.err);
    }
}
