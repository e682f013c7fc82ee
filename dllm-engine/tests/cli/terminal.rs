//! The command in a terminal: a pseudo terminal, and a screen that is read back.

use std::io::{Read, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use portable_pty::{Child, CommandBuilder, MasterPty, PtyPair, PtySize, native_pty_system};

use rustix::process::{Pid, Signal, kill_process};

use super::*;

/// Longer than any test may take.
const PATIENCE: Duration = Duration::from_secs(60);

struct Terminal {
    pair: PtyPair,
    child: Box<dyn Child + Send + Sync>,
    keys: Arc<Mutex<Box<dyn Write + Send>>>,
    screen: Arc<Mutex<vt100::Parser>>,
    /// Everything that was ever written to it.
    written: Arc<Mutex<Vec<u8>>>,
    modes_before: String,
}

fn size(rows: u16, cols: u16) -> PtySize {
    PtySize { rows, cols, pixel_width: 0, pixel_height: 0 }
}

fn modes(master: &dyn MasterPty) -> String {
    format!("{:?}", master.get_termios().unwrap())
}

impl Terminal {
    fn start(args: &[&str], environment: &[(&str, &str)]) -> Self {
        let pair = native_pty_system().openpty(size(24, 80)).unwrap();
        let modes_before = modes(&*pair.master);
        let mut command = CommandBuilder::new(env!("CARGO_BIN_EXE_dllm"));
        command.args(args);
        command.env_remove("DLLM_MODEL");
        command.env_remove("NO_COLOR");
        command.env("DLLM_THREADS", "1");
        command.env("TERM", "xterm-256color");
        environment.iter().for_each(|(key, value)| command.env(key, value));
        let child = pair.slave.spawn_command(command).unwrap();
        let keys = Arc::new(Mutex::new(pair.master.take_writer().unwrap()));
        let screen = Arc::new(Mutex::new(vt100::Parser::new(24, 80, 1000)));
        let written = Arc::new(Mutex::new(Vec::new()));
        let mut output = pair.master.try_clone_reader().unwrap();
        let (screen_in, written_in) = (Arc::clone(&screen), Arc::clone(&written));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = output.read(&mut bytes) {
                screen_in.lock().unwrap().process(&bytes[..n]);
                written_in.lock().unwrap().extend_from_slice(&bytes[..n]);
            }
        });
        Self { pair, child, keys, screen, written, modes_before }
    }

    fn send(&self, keys: &str) {
        self.send_bytes(keys.as_bytes());
    }

    fn send_bytes(&self, keys: &[u8]) {
        let mut out = self.keys.lock().unwrap();
        out.write_all(keys).unwrap();
        out.flush().unwrap();
    }

    fn signal(&self, signal: Signal) {
        let id = self.child.process_id().and_then(|id| Pid::from_raw(id as i32)).unwrap();
        kill_process(id, signal).unwrap();
    }

    fn contents(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    #[track_caller]
    fn wait_until(&self, what: &str, holds: impl Fn(&str) -> bool) -> String {
        let begin = Instant::now();
        loop {
            let contents = self.contents();
            if holds(&contents) {
                return contents;
            }
            assert!(begin.elapsed() < PATIENCE, "never seen: {what}; on the screen:\n{contents}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[track_caller]
    fn wait_for(&self, text: &str) -> String {
        self.wait_until(text, |contents| contents.contains(text))
    }

    /// The prompt on the last line, ready for input.
    #[track_caller]
    fn wait_for_prompt(&self) -> String {
        self.wait_until("the prompt", |contents| contents.lines().last().is_some_and(|line| line.trim_end() == ">"))
    }

    fn resize(&self, rows: u16, cols: u16) {
        self.screen.lock().unwrap().screen_mut().set_size(rows, cols);
        self.pair.master.resize(size(rows, cols)).unwrap();
    }

    /// Waits for the end. The terminal must be as it was, with its cursor.
    #[track_caller]
    fn end(mut self) -> (u32, String) {
        let begin = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(begin.elapsed() < PATIENCE, "it does not end; on the screen:\n{}", self.contents());
            std::thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(modes(&*self.pair.master), self.modes_before);
        std::thread::sleep(Duration::from_millis(100)); // what was written last is on its way
        assert!(!self.screen.lock().unwrap().screen().hide_cursor());
        let written = String::from_utf8_lossy(&self.written.lock().unwrap()).into_owned();
        (status.exit_code(), written)
    }
}

#[test]
fn a_conversation_shows_the_canvas_and_leaves_the_answer() {
    let terminal = Terminal::start(&["chat", "--pace", "150"], &[]);
    terminal.wait_for("/help");
    terminal.wait_for_prompt();
    terminal.send("86 + 45 =\r");
    let live = terminal.wait_for("step 2 of");
    assert!(live.contains("temperature") && live.contains("entropy") && live.contains("accepted"), "{live}");
    let settled = terminal.wait_for_prompt();
    assert!(settled.lines().any(|line| line.trim_end() == SUM_ANSWER), "{settled}");
    assert!(!settled.contains("temperature"), "{settled}");
    terminal.send("/receipt\r");
    terminal.wait_for("tok/s");
    terminal.send("/exit\r");
    let (code, written) = terminal.end();
    assert_eq!(code, 0);
    assert!(written.contains("\x1b[?25l") && written.contains("\x1b[?25h"));
}

#[test]
fn ctrl_c_ends_the_answer_then_the_program() {
    let terminal = Terminal::start(&[&["chat"], &SLOW[..]].concat(), &[]);
    terminal.wait_for_prompt();
    terminal.send(&format!("{COUNT}\r"));
    terminal.wait_for("canvas 2");
    assert_ne!(modes(&*terminal.pair.master), terminal.modes_before);
    terminal.send("\x03");
    terminal.wait_for("(cancelled)");
    let contents = terminal.wait_for_prompt();
    assert!(contents.contains("3 4 5"), "{contents}");
    terminal.send("86 + 45 =\r");
    terminal.wait_until("the next answer", |c| c.lines().any(|line| line.trim_end() == SUM_ANSWER));
    terminal.wait_for_prompt();
    terminal.send("\x03");
    assert_eq!(terminal.end().0, 130);
}

#[test]
fn issue_2_what_is_typed_ahead_is_not_lost() {
    let terminal = Terminal::start(&["chat", "--seed", "1", "--pace", "100"], &[]);
    terminal.wait_for_prompt();
    // Three lines at once, as a paste without brackets: one reading by the editor takes them all.
    terminal.send(&format!("/seed 12\r/seed 13\r{SUM}\r"));
    terminal.wait_for("step 2 of");
    // And two while an answer is made.
    terminal.send("/seed 14\r/exit\r");
    let (code, written) = terminal.end();
    assert_eq!(code, 0);
    for part in ["(seed 12)", "(seed 13)", SUM_ANSWER, "(seed 14)"] {
        assert!(written.contains(part), "{part} is missing: {written:?}");
    }
}

#[test]
fn ctrl_d_leaves() {
    let terminal = Terminal::start(&["chat"], &[]);
    terminal.wait_for_prompt();
    terminal.send("\x04");
    assert_eq!(terminal.end().0, 0);
}

#[test]
fn commands_of_a_conversation() {
    let terminal = Terminal::start(&["chat"], &[]);
    terminal.wait_for_prompt();
    for (command, answer) in [
        ("/nonsense", "there is no command"),
        ("/seed 12", "(seed 12)"),
        ("/seed x", "bad seed"),
        ("/system Be brief.", "(a new conversation)"),
        ("/think maybe", "neither on nor off"),
        ("/new x", "/new stands alone"),
        ("/receipt", "no answer yet"),
        ("/help", "forget the conversation"),
    ] {
        terminal.send(&format!("{command}\r"));
        terminal.wait_for(answer);
        terminal.wait_for_prompt();
    }
    terminal.send("86 + 45 =\r");
    terminal.wait_until("the answer", |c| c.lines().any(|line| line.trim_end() == SUM_ANSWER));
    terminal.wait_for_prompt();
    terminal.send("/receipt\r");
    terminal.wait_for("device_bytes");
    terminal.wait_for_prompt();
    terminal.send("/exit\r");
    assert_eq!(terminal.end().0, 0);
}

#[test]
fn terminals_without_escape_codes_get_none() {
    for environment in [("TERM", "dumb"), ("NO_COLOR", "1")] {
        let terminal = Terminal::start(&["chat", "--pace", "20"], &[environment]);
        terminal.wait_for_prompt();
        terminal.send("86 + 45 =\n");
        terminal.wait_until("the answer", |c| c.lines().any(|line| line.trim_end() == SUM_ANSWER));
        terminal.wait_for_prompt();
        terminal.send("\x04");
        let (code, written) = terminal.end();
        assert_eq!(code, 0);
        assert!(!written.contains('\x1b'), "{written:?}");
    }
}

#[test]
fn narrow_and_changing_terminals() {
    let terminal = Terminal::start(&[&["generate", "--watch", COUNT], &SLOW[..]].concat(), &[]);
    terminal.wait_for("step 1 of");
    terminal.resize(6, 20);
    terminal.wait_for("step 3");
    terminal.resize(3, 2);
    std::thread::sleep(Duration::from_millis(300));
    terminal.resize(24, 100);
    terminal.wait_for("canvas 2 · step");
    terminal.wait_for("tok/s");
    let (code, written) = terminal.end();
    assert_eq!(code, 0);
    assert!(written.contains("36 37 38 39 40\x1b[0m"), "the answer is not printed whole: {written:?}");
}

#[test]
fn a_watched_answer_is_interrupted() {
    let terminal = Terminal::start(&[&["generate", "--watch", COUNT], &SLOW[..]].concat(), &[]);
    terminal.wait_for("canvas 2");
    terminal.send("\x03");
    terminal.wait_for("cancelled");
    let contents = terminal.contents();
    assert!(contents.contains("3 4 5") && !contents.contains("temperature"), "{contents}");
    assert_eq!(terminal.end().0, 130);
}

#[test]
fn a_terminal_that_goes_away_ends_it() {
    let terminal = Terminal::start(&["chat"], &[]);
    terminal.wait_for_prompt();
    assert_ne!(modes(&*terminal.pair.master), terminal.modes_before);
    terminal.signal(Signal::HUP);
    assert_eq!(terminal.end().0, 130);
}

/// Whether the terminal was told last not to mark what is pasted.
fn pastes_plainly(written: &str) -> bool {
    written.rfind("\x1b[?2004l") > written.rfind("\x1b[?2004h")
}

#[test]
fn a_request_to_end_at_the_prompt_restores_the_terminal() {
    for kind in [Signal::TERM, Signal::HUP] {
        let terminal = Terminal::start(&["chat"], &[]);
        terminal.wait_for_prompt();
        terminal.signal(kind);
        let (code, written) = terminal.end();
        assert_eq!(code, 130);
        assert!(written.contains("\x1b[?2004h") && pastes_plainly(&written), "{kind:?}: {written:?}");
    }
}

#[test]
fn a_request_to_end_during_an_answer_ends_the_conversation() {
    for kind in [Signal::TERM, Signal::HUP] {
        for environment in [&[][..], &[("TERM", "dumb")]] {
            let terminal = Terminal::start(&[&["chat"], &SLOW[..]].concat(), environment);
            terminal.wait_for_prompt();
            terminal.send(&format!("{COUNT}\r"));
            terminal.wait_for(if environment.is_empty() { "canvas 2" } else { "3 4 5" });
            terminal.signal(kind);
            let (code, written) = terminal.end();
            assert_eq!(code, 130);
            assert!(environment.is_empty() == pastes_plainly(&written), "{written:?}");
            assert!(written.contains("(cancelled)"), "{kind:?}: {written:?}");
        }
    }
}

#[test]
fn a_line_that_is_no_text_is_told_and_the_conversation_goes_on() {
    for environment in [&[][..], &[("TERM", "dumb")]] {
        let terminal = Terminal::start(&["chat"], environment);
        terminal.wait_for_prompt();
        terminal.send_bytes(b"\xe4bc\r");
        terminal.wait_for("UTF-8");
        terminal.wait_for_prompt();
        terminal.send(&format!("{SUM}\r"));
        terminal.wait_until("the answer", |c| c.lines().any(|line| line.trim_end() == SUM_ANSWER));
        terminal.wait_for_prompt();
        terminal.send("\x04");
        assert_eq!(terminal.end().0, 0);
    }
}

fn watched() -> Terminal {
    let terminal = Terminal::start(&[&["generate", "--watch", COUNT], &SLOW[..]].concat(), &[]);
    terminal.wait_for("canvas 1 · step 2");
    assert_ne!(modes(&*terminal.pair.master), terminal.modes_before);
    terminal
}

#[test]
fn issue_2_ctrl_backslash_leaves_the_terminal_as_it_was() {
    let terminal = watched();
    terminal.send("\x1c");
    assert_ne!(terminal.end().0, 0);
}

#[test]
fn issue_2_ctrl_z_gives_the_terminal_back_until_the_program_goes_on() {
    let terminal = watched();
    terminal.send("\x1a");
    let as_before = |terminal: &Terminal| modes(&*terminal.pair.master) == terminal.modes_before;
    let wait_for_modes = |wanted: bool| {
        let begin = Instant::now();
        while as_before(&terminal) != wanted {
            assert!(begin.elapsed() < PATIENCE, "the modes never changed");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    wait_for_modes(true);
    std::thread::sleep(Duration::from_millis(400)); // more than two steps, were it not stopped
    let stopped = terminal.contents();
    assert!(!terminal.screen.lock().unwrap().screen().hide_cursor());
    std::thread::sleep(Duration::from_millis(400));
    assert_eq!(terminal.contents(), stopped);
    terminal.signal(Signal::CONT);
    wait_for_modes(false);
    terminal.wait_for("canvas 2");
    assert!(terminal.screen.lock().unwrap().screen().hide_cursor());
    terminal.send("\x03");
    assert_eq!(terminal.end().0, 130);
}
