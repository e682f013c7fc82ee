//! What the command line's words mean: numbers, the environment, and what to say to what cannot be followed.

use std::ffi::OsString;
use std::io::Write;
use std::str::FromStr;

use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::output::{Failure, Result};

/// A whole number of type `T`, which is unsigned.
pub fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    let most = u64::MAX >> (64 - 8 * size_of::<T>());
    text.parse().map_err(|_| format!("no whole number in 0..={most}"))
}

/// A number. One that is infinite or none is for the engine to refuse, which knows the range; one that only becomes
/// infinite would be refused as something that nobody wrote.
pub fn real(text: &str) -> Result<f32, String> {
    let value: f32 = text.parse().map_err(|_| "no number".to_owned())?;
    match value.is_infinite() && text.contains(|c: char| c.is_ascii_digit()) {
        true => Err(format!("beyond {:e}", f32::MAX)),
        false => Ok(value),
    }
}

/// A variable of the environment; an empty one counts as not set. clap could read them, but would show what they say as if
/// it stood on the command line.
pub fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Threads where the command line names none.
pub fn threads_of_environment() -> Result<usize> {
    let Some(value) = variable("DLLM_THREADS") else { return Ok(0) };
    let wrong = |why| format!("bad DLLM_THREADS in the environment: {value:?} is {why}: change or unset it");
    whole(value.to_str().unwrap_or_default()).map_err(|why| Failure::Message(wrong(why)))
}

/// Prints what clap has to say to a command line that cannot be followed, or that asks for help. Returns the exit code.
pub fn refuse(mut error: clap::Error, arguments: &[OsString]) -> Result<u8> {
    // A name of one letter is similar to every other.
    let tiny = |value: &ContextValue| matches!(value, ContextValue::String(name) if name.len() < "--xy".len());
    if error.get(ContextKind::SuggestedArg).is_some_and(tiny) {
        error.remove(ContextKind::SuggestedArg);
        // It is the one of the suggestion.
        error.remove(ContextKind::Usage);
    }
    if error.kind() == ErrorKind::InvalidSubcommand
        && let Some(text) = arguments.get(1).filter(|text| *text != "help")
    {
        let tip = format!("to have a prompt answered: dllm generate {:?}", text.to_string_lossy());
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    let printed = error.print().and_then(|()| std::io::stdout().flush());
    let code = u8::try_from(error.exit_code()).unwrap_or(2);
    // Standard error may be closed: the code remains. Help that nobody gets is a failure.
    if error.use_stderr() { Ok(code) } else { Ok(printed.map(|()| code)?) }
}
