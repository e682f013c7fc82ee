//! The kept fuzzing corpora, through the checks of the fuzz targets.

#[path = "../fuzz/check/gguf.rs"]
mod gguf;
#[path = "../fuzz/check/request.rs"]
mod request;

use std::path::PathBuf;

fn run(target: &str, check: fn(&[u8])) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz").join("corpus").join(target);
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let done = std::panic::catch_unwind(|| check(&bytes));
        assert!(done.is_ok(), "{}", path.display());
        files += 1;
    }
    assert!(files >= 5, "{files} files only: is the corpus there?");
}

#[test]
fn headers() {
    run("gguf", gguf::check);
}

#[test]
fn requests() {
    run("request", request::check);
}
