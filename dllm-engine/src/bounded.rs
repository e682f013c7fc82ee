//! What a chat template may use of memory.
//!
//! minijinja bounds the instructions that a template runs, but not what they make: a text doubled forty times takes a
//! terabyte, a list put into a list a hundred thousand times overflows the stack when it is dropped. So everything that a
//! template makes is charged to a budget. Filters and methods are charged before they run. Operators offer no place for
//! that; the compiled instructions are rewritten instead, so that what makes texts and lists calls a filter of this module.
//!
//! A template is parsed and rendered on a thread of its own: the parser, and whoever drops what it made, recurse along
//! chains (`1+1+1`, `elif`), so the stack bounds how long a template may be.
//!
//! What is charged is never given back, so it bounds what is held at any time.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::io;
use std::sync::OnceLock;

use minijinja::machinery::{CodeGenerator, Instruction, Instructions, Vm, WhitespaceConfig, make_string_output, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, context};

use crate::error::{brief, cut, gib};
use crate::namespace;

/// Bytes that one rendering may make.
pub const BUDGET: usize = 256 << 20;
/// What a list or map costs besides its elements: no more than 16384 can be made, so none is nested deeper.
const CONTAINER: usize = 16 << 10;
/// What an element costs.
pub const ELEMENT: usize = 40;
/// What a written piece costs at least: a list can be written in pieces of a byte, which take longer than their bytes.
const PIECE: usize = 32;
/// What a piece of indented output costs: it goes through as many writers as it is deep.
const INDENTED: usize = 4 << 10;
/// Most of a width, a count or a precision.
const MOST: i64 = 1 << 16;
/// Stack for values as deeply nested as the budget allows, and for chains as long as a template may be.
const STACK: usize = 128 << 20;
/// As much again for what reads a namespace that holds itself, until the namespace ends that.
const NAMESPACES: usize = 64 << 20;
/// Most bytes of a template, so that a chain of a byte per link has 1 KiB of stack for each. Models have up to 50 KB.
const MAX_SOURCE: usize = STACK >> 10;
/// Most bytes of a value that an error shows; the message is cut further.
const BEGINNING: usize = 4 << 10;
/// What a bound or a step of a slice is cut to: far longer than any text, and safe to calculate with.
const FAR: i64 = 1 << 40;

thread_local! {
    /// What is left of the budget of this thread's rendering.
    static LEFT: Cell<usize> = const { Cell::new(0) };
}

/// Compiles a template; for its errors only, as [`render`] compiles again.
///
/// # Errors
/// `Template` with the line and the reason.
pub fn check(name: &str, source: &str) -> crate::Result<()> {
    apart(|| compile(name, source).map(|_| ()).map_err(|e| in_words(&e)))
}

/// Renders a template within the budget.
///
/// # Errors
/// `Template` with the line and the reason.
pub fn render(env: &Environment<'static>, name: &str, source: &str, root: &Value) -> crate::Result<String> {
    let work = || {
        LEFT.set(BUDGET);
        let (instructions, blocks) = compile(name, source)?;
        let blocks: BTreeMap<_, _> = blocks.iter().map(|(name, block)| (*name, bounded(block))).collect();
        let instructions = bounded(&instructions);
        let mut text = String::new();
        Vm::new(env).eval(
            &instructions,
            root.clone(),
            &blocks,
            &mut make_string_output(&mut text),
            AutoEscape::None,
        )?;
        Ok(text)
    };
    // In words already on the thread with the large stack: an error may hold deeply nested values.
    apart(|| namespace::within(NAMESPACES, work).map_err(|e| in_words(&e)))
}

/// Does the work on a thread with a large stack.
fn apart<T: Send>(work: impl FnOnce() -> crate::Result<T> + Send) -> crate::Result<T> {
    const SIZE: usize = STACK + NAMESPACES;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(SIZE).spawn_scoped(scope, work).map_err(|e| {
            let why = format!("the system refuses a thread with a stack of {} to run it on ({e})", gib(SIZE as u64));
            crate::Error::Template(format!("{why}: free memory, or raise this process's limits (ulimit)"))
        })?;
        let fault = || crate::Error::Template("a fault in the template engine, please report it".into());
        thread.join().unwrap_or_else(|_| Err(fault()))
    })
}

