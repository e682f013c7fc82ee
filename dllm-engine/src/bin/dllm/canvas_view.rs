//! The live view: a canvas in the terminal while it settles.
//!
//! The view is a block of lines at the bottom of the terminal that is drawn over and over. Settled text leaves it upwards:
//! it is printed once and stays. The picture goes to standard error, settled text to standard output.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dllm_engine::Step;
use dllm_engine::vocab::Vocab;
use unicode_width::UnicodeWidthChar;

use super::output;
use super::signal::{Still, resumed};

/// Time between two pictures: more often, nobody sees it.
const FRAME: Duration = Duration::from_millis(33);

/// Entropy in nats below which a draft token gets a shade. The colours are of the 256 that both dark and light
/// backgrounds show well; the surest tokens have the terminal's own.
const SHADES: [(f32, Style); 4] =
    [(0.05, Style::Plain), (0.5, Style::Colour(37)), (1.5, Style::Colour(67)), (3.0, Style::Colour(103))];
const UNSURE: Style = Style::Colour(245);

/// What stands for a token that prints nothing.
const HIDDEN: char = '·';

/// Whether the terminal can show it and the user wants colours.
pub fn supported() -> bool {
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    io::stderr().is_terminal() && !dumb && !no_colour && escape_codes()
}

#[cfg(windows)]
fn escape_codes() -> bool {
    crossterm::ansi_support::supports_ansi()
}

#[cfg(not(windows))]
fn escape_codes() -> bool {
    true
}

pub struct CanvasView {
    vocab: Arc<Vocab>,
    /// Settled text of the line that is not finished yet.
    tail: String,
    /// Widths of the lines that stand in the terminal.
    drawn: Vec<usize>,
    next: Instant,
    _still: Still,
}

impl CanvasView {
    pub fn new(vocab: Arc<Vocab>) -> Self {
        Self { vocab, tail: String::new(), drawn: Vec::new(), next: Instant::now(), _still: Still::begin() }
    }

    /// Shows how much of the prompt has been read.
    pub fn prefill(&mut self, done: usize, total: usize) -> io::Result<()> {
        if !self.due(done == total) {
            return Ok(());
        }
        let mut page = Page::new();
        page.text(&self.tail, Style::Plain);
        page.status(&format!("reading the prompt: {done} of {total} tokens"));
        self.draw(page)
    }

    /// Shows a denoising step.
    pub fn step(&mut self, step: &Step<'_>) -> io::Result<()> {
        if !self.due(step.stop || step.step == 1) {
            return Ok(());
        }
        let mut page = Page::new();
        page.text(&self.tail, Style::Plain);
        draft(&self.vocab, step, &mut page);
        page.status(&status(step));
        self.draw(page)
    }

    /// Prints what has settled. The unfinished last line stays in the picture.
    pub fn settle(&mut self, text: &str) -> io::Result<()> {
        self.erase()?;
        self.tail.push_str(text);
        if let Some(end) = self.tail.rfind('\n') {
            let rest = self.tail.split_off(end + 1);
            output::write_text(&std::mem::replace(&mut self.tail, rest))?;
        }
        Ok(())
    }

    /// Removes the picture and prints the rest.
    pub fn finish(mut self) -> io::Result<()> {
        self.erase()?;
        output::write_text(&std::mem::take(&mut self.tail))
    }

    fn due(&mut self, always: bool) -> bool {
        let now = Instant::now();
        let due = always || now >= self.next;
        if due {
            self.next = now + FRAME;
        }
        due
    }

    fn draw(&mut self, page: Page) -> io::Result<()> {
        let lines = page.lines();
        self.forget_if_resumed();
        let mut frame = self.erasure();
        for (i, line) in lines.iter().enumerate() {
            frame += if i > 0 { "\r\n" } else { "" };
            frame += &line.text;
        }
        self.drawn = lines.iter().map(|line| line.width).collect();
        // Between these two codes, terminals that know them show nothing half done.
        put(&format!("\x1b[?2026h{frame}\x1b[?2026l"))
    }

