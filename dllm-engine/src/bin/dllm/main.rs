//! The `dllm` command.

mod args;
mod bench;
mod canvas_view;
mod chat;
mod generate;
mod inspect;
mod output;
mod parity;
mod plan;
mod signal;
mod tokenize;
mod usage;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};
use output::{Failure, Outcome};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) => return usage::refuse(error, &arguments).map_or_else(Failure::report, ExitCode::from),
    };
    // A conversation does so itself, in its own time.
    if !matches!(cli.command, Command::Chat(_)) {
        signal::install();
    }
    let result = match cli.command {
        Command::Generate(args) => generate::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Parity(args) => parity::run(&args),
    };
    match result {
        Ok(outcome) => outcome.into(),
        Err(failure) => {
            let code = failure.report();
            // Someone asked for the end, or closed the terminal: what then cannot be written any more follows from that.
            if signal::was_requested() { Outcome::Interrupted.into() } else { code }
        }
    }
}
