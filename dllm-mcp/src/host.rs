//! `dllm_engine::Engine` behind the worker's interface, and the models in the model folder.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use dllm_engine::{
    Completion, Control, Engine, EngineParams, Event, FinishReason, ModelSource, Pin, Request, Step, vocab::Vocab,
};
use serde_json::{Value, json};

use crate::answer::Answer;
use crate::backend::{Ask, Backend, Frame, Host, Loaded, Memory, ModelCard, Piece, Tick};
use crate::config::Config;
use crate::error::{Fault, Kind, Result};
use crate::lock::DeviceLock;

/// Id of the tiny model inside the program.
pub const TINY: &str = "dllm-tiny";

/// The engine and its settings.
pub struct EngineHost {
    models: Models,
    memory: Arc<Mutex<Option<Memory>>>,
}

/// What is needed to find and load a model.
#[derive(Clone)]
struct Models {
    model: Option<String>,
    folder: Option<PathBuf>,
    locks: PathBuf,
    device: Option<String>,
    lanes: usize,
    context: usize,
    threads: usize,
}

impl EngineHost {
    /// Reads no file yet.
    pub fn new(config: &Config) -> Self {
        let models = Models {
            model: config.model.clone(),
            folder: config.model_dir.clone(),
            locks: config.state_dir().join("locks"),
            device: config.device.clone(),
            lanes: usize::from(config.lanes),
            context: config.context as usize,
            threads: config.threads as usize,
        };
        Self { models, memory: Arc::default() }
    }
}

impl Models {
    fn params(&self, source: ModelSource) -> EngineParams {
        EngineParams {
            model: source,
            device: self.device.clone(),
            context: self.context,
            lanes: self.lanes,
            threads: self.threads,
            ..EngineParams::default()
        }
    }

    /// The file of an id. Ids are names of files in the model folder; a path is taken from the operator only.
    fn source(&self, id: &str) -> Result<ModelSource> {
        if id == TINY {
            return Ok(ModelSource::Embedded);
        }
        if let Some((_, path)) = self.files().into_iter().find(|(name, _)| name == id) {
            return Ok(ModelSource::Path(path));
        }
        let why = format!("there is no model {id:?}: dllm_models operation=list names those that are there");
        Err(Fault::new(Kind::LoadFailed, why))
    }

    /// Ids and files: the configured model, then the model folder's.
    fn files(&self) -> Vec<(String, PathBuf)> {
        let mut files: Vec<(String, PathBuf)> = Vec::new();
        let configured = self.model.iter().map(PathBuf::from).filter(|path| is_gguf(path));
        let mut found: Vec<PathBuf> = self
            .folder
            .iter()
            .filter_map(|folder| folder.read_dir().ok())
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| is_gguf(path))
            .collect();
        found.sort();
        for path in configured.chain(found) {
            if let Some(stem) = path.file_stem().and_then(|stem| stem.to_str())
                && !files.iter().any(|(id, _)| id == stem)
            {
                files.push((stem.to_owned(), path));
            }
        }
        files
    }

    fn card(&self, id: String, source: ModelSource) -> ModelCard {
        let path = match &source {
            ModelSource::Path(path) => path.display().to_string(),
            ModelSource::Embedded => String::new(),
        };
        let mut card = ModelCard {
            id,
            path,
            family: String::new(),
            quantization: String::new(),
            bytes: 0,
            fits: false,
            problem: String::new(),
        };
        if let ModelSource::Path(path) = &source {
            card.bytes = path.metadata().map_or(0, |meta| meta.len());
        }
        match Engine::open(&source).and_then(|file| {
            Ok((file.meta().str_opt("general.architecture")?.unwrap_or("").to_owned(), file.quantization()))
        }) {
            Ok((family, quantization)) => (card.family, card.quantization) = (family, quantization),
            Err(error) => card.problem = error.to_string(),
        }
        if card.problem.is_empty() {
            match Engine::plan(&self.params(source)) {
                Ok(plan) => card.fits = plan.fits(),
                Err(error) => card.problem = error.to_string(),
            }
        }
        card
    }
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

impl Host for EngineHost {
    fn backend(&self) -> Box<dyn Backend> {
        Box::new(EngineBackend {
            models: self.models.clone(),
            memory: Arc::clone(&self.memory),
            loaded: None,
            running: Vec::new(),
        })
    }

    fn default_model(&self) -> String {
        match &self.models.model {
            Some(model) if is_gguf(Path::new(model)) => {
                Path::new(model).file_stem().and_then(|s| s.to_str()).unwrap_or(model).to_owned()
            }
            Some(id) => id.clone(),
            None => TINY.to_owned(),
        }
    }