fn in_words(error: &Error) -> crate::Error {
    let why = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => "it does not come to an end".to_owned(),
        (ErrorKind::WriteFailure, _) => format!("its texts and lists take more than {BUDGET} bytes"),
        (_, Some(detail)) => brief(detail).into_owned(),
        (kind, None) => kind.to_string(),
    };
    crate::Error::Template(match error.line() {
        Some(line) => format!("{why} (line {line} of the template)"),
        None => why,
    })
}

type Compiled<'s> = (Instructions<'s>, BTreeMap<&'s str, Instructions<'s>>);

fn compile<'s>(name: &'s str, source: &'s str) -> Result<Compiled<'s>, Error> {
    if source.len() > MAX_SOURCE {
        let why = format!("it has {} bytes, more than {MAX_SOURCE}", source.len());
        return Err(Error::new(ErrorKind::SyntaxError, why));
    }
    // As Hugging Face's `apply_chat_template` sets them.
    let blanks = WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
    let template = parse(source, name, SyntaxConfig, blanks)?;
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&template);
    Ok(generator.finish())
}

/// The same instructions, with what they make charged.
fn bounded<'s>(old: &Instructions<'s>) -> Instructions<'s> {
    let mut new = Instructions::new(old.name(), old.source());
    let mut places = Vec::with_capacity(old.len() + 1);
    for i in 0..old.len() as u32 {
        places.push(new.len() as u32);
        for instruction in old.get(i).map(charged).into_iter().flatten() {
            match old.get_line(i) {
                Some(line) => new.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX)),
                None => new.add(instruction),
            };
        }
    }
    places.push(new.len() as u32);
    for i in 0..new.len() as u32 {
        if let Some(
            Instruction::Iterate(to)
            | Instruction::Jump(to)
            | Instruction::JumpIfFalse(to)
            | Instruction::JumpIfFalseOrPop(to)
            | Instruction::JumpIfTrueOrPop(to)
            | Instruction::BuildMacro(_, to, _),
        ) = new.get_mut(i)
        {
            *to = places.get(*to as usize).copied().unwrap_or(u32::MAX);
        }
    }
    new
}

fn charged<'s>(instruction: &Instruction<'s>) -> Vec<Instruction<'s>> {
    // The last number says that the filter is not to be remembered by its place among the template's filters.
    let filter = |name, arguments| Instruction::ApplyFilter(name, Some(arguments), u8::MAX);
    match instruction {
        // By way of the formatter.
        Instruction::EmitRaw(text) => vec![Instruction::LoadConst(Value::from(*text)), Instruction::Emit],
        Instruction::StringConcat => vec![filter("~", 2)],
        Instruction::Add => vec![filter("+", 2)],
        Instruction::Mul => vec![filter("*", 2)],
        Instruction::Slice => vec![filter("[:]", 4), filter("charge", 1)],
        Instruction::SetAttr(name) => {
            vec![Instruction::LoadConst(Value::from(*name)), filter("=", 3), Instruction::DiscardTop]
        }
        makes @ (Instruction::BuildList(_)
        | Instruction::BuildMap(_)
        | Instruction::ApplyFilter(..)
        | Instruction::CallFunction(..)
        | Instruction::CallMethod(..)
        | Instruction::CallObject(_)) => vec![makes.clone(), filter("charge", 1)],
        other => vec![other.clone()],
    }
}

/// Filters and methods that make text of what they get, or more than they get.
const BEFORE: [&str; 18] = [
    "string",
    "escape",
    "e",
    "upper",
    "lower",
    "title",
    "capitalize",
    "trim",
    "split",
    "lines",
    "list",
    "replace",
    "join",
    "indent",
    "format",
    "batch",
    "slice",
    "urlencode",
];

