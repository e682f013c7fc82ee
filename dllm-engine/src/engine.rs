//! The engine: one straight way from a prompt to text.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::denoise::{DenoiseSettings, Generation, Lanes, Work};
use crate::embedded;
use crate::error::{Error, Result};
use crate::event::{Completion, Control, Event};
use crate::family::{self, NoiseKind};
use crate::gguf::Gguf;
use crate::model::{Forward, MemoryPlan, Network, PartTime, Shape};
use crate::params::{EngineParams, KvType, Level, Message, ModelSource, Prompt, Request};
use crate::receipt::Receipt;
use crate::rng::{MaskNoise, Noise, SeededNoise};
use crate::sampler;
use crate::text::Settler;
use crate::tokenizer::Tokenizer;
use crate::vocab::{Dialect, Vocab, VocabFile};

/// Prompt tokens read between two denoising steps, so that a long prompt does not hold up lanes that run.
const PREFILL_BUDGET: usize = 2048;

/// What is known of a loaded model.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct ModelInfo {
    /// The model's name, as its file says.
    pub name: String,
    /// The file; `None` for the embedded model.
    pub path: Option<PathBuf>,
    /// Family (`diffusion-gemma`).
    pub family: String,
    /// The weights' main type (`Q4_K_M`, `F16`).
    pub quantization: String,
    /// Vocabulary size.
    pub vocab: usize,
    /// Canvas length in tokens.
    pub canvas: usize,
    /// Context length in tokens, per lane.
    pub context: usize,
    /// Lanes.
    pub lanes: usize,
    /// Device that computes.
    pub device: String,
    /// Its product name.
    pub device_description: String,
    /// CPU threads.
    pub threads: usize,
    /// Exactness.
    pub level: Level,
    /// Storage of keys and values.
    pub kv: KvType,
    /// Default sampler.
    pub sampler: String,
    /// What loading took.
    pub memory: MemoryPlan,
}

/// What a receipt says of a request besides its cost.
struct Ticket {
    /// Time that making tokens of the prompt took, which belongs to the request.
    prepared: Duration,
    seed: u64,
    candidate: u64,
    sampler: &'static str,
    max_steps: u32,
}

/// A loaded model that answers requests, several at a time on its lanes.
///
/// Synchronous and single-threaded by design: one thread owns it (it can be moved there), and progress comes by events.
///
/// ```
/// use dllm_engine::{Engine, EngineParams, Request};
///
/// let mut engine = Engine::load(EngineParams::default())?; // the embedded tiny model
/// let answer = engine.generate(&Request::new("86 + 45 =").seed(1), &mut |_| dllm_engine::Control::Continue)?;
/// assert_eq!(answer.text, "131");
/// # Ok::<(), dllm_engine::Error>(())
/// ```
pub struct Engine {
    lanes: Lanes<Network>,
    tickets: Vec<Option<Ticket>>,
    tokenizer: Tokenizer,
    settings: DenoiseSettings,
    sampler: sampler::Entry,
    info: ModelInfo,
}

impl Engine {
    /// Opens the file that a source names. Reads metadata only.
    ///
    /// # Errors
    /// `Io`, `BadFile`.
    pub fn open(source: &ModelSource) -> Result<Arc<Gguf>> {
        Ok(Arc::new(match source {
            ModelSource::Embedded => embedded::model()?,
            ModelSource::Path(path) => Gguf::open(path)?,
        }))
    }

    /// What loading would take, without loading.
    ///
    /// # Errors
    /// As `load`, but for `OutOfMemory`.
    pub fn plan(params: &EngineParams) -> Result<MemoryPlan> {
        Network::plan(&Self::open(&params.model)?, params)
    }

    /// Loads a model.
    ///
    /// # Errors
    /// `Io`, `BadFile`, `Unsupported` for the file; `BadArgument`, `NoDevice` for the parameters; `OutOfMemory` where the
    /// plan does not fit; `Template` for a chat template that does not compile.
    pub fn load(params: EngineParams) -> Result<Self> {
        Self::load_with(params, &mut |_, _| {})
    }