    fn models(&self) -> Vec<ModelCard> {
        let tiny = (TINY.to_owned(), ModelSource::Embedded);
        let files = self.models.files().into_iter().map(|(id, path)| (id, ModelSource::Path(path)));
        files.chain([tiny]).map(|(id, source)| self.models.card(id, source)).collect()
    }

    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if let Some(folder) = &self.models.folder
            && let Err(e) = folder.read_dir()
        {
            problems.push(format!("the model folder {} cannot be read: {e}; see --model-dir", folder.display()));
        }
        match self.models.model.as_deref() {
            Some(path) if is_gguf(Path::new(path)) => {
                if let Err(e) = std::fs::metadata(path) {
                    problems.push(format!("the model {path} cannot be opened: {e}; see --model"));
                }
            }
            Some(id) => problems.extend(self.models.source(id).err().map(|_| {
                format!("the model {id:?} is neither a .gguf file nor in the model folder; see --model and --model-dir")
            })),
            None => {}
        }
        problems
    }

    fn memory(&self) -> Option<Memory> {
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct EngineBackend {
    models: Models,
    memory: Arc<Mutex<Option<Memory>>>,
    loaded: Option<(Engine, Vec<DeviceLock>)>,
    /// What runs on each lane.
    running: Vec<Option<Running>>,
}

struct Running {
    max_steps: u64,
    total: u64,
    trace: bool,
    pieces: Vec<Piece>,
    gaps: Vec<Range<usize>>,
}

impl EngineBackend {
    fn engine(&mut self) -> Result<&mut Engine> {
        let loaded = self.loaded.as_mut().map(|(engine, _)| engine);
        loaded.ok_or_else(|| Fault::new(Kind::NotLoaded, "no model is loaded"))
    }

    fn set_memory(&self, memory: Option<Memory>) {
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner) = memory;
    }
}

impl Backend for EngineBackend {
    fn load(&mut self, id: &str, progress: &mut dyn FnMut(u64, u64)) -> Result<Loaded> {
        self.unload();
        let params = self.models.params(self.models.source(id)?);
        let plan = Engine::plan(&params).map_err(load_fault)?;
        // Of a model over several GPUs each; the host's memory beside a GPU is nobody's alone.
        let beside = plan.beside.iter().map(|part| &part.device).filter(|device| *device != "CPU");
        let devices = std::iter::once(&plan.device).chain(beside);
        let locks = devices.map(|device| DeviceLock::take(&self.models.locks, device)).collect::<Result<Vec<_>>>()?;
        let engine = Engine::load_with(params, progress).map_err(load_fault)?;
        let info = engine.info();
        let used = engine.device_bytes();
        self.set_memory(Some(Memory { used, free: plan.free.saturating_sub(used), total: plan.total }));
        let loaded = Loaded {
            id: id.to_owned(),
            model: info.name.clone(),
            family: info.family.clone(),
            quantization: info.quantization.clone(),
            device: info.device.clone(),
            lanes: info.lanes,
            context: info.context,
            bytes: used,
            details: serde_json::to_value(info).unwrap_or(Value::Null),
        };
        self.running = (0..info.lanes).map(|_| None).collect();
        self.loaded = Some((engine, locks));
        Ok(loaded)
    }

    fn unload(&mut self) {
        self.running.clear();
        self.loaded = None;
        self.set_memory(None);
    }

    fn admit(&mut self, ask: &Ask) -> Result<usize> {
        let engine = self.engine()?;
        let mut request = ask.request.clone();
        let mut gaps = Vec::new();
        if !ask.pieces.is_empty() {
            (request.pins, gaps, request.max_tokens) = lay_out(engine, &ask.pieces)?;
            check_room(engine, &request)?;
        }
        let max_steps = u64::from(request.denoise.max_steps.unwrap_or(engine.settings().max_steps));
        let canvases = request.max_tokens.div_ceil(engine.info().canvas.max(1)) as u64;
        let lane = engine.admit(&request)?;
        let total = canvases.saturating_mul(max_steps);
        let running = Running { max_steps, total, trace: ask.trace, pieces: ask.pieces.clone(), gaps };
        if let Some(slot) = self.running.get_mut(lane) {
            *slot = Some(running);
        }
        Ok(lane)
    }

    fn step(&mut self, on_tick: &mut dyn FnMut(usize, Tick)) -> Vec<(usize, Result<Answer>)> {
        let Some((engine, _)) = self.loaded.as_mut() else { return Vec::new() };
        let running = &self.running;
        let vocab = Arc::clone(engine.vocab());
        let ended = engine.step(&mut |lane, event| {
            if let Some(Some(running)) = running.get(lane)
                && let Some(tick) = tick(running, &event, &vocab)
            {
                on_tick(lane, tick);
            }
            Control::Continue
        });
        let answer = |running: &mut Vec<Option<Running>>, lane: usize, result: dllm_engine::Result<Completion>| {
            let running = running.get_mut(lane).and_then(Option::take);
            result.map(|completion| to_answer(engine, completion, running)).map_err(Fault::from)
        };
        ended.into_iter().map(|(lane, result)| (lane, answer(&mut self.running, lane, result))).collect()
    }

