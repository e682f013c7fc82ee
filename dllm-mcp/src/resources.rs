//! What can be read: models, jobs and their results, the configuration.

use std::sync::Arc;

use rmcp::ErrorData;
use rmcp::model::{ArgumentInfo, ReadResourceResult, Reference, Resource, ResourceContents, ResourceTemplate};
use serde_json::{Map, Value, json};

use crate::error::{Fault, Kind, shown};

use crate::reply::to_resource;
use crate::server::App;
use crate::tools::{job, status};

const CONFIG: &str = "dllm://config";

/// Resources that are there now.
pub fn list(app: &App) -> Vec<Resource> {
    let json = "application/json";
    let config = Resource::new(CONFIG, "config").with_title("Configuration").with_mime_type(json);
    let jobs = app.jobs.list().into_iter().take(50).flat_map(|job| {
        let uri = format!("dllm://jobs/{}", job.id);
        let results = Resource::new(format!("{uri}/results"), format!("results of {}", job.id)).with_mime_type(json);
        [Resource::new(uri, format!("{} job {}", job.task.name(), job.id)).with_mime_type(json), results]
    });
    std::iter::once(config).chain(jobs).collect()
}

/// Kinds of resources.
pub fn templates() -> Vec<ResourceTemplate> {
    let template = |uri: &str, name: &str, about: &str| {
        ResourceTemplate::new(uri, name).with_description(about).with_mime_type("application/json")
    };
    vec![
        template(
            "dllm://jobs/{id}/canvas/{canvas}/frame/{step}",
            "frame",
            "A canvas after a denoising step, of a dllm_generate with trace=true; canvases count from 0, steps from 1",
        ),
        template("dllm://models/{id}", "model", "A model that can be loaded"),
        template("dllm://jobs/{id}", "job", "State of a job"),
        template(
            "dllm://jobs/{id}/results",
            "results",
            "First page of a job's results; dllm_job operation=results has the others",
        ),
    ]
}

/// Reads one.
///
/// # Errors
/// `resource_not_found`.
pub async fn read(app: &Arc<App>, uri: &str) -> Result<ReadResourceResult, ErrorData> {
    let failed = |fault: Fault| match fault.kind {
        Kind::Internal => ErrorData::internal_error(fault.message, None),
        _ => ErrorData::resource_not_found(fault.message, Some(json!({"uri": shown(uri)}))),
    };
    let missing = |why: String| ErrorData::resource_not_found(why, Some(json!({"uri": shown(uri)})));
    let path: Vec<&str> = uri.strip_prefix("dllm://").unwrap_or("").split('/').collect();
    let value = match path.as_slice() {
        ["config"] => status::config(app),
        ["models", id] => model(app, id).await.map_err(failed)?,
        ["jobs", id] => Value::Object(app.jobs.get(id).map_err(failed)?.data()),
        ["jobs", id, "results"] => {
            let (app, id) = (Arc::clone(app), (*id).to_owned());
            // It reads a file.
            let page = tokio::task::spawn_blocking(move || job::results(&app, &id, "", 100)).await;
            let page =
                page.unwrap_or_else(|e| Err(Fault::new(Kind::Internal, format!("the results cannot be read: {e}"))));
            Value::Object(page.map_err(failed)?.data)
        }
        ["jobs", id, "canvas", canvas, "frame", step] => {
            let job = app.jobs.get(id).map_err(failed)?;
            let frame = canvas.parse().ok().zip(step.parse().ok()).and_then(|(canvas, step)| job.frame(canvas, step));
            let why =
                || missing("there is no such frame: frames_per_canvas of the job counts those that are kept".into());
            serde_json::to_value(frame.ok_or_else(why)?).unwrap_or_default()
        }
        _ => return Err(missing(format!("there is no resource {:?}", shown(uri)))),
    };
    let data = if let Value::Object(data) = value { data } else { Map::new() };
    let text = ResourceContents::text(to_resource(data), uri).with_mime_type("application/json");
    Ok(ReadResourceResult::new(vec![text]))
}

async fn model(app: &Arc<App>, id: &str) -> Result<Value, Fault> {
    let app = Arc::clone(app);
    let cards = tokio::task::spawn_blocking(move || app.host.models()).await;
    let cards = cards.map_err(|_| Fault::new(Kind::Internal, "the models cannot be listed"))?;
    let card = cards
        .into_iter()
        .find(|card| card.id == id)
        .ok_or_else(|| Fault::argument("model", format!("there is no model {:?}", shown(id))))?;
    serde_json::to_value(card).map_err(|e| Fault::new(Kind::Internal, e.to_string()))
}

/// Values of an argument that begin with what was typed.
///
/// # Errors
/// `invalid_params` for a resource that does not exist.
pub async fn complete(app: &Arc<App>, of: &Reference, argument: &ArgumentInfo) -> Result<Vec<String>, ErrorData> {
    let unknown = |what: &str, name: &str| {
        ErrorData::invalid_params(format!("there is no {what} {:?} to complete", shown(name)), None)
    };
    let mut values: Vec<String> = match of {
        // No prompt has arguments that could be listed; for one that does not exist there is nothing either, as the conformance
        // suite wants it.
        Reference::Prompt(_) => Vec::new(),
        Reference::Resource(resource) => match (resource.uri.as_str(), argument.name.as_str()) {
            ("dllm://models/{id}", "id") => {
                let app = Arc::clone(app);
                let cards = tokio::task::spawn_blocking(move || app.host.models()).await.unwrap_or_default();
                cards.into_iter().map(|card| card.id).collect()
            }
            (uri, "id") if uri.starts_with("dllm://jobs/{id}") && is_template(uri) => {
                app.jobs.list().iter().map(|job| job.id.to_string()).collect()
            }
            (uri, _) if is_template(uri) => Vec::new(),
            (uri, _) => return Err(unknown("resource template", uri)),
        },
        _ => return Err(unknown("kind of reference", "?")),
    };
    values.retain(|value| value.starts_with(&argument.value));
    Ok(values)
}

fn is_template(uri: &str) -> bool {
    templates().iter().any(|template| template.uri_template == uri)
}
