//! Bad files: each is refused with a message that says what is wrong and where.

#[path = "common/gguf.rs"]
mod gguf_file;

use std::fs;
use std::path::Path;

use dllm_engine::Error;
use dllm_engine::gguf::{Gguf, Header};
use gguf_file::{ARRAY, BOOL, F32, F64, GgufFile, STR, U8, array, floats, string};

/// The message of the error that reading these bytes gives.
fn refusal(bytes: &[u8]) -> String {
    match Header::read(bytes, bytes.len() as u64, Path::new("bad.gguf")) {
        Ok(_) => panic!("a bad file was accepted"),
        Err(e) => e.to_string(),
    }
}

#[track_caller]
fn assert_refused(file: &GgufFile, part: &str) {
    let message = refusal(&file.bytes());
    assert!(message.starts_with("bad.gguf: "), "{message}");
    assert!(message.contains(part), "{message:?} lacks {part:?}");
}

/// The error of opening a path.
#[track_caller]
fn open_error(path: &Path) -> Error {
    Gguf::open(path).expect_err("a bad file was accepted")
}

#[test]
fn every_truncation_is_refused() {
    let bytes = GgufFile::sample().bytes();
    // The last tensor's 68 bytes are followed by 28 of padding, which a file may lack.
    for len in 1..bytes.len() - 28 {
        let message = refusal(&bytes[..len]);
        assert!(message.contains("truncated") || message.contains("are left") || message.contains("behind the end"));
    }
    assert!(Header::read(&bytes[..bytes.len() - 28], bytes.len() as u64 - 28, Path::new("x")).is_ok());
}

#[test]
fn truncation_names_the_key_and_the_byte() {
    let file = GgufFile::new().key("a.name", STR, &1000u64.to_le_bytes());
    assert_refused(&file, "truncated at byte 50: key \"a.name\" needs 1000 bytes, 14 are left");
}

#[test]
fn truncated_data_names_the_tensor() {
    let mut bytes = GgufFile::new().tensor("a.weight", &[64], 0, &[0; 256]).bytes();
    bytes.truncate(bytes.len() - 1);
    assert!(refusal(&bytes).contains("tensor \"a.weight\" has 256 bytes, but 255 are left in the file of"));
}

#[test]
fn wrong_magic() {
    assert_refused(&GgufFile { magic: *b"vers", ..GgufFile::sample() }, "begins with \"vers\", not \"GGUF\"");
}

#[test]
fn wrong_versions() {
    for (version, part) in [
        (0, "GGUF version 0 is unknown"),
        (1, "GGUF version 1 is too old, versions 2 and 3 are read"),
        (4, "GGUF version 4 is unknown, versions 2 and 3 are read"),
        (3u32.swap_bytes(), "the file is big endian"),
    ] {
        let bytes = GgufFile { version, ..GgufFile::sample() }.bytes();
        let error = Header::read(&bytes[..], bytes.len() as u64, Path::new("x")).expect_err("accepted");
        assert!(matches!(error, Error::Unsupported { .. }) && error.to_string().contains(part), "{error}");
    }
}

#[test]
fn huge_counts() {
    let file = GgufFile { claimed_tensors: Some(u64::MAX), ..GgufFile::sample() };
    assert_refused(&file, "damaged at byte 8: the file counts 18446744073709551615 tensors, more than 65536");
    let file = GgufFile { claimed_keys: Some(1 << 40), ..GgufFile::sample() };
    assert_refused(&file, "damaged at byte 16: the file counts 1099511627776 keys, more than 65536");
    let file = GgufFile { claimed_tensors: Some(60_000), ..GgufFile::new() };
    assert_refused(&file, "the table of 60000 tensors needs 1980000 bytes, 8 are left");
}