    /// As `load`; `progress` is told bytes done and bytes in all.
    ///
    /// # Errors
    /// As `load`.
    pub fn load_with(params: EngineParams, progress: &mut dyn FnMut(u64, u64)) -> Result<Self> {
        let file = Self::open(&params.model)?;
        // The vocabulary first: it is quick, and a file without a usable one need not be loaded.
        let tokenizer = Tokenizer::load(&file)?;
        let family = family::load(&file)?;
        let meta = file.meta();
        let (sampler, settings) = family.sampler();
        settings.check()?;
        let sampler = sampler::by_name(sampler)?;
        let name = meta.str_opt("general.name")?.filter(|n| !n.trim().is_empty()).unwrap_or("unnamed").to_owned();
        let network = Network::load(Arc::clone(&file), &params, progress)?;
        let shape = network.shape();
        let info = ModelInfo {
            name,
            path: match params.model {
                ModelSource::Embedded => None,
                ModelSource::Path(path) => Some(path),
            },
            family: family.name().to_owned(),
            quantization: file.quantization(),
            vocab: shape.vocab,
            canvas: shape.canvas,
            context: shape.context,
            lanes: shape.lanes,
            device: network.device(),
            device_description: network.device_description(),
            threads: network.threads(),
            level: network.level(),
            kv: network.kv(),
            sampler: sampler.name.to_owned(),
            memory: network.memory().clone(),
        };
        Ok(Self {
            tickets: (0..shape.lanes).map(|_| None).collect(),
            lanes: Lanes::new(network, PREFILL_BUDGET),
            tokenizer,
            settings,
            sampler,
            info,
        })
    }

    /// What is loaded.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// The vocabulary, for tokens to text and back.
    pub fn vocab(&self) -> &Arc<Vocab> {
        self.tokenizer.vocab()
    }

    /// The tokens that end an answer.
    pub fn eog(&self) -> &[u32] {
        self.tokenizer.eog()
    }

    /// The loop's settings where a request has no overrides.
    pub fn settings(&self) -> &DenoiseSettings {
        &self.settings
    }

    /// Sizes of the network.
    pub fn shape(&self) -> Shape {
        self.lanes.shape()
    }

    /// Most device memory in use, bytes.
    pub fn device_bytes(&self) -> u64 {
        self.lanes.forward().device_bytes()
    }

    /// Where the time of the last denoising step goes: its graph's parts, each computed alone, the slowest first. The sum is
    /// more than the step where a device overlaps parts or replays them without the host. Forgets the lanes' caches.
    ///
    /// # Errors
    /// `BadArgument` where no step ran yet or the model lies on several devices; `Backend` where the device fails.
    pub fn breakdown(&mut self) -> Result<Vec<PartTime>> {
        if self.running() > 0 {
            return Err(Error::argument("breakdown", format!("{} lanes run: let them end first", self.running())));
        }
        let parts = self.lanes.forward_mut().breakdown();
        self.forget();
        parts
    }

    /// The tokens that a prompt becomes.
    ///
    /// # Errors
    /// `BadArgument`, `Template`.
    pub fn encode(&self, prompt: &Prompt, thinking: bool) -> Result<Vec<u32>> {
        self.tokenizer.encode(prompt, thinking)
    }

