//! Models in several files: `name-00001-of-00003.gguf` and so on, side by side. The first holds the metadata.

use std::path::{Path, PathBuf};

use super::reader::Header;
use super::source::Part;
use crate::error::{Error, Result};

/// What a part's file name says.
struct PartName {
    folder: PathBuf,
    stem: String,
    /// From 1.
    number: u32,
    count: u32,
}

impl PartName {
    /// `None` where the name is not that of a part.
    fn parse(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = name.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| match text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit()) {
            true => text.parse().ok(),
            false => None,
        };
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        Some(Self { folder, stem: stem.to_owned(), number: digits(number)?, count: digits(count)? })
    }

    /// The path of part `number`.
    fn path(&self, number: u32) -> PathBuf {
        self.folder.join(format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count))
    }
}

/// Opens a file and, where it is a part of a split model, all parts in order.
pub(super) fn open(path: &Path) -> Result<Vec<(Part, Header)>> {
    let opened = Part::open(path)?;
    let said = opened.1.meta.u32_opt("split.count")?;
    let count = said.unwrap_or(1);
    let no = opened.1.meta.u32_opt("split.no")?.unwrap_or(0);
    let Some(name) = part_name(path, said, u64::from(no) + 1)? else { return Ok(vec![opened]) };
    let mut opened = Some(opened);
    let mut parts = Vec::new();
    for number in 1..=name.count {
        let part = match opened.take_if(|_| number == name.number) {
            Some(part) => part,
            None => open_other(&name, number, path)?,
        };
        check_part(&part, number, count)?;
        parts.push(part);
    }
    check_total(path, &parts)?;
    Ok(parts)
}

/// The file's part name, or `None` for a whole model; refuses a name that contradicts the file's `split.count`. `part` is
/// which part, from 1, the file says it is.
fn part_name(path: &Path, said: Option<u32>, part: u64) -> Result<Option<PartName>> {
    let count = said.unwrap_or(1);
    let why = match PartName::parse(path) {
        None if count <= 1 => return Ok(None),
        None => {
            format!("the file is part {part} of {count}: give it back its name, NAME-{part:05}-of-{count:05}.gguf")
        }
        Some(name) if name.count == 1 && count <= 1 => return Ok(None),
        Some(name) if name.count != count.max(1) => {
            let found = said.map_or("is missing".to_owned(), |n| format!("says {n}"));
            let says = format!("the name says {} parts, but split.count {found}", name.count);
            format!("{says}: give the file back its own name")
        }
        Some(name) if !(1..=count).contains(&name.number) => {
            format!("the name says part {} of {count}: give the file back its own name", name.number)
        }
        Some(name) => return Ok(Some(name)),
    };
    Err(Error::file(path, why))
}

fn open_other(name: &PartName, number: u32, asked: &Path) -> Result<(Part, Header)> {
    let path = name.path(number);
    if !path.exists() {
        let beside = asked.file_name().unwrap_or_default().display();
        let why = format!("part {number} of {} is missing beside {beside}: put all parts into one folder", name.count);
        return Err(Error::file(path, why));
    }
    Part::open(&path)
}

/// Checks that a part is the one its name says.
fn check_part((part, header): &(Part, Header), number: u32, count: u32) -> Result<()> {
    let (no, parts) = (header.meta.u32("split.no")?, header.meta.u32("split.count")?);
    if parts != count || no.checked_add(1) != Some(number) {
        let is = format!("the file holds part {} of {parts}, but its name says {number} of {count}", u64::from(no) + 1);
        return Err(Error::file(part.path(), format!("{is}: give the file back its own name")));
    }
    Ok(())
}

/// Checks that the parts belong together, as far as a count of tensors can tell.
fn check_total(path: &Path, parts: &[(Part, Header)]) -> Result<()> {
    let found: u64 = parts.iter().map(|(_, header)| header.tensors.len() as u64).sum();
    for (_, header) in parts {
        let said = header.meta.u64("split.tensors.count")?;
        if said != found {
            let why = format!("split.tensors.count is {said}, but the {} parts hold {found} tensors", parts.len());
            return Err(Error::file(path, format!("{why}: get all parts of one model again")));
        }
    }
    Ok(())
}
