//! `dllm_batch`: many items, from the call or from a file.

use std::collections::HashSet;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::generate::{drawn, format, max_tokens};
use super::{Call, args};
use crate::batch::{self, BatchRun, Input, Survey};
use crate::error::{Fault, Kind, Result};
use crate::format::Format;
use crate::item::{Recipe, Settings};
use crate::jobs::Job;
use crate::output::{self, Existing, Prepared};
use crate::progress;
use crate::reply::Reply;
use crate::server::App;

pub(super) const ABOUT: &str = "Run many prompts as a job. Items come as a JSON array in items_json (at most 32) or as JSONL lines in \
input_path: {\"id\", \"prompt\"} or, with a template, {\"id\", variables}; optional overrides {max_tokens, seed, ...}. Results are \
JSONL lines {id, ok, text or json, ...}, written one by one to output_path; a batch that was interrupted goes on with resume=true. \
Returns a job_id: call dllm_job operation=wait, then operation=results.";

const MAX_INLINE: usize = 32;
const MAX_INLINE_BYTES: usize = 256 * 1024;

/// Arguments.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Args {
    /// A JSON array of at most 32 items, as text.
    #[serde(default, deserialize_with = "args::json_text")]
    pub items_json: String,
    /// A JSONL file with items, under one of the roots that dllm_status lists.
    #[serde(default)]
    pub input_path: String,
    /// The JSONL file for the results; without it the server keeps them.
    #[serde(default)]
    pub output_path: String,
    /// A prompt with {{variables}} that the items bring.
    #[serde(default)]
    pub template: String,
    /// A JSON schema, as text, that every answer must match.
    #[serde(default, deserialize_with = "args::json_text")]
    pub json_schema: String,
    /// Most tokens of an answer.
    #[serde(default = "max_tokens")]
    #[schemars(range(min = 1, max = 131_072))]
    pub max_tokens: u32,
    /// Seed of all items; -1 draws one for each. The results name it.
    #[serde(default = "drawn")]
    pub seed: i64,
    /// Whether to go on where the output file ends.
    #[serde(default = "yes")]
    pub resume: bool,
    /// Whether to empty an output file that exists. Needs resume=false.
    #[serde(default)]
    pub overwrite: bool,
    /// Seconds to wait for the end, at most 25.
    #[serde(default)]
    #[schemars(range(min = 0, max = 25))]
    pub wait_s: f64,
}

fn yes() -> bool {
    true
}

pub(super) async fn run(args: Args, call: &Call) -> Result<Reply> {
    let wait = args::wait(args.wait_s)?;
    if args.overwrite && args.resume {
        return Err(Fault::argument("overwrite", "it contradicts resume=true: say resume=false too"));
    }
    let app = Arc::clone(&call.app);
    // Files are read here, so not on a thread that answers others.
    let task = tokio::task::spawn_blocking(move || submit(&args, &app)).await;
    let (job, survey) =
        task.map_err(|e| Fault::new(Kind::Internal, format!("the batch could not be started: {e}")))??;
    progress::wait(&job, wait, &call.cancel, call.notifier.as_ref(), &call.app.worker, false).await?;
    let mut data = job.data();
    data.insert("accepted".into(), json!(survey.accepted));
    data.insert("rejected_count".into(), json!(survey.rejected));
    data.insert("rejected".into(), Value::Array(survey.reasons));
    data.insert("output".into(), json!(format!("dllm://jobs/{}/results", job.id)));
    if let Some(path) = &job.output {
        data.insert("output_path".into(), json!(path.display().to_string()));
    }
    let (id, view) = (job.id, job.view());
    let message = format!(
        "{} items accepted, {} done before, {} rejected; job {id} is {}: call dllm_job operation=wait",
        survey.accepted,
        survey.skipped,
        survey.rejected,
        view.state.name()
    );
    Ok(Reply::new(message, Value::Object(data)).link(format!("dllm://jobs/{id}/results")))
}

/// The blocking part: opens the files, looks through the items, hands over the job.
fn submit(args: &Args, app: &App) -> Result<(Arc<Job>, Survey)> {
    let input = input(args, app)?;
    let format = format(&args.json_schema)?;
    let recipe = recipe(args, format.as_ref())?;
    let id = uuid::Uuid::new_v4();
    let path = if args.output_path.is_empty() { app.results_file(id) } else { app.roots.output(&args.output_path)? };
    // By identity, not by name: one file can have several names.
    if matches!(&input, Input::File(file) if same_file::is_same_file(file, &path).unwrap_or(false)) {
        return Err(Fault::argument("output_path", "it is the input file"));
    }
    let busy = app.jobs.list().into_iter().find(|job| !job.view().state.ended() && job.output.as_ref() == Some(&path));
    if let Some(job) = busy {
        return Err(output::busy(&path, &format!("job {}", job.id)));
    }
    let survey_first = batch::survey(&input, &recipe, &HashSet::new())?;
    if survey_first.accepted == 0 {
        let why = survey_first
            .reasons
            .first()
            .map_or("there are none".to_owned(), |reason| reason["why"].as_str().unwrap_or("").to_owned());
        return Err(Fault::argument("items", format!("none can be run: {why}")));
    }
    let output = Prepared::new(path.clone(), existing(args))?;
    let mut survey =
        if output.done().is_empty() { survey_first } else { batch::survey(&input, &recipe, output.done())? };
    let job = Job::batch(id, survey.accepted, path, format);
    job.skip(survey.skipped);
    app.worker.submit_batch(|| BatchRun::new(Arc::clone(&job), input, recipe, &mut survey, output))?;
    app.jobs.add(&job);
    Ok((job, survey))
}

fn existing(args: &Args) -> Existing {
    match (args.resume, args.overwrite) {
        (true, _) => Existing::Resume,
        (false, true) => Existing::Overwrite,
        (false, false) => Existing::Refuse,
    }
}

fn recipe(args: &Args, format: Option<&Format>) -> Result<Recipe> {
    let settings = Settings { max_tokens: args.max_tokens, seed: args.seed, ..Settings::default() };
    settings.check()?;
    if !args.template.is_empty() && !args.template.contains("{{") {
        let why = "it has no variable, so all items would ask the same: write {{name}} for each field that items bring";
        return Err(Fault::argument("template", why));
    }
    Ok(Recipe {
        template: args.template.clone(),
        settings,
        instruction: format.map(Format::instruction).unwrap_or_default(),
    })
}

fn input(args: &Args, app: &App) -> Result<Input> {
    match (args.items_json.trim().is_empty(), args.input_path.is_empty()) {
        (true, false) => Ok(Input::File(app.roots.input(&args.input_path)?)),
        (false, true) => inline(&args.items_json),
        _ => Err(Fault::argument("items_json", "give either items_json or input_path")),
    }
}

/// Items that came with the call, as lines.
fn inline(items: &str) -> Result<Input> {
    if items.len() > MAX_INLINE_BYTES {
        return Err(Fault::argument(
            "items_json",
            format!("it has {} bytes, at most {MAX_INLINE_BYTES}: use input_path", items.len()),
        ));
    }
    let items: Vec<Value> =
        serde_json::from_str(items).map_err(|e| Fault::argument("items_json", format!("it is no JSON array: {e}")))?;
    if items.is_empty() || items.len() > MAX_INLINE {
        return Err(Fault::argument(
            "items_json",
            format!("{} items are not in 1..={MAX_INLINE}: use input_path", items.len()),
        ));
    }
    let lines: String = items.iter().map(|item| format!("{item}\n")).collect();
    Ok(Input::Inline(lines.into()))
}