#[test]
fn huge_arrays_and_strings() {
    for (element_type, size) in [(U8, 1), (F32, 4), (BOOL, 1), (STR, 8)] {
        for count in [1 << 32, 1 << 61, u64::MAX] {
            let file = GgufFile::new().key("a.list", ARRAY, &array(element_type, count, &[0; 64]));
            let needs = count.saturating_mul(size);
            assert_refused(&file, &format!("needs {needs} bytes"));
        }
    }
    let file = GgufFile::new().key("a.text", STR, &u64::MAX.to_le_bytes());
    assert_refused(&file, "key \"a.text\" needs 18446744073709551615 bytes");
    let long = array(STR, 2, &[string("x"), u64::MAX.to_le_bytes().to_vec()].concat());
    assert_refused(&GgufFile::new().key("a.tokens", ARRAY, &long), "string 1 of key \"a.tokens\" needs 184467440737");
}

#[test]
fn headers_beyond_the_limit() {
    let file = GgufFile::new().key("a.text", STR, &(300u64 << 20).to_le_bytes());
    // The length is claimed: the refusal must come before anything is read or allocated.
    let error = Header::read(&file.bytes()[..], 1 << 40, Path::new("x")).expect_err("accepted");
    assert!(error.to_string().contains("key \"a.text\" makes the header longer than 268435456 bytes"), "{error}");
}

#[test]
fn nested_arrays_too_deep_or_too_many() {
    let mut nested = array(U8, 1, &[1]);
    for _ in 0..4 {
        nested = array(ARRAY, 1, &nested);
    }
    assert_refused(&GgufFile::new().key("a.deep", ARRAY, &nested), "key \"a.deep\" nests 1 arrays 4 deep");
    let many = array(ARRAY, 5000, &[0; 64]);
    assert_refused(&GgufFile::new().key("a.many", ARRAY, &many), "key \"a.many\" nests 5000 arrays");
}

#[test]
fn bad_keys_and_values() {
    let new = GgufFile::new;
    assert_refused(&new().u32("a.x", 1).u32("a.x", 2), "key \"a.x\" appears twice");
    assert_refused(&new().u32("", 1), "key 0 has an empty name");
    assert_refused(&new().u32(&"k".repeat(65536), 1), "the name of key 0 has 65536 bytes, more than 65535");
    assert_refused(&new().key("a.x", 13, &[0; 8]), "key \"a.x\" has the value type 13, not 0 to 12");
    assert_refused(&new().key("a.x", ARRAY, &array(99, 0, &[])), "key \"a.x\" has the element type 99");
    assert_refused(&new().key("a.x", BOOL, &[2]), "key \"a.x\" is a bool of value 2, not 0 or 1");
    assert_refused(&new().key("a.x", STR, &string([0xff, 0xfe])), "key \"a.x\" is not UTF-8");
    let tokens = array(STR, 2, &[string("good"), string([0xc3])].concat());
    assert_refused(&new().key("a.tokens", ARRAY, &tokens), "string 1 of key \"a.tokens\" is not UTF-8");
}

