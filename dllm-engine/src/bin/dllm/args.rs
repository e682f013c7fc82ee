//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use dllm_engine::{DenoiseOverrides, Dense, EngineParams, KvType, Level, ModelSource, Offload};

use super::output::Result;
use super::usage::{self, real, whole};

/// Run diffusion language models on this machine, in this process.
#[derive(Parser)]
#[command(
    name = "dllm",
    version,
    max_term_width = 100,
    long_about = "Runs diffusion language models on this machine, in this process: no server, no download, no Python.\n\n\
                  A diffusion language model writes a block of tokens (a canvas) at once: it starts from noise and settles \
                  the canvas over several denoising steps. Without --model, a tiny model inside the program answers; it \
                  knows sums and a few facts and is there to try things out.",
    after_help = "Examples:\n  \
        dllm generate '86 + 45 ='                     one answer from the model inside the program\n  \
        dllm generate --watch --pace 100 '12 + 30 ='  the same, with the canvas in view, slowly\n  \
        dllm chat -m model.gguf                       a conversation\n  \
        dllm plan model.gguf --ctx 32768              will it fit?\n\n\
        Exit codes: 0 done, 1 the answer is no (a parity miss, a plan that does not fit), 2 an error, 130 interrupted.\n\
        `dllm help COMMAND` explains a command and its options."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    Generate(GenerateArgs),
    Chat(ChatArgs),
    Inspect(InspectArgs),
    Plan(PlanArgs),
    Tokenize(TokenizeArgs),
    Bench(BenchArgs),
    Parity(ParityArgs),
}

#[derive(Clone, Copy, ValueEnum)]
pub enum LevelArg {
    /// Follows the transformers reference step by step; weights are expanded to F32.
    Reference,
    /// The same maths in the device's own order and rounding.
    Fused,
    /// As fused, with self-conditioning from the likeliest tokens only (GPUs).
    Topk,
}

