//! `dllm inspect`: what a model file holds.

use std::collections::BTreeMap;

use dllm_engine::gguf::{Array, Gguf, TensorInfo, Value};
use dllm_engine::{Engine, MemoryPlan, Tokenizer};
use serde_json::{Map, Value as Json, json};

use super::args::InspectArgs;
use super::output::{self, Outcome, Result, bytes, count, printable};

/// Elements of an array, and characters of a text, that are shown.
const SHOWN: usize = 6;
const SHOWN_CHARS: usize = 100;

/// What this program would make of the file.
struct Verdict {
    /// Memory, or why the file cannot be run.
    plan: Result<MemoryPlan, String>,
    tokenizer: Result<Tokenizer, String>,
}

pub fn run(args: &InspectArgs) -> Result {
    let source = args.file.source();
    let file = Engine::open(&source)?;
    let params = args.load.params(source, 1)?;
    let plan = Engine::plan(&params).map_err(|error| output::loading(error, &params));
    let verdict = Verdict { plan, tokenizer: Tokenizer::load(&file).map_err(output::words) };
    match args.json {
        true => output::json(&as_json(&file, &verdict))?,
        false => as_text(&file, &verdict)?,
    }
    Ok(Outcome::Done)
}

fn architecture(file: &Gguf) -> &str {
    file.meta().str_opt("general.architecture").ok().flatten().unwrap_or("none")
}

fn has_template(file: &Gguf) -> bool {
    file.meta().get("tokenizer.chat_template").is_some()
}

/// Tensors, elements and bytes per type.
fn totals(file: &Gguf) -> BTreeMap<String, (usize, u64, u64)> {
    let mut totals = BTreeMap::<String, (usize, u64, u64)>::new();
    for tensor in file.tensors() {
        let (n, elements, bytes) = totals.entry(tensor.ty.name()).or_default();
        *n += 1;
        *elements = elements.saturating_add(tensor.elements());
        *bytes = bytes.saturating_add(tensor.bytes);
    }
    totals
}

fn shape(tensor: &TensorInfo) -> &[u64] {
    let dims = tensor.shape.iter().rposition(|n| *n > 1).map_or(1, |last| last + 1);
    tensor.shape.get(..dims).unwrap_or(&tensor.shape)
}

fn as_text(file: &Gguf, verdict: &Verdict) -> Result<()> {
    output::line(format_args!("{}\n", file.path().display()))?;
    output::line("METADATA")?;
    for (key, value) in file.meta().iter() {
        output::line(format_args!("  {} = {}", printable(key), short(value)))?;
    }
    output::line("\nTENSORS")?;
    for tensor in file.tensors() {
        let shape: Vec<_> = shape(tensor).iter().map(u64::to_string).collect();
        let (name, ty, shape) = (printable(&tensor.name), tensor.ty.name(), shape.join(" x "));
        output::line(format_args!("  {name:<44} {ty:<7} {shape:>22} {:>11}", bytes(tensor.bytes)))?;
    }
    output::line("\nTOTAL")?;
    for (ty, (n, elements, size)) in totals(file) {
        let tensors = count(n, "tensor");
        output::line(format_args!("  {ty:<7} {tensors:>12} {elements:>15} elements {:>11}", bytes(size)))?;
    }
    output::line(format_args!("  {}, {}", file.quantization(), count(file.files(), "file")))?;
    output::line("\nVOCABULARY")?;
    vocabulary(file, verdict)?;
    output::line("\nLOADING")?;
    match &verdict.plan {
        Ok(plan) => {
            output::line(format_args!("  family {}, on {}", printable(architecture(file)), plan.device))?;
            output::line(format_args!(
                "  {:>11} of weights mapped: used where the file lies",
                bytes(plan.weights_mapped)
            ))?;
            output::line(format_args!("  {:>11} of weights copied to the device, or expanded", bytes(plan.weights)))?;
            let fits = if plan.fits() { "fits" } else { "does not fit" };
            let (needed, free) = (bytes(plan.needed()), bytes(plan.free));
            let rest = format!("{needed} needed with a context of {}, {free} free: it {fits}", plan.context);
            output::line(format_args!("  {rest}"))?;
        }
        Err(error) => output::line(format_args!("  not possible: {error}"))?,
    }
    Ok(())
}