#[test]
fn missing_keys_and_wrong_types_are_named() {
    let bytes = GgufFile::sample().bytes();
    let meta = Header::read(&bytes[..], bytes.len() as u64, Path::new("bad.gguf")).expect("the sample").meta;
    #[track_caller]
    fn says<T: std::fmt::Debug>(result: dllm_engine::Result<T>, part: &str) {
        let message = result.expect_err("accepted").to_string();
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
    says(meta.u32("a.block_count"), "bad.gguf: key \"a.block_count\" (u32) is missing");
    says(meta.array_str("a.none"), "key \"a.none\" (array of string) is missing");
    says(meta.u32("a.f32"), "is f32 1e-6, expected u32");
    says(meta.u32("a.i64"), "is i64 -3, expected u32");
    says(meta.u32("general.architecture"), "key \"general.architecture\" at byte 24 is string, expected u32");
    says(meta.str("a.u8"), "is u8 200, expected string");
    says(meta.bool_opt("a.u8"), "is u8 200, expected bool");
    says(meta.f32("a.u8"), "is u8 200, expected finite f32");
    says(meta.array_u32("a.tokens"), "is array of 4 string, expected array of u32");
    says(meta.array_bool("a.kv"), "is array of 3 i32, expected array of bool");
    says(meta.per_layer_u32("a.kv", 4), "is array of 3 i32, expected array of 4 u32, one per layer");
    let bytes = GgufFile::new().key("a.eps", F32, &f32::NAN.to_le_bytes()).bytes();
    let meta = Header::read(&bytes[..], bytes.len() as u64, Path::new("bad.gguf")).expect("a file").meta;
    says(meta.f32("a.eps"), "is f32 NaN, expected finite f32");
}

#[test]
fn bad_shapes_types_and_names() {
    let info = |dims: &[u64], ty| GgufFile::new().info("a.weight", dims, ty, 0);
    assert_refused(&info(&[64, 0], 0), "tensor \"a.weight\" has the shape [64, 0, 1, 1] with a dimension of 0");
    assert_refused(&info(&[], 0), "tensor \"a.weight\" has 0 dimensions, not 1 to 4");
    assert_refused(&info(&[1; 5], 0), "tensor \"a.weight\" has 5 dimensions, not 1 to 4");
    assert_refused(&info(&[1 << 32, 1 << 32], 0), "too many elements to count");
    assert_refused(&info(&[u64::MAX], 0), "too many elements to count");
    assert_refused(&info(&[1 << 62], 0), "too many bytes to count");
    assert_refused(&info(&[100, 4], 12), "has rows of 100 elements, but Q4_K needs a multiple of 256");
    assert_refused(&info(&[64], 4), "tensor \"a.weight\" at byte 24 has type 4, which this build's ggml does not have");
    assert_refused(&info(&[64], u32::MAX), "has type 4294967295, which this build's ggml does not have");
    assert_refused(&GgufFile::new().info("", &[1], 0, 0), "tensor 0 has the name \"\"");
    assert_refused(&GgufFile::new().info("a\0b", &[1], 0, 0), "tensor 0 has the name \"a\\0b\"");
    assert_refused(
        &GgufFile::new().info(&"n".repeat(64), &[1], 0, 0),
        "the name of tensor 0 has 64 bytes, more than 63",
    );
    let twice = GgufFile::new().tensor("a", &[8], 0, &[0; 32]).tensor("a", &[8], 0, &[0; 32]);
    assert_refused(&twice, "tensor \"a\" appears twice");
}

#[test]
fn bad_offsets() {
    let base = || GgufFile::new().tensor("a", &[64], 0, &[0; 256]);
    assert_refused(&base().info("b", &[8], 0, 224), "tensors \"a\" and \"b\" overlap");
    assert_refused(&base().info("b", &[8], 0, 0), "overlap");
    assert_refused(&base().info("b", &[8], 0, 8), "tensor \"b\" has the offset 8, no multiple of 32");
    assert_refused(&base().info("b", &[8], 0, 1 << 40), "tensor \"b\" has the offset 1099511627776, behind the end");
    assert_refused(&base().info("b", &[8], 0, u64::MAX - 31), "behind the end of the file");
    assert_refused(&base().info("b", &[8], 0, 256), "tensor \"b\" has 32 bytes, but 0 are left");
}

#[test]
fn bad_alignments() {
    for alignment in [0, 1, 16, 48, u32::MAX] {
        let part = format!("general.alignment is {alignment}, not a power of two from 32");
        assert_refused(&GgufFile::sample().u32("general.alignment", alignment), &part);
    }
    let text = GgufFile::sample().str("general.alignment", "32");
    assert_refused(&text, "key \"general.alignment\" at byte");
    let narrow = GgufFile::new().u32("general.alignment", 64).info("a", &[8], 0, 32);
    assert_refused(&narrow, "tensor \"a\" has the offset 32, no multiple of 64");
    let far = GgufFile::sample().u32("general.alignment", 1 << 31);
    assert_refused(&far, "behind the end of the file");
    // The place that is named lies in the file, not where the data would begin.
    assert_refused(&far, &format!("damaged at byte {}:", far.bytes().len()));
}

/// A number that F32 has as 0 only is not taken for 0, and is named as it is.
#[test]
fn numbers_are_named_as_they_are() {
    let dir = tempfile::tempdir().expect("a folder");
    for (value, says) in [(1e-300, Some("is f64 1e-300")), (1e300, Some("is f64 1e300")), (0.0, None), (0.25, None)] {
        let path = dir.path().join("f64.gguf");
        fs::write(&path, GgufFile::sample().key("x", F64, &f64::to_le_bytes(value)).bytes()).expect("write");
        let file = Gguf::open(&path).expect("an intact file");
        match (file.meta().f32("x"), says) {
            (Ok(read), None) => assert_eq!(f64::from(read), value),
            (Err(error), Some(says)) => assert!(error.to_string().contains(says), "{error}"),
            (read, _) => panic!("{value}: {read:?}"),
        }
    }
}

#[test]
fn folder_empty_missing_and_foreign_files() {
    let dir = tempfile::tempdir().expect("a folder");
    assert!(open_error(dir.path()).to_string().contains("this is a folder: name a .gguf file in it"));
    let empty = dir.path().join("empty.gguf");
    fs::write(&empty, b"").expect("write");
    assert!(open_error(&empty).to_string().contains("the file is empty"));
    let missing = open_error(&dir.path().join("none.gguf"));
    assert!(
        matches!(&missing, Error::Io { action: "open", source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    );
    assert!(missing.to_string().starts_with("cannot open ") && missing.to_string().contains("none.gguf"));
    let page = dir.path().join("page.gguf");
    fs::write(&page, b"<!DOCTYPE html>").expect("write");
    assert!(open_error(&page).to_string().contains("begins with \"<!DO\", not \"GGUF\""));
}

#[cfg(unix)]
#[test]
fn unreadable_and_special_files() {
    use std::os::unix::fs::PermissionsExt;
    let special = open_error(Path::new("/dev/null"));
    assert!(special.to_string().contains("this is no ordinary file"), "{special}");
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("locked.gguf");
    fs::write(&path, GgufFile::sample().bytes()).expect("write");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).expect("chmod");
    if fs::File::open(&path).is_ok() {
        eprintln!("skipped: this user may read everything");
        return;
    }
    assert!(open_error(&path).to_string().starts_with("cannot open "));
}

#[test]
fn nan_and_infinite_weights() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("nan.gguf");
    let inf16 = half::f16::INFINITY.to_le_bytes();
    let mut q8_0 = vec![1; 34];
    q8_0[..2].copy_from_slice(&half::f16::NAN.to_le_bytes());
    let file = GgufFile::new()
        .tensor("good", &[4], 0, &floats(&[1.0, -1.0, 0.0, 1e30]))
        .tensor("f32", &[4], 0, &floats(&[1.0, f32::NAN, 0.0, 0.0]))
        .tensor("f16", &[4], 1, &[[0, 0], [0, 0], [0, 0], inf16].concat())
        .tensor("bf16", &[2], 30, &[0, 0, 0x80, 0x7f])
        .tensor("q8_0", &[32], 8, &q8_0);
    fs::write(&path, file.bytes()).expect("write");
    let gguf = Gguf::open(&path).expect("the header is good");
    let check = |name: &str| gguf.check_finite(gguf.tensor(name).expect("a tensor"));
    assert!(check("good").is_ok());
    for name in ["f32", "f16", "bf16", "q8_0"] {
        let message = check(name).expect_err("accepted").to_string();
        assert!(message.contains(&format!("tensor {name:?} (")) && message.contains("NaN or infinite"), "{message}");
    }
}

#[test]
fn issue_2_a_type_that_cannot_be_read_is_not_called_nan() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("types.gguf");
    let file = GgufFile::new().tensor("a", &[32], 9, &[0; 36]).tensor("b", &[4], 26, &[0; 16]);
    fs::write(&path, file.bytes()).expect("write");
    let gguf = Gguf::open(&path).expect("the header is good");
    for (name, ty) in [("a", "Q8_1"), ("b", "I32")] {
        let error = gguf.check_finite(gguf.tensor(name).expect("a tensor")).expect_err("accepted");
        assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
        assert!(error.to_string().contains(&format!("tensor {name:?} is {ty}")), "{error}");
    }
}

