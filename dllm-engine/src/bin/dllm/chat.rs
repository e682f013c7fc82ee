//! `dllm chat`: a conversation in the terminal, or through pipes.

use std::io::{BufRead, ErrorKind, IsTerminal, Read};
use std::sync::Arc;

use dllm_engine::vocab::{MAX_TEXT, Vocab};
use dllm_engine::{Chat, Completion, Error, FinishReason, Message, ModelInfo, Prompt, Request, Role};
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

use super::args::ChatArgs;
use super::canvas_view::{self, CanvasView};
use super::generate::{Follow, request, summary};
use super::output::{self, Failure, Outcome, Result, note};
use super::signal;

const PROMPT: &str = "> ";

const HELP: &str = "\
/new            forget the conversation
/seed N         use this seed; /seed alone draws one for every answer
/system TEXT    set the instructions and begin anew; /system alone removes them
/think on|off   let the model think first
/receipt        what the last answer cost
/help           this list
/exit           leave
//...           a question that begins with one /
Ctrl-C ends an answer; at the prompt it ends the program, as Ctrl-D does.";

pub fn run(args: &ChatArgs) -> Result {
    let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let live = terminal && canvas_view::supported();
    // The line editor takes Ctrl-C over when it is made; this takes it back.
    let mut reader = Reader::new(terminal, live)?;
    signal::install();
    let mut engine = output::load(args.load.params(args.model.source(), 1)?)?;
    let (info, vocab) = (engine.info().clone(), Arc::clone(engine.vocab()));
    if terminal {
        note(welcome(&info));
    }
    let mut talk = Talk {
        chat: engine.chat(),
        vocab,
        request: request(Prompt::Messages(Vec::new()), &args.answer)?,
        system: args.answer.system.clone(),
        pace: args.answer.pace,
        last: None,
        live,
        terminal,
    };
    talk.begin();
    loop {
        let line = match reader.line()? {
            Line::Text(line) => line,
            Line::End => return Ok(Outcome::Done),
            Line::Interrupt => return Ok(Outcome::Interrupted),
            Line::Bad(why) => {
                talk.wrong(why)?;
                continue;
            }
        };
        let next = match line.trim() {
            "" => Next::Go,
            question if question.starts_with("//") => talk.ask(&question[1..])?,
            command if command.starts_with('/') => talk.command(command)?,
            question => talk.ask(question)?,
        };
        if let Next::End(outcome) = next {
            return Ok(outcome);
        }
        if signal::ending() {
            return Ok(Outcome::Interrupted);
        }
    }
}

fn welcome(info: &ModelInfo) -> String {
    format!(
        "{} · {} · {} · context {}\n/help lists the commands",
        output::printable(&info.name),
        info.quantization,
        info.device,
        info.context
    )
}

enum Next {
    Go,
    End(Outcome),
}

struct Talk<'e> {
    chat: Chat<'e>,
    vocab: Arc<Vocab>,
    /// Everything but the question.
    request: Request,
    system: Option<String>,
    pace: u64,
    last: Option<Completion>,
    live: bool,
    /// Someone sits there: a wrong command or question is told and the conversation goes on.
    terminal: bool,
}

