//! Ctrl-C, and the terminal's state: whatever ends the program, the terminal is as it was.

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::output::{INTERRUPTED, note};

/// Work is going on that looks at `REQUESTED`.
static CANCELLABLE: AtomicBool = AtomicBool::new(false);
/// The user wants that work to end.
static REQUESTED: AtomicBool = AtomicBool::new(false);
/// The system wants the program to end, or its terminal has gone: when that work has ended, so does the program.
static ENDING: AtomicBool = AtomicBool::new(false);
/// A line editor has the terminal and has asked it to mark what is pasted.
static EDITING: AtomicBool = AtomicBool::new(false);
/// The cursor is hidden.
static HIDDEN: AtomicBool = AtomicBool::new(false);
/// A picture is being drawn.
static DRAWING: AtomicBool = AtomicBool::new(false);
/// The program was stopped and goes on: what stands in the terminal now is not what it drew.
static RESUMED: AtomicBool = AtomicBool::new(false);

/// Takes over Ctrl-C, the system's request to end and the closing of the terminal; remembers the terminal's modes. On Unix
/// Ctrl-\ and Ctrl-Z keep their meaning, but find the terminal as it was.
///
/// The first request ends cancellable work at its next step. A second one, or one outside such work, ends the program.
/// After the system's request or the terminal's closing the program ends with that work: see [`ending`].
pub fn install() {
    modes::remember();
    modes::watch();
    if let Err(error) = ctrlc::set_handler(|| on_request(false)) {
        note(format_args!("warning: Ctrl-C will end the program at once: {error}"));
    }
    std::panic::set_hook(Box::new(|panic| {
        restore_terminal();
        note(format_args!("error: a fault in this program, please report it: {panic}").to_string().replace('\n', " "));
    }));
}

/// `end`: the program is to end, not only its work.
fn on_request(end: bool) {
    // Before the question whether work goes on: whoever ends work looks at this after it.
    if end {
        ENDING.store(true, SeqCst);
    }
    if CANCELLABLE.load(SeqCst) && !REQUESTED.swap(true, SeqCst) {
        return;
    }
    exit();
}

/// Ends the program as interrupted, from any thread.
fn exit() -> ! {
    // Held to the end: nobody may hide the cursor again, or be about to show it.
    let _terminal = terminal();
    put_back();
    // Not `std::process::exit`: it runs the exit handlers of C and C++, which take away what a thread that computes still
    // uses. Nothing here waits for them; what was printed is flushed.
    signal_hook::low_level::exit(INTERRUPTED.into())
}

fn restore_terminal() {
    let _terminal = terminal();
    put_back();
}

/// Whoever holds it may change the terminal's state.
fn terminal() -> MutexGuard<'static, ()> {
    static TERMINAL: Mutex<()> = Mutex::new(());
    TERMINAL.lock().unwrap_or_else(PoisonError::into_inner)
}

fn put_back() {
    modes::restore();
    if EDITING.load(SeqCst) {
        put("\x1b[?2004l");
    }
    show_cursor();
}

fn put(codes: &str) {
    let mut err = std::io::stderr();
    // The terminal may have gone.
    let _ = err.write_all(codes.as_bytes()).and_then(|()| err.flush());
}

fn show_cursor() {
    if HIDDEN.swap(false, SeqCst) {
        put("\x1b[0m\x1b[?25h");
    }
}

/// Whether the user wanted the last cancellable work to end, also where it had just ended by itself.
pub fn was_requested() -> bool {
    REQUESTED.load(SeqCst)
}

/// Whether the program is to end now that no work goes on.
pub fn ending() -> bool {
    ENDING.load(SeqCst)
}

/// Work that Ctrl-C ends gently, while this lives.
pub struct Cancellable(());