#[test]
fn issue_2_the_last_value_of_a_long_tensor_is_looked_at() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("long.gguf");
    let mut values = vec![1.0; 3 * 256 + 5];
    *values.last_mut().expect("values") = f32::NEG_INFINITY;
    let file = GgufFile::new().tensor("long", &[values.len() as u64], 0, &floats(&values));
    fs::write(&path, file.bytes()).expect("write");
    let gguf = Gguf::open(&path).expect("the header is good");
    let message = gguf.check_finite(gguf.tensor("long").expect("a tensor")).expect_err("accepted").to_string();
    assert!(message.contains("tensor \"long\" (F32") && message.contains("NaN or infinite"), "{message}");
}

#[test]
fn a_file_replaced_by_another_is_read_on() {
    let dir = tempfile::tempdir().expect("a folder");
    let (path, other) = (dir.path().join("m.gguf"), dir.path().join("new.gguf"));
    fs::write(&path, GgufFile::new().tensor("a", &[4], 0, &floats(&[1.0; 4])).bytes()).expect("write");
    let gguf = Gguf::open(&path).expect("open");
    fs::write(&other, GgufFile::new().tensor("a", &[4], 0, &floats(&[2.0; 4])).bytes()).expect("write");
    if let Err(e) = fs::rename(&other, &path) {
        // Windows may refuse to replace an open file: then nothing was replaced.
        if !cfg!(windows) {
            panic!("rename: {e}");
        }
    }
    assert!(gguf.check_unchanged().is_ok());
    let a = gguf.tensor("a").expect("a");
    assert_eq!(gguf.data(a).expect("data"), floats(&[1.0; 4]));
}