impl Talk<'_> {
    fn begin(&mut self) {
        self.chat.clear();
        if let Some(system) = &self.system {
            self.chat.push(Message::system(system));
        }
    }

    fn ask(&mut self, question: &str) -> Result<Next> {
        let mut follow = Follow::new(self.pace);
        follow.stream = true;
        if self.live {
            follow.view = Some(CanvasView::new(Arc::clone(&self.vocab)));
        }
        let answer = match self.chat.ask(question, &self.request, &mut |event| follow.event(0, &event)) {
            Ok(answer) => answer,
            Err(error) => {
                drop(follow);
                return self.wrong(self.in_conversation(error));
            }
        };
        follow.finish(std::slice::from_ref(&answer))?;
        // A request that came after the last step cancels nothing any more, but it was one: a script's run ends.
        let cancelled = answer.finish_reason == FinishReason::Cancelled;
        let interrupted = cancelled || signal::was_requested();
        if let Some(thought) = &answer.reasoning {
            note(format_args!("thought: {}", output::printable(thought.trim())));
        }
        if self.terminal {
            match () {
                () if cancelled => note("(cancelled)"),
                () if answer.text.is_empty() => note("(the answer is empty)"),
                () if answer.finish_reason == FinishReason::Length => note("(cut at the limit)"),
                () => {}
            }
        }
        self.last = Some(answer);
        Ok(if interrupted && !self.terminal { Next::End(Outcome::Interrupted) } else { Next::Go })
    }

    /// What to say to a question that could not be answered. The prompt is the conversation here.
    fn in_conversation(&self, error: Error) -> String {
        let begun = self.chat.messages().iter().any(|message| message.role == Role::User);
        match error {
            Error::PromptTooLong { tokens, fits, .. } if begun => {
                format!(
                    "the conversation and this question have {tokens} tokens, but {fits} fit: /new begins a new one"
                )
            }
            error => output::words(error),
        }
    }

    fn command(&mut self, line: &str) -> Result<Next> {
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        match (name, rest) {
            ("/exit" | "/quit" | "/help" | "/new" | "/receipt", more) if !more.is_empty() => {
                return self.wrong(format_args!(
                    "{name} stands alone, without {more:?}; a question that begins with / needs //"
                ));
            }
            ("/exit" | "/quit", _) => return Ok(Next::End(Outcome::Done)),
            ("/help", _) => note(HELP),
            ("/new", _) => {
                self.begin();
                self.say("a new conversation");
            }
            ("/seed", "") => {
                self.request.seed = None;
                self.say("a drawn seed for every answer");
            }
            ("/seed", n) => match n.parse() {
                Ok(seed) => {
                    self.request.seed = Some(seed);
                    self.say(format_args!("seed {seed}"));
                }
                Err(_) => return self.wrong(format_args!("bad seed: {n:?} is not in 0..={}", u64::MAX)),
            },
            ("/system", text) => {
                self.system = Some(text.to_owned()).filter(|text| !text.is_empty());
                self.begin();
                self.say(if text.is_empty() { "no instructions, a new conversation" } else { "a new conversation" });
            }
            ("/think", "on" | "off") => {
                self.request.thinking = rest == "on";
                self.say(format_args!("think {rest}"));
            }
            ("/think", other) => return self.wrong(format_args!("bad think: {other:?} is neither on nor off")),
            ("/receipt", _) => match &self.last {
                Some(answer) => {
                    note(serde_json::to_string_pretty(&answer.receipt).unwrap_or_default());
                    note(summary(answer));
                }
                None => note("no answer yet"),
            },
            (other, _) => return self.wrong(format_args!("there is no command {other:?}: /help lists them")),
        }
        Ok(Next::Go)
    }

    fn say(&self, what: impl std::fmt::Display) {
        if self.terminal {
            note(format_args!("({what})"));
        }
    }

    /// A person is told and goes on; a script that is wrong ends.
    fn wrong(&self, what: impl std::fmt::Display) -> Result<Next> {
        if self.terminal {
            note(format_args!("error: {what}"));
            return Ok(Next::Go);
        }
        Err(Failure::Message(what.to_string()))
    }
}

enum Line {
    Text(String),
    End,
    Interrupt,
    /// What came is no text; more may come.
    Bad(String),
}

/// Where the user's lines come from.
enum Reader {
    /// A terminal, with editing and history.
    Editor(Box<DefaultEditor>),
    /// A pipe, or a terminal that is to get no escape codes.
    Plain { prompt: bool },
}

impl Reader {
    fn new(terminal: bool, live: bool) -> Result<Self> {
        if !live {
            return Ok(Self::Plain { prompt: terminal });
        }
        let config = Config::builder().auto_add_history(true).bracketed_paste(true).build();
        Ok(Self::Editor(Box::new(DefaultEditor::with_config(config).map_err(unreadable)?)))
    }

    fn line(&mut self) -> Result<Line> {
        match self {
            Self::Editor(editor) => {
                let _editing = signal::Editing::begin();
                match editor.readline(PROMPT) {
                    Ok(line) => Ok(Line::Text(line)),
                    Err(ReadlineError::Eof) => Ok(Line::End),
                    Err(ReadlineError::Interrupted) => Ok(Line::Interrupt),
                    Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => Ok(Line::Bad(
                        "the line has a byte that is no UTF-8: type it again, with the terminal set to UTF-8".into(),
                    )),
                    Err(error) => Err(unreadable(error)),
                }
            }
            Self::Plain { prompt } => {
                if *prompt {
                    output::write_text(PROMPT)?;
                }
                let mut bytes = Vec::new();
                // Longer lines are refused anyway; more need not be held.
                let mut input = std::io::stdin().lock().take(MAX_TEXT as u64 + 2);
                let n = input.read_until(b'\n', &mut bytes).map_err(unreadable)?;
                if n == 0 {
                    if *prompt {
                        output::line("")?;
                    }
                    return Ok(Line::End);
                }
                Ok(match dllm_engine::prompt::text_from_bytes(&bytes) {
                    Ok(text) => Line::Text(text.to_owned()),
                    Err(error) => Line::Bad(error.to_string()),
                })
            }
        }
    }
}

fn unreadable(error: impl std::fmt::Display) -> Failure {
    Failure::Message(format!("cannot read the next line: {error}"))
}
