//! Which files a caller may name: only plain files under the configured roots.

use std::path::{Component, Path, PathBuf};

use crate::error::{Fault, Kind, Result};

/// The folders that batch files may be in.
#[derive(Debug, Clone)]
pub struct Roots(Vec<PathBuf>);

impl Roots {
    /// Folders that exist; their links are followed once, here.
    ///
    /// # Errors
    /// `PathRefused` where a folder cannot be opened.
    pub fn new(folders: &[PathBuf]) -> Result<Self> {
        let canonical = |folder: &PathBuf| {
            let wrong = |why: String| {
                Fault::new(
                    Kind::PathRefused,
                    format!("the root {} cannot be used: {why}; name a folder that exists", folder.display()),
                )
            };
            let real = folder.canonicalize().map_err(|e| wrong(e.to_string()))?;
            if real.is_dir() { Ok(real) } else { Err(wrong("it is no folder".into())) }
        };
        Ok(Self(folders.iter().map(canonical).collect::<Result<_>>()?))
    }

    /// The folders.
    pub fn folders(&self) -> &[PathBuf] {
        &self.0
    }

    /// A file to read.
    ///
    /// # Errors
    /// `PathRefused`.
    pub fn input(&self, path: &str) -> Result<PathBuf> {
        let full = self.resolve(path)?;
        let real = full.canonicalize().map_err(|e| self.missing(path, &full, "", &e))?;
        self.check_inside(path, &real)?;
        // A pipe or a device would block or never end.
        match real.metadata() {
            Ok(meta) if meta.is_file() => Ok(real),
            Ok(_) => Err(refused(path, "it is no plain file").advise("name a plain file with one item per line")),
            Err(e) => Err(unreachable(path, "", &e)),
        }
    }

    /// A file to write. It need not exist; its folder must.
    ///
    /// # Errors
    /// `PathRefused`.
    pub fn output(&self, path: &str) -> Result<PathBuf> {
        let full = self.resolve(path)?;
        let (Some(folder), Some(name)) = (full.parent(), full.file_name()) else {
            return Err(refused(path, "it names no file"));
        };
        check_name(path, name)?;
        let folder = folder.canonicalize().map_err(|e| self.missing(path, folder, "the folder of", &e))?;
        self.check_inside(path, &folder)?;
        let real = folder.join(name);
        match real.symlink_metadata() {
            Ok(meta) if meta.is_file() => Ok(real),
            Ok(_) => Err(refused(path, "it is no plain file (a link counts as none)")
                .advise("name a plain file, or one that does not exist yet")),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(real),
            Err(e) => Err(unreachable(path, "", &e)),
        }
    }

    fn resolve(&self, path: &str) -> Result<PathBuf> {
        check_words(path)?;
        let path_buf = Path::new(path);
        if path_buf.is_absolute() {
            return Ok(path_buf.to_owned());
        }
        let root = self.0.first().ok_or_else(|| refused(path, "no root is configured"))?;
        Ok(root.join(path_buf))
    }

    /// What to say of a path that cannot be followed: of one outside the roots not whether it exists.
    fn missing(&self, path: &str, full: &Path, of: &str, error: &std::io::Error) -> Fault {
        let nearest = full.ancestors().skip(1).find_map(|folder| folder.canonicalize().ok());
        match nearest.map(|folder| self.check_inside(path, &folder)) {
            Some(Err(outside)) => outside,
            _ => unreachable(path, of, error),
        }
    }

    fn check_inside(&self, path: &str, real: &Path) -> Result<()> {
        if self.0.iter().any(|root| real.starts_with(root)) {
            return Ok(());
        }
        let roots: Vec<_> = self.0.iter().map(|root| root.display().to_string()).collect();
        Err(refused(path, format!("it is not under {}", roots.join(" or "))))
    }
}

/// Refuses by its words alone what means something special on some system. The same everywhere, so that a batch written on
/// one machine behaves alike on another.
fn check_words(path: &str) -> Result<()> {
    if path.trim().is_empty() || path.len() > 4096 || path.contains('\0') {
        return Err(refused(path, "it is empty, too long, or holds a zero byte"));
    }
    if path.starts_with("\\\\") || path.starts_with("//") {
        return Err(refused(path, "network and device paths are not allowed"));
    }
    let without_drive = match path.as_bytes() {
        [drive, b':', ..] if cfg!(windows) && drive.is_ascii_alphabetic() => path.get(2..).unwrap_or(""),
        _ => path,
    };
    if without_drive.contains(':') {
        return Err(refused(path, "a colon names an alternate stream"));
    }
    if cfg!(windows) && without_drive.len() < path.len() && !without_drive.starts_with(['\\', '/']) {
        return Err(refused(path, "a drive without a folder depends on the process"));
    }
    if Path::new(path).components().any(|part| part == Component::ParentDir)
        || path.split(['/', '\\']).any(|part| part == "..")
    {
        return Err(refused(path, "'..' is not allowed"));
    }
    match path.split(['/', '\\']).find(|part| is_device(part)) {
        Some(part) => Err(refused(path, format!("{part} is the name of a device"))),
        None => Ok(()),
    }
}

/// Refuses a name for a new file that another system could not have, or would take for another name.
fn check_name(path: &str, name: &std::ffi::OsStr) -> Result<()> {
    let name = name.to_str().ok_or_else(|| refused(path, "its name is no text"))?;
    // A path's end tells what its parsed name does not: "a/" is "a".
    let why = if path.ends_with(['/', '\\', '.', ' ']) || name.ends_with(['.', ' ']) {
        "its name ends with a dot, a blank or a separator".to_owned()
    } else if let Some(bad) = name.chars().find(|c| c.is_control() || "<>:\"/\\|?*".contains(*c)) {
        format!("its name has the character {bad:?}")
    } else {
        return Ok(());
    };
    Err(refused(path, why).advise("take a name that each system can have, as results-1.jsonl"))
}

/// Windows' device names, with any extension and trailing blanks or dots.
fn is_device(part: &str) -> bool {
    let stem = part.split('.').next().unwrap_or("").trim_end().to_ascii_uppercase();
    if ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"].contains(&stem.as_str()) {
        return true;
    }
    let number = stem.strip_prefix("COM").or_else(|| stem.strip_prefix("LPT"));
    number.is_some_and(|n| n.chars().count() == 1 && n.chars().all(|c| c.is_ascii_digit() || "¹²³".contains(c)))
}

/// What the system says of a path that is to be looked at.
fn unreachable(path: &str, of: &str, error: &std::io::Error) -> Fault {
    let shown: String = path.chars().take(200).collect();
    let action = if of.is_empty() { "use".to_owned() } else { format!("use {of}") };
    Fault::io(&action, Path::new(&shown), error)
}

fn refused(path: &str, why: impl std::fmt::Display) -> Fault {
    let shown: String = path.chars().take(200).collect();
    Fault::new(Kind::PathRefused, format!("path {shown:?} is refused: {why}"))
}