impl From<LevelArg> for Level {
    fn from(arg: LevelArg) -> Self {
        match arg {
            LevelArg::Reference => Self::Reference,
            LevelArg::Fused => Self::Fused,
            LevelArg::Topk => Self::TopK,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
pub enum KvArg {
    /// F32 on the CPU, F16 elsewhere.
    Auto,
    F32,
    F16,
    #[value(name = "q8_0")]
    Q8_0,
}

impl From<KvArg> for KvType {
    fn from(arg: KvArg) -> Self {
        match arg {
            KvArg::Auto => Self::Auto,
            KvArg::F32 => Self::F32,
            KvArg::F16 => Self::F16,
            KvArg::Q8_0 => Self::Q8_0,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
pub enum DenseArg {
    /// In half precision where that fits, else quantized.
    Auto,
    /// In half precision: fastest where memory is plenty.
    Half,
    /// As in the file.
    Quantized,
}

impl From<DenseArg> for Dense {
    fn from(arg: DenseArg) -> Self {
        match arg {
            DenseArg::Auto => Self::Auto,
            DenseArg::Half => Self::Half,
            DenseArg::Quantized => Self::Quantized,
        }
    }
}

/// Which model.
#[derive(Args)]
pub struct ModelArg {
    /// GGUF file of the model; of a split file, any part [default: $DLLM_MODEL, else the tiny model inside the program].
    #[arg(short, long, value_name = "FILE", help_heading = "Loading")]
    pub model: Option<PathBuf>,
}

/// A model as the one positional argument; as an option, too, since the other commands want it so.
#[derive(Args)]
pub struct FileArg {
    /// GGUF file; of a split file, any part [default: $DLLM_MODEL, else the tiny model inside the program].
    pub file: Option<PathBuf>,
    /// The same as FILE.
    #[arg(short, long, value_name = "FILE", conflicts_with = "file")]
    pub model: Option<PathBuf>,
}

impl ModelArg {
    pub fn source(&self) -> ModelSource {
        source(self.model.as_ref())
    }
}

impl FileArg {
    pub fn source(&self) -> ModelSource {
        source(self.file.as_ref().or(self.model.as_ref()))
    }
}

/// Where the weights come from.
fn source(argument: Option<&PathBuf>) -> ModelSource {
    let path = argument.cloned().or_else(|| usage::variable("DLLM_MODEL").map(PathBuf::from));
    path.map_or(ModelSource::Embedded, ModelSource::Path)
}

/// How to load a model.
#[derive(Args)]
#[command(next_help_heading = "Loading")]
pub struct LoadArgs {
    /// Device that computes, by name (CPU, CUDA0, Vulkan0), or GPUs that share the layers (CUDA0,CUDA1) [default: the first
    /// GPU with kernels of this engine, else the CPU].
    #[arg(short, long, value_name = "NAME")]
    pub device: Option<String>,
    /// Context: tokens of prompt and answer together, per lane. 0 takes the file's own, at most 8192.
    #[arg(short, long, value_name = "TOKENS", default_value_t = 0, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub ctx: usize,
    /// Exactness.
    #[arg(long, value_enum, default_value_t = LevelArg::Fused)]
    pub level: LevelArg,
    /// Storage of keys and values.
    #[arg(long, value_enum, default_value_t = KvArg::Auto)]
    pub kv: KvArg,
    /// Dense matrices on a CUDA device.
    #[arg(long, value_enum, default_value_t = DenseArg::Auto)]
    pub dense: DenseArg,
    /// Most memory of each device but the host beside it to plan with, in GiB [default: all that is free].
    #[arg(long, value_name = "GIB", value_parser = gibibytes)]
    pub memory: Option<u64>,
    /// Keep the experts of the first N layers in the host's memory and send them to the GPU at every pass. 0: none, even if it
    /// does not fit [default: as few as make the rest fit].
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true, conflicts_with = "host_layers")]
    pub host_experts: Option<usize>,
    /// Compute the first N layers on the CPU.
    #[arg(long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub host_layers: Option<usize>,
    /// CPU threads. 0 takes the number of physical cores [default: $DLLM_THREADS, else 0].
    #[arg(short, long, value_name = "N", value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub threads: Option<usize>,
}

impl LoadArgs {
    pub fn params(&self, model: ModelSource, lanes: usize) -> Result<EngineParams> {
        Ok(EngineParams {
            model,
            device: self.device.clone(),
            context: self.ctx,
            level: self.level.into(),
            kv: self.kv.into(),
            dense: self.dense.into(),
            memory: self.memory.unwrap_or(0),
            offload: match (self.host_experts, self.host_layers) {
                (Some(0), _) | (None, Some(0)) => Offload::Whole,
                (Some(n), _) => Offload::HostExperts(n),
                (None, Some(n)) => Offload::HostLayers(n),
                (None, None) => Offload::Auto,
            },
            threads: self.threads.map_or_else(usage::threads_of_environment, Ok)?,
            lanes,
            ..EngineParams::default()
        })
    }
}

/// GiB as bytes.
fn gibibytes(text: &str) -> Result<u64, String> {
    match text.parse::<f64>().map(|n| n * f64::from(1 << 30)) {
        // 0 would mean: no limit. What is less than a byte must not become that.
        Ok(bytes) if (1.0..=1e6 * f64::from(1 << 30)).contains(&bytes) => Ok(bytes as u64),
        _ => Err("give a number from 1e-9 to 1e6, in GiB, such as 22.5".into()),
    }
}

/// What shapes an answer.
#[derive(Args)]
#[command(next_help_heading = "Answer")]
pub struct AnswerArgs {
    /// Seed: the same seed, model and level give the same answer [default: a drawn one, named in the receipt].
    #[arg(short, long, value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Most tokens of the answer.
    #[arg(short = 'k', long, value_name = "N", default_value_t = 256, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub max_tokens: usize,
    /// Most denoising steps per canvas [default: the model's own].
    #[arg(long, value_name = "N", value_parser = whole::<u32>, allow_negative_numbers = true)]
    pub max_steps: Option<u32>,
    /// Entropy in nats that one step may accept: more is faster and less careful [default: the model's own].
    #[arg(long, value_name = "NATS", value_parser = real, allow_negative_numbers = true)]
    pub entropy_bound: Option<f32>,
    /// Temperature towards the last step [default: the model's own].
    #[arg(long, value_name = "T", value_parser = real, allow_negative_numbers = true)]
    pub t_min: Option<f32>,
    /// Temperature at the first step [default: the model's own].
    #[arg(long, value_name = "T", value_parser = real, allow_negative_numbers = true)]
    pub t_max: Option<f32>,
    /// What chooses the positions that a step accepts, by name [default: the model's own].
    #[arg(long, value_name = "NAME")]
    pub sampler: Option<String>,
    /// Instructions that stand above the conversation.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Text that ends the answer, which is cut before it. May be given several times.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Ask the model to think first.
    #[arg(long)]
    pub think: bool,
    /// Let a step take at least this many milliseconds, to watch a fast model.
    #[arg(long, value_name = "MS", default_value_t = 0, value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub pace: u64,
}

impl AnswerArgs {
    pub fn overrides(&self) -> DenoiseOverrides {
        DenoiseOverrides {
            max_steps: self.max_steps,
            t_min: self.t_min,
            t_max: self.t_max,
            entropy_bound: self.entropy_bound,
            ..DenoiseOverrides::default()
        }
    }
}

/// Answer one prompt.
#[derive(Args)]
#[command(after_help = "Examples:\n  \
    dllm generate '86 + 45 ='\n  \
    dllm generate --watch --pace 100 '86 + 45 ='      see the canvas settle, slowly\n  \
    dllm generate --file question.txt --json          one JSON object: text, reasoning, finish_reason, receipt\n  \
    git diff | dllm generate -m model.gguf - --system 'Review this'\n  \
    dllm generate -n 4 --seed 1 'Spell the word \"garden\".'   four candidates in one run\n  \
    dllm generate --candidate 2 --seed 1 'Spell the word \"garden\".'   the third of them alone\n  \
    dllm generate --trace steps.jsonl '86 + 45 ='     every step, one JSON object a line\n\n\
    The answer goes to standard output, everything else to standard error. A line end at the end of a file or pipe is not\n\
    part of the prompt. Ctrl-C ends the answer at the next step and prints what is finished; twice ends at once.")]
pub struct GenerateArgs {
    /// The prompt; `-`, or nothing with a pipe at hand, reads standard input.
    pub prompt: Option<String>,
    /// Read the prompt from a file.
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    pub file: Option<PathBuf>,
    /// Print one JSON object {text, reasoning, finish_reason, converged, receipt}; with several candidates
    /// {candidates: [...]}.
    #[arg(long)]
    pub json: bool,
    /// Show the canvas in the terminal while it settles.
    #[arg(short, long, conflicts_with_all = ["json", "n"])]
    pub watch: bool,
    /// Candidates, from one seed, side by side on lanes: numbers 0 to N-1.
    #[arg(short, long, default_value_t = 1, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub n: usize,
    /// The candidate of this number alone.
    #[arg(long, value_name = "NUMBER", default_value_t = 0, value_parser = whole::<u64>, conflicts_with = "n")]
    pub candidate: u64,
    /// Take the prompt as it is: no chat template, and special tokens in it are parsed.
    #[arg(long, conflicts_with_all = ["system", "think"])]
    pub raw: bool,
    /// Write every step to a new file, one JSON object a line. A file that holds something already is refused.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    pub answer: AnswerArgs,
    #[command(flatten)]
    pub model: ModelArg,
    #[command(flatten)]
    pub load: LoadArgs,
}

/// Talk with a model.
#[derive(Args)]
#[command(after_help = "Examples:\n  \
    dllm chat\n  \
    dllm chat -m model.gguf --system 'Answer in one sentence.'\n  \
    printf '2 + 2 =\\n3 + 3 =\\n' | dllm chat            a line a turn, plain text out\n\n\
    In the conversation: /help lists the commands. Ctrl-C ends an answer, at the prompt the program; Ctrl-D ends it, too.\n\
    Pipes, TERM=dumb and NO_COLOR get plain text.")]
pub struct ChatArgs {
    #[command(flatten)]
    pub answer: AnswerArgs,
    #[command(flatten)]
    pub model: ModelArg,
    #[command(flatten)]
    pub load: LoadArgs,
}

/// Show what a model file holds and where it would be loaded.
#[derive(Args)]
#[command(after_help = "Examples:\n  dllm inspect model.gguf\n  dllm inspect model.gguf --json | jq .metadata\n\n\
    Works for GGUF files of any architecture, also for those that this program does not run.")]
pub struct InspectArgs {
    #[command(flatten)]
    pub file: FileArg,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub load: LoadArgs,
}

/// Tell how much memory a model would take. Exit code 1 where it does not fit.
#[derive(Args)]
#[command(
    after_help = "Examples:\n  dllm plan model.gguf --ctx 32768 --lanes 4\n  dllm plan model.gguf --device CUDA0 --json"
)]
pub struct PlanArgs {
    #[command(flatten)]
    pub file: FileArg,
    /// Answers that run side by side, each with a cache of its own.
    #[arg(short, long, default_value_t = 1, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub lanes: usize,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub load: LoadArgs,
}

/// Show the tokens of a text.
#[derive(Args)]
#[command(
    after_help = "Examples:\n  dllm tokenize 'Hello, world'\n  dllm tokenize --chat 'Hello'\n  dllm tokenize --special '<bos>Hello' --json"
)]
pub struct TokenizeArgs {
    /// The text; `-`, or nothing with a pipe at hand, reads standard input.
    pub text: Option<String>,
    /// Find special tokens in the text; else text that looks like one stays text.
    #[arg(long)]
    pub special: bool,
    /// Take the text as a user's message and render it with the chat template.
    #[arg(long, conflicts_with = "special")]
    pub chat: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArg,
}