    /// After a stop the shell's words stand below the picture: it is left to them.
    fn forget_if_resumed(&mut self) {
        if resumed() {
            self.drawn.clear();
        }
    }

    fn erase(&mut self) -> io::Result<()> {
        self.forget_if_resumed();
        let codes = self.erasure();
        self.drawn.clear();
        put(&codes)
    }

    /// Codes that clear the picture and leave the cursor where it began. A terminal that has become narrower since has
    /// broken its lines.
    fn erasure(&self) -> String {
        let (columns, _) = size();
        let rows: usize = self.drawn.iter().map(|width| width.div_ceil(columns).max(1)).sum();
        match rows {
            0 => String::new(),
            1 => "\r\x1b[J".into(),
            rows => format!("\r\x1b[{}A\x1b[J", rows - 1),
        }
    }
}

impl Drop for CanvasView {
    fn drop(&mut self) {
        let _ = self.erase();
    }
}

fn put(codes: &str) -> io::Result<()> {
    let mut err = io::stderr().lock();
    err.write_all(codes.as_bytes())?;
    err.flush()
}

/// Columns and rows of the terminal.
fn size() -> (usize, usize) {
    let (columns, rows) = crossterm::terminal::size().unwrap_or((80, 24));
    (usize::from(columns).max(1), usize::from(rows).max(2))
}

/// The canvas as it would be if it ended now, shaded by how sure the model is; what the step accepted is underlined.
fn draft(vocab: &Vocab, step: &Step<'_>, page: &mut Page) {
    let positions = || step.argmax.iter().zip(step.entropy).zip(step.accepted);
    let ended = positions().position(|((id, _), accepted)| *accepted && vocab.is_eog(*id));
    let shown = step.argmax.iter().rposition(|id| !vocab.is_hidden(*id)).map_or(0, |last| last + 1);
    for ((id, entropy), accepted) in positions().take(ended.unwrap_or(shown).min(shown)) {
        let style = SHADES.iter().find(|(limit, _)| entropy < limit).map_or(UNSURE, |(_, style)| *style);
        page.marked = *accepted;
        let piece = String::from_utf8_lossy(vocab.piece(*id));
        match () {
            () if vocab.is_hidden(*id) || piece.is_empty() => page.char(HIDDEN, style),
            // A line that is not sure to end would make the picture jump.
            () if style == UNSURE => page.text(&piece.replace('\n', "↵"), style),
            () => page.text(&piece, style),
        }
    }
    page.marked = false;
}

fn status(step: &Step<'_>) -> String {
    let accepted = step.accepted.iter().filter(|accepted| **accepted).count();
    format!(
        "canvas {} · step {} of {} · temperature {:.2} · entropy {:.3} · accepted {accepted} of {}",
        step.canvas + 1,
        step.step,
        step.max_steps,
        step.temperature,
        step.mean_entropy,
        step.argmax.len()
    )
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Plain,
    Faint,
    /// One of the 256 colours.
    Colour(u8),
}

#[derive(Debug, Clone, Default)]
struct Line {
    text: String,
    width: usize,
}

/// Breaks text into lines of the terminal.
struct Page {
    columns: usize,
    rows: usize,
    lines: Vec<Line>,
    current: (Style, bool),
    /// Whether what is added is underlined.
    marked: bool,
}

impl Page {
    fn new() -> Self {
        let (columns, rows) = size();
        Self::sized(columns, rows)
    }

    fn sized(columns: usize, rows: usize) -> Self {
        // The last column stays free: terminals differ in what they do behind it.
        let columns = columns.saturating_sub(1).max(1);
        Self { columns, rows, lines: vec![Line::default()], current: (Style::Plain, false), marked: false }
    }

    fn text(&mut self, text: &str, style: Style) {
        text.chars().for_each(|c| self.char(c, style));
    }