    /// Answers one request. The cache is kept: a following request that starts with the same tokens reads only the rest.
    ///
    /// # Errors
    /// `BadArgument`, `PromptTooLong`, `Template` for the request; `NotFinite`, `Backend` from the computation.
    pub fn generate(
        &mut self,
        request: &Request,
        on_event: &mut dyn FnMut(Event<'_>) -> Control,
    ) -> Result<Completion> {
        let (work, ticket) = self.work(request)?;
        let generation = self.lanes.generate(work, on_event)?;
        Ok(self.completion(ticket, generation))
    }

    /// Answers many requests, as many at a time as there are lanes. Results come in the order of the requests; events carry
    /// the request's number. A request that fails does not stop the others.
    pub fn generate_all(
        &mut self,
        requests: &[Request],
        on_event: &mut dyn FnMut(usize, Event<'_>) -> Control,
    ) -> Vec<Result<Completion>> {
        let mut results: Vec<Option<Result<Completion>>> = requests.iter().map(|_| None).collect();
        let mut owner = vec![0_usize; self.tickets.len()];
        let mut waiting = requests.iter().enumerate();
        loop {
            while self.free() > 0
                && let Some((i, request)) = waiting.next()
            {
                match self.admit(request) {
                    Ok(lane) => owner[lane] = i,
                    Err(error) => results[i] = Some(Err(error)),
                }
            }
            if self.running() == 0 {
                break;
            }
            for (lane, result) in self.step(&mut |lane, event| on_event(owner[lane], event)) {
                results[owner[lane]] = Some(result);
            }
        }
        let missing = || Err(Error::Backend("a request was not answered".into()));
        results.into_iter().map(|result| result.unwrap_or_else(missing)).collect()
    }

    /// Lanes that can take a request.
    pub fn free(&self) -> usize {
        self.lanes.free()
    }

    /// Lanes that run one.
    pub fn running(&self) -> usize {
        self.lanes.running()
    }

    /// Starts a request on a free lane and returns the lane: for callers that schedule themselves. `step` advances it.
    ///
    /// # Errors
    /// As `generate`; `BadArgument` where no lane is free.
    pub fn admit(&mut self, request: &Request) -> Result<usize> {
        let (work, ticket) = self.work(request)?;
        let lane = self.lanes.admit(work)?;
        self.tickets[lane] = Some(ticket);
        Ok(lane)
    }

    /// Advances all running lanes by at most one prefill pass and one denoising step. Returns the lanes that ended.
    pub fn step(&mut self, on_event: &mut dyn FnMut(usize, Event<'_>) -> Control) -> Vec<(usize, Result<Completion>)> {
        let finished = self.lanes.step(&mut |lane, event| on_event(lane, event));
        finished
            .into_iter()
            .map(|done| {
                let ticket = self.tickets[done.lane].take();
                let result = done.result.and_then(|generation| {
                    let ticket = ticket.ok_or_else(|| Error::Backend("a lane ended that nobody started".into()))?;
                    Ok(self.completion(ticket, generation))
                });
                (done.lane, result)
            })
            .collect()
    }

    /// Ends a lane's request at the next step; what is finished is kept.
    pub fn cancel(&mut self, lane: usize) {
        self.lanes.cancel(lane);
    }

    /// Forgets the caches of lanes that run nothing.
    pub fn forget(&mut self) {
        self.lanes.forget();
    }

    /// A conversation on this engine.
    pub fn chat(&mut self) -> Chat<'_> {
        Chat { engine: self, messages: Vec::new() }
    }

    fn work(&self, request: &Request) -> Result<(Work, Ticket)> {
        let since = Instant::now();
        let prompt = self.encode(&request.prompt, request.thinking)?;
        let settings = self.settings.with(&request.denoise)?;
        let seed = request.seed.unwrap_or_else(drawn_seed);
        let given = request.pins.iter().map(|pin| pin.position.saturating_add(1)).max().unwrap_or(0);
        let settler = Settler::new(Arc::clone(self.vocab()), &prompt, &request.stop, request.max_tokens)?.given(given);
        let sampler = (request.sampler.unwrap_or(self.sampler).make)(&settings);
        let candidate = request.candidate;
        let ticket = Ticket {
            prepared: since.elapsed(),
            seed,
            candidate,
            sampler: sampler.name(),
            max_steps: settings.max_steps,
        };
        let work = Work {
            prompt,
            max_tokens: request.max_tokens,
            noise: self.noise(seed, candidate),
            settings,
            sampler,
            text: Box::new(settler),
            pins: request.pins.clone(),
            eog: Arc::clone(self.tokenizer.eog()),
        };
        Ok((work, ticket))
    }

    fn noise(&self, seed: u64, candidate: u64) -> Box<dyn Noise> {
        let vocab = self.info.vocab as u32;
        match self.lanes.forward().family().noise() {
            NoiseKind::Uniform => Box::new(SeededNoise::new(seed, candidate, vocab)),
            NoiseKind::Mask(mask) => Box::new(MaskNoise::new(mask, seed, candidate, vocab)),
        }
    }

    fn completion(&self, ticket: Ticket, mut g: Generation) -> Completion {
        g.cost.total += ticket.prepared;
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        let (cost, n) = (&g.cost, g.tokens.len());
        let receipt = Receipt {
            model: self.info.name.clone(),
            family: self.info.family.clone(),
            quantization: self.info.quantization.clone(),
            device: self.info.device.clone(),
            seed: ticket.seed,
            candidate: ticket.candidate,
            level: self.info.level,
            kv: self.info.kv,
            dense: self.info.memory.dense,
            placement: self.info.memory.placement.clone(),
            sampler: ticket.sampler.to_owned(),
            max_steps: ticket.max_steps,
            prompt_tokens: cost.prompt_tokens,
            cached_tokens: cost.cached_tokens,
            tokens: n,
            steps_per_canvas: cost.steps_per_canvas.clone(),
            tokens_per_forward: cost.tokens_per_forward(n),
            prefill_ms: ms(cost.prefill),
            step_ms: ms(cost.step),
            commit_ms: ms(cost.commit),
            host_ms: ms(cost.host),
            total_ms: ms(cost.total),
            tokens_per_second: cost.tokens_per_second(n),
            lanes: cost.lanes,
            graphs_built: cost.graphs.graphs_built,
            graphs_replayed: cost.graphs.graphs_replayed,
            captured_replays: cost.graphs.captured_replays,
            device_bytes: self.device_bytes(),
        };
        Completion {
            text: g.text,
            reasoning: g.reasoning,
            tokens: g.tokens,
            finish_reason: g.finish_reason,
            converged: g.converged,
            receipt,
        }
    }
}

/// A conversation. It borrows its engine, so the engine cannot be dropped while it lives:
///
/// ```compile_fail,E0505
/// # use dllm_engine::{Engine, EngineParams};
/// let mut engine = Engine::load(EngineParams::default()).unwrap();
/// let chat = engine.chat();
/// drop(engine);
/// println!("{}", chat.messages().len());
/// ```
pub struct Chat<'e> {
    engine: &'e mut Engine,
    messages: Vec<Message>,
}

impl Chat<'_> {
    /// The turns so far.
    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Adds a turn without an answer: system instructions, or history from elsewhere.
    pub fn push(&mut self, message: Message) {
        self.messages.push(message);
    }

