//! What a caller sets: how to load (`EngineParams`) and what to generate (`Request`).

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::sampler;

/// Where the weights come from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ModelSource {
    /// The tiny trained model inside the program (7 MB), for a first try and for tests.
    #[default]
    Embedded,
    /// A GGUF file. Of a split file, any part.
    Path(PathBuf),
}

/// How exactly the reference is followed (decision D10). Named in every receipt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Every product in F32 from the file's values: matches the transformers reference step by step, given the same noise.
    /// Weights that are not F32 are expanded in memory.
    Reference,
    /// The same maths in another summation order and with the backend's own rounding of activations.
    #[default]
    Fused,
    /// As `fused`, with self-conditioning from the likeliest tokens only.
    TopK,
}

/// How the dense matrices (all but the experts) lie in a CUDA device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dense {
    /// In half precision where that fits into the device's free memory, else quantized. The receipt says which.
    #[default]
    Auto,
    /// Expanded to half precision: fastest where memory is plenty and fast.
    Half,
    /// As the file has them.
    Quantized,
}

/// What of a model stays in the host's memory beside a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Offload {
    /// Nothing where it fits, else the experts of as few layers as needed. The receipt says what was chosen.
    #[default]
    Auto,
    /// Nothing: what does not fit is refused.
    Whole,
    /// The experts of the first so many layers. The GPU is sent them at every pass.
    HostExperts(usize),
    /// The first so many layers, computed on the CPU.
    HostLayers(usize),
}

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvType {
    /// F32 on the CPU, F16 elsewhere. The receipt says which.
    #[default]
    Auto,
    /// 4 bytes a value.
    F32,
    /// 2 bytes a value.
    F16,
    /// 1.0625 bytes a value.
    Q8_0,
}

/// How to load a model.
#[derive(Debug, Clone)]
pub struct EngineParams {
    /// The weights.
    pub model: ModelSource,
    /// A device by name (`CPU`, `CUDA0`, `Vulkan0`), several GPUs with commas between (`CUDA0,CUDA1`), which share the
    /// layers, or `None` for the first GPU that this engine has kernels for, else the CPU.
    pub device: Option<String>,
    /// Tokens of prompt and answer together, per lane. 0 takes the file's own length, at most 8192.
    pub context: usize,
    /// Sequences that run side by side, 1 to 64.
    pub lanes: usize,
    /// Exactness.
    pub level: Level,
    /// Storage of keys and values.
    pub kv: KvType,
    /// How the dense matrices lie in a CUDA device's memory.
    pub dense: Dense,
    /// Most bytes of memory to plan with on each GPU, or on the CPU where a model is whole there; 0 is all that is free.
    pub memory: u64,
    /// What stays in the host's memory beside a GPU.
    pub offload: Offload,
    /// Tokens per prefill pass. 0 chooses.
    pub prefill_chunk: usize,
    /// CPU threads, at most as many as there are processors. 0 takes the number of physical cores.
    pub threads: usize,
    /// Granularity of key counts. 256 is what flash attention on GPUs wants; parity tests take less, to wrap the ring.
    pub key_padding: usize,
    /// Load even when the plan says that it does not fit.
    pub ignore_memory_plan: bool,
}

impl Default for EngineParams {
    fn default() -> Self {
        Self {
            model: ModelSource::Embedded,
            device: None,
            context: 0,
            lanes: 1,
            level: Level::default(),
            kv: KvType::default(),
            dense: Dense::default(),
            memory: 0,
            offload: Offload::default(),
            prefill_chunk: 0,
            threads: 0,
            key_padding: 256,
            ignore_memory_plan: false,
        }
    }
}

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions that stand above the conversation.
    System,
    /// The person or program that asks.
    User,
    /// The model.
    Assistant,
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said. Text that looks like a special token stays text.
    pub content: String,
}

impl Message {
    /// A turn of the user.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: Role::User, content: content.into() }
    }

    /// A turn of the model.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self { role: Role::Assistant, content: content.into() }
    }

    /// Instructions.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: Role::System, content: content.into() }
    }
}

/// What the model reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// A conversation, rendered with the model's chat template.
    Messages(Vec<Message>),
    /// Text as it is: special tokens in it are parsed and nothing is added but the begin token.
    Raw(String),
    /// Token ids as they are; nothing is added.
    Tokens(Vec<u32>),
}

impl From<&str> for Prompt {
    /// One turn of the user.
    fn from(text: &str) -> Self {
        Self::Messages(vec![Message::user(text)])
    }
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Self::Messages(vec![Message::user(text)])
    }
}

/// Settings of the denoising loop; `None` takes the file's value, else the family's default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DenoiseOverrides {
    /// Most denoising steps per canvas, 1 to 4096. Fewer steps are another temperature schedule, hence another sampler.
    pub max_steps: Option<u32>,
    /// Temperature towards the last step, above 0, at most 10.
    pub t_min: Option<f32>,
    /// Temperature at the first step, at least `t_min`, at most 10.
    pub t_max: Option<f32>,
    /// Entropy in nats that one step may accept, 0 or more.
    pub entropy_bound: Option<f32>,
    /// Steps that the argmax canvas must have stayed the same before an early stop.
    pub stability_threshold: Option<u32>,
    /// Mean entropy in nats below which a stable canvas counts as finished.
    pub confidence_threshold: Option<f32>,
}

/// A position of the answer that is given and stays as it is, through accept and renoise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pin {
    /// Position in the answer, from 0; canvas `position / canvas length`.
    pub position: usize,
    /// The token that stands there.
    pub token: u32,
}

/// What to generate.
#[derive(Debug, Clone)]
pub struct Request {
    /// What the model reads.
    pub prompt: Prompt,
    /// Most tokens of the answer, at least 1. Canvases are whole; the answer is cut to this.
    pub max_tokens: usize,
    /// The seed; `None` draws one. The receipt names it either way.
    pub seed: Option<u64>,
    /// Which of several candidates with the same seed this is (decision D7): 0 for the first.
    pub candidate: u64,
    /// Settings of the loop.
    pub denoise: DenoiseOverrides,
    /// What chooses the positions to accept: one of [`sampler::by_name`](crate::sampler::by_name) or the caller's own;
    /// `None` takes the family's.
    pub sampler: Option<sampler::Entry>,
    /// Texts that end the answer; the answer is cut before the first. None may be empty.
    pub stop: Vec<String>,
    /// Ask the model to think first (where its template knows how).
    pub thinking: bool,
    /// Given positions of the answer.
    pub pins: Vec<Pin>,
}

impl Request {
    /// A request with the defaults: 256 tokens, a drawn seed, the file's own sampler settings.
    pub fn new(prompt: impl Into<Prompt>) -> Self {
        Self {
            prompt: prompt.into(),
            max_tokens: 256,
            seed: None,
            candidate: 0,
            denoise: DenoiseOverrides::default(),
            sampler: None,
            stop: Vec::new(),
            thinking: false,
            pins: Vec::new(),
        }
    }

    /// Sets the most tokens of the answer.
    pub fn max_tokens(mut self, n: usize) -> Self {
        self.max_tokens = n;
        self
    }

    /// Sets the seed.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets the sampler.
    pub fn sampler(mut self, sampler: sampler::Entry) -> Self {
        self.sampler = Some(sampler);
        self
    }
}