    fn char(&mut self, c: char, style: Style) {
        match c {
            '\n' => return self.end_line(),
            '\t' => return (0..4).for_each(|_| self.char(' ', style)),
            _ => {}
        }
        // What acts on the terminal must not reach it. What is too wide for any line cannot be shown.
        let (c, width) = match c.width() {
            _ if output::acts(c) => (HIDDEN, 1),
            None => (HIDDEN, 1),
            Some(width) if width > self.columns => (HIDDEN, 1),
            Some(width) => (c, width),
        };
        if self.lines.last().is_some_and(|line| line.width + width > self.columns) {
            self.end_line();
        }
        let wanted = (style, self.marked && c != ' ');
        let codes = if wanted == self.current { String::new() } else { codes(wanted) };
        self.current = wanted;
        if let Some(line) = self.lines.last_mut() {
            line.text += &codes;
            line.text.push(c);
            line.width += width;
        }
    }

    fn end_line(&mut self) {
        self.reset();
        self.lines.push(Line::default());
    }

    fn reset(&mut self) {
        if self.current != (Style::Plain, false)
            && let Some(line) = self.lines.last_mut()
        {
            line.text += "\x1b[0m";
        }
        self.current = (Style::Plain, false);
    }

    /// The last line, cut where the terminal ends.
    fn status(&mut self, text: &str) {
        if self.lines.last().is_some_and(|line| line.width > 0) {
            self.end_line();
        }
        let mut width = 0;
        for c in text.chars() {
            width += c.width().unwrap_or(0);
            if width > self.columns {
                break;
            }
            self.char(c, Style::Faint);
        }
        self.reset();
    }

    /// As many of the last lines as the terminal has rows, less one: the line above stays in sight.
    fn lines(mut self) -> Vec<Line> {
        let excess = self.lines.len().saturating_sub(self.rows - 1);
        self.lines.split_off(excess)
    }
}

fn codes((style, marked): (Style, bool)) -> String {
    let underline = if marked { ";4" } else { "" };
    match style {
        Style::Plain => format!("\x1b[0{underline}m"),
        Style::Faint => format!("\x1b[0;2{underline}m"),
        Style::Colour(n) => format!("\x1b[0;38;5;{n}{underline}m"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(page: Page) -> Vec<String> {
        page.lines().into_iter().map(|line| line.text).collect()
    }

    #[test]
    fn lines_break_before_what_does_not_fit() {
        let mut page = Page::sized(5, 10);
        page.text("abcdef漢字g", Style::Plain);
        let widths: Vec<_> = page.lines.iter().map(|line| line.width).collect();
        assert_eq!(plain(page), ["abcd", "ef漢", "字g"]);
        assert_eq!(widths, [4, 4, 3]);
    }

    #[test]
    fn a_terminal_of_one_column_shows_what_it_can() {
        let mut page = Page::sized(1, 10);
        page.text("a漢", Style::Plain);
        page.status("canvas");
        assert_eq!(plain(page)[..2], ["a".to_owned(), HIDDEN.to_string()]);
    }

    #[test]
    fn only_the_last_rows_are_kept() {
        let mut page = Page::sized(80, 3);
        page.text("1\n2\n3\n4", Style::Plain);
        assert_eq!(plain(page), ["3", "4"]);
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        let mut page = Page::sized(80, 3);
        page.text("a\x1b[2Jb\r\x07", Style::Plain);
        assert_eq!(plain(page), [format!("a{HIDDEN}[2Jb{HIDDEN}{HIDDEN}")]);
        let mut page = Page::sized(80, 3);
        page.text("a\u{202e}b\u{200b}", Style::Plain);
        assert_eq!(plain(page), [format!("a{HIDDEN}b{HIDDEN}")]);
    }

    #[test]
    fn styles_end_with_their_line() {
        let mut page = Page::sized(3, 9);
        page.marked = true;
        page.text("abc", Style::Colour(37));
        assert_eq!(plain(page), ["\x1b[0;38;5;37;4mab\x1b[0m", "\x1b[0;38;5;37;4mc"]);
    }
}
