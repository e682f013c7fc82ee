//! `dllm plan`: how much memory a model would take.

use dllm_engine::{Dense, Engine, MemoryPlan};
use serde_json::json;

use super::args::PlanArgs;
use super::output::{self, Failure, Outcome, Result, bytes, count};

pub fn run(args: &PlanArgs) -> Result {
    let params = args.load.params(args.file.source(), args.lanes)?;
    let plan = Engine::plan(&params).map_err(|error| Failure::Message(output::loading(error, &params)))?;
    if args.json {
        let mut value = json!(plan);
        value["needed"] = plan.needed().into();
        value["fits"] = plan.fits().into();
        output::json(&value)?;
    } else {
        output::line(table(&plan))?;
    }
    Ok(if plan.fits() { Outcome::Done } else { Outcome::No })
}

fn table(plan: &MemoryPlan) -> String {
    let rows = [
        ("weights, copied", plan.weights, "copied to the device, or expanded"),
        ("cache", plan.cache, "keys and values of all lanes"),
        ("compute", plan.compute, "intermediate results"),
        ("inputs", plan.inputs, "inputs and state of the passes"),
        ("needed", plan.needed(), ""),
        ("free", plan.free, if plan.limited { "the limit of --memory" } else { "" }),
        ("weights, mapped", plan.weights_mapped, "used where the file lies; the system may drop them again"),
    ];
    let row =
        |(name, n, what): (&str, u64, &str)| format!("{name:<16} {:>11}   {what}", bytes(n)).trim_end().to_owned();
    let all = std::iter::once((plan.needed(), plan.free)).chain(plan.beside.iter().map(|d| (d.needed(), d.free)));
    let missing: u64 = all.map(|(needed, free)| needed.saturating_sub(free)).sum();
    let verdict = match missing {
        0 => format!("it fits, {} to spare", bytes(plan.free - plan.needed())),
        n => format!("it does not fit: {} are missing", bytes(n)),
    };
    let dense = match plan.dense {
        Some(Dense::Quantized) => ", dense matrices quantized",
        Some(_) => ", dense matrices in half precision",
        None => "",
    };
    let head = format!("{}{dense}, context of {} tokens, {}", plan.device, plan.context, count(plan.lanes, "lane"));
    let mut lines = vec![head];
    lines.extend(plan.placement.clone());
    lines.push(String::new());
    for (i, entry) in rows.into_iter().enumerate() {
        if i == 4 || i == 6 {
            lines.push(String::new());
        }
        lines.push(row(entry));
    }
    for other in &plan.beside {
        let (needed, free, mapped) = (bytes(other.needed()), bytes(other.free), bytes(other.weights_mapped));
        lines.extend([
            String::new(),
            format!("beside it, {}: {needed} needed, {free} free, {mapped} mapped", other.device),
        ]);
    }
    lines.extend([String::new(), verdict]);
    lines.join("\n")
}
