//! Applies a unified diff, so that no `patch` program is needed (Windows has none).

use std::fs;
use std::path::Path;

use crate::Result;

/// Applies every file section of `diff` below `root`. Line ends of the target are kept.
pub fn apply(root: &Path, diff: &str) -> Result<()> {
    let lines: Vec<&str> = diff.lines().collect();
    let mut at = 0;
    while at < lines.len() {
        let Some(name) = lines[at].strip_prefix("+++ ") else {
            at += 1;
            continue;
        };
        let name = name.split('\t').next().unwrap_or(name).trim_start_matches("b/");
        let path = root.join(name);
        let text = fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        let end = if text.contains("\r\n") { "\r\n" } else { "\n" };
        let mut file: Vec<String> = text.lines().map(str::to_owned).collect();
        at += 1;
        let mut shift = 0_isize;
        while at < lines.len() && lines[at].starts_with("@@") {
            let start = hunk_start(lines[at])?;
            let first = at + 1;
            let last = (first..lines.len())
                .find(|&i| lines[i].starts_with("@@") || lines[i].starts_with("--- "))
                .unwrap_or(lines.len());
            shift += apply_hunk(&mut file, &lines[first..last], start as isize - 1 + shift, name)?;
            at = last;
        }
        fs::write(&path, file.join(end) + end).map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    }
    Ok(())
}

/// `@@ -2120,6 +2120,18 @@` gives 2120.
fn hunk_start(header: &str) -> Result<usize> {
    header
        .split(['-', ',', ' '])
        .filter_map(|part| part.parse().ok())
        .next()
        .ok_or_else(|| format!("not a hunk header: {header}"))
}

/// Returns by how many lines the file grew. The hunk may sit up to 200 lines from where it says.
fn apply_hunk(file: &mut Vec<String>, hunk: &[&str], expected: isize, name: &str) -> Result<isize> {
    let body = |line: &str| line.get(1..).unwrap_or("").to_owned();
    let is = |line: &str, marks: &[char]| line.is_empty() || line.starts_with(marks);
    let old: Vec<String> = hunk.iter().filter(|l| is(l, &[' ', '-'])).map(|l| body(l)).collect();
    let new: Vec<String> = hunk.iter().filter(|l| is(l, &[' ', '+'])).map(|l| body(l)).collect();
    let place = (0..200)
        .flat_map(|d| [expected + d, expected - d])
        .filter(|&p| p >= 0 && p as usize + old.len() <= file.len())
        .find(|&p| file[p as usize..p as usize + old.len()] == old[..]);
    match place {
        Some(p) => {
            let grown = new.len() as isize - old.len() as isize;
            file.splice(p as usize..p as usize + old.len(), new);
            Ok(grown)
        }
        None => Err(format!(
            "the hunk for line {} of {name} does not fit: take the pinned llama.cpp, or refresh vendor/patches (docs/updating-llama.md)",
            expected + 1
        )),
    }
}