/// Gives an environment the filters that rewritten instructions call, and lets its own ones charge.
pub fn install(env: &mut Environment<'static>) {
    env.add_filter("charge", |value: Value| charge(size(&value)).map(|()| value));
    env.add_filter("pprint", |value: Value| {
        let mut text = String::new();
        write!(Charged::by(INDENTED, &mut text), "{value:#?}")?;
        Ok(Value::from(text))
    });
    // Prints everything there is, unbounded.
    env.remove_global("debug");
    namespace::install(env);
    env.add_filter("[:]", slice);
    env.add_filter("~", |a: Value, b: Value| text(format_args!("{a}{b}")));
    env.add_filter("+", |a: Value, b: Value| match (a.as_str(), b.as_str()) {
        (Some(a), Some(b)) => text(format_args!("{a}{b}")),
        _ => {
            let cost = size(&a).saturating_add(size(&b));
            operator("a + b", a.clone(), b.clone(), i64::checked_add, cost)
        }
    });
    env.add_filter("*", |a: Value, b: Value| {
        let times = |many: &Value, n: &Value| size(many).saturating_mul(n.as_usize().unwrap_or(0));
        operator("a * b", a.clone(), b.clone(), i64::checked_mul, times(&a, &b).max(times(&b, &a)))
    });
    for name in BEFORE {
        env.add_filter(name, move |arguments: Rest<Value>| {
            before(name, &arguments)?;
            plain().empty_state().apply_filter(name, &arguments)
        });
    }
    env.set_unknown_method_callback(|state, value, method, arguments| {
        let all: Vec<Value> = [value].into_iter().chain(arguments).cloned().collect();
        before(method, &all)?;
        minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)
    });
    env.set_formatter(|out, state, value| match value.kind() {
        // As Python writes them.
        ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
        ValueKind::None => Ok(out.write_str("None")?),
        ValueKind::String => charge(size(value)).and_then(|()| minijinja::escape_formatter(out, state, value)),
        ValueKind::Undefined | ValueKind::Number | ValueKind::Invalid => minijinja::escape_formatter(out, state, value),
        _ => Ok(write!(Charged::new(out), "{value}")?),
    });
}

/// An environment with nothing changed: what a charged filter or operator does.
fn plain() -> &'static Environment<'static> {
    static PLAIN: OnceLock<Environment<'static>> = OnceLock::new();
    PLAIN.get_or_init(Environment::new)
}

/// Takes from the budget.
///
/// # Errors
/// `WriteFailure` where it is used up.
pub fn charge(bytes: usize) -> Result<(), Error> {
    let rest = LEFT.get().checked_sub(bytes).ok_or_else(|| Error::from(ErrorKind::WriteFailure))?;
    LEFT.set(rest);
    Ok(())
}

/// What a value takes, its elements' own values not looked into: those were charged when they were made.
fn size(value: &Value) -> usize {
    match (value.as_str(), value.kind()) {
        (Some(text), _) => text.len(),
        (None, ValueKind::Undefined | ValueKind::None | ValueKind::Bool | ValueKind::Number) => 0,
        _ => CONTAINER.saturating_add(value.len().unwrap_or(0).saturating_mul(ELEMENT)),
    }
}

fn text(parts: fmt::Arguments<'_>) -> Result<Value, Error> {
    let mut text = String::new();
    Charged::new(&mut text).write_fmt(parts)?;
    Ok(Value::from(text))
}

/// An operator on what is no text: quickly on integers, else as minijinja has it.
fn operator(
    source: &'static str,
    a: Value,
    b: Value,
    on_integers: impl Fn(i64, i64) -> Option<i64>,
    cost: usize,
) -> Result<Value, Error> {
    if a.is_integer()
        && b.is_integer()
        && let (Ok(x), Ok(y)) = (i64::try_from(a.clone()), i64::try_from(b.clone()))
        && let Some(result) = on_integers(x, y)
    {
        return Ok(Value::from(result));
    }
    charge(cost)?;
    plain().compile_expression(source)?.eval(context! { a, b })
}

/// `value[start:stop:step]`. Backwards it is done here: there minijinja's own takes a wrong end for 0 and overflows.
fn slice(value: Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
    let near = |bound: Value| match bound.is_integer() {
        true => i64::try_from(bound.clone()).map_or(bound, |n| Value::from(n.clamp(-FAR, FAR))),
        false => bound,
    };
    let number = |bound: &Value| bound.is_integer().then(|| i64::try_from(bound.clone()).ok()).flatten();
    let (start, stop, step) = (near(start), near(stop), near(step));
    let back = number(&step).filter(|n| *n < 0);
    let plainly = [&start, &stop].iter().all(|bound| bound.is_none() || number(bound).is_some());
    let sequence = matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Iterable);
    let Some(step) = back.filter(|_| plainly && sequence) else {
        return plain().compile_expression("value[start:stop:step]")?.eval(context! { value, start, stop, step });
    };
    let items: Vec<Value> = match value.as_str() {
        Some(text) => text.chars().map(Value::from).collect(),
        None => value.try_iter()?.collect(),
    };
    let n = i64::try_from(items.len()).unwrap_or(FAR).min(FAR);
    let place =
        |bound: &Value, default| number(bound).map_or(default, |at| if at < 0 { at + n } else { at }).clamp(-1, n - 1);
    let (mut at, stop) = (place(&start, n - 1), place(&stop, -1));
    let mut taken = Vec::new();
    while at > stop {
        taken.extend(usize::try_from(at).ok().and_then(|at| items.get(at)).cloned());
        at += step;
    }
    Ok(match value.as_str() {
        Some(_) => Value::from(taken.iter().filter_map(Value::as_str).collect::<String>()),
        None => Value::from(taken),
    })
}