/// Measure speed.
#[derive(Args)]
#[command(after_help = "Examples:\n  \
    dllm bench -m model.gguf\n  \
    dllm bench -m model.gguf --lanes 4 --prompt-tokens 2048 --steps 32 --json\n\n\
    With --steps every canvas takes that many steps; without, the stop rule decides. The prompt is drawn from the\n\
    vocabulary, or given with --prompt.")]
pub struct BenchArgs {
    /// Tokens of the drawn prompt.
    #[arg(short, long, value_name = "N", default_value_t = 128, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub prompt_tokens: usize,
    /// A prompt to measure with instead.
    #[arg(long, value_name = "TEXT", conflicts_with = "prompt_tokens")]
    pub prompt: Option<String>,
    /// Denoising steps of every canvas [default: until the stop rule ends it].
    #[arg(long, value_name = "N", value_parser = whole::<u32>, allow_negative_numbers = true)]
    pub steps: Option<u32>,
    /// Most tokens of an answer.
    #[arg(short = 'k', long, value_name = "N", default_value_t = 256, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub max_tokens: usize,
    /// Answers side by side.
    #[arg(short, long, default_value_t = 1, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub lanes: usize,
    /// Measured repetitions, after one that is not counted.
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub repetitions: usize,
    /// Say, too, where a step's time goes: each part of its graph computed alone.
    #[arg(long)]
    pub breakdown: bool,
    /// Seed of the first repetition.
    #[arg(short, long, default_value_t = 1, value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub seed: u64,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub model: ModelArg,
    #[command(flatten)]
    pub load: LoadArgs,
}