fn vocabulary(file: &Gguf, verdict: &Verdict) -> Result<()> {
    let Ok(tokenizer) = &verdict.tokenizer else {
        let tokens = file.meta().get("tokenizer.ggml.tokens");
        let n = if let Some(Value::Array(tokens)) = tokens { tokens.len() } else { 0 };
        output::line(format_args!("  {}", count(n, "token")))?;
        return Ok(output::line(format_args!("  chat template: {}", yes(has_template(file))))?);
    };
    let vocab = tokenizer.vocab();
    let ends: Vec<_> = tokenizer.eog().iter().map(|id| format!("{} {id}", printable(vocab.text(*id)))).collect();
    output::line(format_args!("  {}, end tokens: {}", count(vocab.len(), "token"), ends.join(", ")))?;
    let template = if has_template(file) { "yes" } else { "no, the family's own is used" };
    Ok(output::line(format_args!("  chat template: {template}"))?)
}

fn yes(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}

/// A value on one line: long texts and arrays are cut, and their length told.
fn short(value: &Value) -> String {
    match value {
        Value::Array(array) => {
            let elements: Vec<_> =
                (0..array.len().min(SHOWN)).filter_map(|i| array.get(i)).map(|v| short(&v)).collect();
            let more = if array.len() > SHOWN { ", ..." } else { "" };
            format!("[{}{more}] ({})", elements.join(", "), count(array.len(), "element"))
        }
        Value::Str(text) => match text.char_indices().nth(SHOWN_CHARS) {
            Some((end, _)) => format!("{:?}... ({} bytes)", text.get(..end).unwrap_or_default(), text.len()),
            None => format!("{text:?}"),
        },
        other => scalar(other).to_string(),
    }
}

fn scalar(value: &Value) -> Json {
    match value {
        Value::U8(n) => json!(n),
        Value::I8(n) => json!(n),
        Value::U16(n) => json!(n),
        Value::I16(n) => json!(n),
        Value::U32(n) => json!(n),
        Value::I32(n) => json!(n),
        Value::U64(n) => json!(n),
        Value::I64(n) => json!(n),
        // JSON has no NaN and no infinity.
        Value::F32(x) if !x.is_finite() => json!(x.to_string()),
        Value::F64(x) if !x.is_finite() => json!(x.to_string()),
        // By way of its shortest text: as a double, 0.8 would read 0.800000011920929.
        Value::F32(x) => json!(x.to_string().parse::<f64>().unwrap_or(f64::from(*x))),
        Value::F64(x) => json!(x),
        Value::Bool(b) => json!(b),
        Value::Str(text) => json!(text),
        Value::Array(array) => array_json(array),
    }
}

/// The first elements and the length: a vocabulary has a quarter of a million.
fn array_json(array: &Array) -> Json {
    let first: Vec<_> = (0..array.len().min(SHOWN)).filter_map(|i| array.get(i)).map(|v| scalar(&v)).collect();
    json!({ "length": array.len(), "first": first })
}

fn as_json(file: &Gguf, verdict: &Verdict) -> Json {
    let metadata: Map<_, _> = file.meta().iter().map(|(key, value)| (key.to_owned(), scalar(value))).collect();
    let tensor = |t: &TensorInfo| json!({ "name": t.name, "type": t.ty.name(), "shape": shape(t), "bytes": t.bytes, "file": t.file, "offset": t.offset });
    let total = |(ty, (n, elements, bytes)): (String, (usize, u64, u64))| {
        (ty, json!({ "tensors": n, "elements": elements, "bytes": bytes }))
    };
    let error = |e: &String| json!({ "error": e });
    json!({
        "path": file.path().display().to_string(),
        "files": file.files(),
        "architecture": architecture(file),
        "quantization": file.quantization(),
        "metadata": metadata,
        "tensors": file.tensors().iter().map(tensor).collect::<Vec<_>>(),
        "totals": totals(file).into_iter().map(total).collect::<Map<_, _>>(),
        "vocabulary": verdict.tokenizer.as_ref().map_or_else(error, |t| json!({
            "tokens": t.vocab().len(), "end_tokens": &**t.eog(), "bos": t.vocab().bos(), "mask": t.vocab().mask(),
        })),
        "chat_template": has_template(file),
        "loading": verdict.plan.as_ref().map_or_else(error, |plan| json!(plan)),
    })
}