/// Windows keeps others from writing to an open model, so there is nothing to notice.
#[cfg(unix)]
#[test]
fn a_file_changed_in_place_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.gguf");
    let bytes = GgufFile::sample().bytes();
    for (cut, part) in [(1, "bytes when it was opened and has"), (0, "was written to since it was opened")] {
        fs::write(&path, &bytes).expect("write");
        let gguf = Gguf::open(&path).expect("open");
        let file = fs::File::options().write(true).open(&path).expect("open to write");
        file.set_len(bytes.len() as u64 - cut).expect("cut");
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).expect("touch");
        let message = gguf.check_unchanged().expect_err("accepted").to_string();
        assert!(message.contains(part), "{message}");
        let message = gguf.data(gguf.tensor("a.weight").expect("a tensor")).expect_err("accepted").to_string();
        assert!(message.contains(part), "{message}");
    }
}

/// Writes part `number` of `count` under a name for `named`.
fn write_part(dir: &Path, named: &str, number: u16, count: u16, tensors: i32, tensor: &str) -> std::path::PathBuf {
    let file = GgufFile::new().u32("a.part", number.into()).split(number, count, tensors);
    let path = dir.join(format!("m-{named}.gguf"));
    fs::write(&path, file.tensor(tensor, &[4], 0, &floats(&[number.into(); 4])).bytes()).expect("write");
    path
}

#[test]
fn a_missing_part_is_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let first = write_part(dir.path(), "00001-of-00003", 1, 3, 3, "a");
    write_part(dir.path(), "00003-of-00003", 3, 3, 3, "c");
    let message = open_error(&first).to_string();
    assert!(
        message.contains("m-00002-of-00003.gguf: part 2 of 3 is missing beside m-00001-of-00003.gguf"),
        "{message}"
    );
}