/// Compare with recorded results of the transformers reference. Exit code 1 where a check misses its limit.
#[derive(Args)]
#[command(after_help = "Examples:\n  \
    dllm parity dllm-engine/tests/data/oracle/tiny --level fused\n  \
    dllm parity dllm-engine/tests/data/oracle/nano --file model-f16.gguf --verbose\n\n\
    The folder holds model.gguf, fixtures.json, fixtures.safetensors and tokenizer_cases.json. Prints a line per group of\n\
    checks and every miss; --verbose prints every check. The limits of level fused are for F32 files.")]
pub struct ParityArgs {
    /// The folder with the recorded results.
    pub dir: PathBuf,
    /// Device that computes, by name [default: the first GPU, else the CPU].
    #[arg(short, long, value_name = "NAME")]
    pub device: Option<String>,
    /// Exactness to check.
    #[arg(long, value_enum, default_value_t = LevelArg::Reference)]
    pub level: LevelArg,
    /// Model file in the folder [default: model.gguf].
    #[arg(long, value_name = "NAME")]
    pub file: Option<String>,
    /// One line per check.
    #[arg(short, long)]
    pub verbose: bool,
}

#[cfg(test)]
mod tests {
    use dllm_engine::Prompt;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::super::generate::request;
    use super::*;

    fn argument() -> impl Strategy<Value = String> {
        let option = prop_oneof![
            Just("--max-tokens"),
            Just("--max-steps"),
            Just("--seed"),
            Just("--t-min"),
            Just("--entropy-bound"),
            Just("--sampler"),
            Just("--stop"),
            Just("-n"),
            Just("--json"),
            Just("--ctx"),
            Just("--device"),
            Just("--"),
        ];
        let value = prop_oneof!["-?[0-9]{1,25}", "-?[0-9]\\.[0-9]e?[0-9]{0,3}", Just("nan".into()), any::<String>()];
        prop_oneof![2 => option.prop_map(str::to_owned), 2 => value]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 4000, ..ProptestConfig::default() })]

        /// Whatever stands on the command line: a request that keeps it, or an error.
        #[test]
        fn issue_2_any_arguments_give_a_request_or_an_error(arguments in vec(argument(), 0..8)) {
            let line = ["dllm", "generate"].into_iter().chain(arguments.iter().map(String::as_str));
            let Ok(Cli { command: Command::Generate(args) }) = Cli::try_parse_from(line) else { return Ok(()) };
            if let Ok(request) = request(Prompt::from("a"), &args.answer) {
                prop_assert_eq!(request.seed, args.answer.seed);
                prop_assert_eq!(request.max_tokens, args.answer.max_tokens);
                prop_assert_eq!(request.sampler.map(|s| s.name), args.answer.sampler.as_deref());
            } else {
                prop_assert!(args.answer.sampler.is_some(), "nothing else is looked at here");
            }
        }
    }
}