    /// Forgets all turns.
    pub fn clear(&mut self) {
        self.messages.clear();
    }

    /// Asks, and remembers question and answer. `request.prompt` is not used; its other fields are. Only tokens that are
    /// not in the cache yet are read. A question that failed or was cancelled before any text is not remembered.
    ///
    /// # Errors
    /// As [`Engine::generate`].
    pub fn ask(
        &mut self,
        question: impl Into<String>,
        request: &Request,
        on_event: &mut dyn FnMut(Event<'_>) -> Control,
    ) -> Result<Completion> {
        self.messages.push(Message::user(question));
        let request = Request { prompt: Prompt::Messages(self.messages.clone()), ..request.clone() };
        let result = self.engine.generate(&request, on_event);
        match &result {
            Ok(done) if !done.text.is_empty() => self.messages.push(Message::assistant(done.text.clone())),
            _ => {
                self.messages.pop();
            }
        }
        result
    }
}

/// A seed for a request without one, from the system's randomness that std's hash maps are keyed with. 53 bits, so that it
/// survives JSON readers that hold numbers as doubles.
fn drawn_seed() -> u64 {
    RandomState::new().hash_one(std::process::id()) >> 11
}

/// The tokenizer's part of a file.
///
/// # Errors
/// `BadFile`, `Unsupported`.
pub(crate) fn load_vocab(file: &Gguf, dialect: &Dialect) -> Result<Vocab> {
    let meta = file.meta();
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let id = |name: &str| meta.u32_opt(&key(&format!("{name}_token_id")));
    let parts = VocabFile {
        model: meta.str(&key("model"))?,
        pre: meta.str_opt(&key("pre"))?,
        tokens: meta.array_str(&key("tokens"))?.iter().collect(),
        scores: meta.array_f32_opt(&key("scores"))?.map(<[f32]>::to_vec),
        token_type: meta.array_i32(&key("token_type"))?,
        merges: meta.array_str_opt(&key("merges"))?.map(|list| list.iter().collect()).unwrap_or_default(),
        bos_token_id: id("bos")?,
        eos_token_id: id("eos")?,
        eot_token_id: id("eot")?,
        eom_token_id: id("eom")?,
        unknown_token_id: id("unknown")?,
        padding_token_id: id("padding")?,
        mask_token_id: id("mask")?,
        add_bos_token: meta.bool_opt(&key("add_bos_token"))?,
    };
    Vocab::load(file.path(), &parts, dialect)
}
