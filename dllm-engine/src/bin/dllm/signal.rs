//! Ctrl-C, and the terminal's state: whatever ends the program, the terminal is as it was.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use super::output::{INTERRUPTED, note};

/// Work is going on that looks at `REQUESTED`.
static CANCELLABLE: AtomicBool = AtomicBool::new(false);
/// The user wants that work to end.
static REQUESTED: AtomicBool = AtomicBool::new(false);
/// The cursor is hidden.
static HIDDEN: AtomicBool = AtomicBool::new(false);

/// Takes over Ctrl-C, the system's request to end and the closing of the terminal; remembers the terminal's modes.
///
/// The first request ends cancellable work at its next step. A second one, or one outside such work, ends the program.
pub fn install() {
    modes::remember();
    if let Err(error) = ctrlc::set_handler(on_request) {
        note(format_args!("warning: Ctrl-C will end the program at once: {error}"));
    }
    std::panic::set_hook(Box::new(|panic| {
        restore_terminal();
        note(format_args!("error: a fault in this program, please report it: {panic}").to_string().replace('\n', " "));
    }));
}

fn on_request() {
    if CANCELLABLE.load(SeqCst) && !REQUESTED.swap(true, SeqCst) {
        return;
    }
    exit();
}

/// Ends the program as interrupted, from any thread.
fn exit() -> ! {
    restore_terminal();
    std::process::exit(INTERRUPTED.into())
}

fn restore_terminal() {
    modes::restore();
    show_cursor();
}

fn show_cursor() {
    if HIDDEN.swap(false, SeqCst) {
        let mut err = std::io::stderr();
        let _ = err.write_all(b"\x1b[0m\x1b[?25h").and_then(|()| err.flush());
    }
}

/// Whether the user wanted the last cancellable work to end, also where it had just ended by itself.
pub fn was_requested() -> bool {
    REQUESTED.load(SeqCst)
}

/// Work that Ctrl-C ends gently, while this lives.
pub struct Cancellable(());

impl Cancellable {
    pub fn begin() -> Self {
        REQUESTED.store(false, SeqCst);
        CANCELLABLE.store(true, SeqCst);
        Self(())
    }

    /// Whether the user wants it to end.
    pub fn requested(&self) -> bool {
        REQUESTED.load(SeqCst)
    }
}

impl Drop for Cancellable {
    fn drop(&mut self) {
        CANCELLABLE.store(false, SeqCst);
    }
}

/// A terminal without cursor and without echo, while this lives: a picture is being drawn there.
pub struct Still(());

impl Still {
    pub fn begin() -> Self {
        modes::mute();
        HIDDEN.store(true, SeqCst);
        let _ = std::io::stderr().write_all(b"\x1b[?25l");
        Self(())
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        restore_terminal();
    }
}

#[cfg(unix)]
mod modes {
    use std::sync::OnceLock;

    use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

    /// The modes that the terminal had when the program started.
    static MODES: OnceLock<Termios> = OnceLock::new();

    pub fn remember() {
        if let Ok(modes) = tcgetattr(std::io::stdin()) {
            let _ = MODES.set(modes);
        }
    }

    pub fn restore() {
        if let Some(modes) = MODES.get() {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, modes);
        }
    }

    /// What is typed is kept for later and not shown. Ctrl-C still works.
    pub fn mute() {
        if let Some(mut modes) = MODES.get().cloned() {
            modes.local_modes.remove(LocalModes::ECHO | LocalModes::ICANON);
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &modes);
        }
    }
}

#[cfg(not(unix))]
mod modes {
    pub fn remember() {}
    pub fn restore() {}
    pub fn mute() {}
}