/// Charges the most that a filter or method may make of its arguments, the value first.
fn before(name: &str, arguments: &[Value]) -> Result<(), Error> {
    if !BEFORE.contains(&name) && name != "splitlines" {
        return Ok(());
    }
    let mut total = 0usize;
    for value in arguments {
        total = total.saturating_add(written(value)?);
        if value.is_integer() && i64::try_from(value.clone()).map_or(true, |n| n.abs() > MOST) {
            let why = format!("{name}: {value} is more than {MOST}");
            return Err(Error::new(ErrorKind::InvalidOperation, why));
        }
    }
    let text = |i: usize| arguments.get(i).and_then(Value::as_str).unwrap_or_default();
    let largest = arguments.iter().filter_map(|v| i64::try_from(v.clone()).ok()).max().unwrap_or(0);
    let largest = usize::try_from(largest).unwrap_or(0);
    let more = match name {
        // A separator for each element; as a method it is the value.
        "join" => {
            let longest = arguments.iter().filter_map(Value::as_str).map(str::len).max().unwrap_or(0);
            let elements = arguments.iter().filter_map(Value::len).max().unwrap_or(0);
            longest.saturating_mul(elements)
        }
        "replace" => text(0).matches(text(1)).count().saturating_mul(text(2).len()),
        "indent" => text(0).lines().count().saturating_add(1).saturating_mul(largest.max(4)),
        "batch" | "slice" => largest.saturating_mul(CONTAINER),
        "list" | "lines" | "split" | "splitlines" => total.saturating_mul(ELEMENT),
        "format" => widths(text(0))?.saturating_add(largest.saturating_mul(text(0).matches('*').count())),
        _ => 0,
    };
    charge(more)
}

/// The sum of the numbers in a format.
fn widths(format: &str) -> Result<usize, Error> {
    let numbers = format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers.map(|digits| digits.parse::<i64>().ok().filter(|n| *n <= MOST).map(|n| n as usize)).try_fold(0, |sum, n| {
        let why = || Error::new(ErrorKind::InvalidOperation, format!("format: a number in it is more than {MOST}"));
        n.map(|n| usize::saturating_add(sum, n)).ok_or_else(why)
    })
}

/// Charges what a value is as text, and returns that. Lists that share elements can be far longer as text than in memory.
fn written(value: &Value) -> Result<usize, Error> {
    let left = LEFT.get();
    match value.as_str() {
        Some(text) => charge(text.len())?,
        None => write!(Charged::new(&mut Nowhere), "{value}")?,
    }
    Ok(left - LEFT.get())
}

/// Charges what is written through it.
pub struct Charged<'w, W: ?Sized> {
    out: &'w mut W,
    piece: usize,
}

impl<'w, W: ?Sized> Charged<'w, W> {
    /// Charges for a writing what it writes.
    pub fn new(out: &'w mut W) -> Self {
        Self::by(PIECE, out)
    }

    /// Charges at least so much for each piece.
    fn by(piece: usize, out: &'w mut W) -> Self {
        Self { out, piece }
    }
}

impl<W: fmt::Write + ?Sized> fmt::Write for Charged<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        charge(text.len().max(self.piece)).map_err(|_| fmt::Error)?;
        self.out.write_str(text)
    }
}

impl io::Write for Charged<'_, Vec<u8>> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        charge(bytes.len().max(self.piece)).map_err(io::Error::other)?;
        self.out.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A value as text for an error: its beginning, where that is long.
pub fn beginning(value: &Value) -> String {
    let mut text = Beginning(String::new());
    // Refuses what goes beyond.
    let _ = write!(text, "{value}");
    text.0
}

struct Beginning(String);

impl fmt::Write for Beginning {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.push_str(cut(text, BEGINNING));
        if self.0.len() < BEGINNING { Ok(()) } else { Err(fmt::Error) }
    }
}

struct Nowhere;

impl fmt::Write for Nowhere {
    fn write_str(&mut self, _: &str) -> fmt::Result {
        Ok(())
    }
}