    fn cancel(&mut self, lane: usize) {
        if let Some((engine, _)) = self.loaded.as_mut() {
            engine.cancel(lane);
        }
    }

    fn free(&self) -> usize {
        self.loaded.as_ref().map_or(0, |(engine, _)| engine.free())
    }
}

fn load_fault(error: dllm_engine::Error) -> Fault {
    use dllm_engine::Error as E;
    // The settings are the operator's.
    let settings = matches!(error, E::BadArgument { .. } | E::NoDevice { .. });
    let fault = Fault::from(error);
    match fault.kind {
        Kind::OutOfVram => fault,
        // Whatever is wrong with the settings or the file, the caller's arguments are not at fault.
        _ if settings => Fault::new(Kind::LoadFailed, fault.message)
            .advise("the operator must start the server with other settings: dllm-mcp --help lists them"),
        _ => Fault::new(Kind::LoadFailed, fault.message),
    }
}

fn tick(running: &Running, event: &Event<'_>, vocab: &Vocab) -> Option<Tick> {
    let frame = match event {
        Event::Step(step) if running.trace => Some(frame(step, vocab)),
        _ => None,
    };
    let steps = match event {
        Event::Step(step) => step.canvas as u64 * running.max_steps + u64::from(step.step),
        Event::Canvas { index, .. } => (*index as u64 + 1) * running.max_steps,
        _ => return None,
    };
    Some(Tick { steps: steps.min(running.total), total: running.total, frame })
}

fn frame(step: &Step<'_>, vocab: &Vocab) -> Frame {
    Frame {
        canvas: step.canvas,
        step: step.step,
        text: vocab.detokenize(step.argmax, false),
        accepted: step.accepted.iter().filter(|accepted| **accepted).count(),
        positions: step.accepted.len(),
        mean_entropy: step.mean_entropy,
        temperature: step.temperature,
        stop: step.stop,
    }
}

/// Given texts become pinned tokens; gaps are left free between them.
fn lay_out(engine: &Engine, pieces: &[Piece]) -> Result<(Vec<Pin>, Vec<Range<usize>>, usize)> {
    let (mut pins, mut gaps, mut at) = (Vec::new(), Vec::new(), 0_usize);
    for piece in pieces {
        match piece {
            Piece::Text(text) => {
                for token in engine.vocab().tokenize(text, false)? {
                    pins.push(Pin { position: at, token });
                    at += 1;
                }
            }
            Piece::Gap(len) => {
                gaps.push(at..at.saturating_add(*len));
                at = at.saturating_add(*len);
            }
        }
    }
    Ok((pins, gaps, at.max(1)))
}

/// Gaps have fixed lengths, so a text that does not fit is refused: the engine would cut it off.
fn check_room(engine: &Engine, request: &Request) -> Result<()> {
    let shape = engine.shape();
    let prompt = engine.encode(&request.prompt, request.thinking)?.len();
    // Whole canvases behind the prompt. A prompt without room for one is told by the engine.
    let room = shape.context.saturating_sub(prompt) / shape.canvas.max(1) * shape.canvas;
    if room == 0 || request.max_tokens <= room {
        return Ok(());
    }
    let (context, asked) = (shape.context, request.max_tokens);
    let why = format!(
        "text and gaps have {asked} tokens, {room} fit behind a prompt of {prompt} (context {context}): ask for shorter gaps"
    );
    Err(Fault::argument("template", why))
}

fn to_answer(engine: &Engine, completion: Completion, running: Option<Running>) -> Answer {
    let receipt = &completion.receipt;
    let (filled, text) = match running.filter(|running| !running.pieces.is_empty()) {
        None => (Vec::new(), completion.text),
        Some(running) => {
            let in_gap = |gap: &Range<usize>| {
                completion.tokens.get(gap.start.min(completion.tokens.len())..gap.end.min(completion.tokens.len()))
            };
            let filled: Vec<String> =
                running.gaps.iter().map(|gap| engine.vocab().detokenize(in_gap(gap).unwrap_or(&[]), false)).collect();
            let text = assemble(&running.pieces, &filled);
            (filled, text)
        }
    };
    Answer {
        text,
        filled,
        reasoning: completion.reasoning,
        tokens: receipt.tokens,
        steps: receipt.steps_per_canvas.iter().copied().map(u64::from).sum(),
        finish_reason: match completion.finish_reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        },
        seed: receipt.seed,
        model: receipt.model.clone(),
        seconds: receipt.total_ms / 1e3,
        receipt: serde_json::to_value(receipt).unwrap_or_else(|_| json!({})),
    }
}

/// The given texts with what was filled in between.
fn assemble(pieces: &[Piece], filled: &[String]) -> String {
    let mut filled = filled.iter();
    let texts = pieces.iter().map(|piece| match piece {
        Piece::Text(text) => text.as_str(),
        Piece::Gap(_) => filled.next().map_or("", String::as_str),
    });
    texts.collect()
}