impl Cancellable {
    pub fn begin() -> Self {
        REQUESTED.store(ENDING.load(SeqCst), SeqCst);
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

/// A line editor that marks pasted text has the terminal, while this lives.
pub struct Editing(());

impl Editing {
    pub fn begin() -> Self {
        EDITING.store(true, SeqCst);
        Self(())
    }
}

impl Drop for Editing {
    fn drop(&mut self) {
        EDITING.store(false, SeqCst);
    }
}

/// A terminal without cursor and without echo, while this lives: a picture is being drawn there.
pub struct Still(());

impl Still {
    pub fn begin() -> Self {
        DRAWING.store(true, SeqCst);
        still();
        Self(())
    }
}

impl Drop for Still {
    fn drop(&mut self) {
        DRAWING.store(false, SeqCst);
        restore_terminal();
    }
}

fn still() {
    let _terminal = terminal();
    modes::mute();
    HIDDEN.store(true, SeqCst);
    put("\x1b[?25l");
}

/// Whether the program was stopped since the last call. Then a picture begins anew.
pub fn resumed() -> bool {
    RESUMED.swap(false, SeqCst)
}

#[cfg(unix)]
mod modes {
    use std::io;
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering::SeqCst;

    use rustix::process::getpgrp;
    use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};
    use signal_hook::consts::{SIGHUP, SIGQUIT, SIGTERM, SIGTSTP};
    use signal_hook::iterator::Signals;
    use signal_hook::low_level::emulate_default_handler;

    use super::super::output::note;
    use super::{DRAWING, EDITING, RESUMED, on_request, put, restore_terminal, still};

    /// The modes that the terminal had when the program started.
    static MODES: OnceLock<Termios> = OnceLock::new();

    pub fn remember() {
        if let Ok(modes) = tcgetattr(std::io::stdin()) {
            let _ = MODES.set(modes);
        }
    }

    pub fn restore() {
        if let Some(modes) = MODES.get() {
            set(modes);
        }
    }

    /// What is typed is kept for later and not shown. Ctrl-C still works.
    pub fn mute() {
        if let Some(mut modes) = MODES.get().cloned() {
            modes.local_modes.remove(LocalModes::ECHO | LocalModes::ICANON);
            set(&modes);
        }
    }

    /// In the background the terminal is another program's, and the system would stop this one for touching it.
    fn set(modes: &Termios) {
        if tcgetpgrp(std::io::stdin()).is_ok_and(|foreground| foreground == getpgrp()) {
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, modes);
        }
    }

    /// The system's request to end, and the terminal's closing.
    fn watch_requests() -> io::Result<()> {
        let mut signals = Signals::new([SIGTERM, SIGHUP])?;
        let watch = move || signals.forever().for_each(|_| on_request(true));
        std::thread::Builder::new().spawn(watch).map(drop)
    }

    /// Ctrl-\ and Ctrl-Z do what they always do, after the terminal has been restored.
    pub fn watch() {
        if let Err(error) = watch_requests() {
            note(format_args!("warning: a request to end will end the program at once: {error}"));
        }
        let mut signals = match Signals::new([SIGQUIT, SIGTSTP]) {
            Ok(signals) => signals,
            Err(error) => return note(format_args!("warning: Ctrl-Z may leave the terminal without echo: {error}")),
        };
        std::thread::spawn(move || {
            for signal in signals.forever() {
                let now = tcgetattr(std::io::stdin());
                restore_terminal();
                // Comes back when the program is continued; for Ctrl-\ never.
                let _ = emulate_default_handler(signal);
                RESUMED.store(true, SeqCst);
                match now {
                    _ if DRAWING.load(SeqCst) => still(),
                    // A line editor's.
                    Ok(modes) => {
                        set(&modes);
                        if EDITING.load(SeqCst) {
                            put("\x1b[?2004h");
                        }
                    }
                    Err(_) => {}
                }
            }
        });
    }
}

#[cfg(not(unix))]
mod modes {
    pub fn remember() {}
    pub fn restore() {}
    pub fn mute() {}
    // When its window is closed, the system ends the program itself.
    pub fn watch() {}
}