#[test]
fn odd_part_names() {
    let dir = tempfile::tempdir().expect("a folder");
    #[track_caller]
    fn says(path: &Path, part: &str) {
        let message = Gguf::open(path).expect_err("accepted").to_string();
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
    says(
        &write_part(dir.path(), "renamed", 1, 2, 2, "a"),
        "the file is part 1 of 2: give it back its name, NAME-00001-of-00002",
    );
    says(
        &write_part(dir.path(), "second", 2, 3, 3, "a"),
        "the file is part 2 of 3: give it back its name, NAME-00002-of-00003",
    );
    says(&write_part(dir.path(), "00001-of-00004", 1, 2, 2, "a"), "name says 4 parts, but split.count says 2");
    says(&write_part(dir.path(), "00003-of-00002", 1, 2, 2, "a"), "the name says part 3 of 2");
    says(&write_part(dir.path(), "00000-of-00002", 1, 2, 2, "a"), "the name says part 0 of 2");
    let whole = dir.path().join("w-00001-of-00002.gguf");
    fs::write(&whole, GgufFile::sample().bytes()).expect("write");
    says(&whole, "the name says 2 parts, but split.count is missing");
    says(&write_part(dir.path(), "00001-of-00003", 1, 0, 0, "a"), "the name says 3 parts, but split.count says 0");
}

#[test]
fn parts_that_do_not_belong_together() {
    let dir = tempfile::tempdir().expect("a folder");
    let first = write_part(dir.path(), "00001-of-00002", 1, 2, 2, "a");
    write_part(dir.path(), "00002-of-00002", 1, 2, 2, "b");
    let message = open_error(&first).to_string();
    assert!(message.contains("the file holds part 1 of 2, but its name says 2 of 2"), "{message}");
    write_part(dir.path(), "00002-of-00002", 2, 2, 2, "a");
    assert!(open_error(&first).to_string().contains("tensor \"a\" is in another part too"));
    write_part(dir.path(), "00002-of-00002", 2, 2, 7, "b");
    assert!(open_error(&first).to_string().contains("split.tensors.count is 7, but the 2 parts hold 2 tensors"));
}

#[test]
fn any_part_opens_the_whole_model() {
    let dir = tempfile::tempdir().expect("a folder");
    let first = write_part(dir.path(), "00001-of-00002", 1, 2, 2, "a");
    let second = write_part(dir.path(), "00002-of-00002", 2, 2, 2, "b");
    for path in [&first, &second] {
        let gguf = Gguf::open(path).expect("both parts are there");
        assert_eq!((gguf.files(), gguf.path()), (2, first.as_path()));
        assert_eq!(gguf.meta().u32("a.part").expect("metadata of the first part"), 1);
        for (name, file, value) in [("a", 0, 1.0), ("b", 1, 2.0)] {
            let tensor = gguf.tensor(name).expect("a tensor");
            assert_eq!(tensor.file, file);
            assert_eq!(gguf.data(tensor).expect("data"), floats(&[value; 4]));
        }
    }
}

#[test]
fn misaligned_embedded_bytes() {
    let bytes = GgufFile::sample().bytes();
    let room = vec![0; bytes.len() + 64].leak();
    let start = room.as_ptr().addr().wrapping_neg() % 32 + 1;
    room[start..start + bytes.len()].copy_from_slice(&bytes);
    let message = Gguf::from_static(&room[start..start + bytes.len()], "embedded").expect_err("accepted").to_string();
    assert!(message.contains("embedded: the embedded bytes do not lie at a multiple of 32"), "{message}");
}

#[test]
fn foreign_tensors() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.gguf");
    fs::write(&path, GgufFile::sample().bytes()).expect("write");
    let gguf = Gguf::open(&path).expect("open");
    let mut foreign = gguf.tensor("a.weight").expect("a tensor").clone();
    foreign.offset = 1 << 40;
    assert!(
        gguf.data(&foreign).expect_err("accepted").to_string().contains("bad tensor: \"a.weight\" does not lie in")
    );
    foreign.offset = 0;
    assert!(
        gguf.data(&foreign).expect_err("accepted").to_string().contains("bad tensor: \"a.weight\" does not lie in")
    );
    foreign.file = 3;
    assert!(gguf.data(&foreign).expect_err("accepted").to_string().contains("there is no file 3, the model has 1"));
}
