//! `dllm parity`: compares with recorded results of the reference.

use dllm_engine::Level;
use dllm_engine::gguf::{GgmlType, Gguf};
use dllm_engine::parity::{self, Check, ParityParams};

use super::args::ParityArgs;
use super::output::{self, Failure, Outcome, Result, count, note};

/// Checks of one group: those whose names begin alike.
#[derive(Default)]
struct Group {
    name: String,
    checks: usize,
    missed: usize,
    /// The largest error as a share of its limit.
    worst: f64,
}

pub fn run(args: &ParityArgs) -> Result {
    let mut params = ParityParams::default();
    params.device = args.device.clone();
    params.level = args.level.into();
    params.file = args.file.clone();
    let bar = output::progress("checks", "{pos}");
    let mut printer = Printer { verbose: args.verbose, group: Group::default(), failure: None };
    let result = parity::run(&args.dir, &params, &mut |check| {
        bar.inc(1);
        bar.suspend(|| printer.take(check));
    });
    bar.finish_and_clear();
    let checks = result?;
    printer.end_group();
    if let Some(failure) = printer.failure {
        return Err(failure);
    }
    let missed = checks.iter().filter(|check| !check.passed()).count();
    output::line(format_args!("{}, {missed} missed", count(checks.len(), "check")))?;
    let file = Gguf::open(args.dir.join(args.file.as_deref().unwrap_or("model.gguf")))?;
    if missed > 0 && params.level != Level::Reference && file.main_type() != Some(GgmlType::F32) {
        note("the limits of this level are for F32 files: docs/parity.md says what other files cost");
    }
    // Nothing checked proves nothing.
    Ok(if missed == 0 && !checks.is_empty() { Outcome::Done } else { Outcome::No })
}

struct Printer {
    verbose: bool,
    group: Group,
    failure: Option<Failure>,
}

impl Printer {
    fn take(&mut self, check: &Check) {
        let name = group(&check.name);
        if name != self.group.name {
            self.end_group();
            self.group = Group { name, ..Group::default() };
        }
        self.group.checks += 1;
        self.group.missed += usize::from(!check.passed());
        let share = if check.limit > 0.0 { check.error / check.limit } else { check.error };
        self.group.worst = self.group.worst.max(share);
        if self.verbose || !check.passed() {
            self.line(check);
        }
    }

    fn end_group(&mut self) {
        let group = std::mem::take(&mut self.group);
        if self.verbose || group.checks == 0 {
            return;
        }
        let verdict = if group.missed == 0 { "ok  " } else { "MISS" };
        let name = output::printable(&group.name);
        let (n, missed, worst) = (count(group.checks, "check"), group.missed, 100.0 * group.worst);
        let missed = if missed == 0 { String::new() } else { format!(", {missed} missed") };
        self.line(format_args!("{verdict} {name:<44} {n:>11}, largest error {worst:.0} % of its limit{missed}"));
    }

    fn line(&mut self, text: impl std::fmt::Display) {
        if let Err(error) = output::line(text) {
            self.failure.get_or_insert(error.into());
        }
    }
}

/// What a check's name shares with its neighbours': the kind, or the recorded case and the number of lanes.
fn group(name: &str) -> String {
    let case = name.split(' ').next().unwrap_or(name);
    match name.rsplit_once("lanes ") {
        Some((_, rest)) => format!("{case}, lanes {}", rest.split(' ').next().unwrap_or(rest)),
        None if name.starts_with("tokens of") => "tokens".into(),
        None if name.contains(" sampler ") => format!("{case}, sampler alone"),
        None => format!("{case}, teacher-forced"),
    }
}
