//! What the operator sets: arguments, each with an environment variable. The only reader of the environment.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches, Parser};

const EXAMPLES: &str = "\
Examples:
  dllm-mcp                                          the tiny model inside the program, over standard input and output
  dllm-mcp --model model.gguf --lanes 8             one model, eight requests side by side
  dllm-mcp --model-dir models --root batches        callers choose a model, and name batch files in the folder batches
  dllm-mcp --http 127.0.0.1:10835                   for clients that speak HTTP: http://127.0.0.1:10835/mcp

A host starts it by a configuration as
  {\"mcpServers\": {\"dllm\": {\"command\": \"dllm-mcp\", \"args\": [\"--model-dir\", \"/srv/models\"]}}}
It then speaks JSON-RPC on standard input and output, a message per line, and ends when its input ends.
DLLM_HTTP_TOKEN in the environment makes HTTP callers send it as Authorization: Bearer.";

/// MCP server that generates text with a diffusion language model, in process.
///
/// Without a model it answers with the tiny model inside the program, which knows little more than arithmetic.
#[derive(Debug, Clone, Parser)]
#[command(name = "dllm-mcp", version, after_help = EXAMPLES)]
pub struct Config {
    /// The model: a GGUF file, or the id of one in the model folder.
    #[arg(long, env = "DLLM_MODEL")]
    pub model: Option<String>,
    /// Folder with GGUF files that callers may load.
    #[arg(long, env = "DLLM_MODEL_DIR")]
    pub model_dir: Option<PathBuf>,
    /// Folder that batch files may be in; it must exist; repeat for more. Without one: the folder `files` in the state folder.
    #[arg(long = "root", env = "DLLM_ROOTS", value_delimiter = ';')]
    pub roots: Vec<PathBuf>,
    /// Folder for results, locks and the log; it is created. Give all servers of a machine the same: the device's lock is in it.
    #[arg(long, env = "DLLM_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// Device (`CPU`, `CUDA0`); without it the first GPU, else the CPU.
    #[arg(long, env = "DLLM_DEVICE")]
    pub device: Option<String>,
    /// Requests that run side by side, 1 to 64.
    #[arg(long, env = "DLLM_LANES", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub lanes: u8,
    /// Tokens of prompt and answer together, up to 1048576; 0 takes the model's own length, at most 8192.
    #[arg(long, env = "DLLM_CONTEXT", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_048_576))]
    pub context: u32,
    /// CPU threads, up to 1024; 0 takes the physical cores.
    #[arg(long, env = "DLLM_THREADS", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub threads: u32,
    /// Minutes without work after which the model is unloaded, up to 525600; 0 never.
    #[arg(long, env = "DLLM_IDLE_MINUTES", default_value_t = 15.0, value_parser = minutes)]
    pub idle_minutes: f64,
    /// Requests that may wait for a lane, 1 to 10000; items of batches do not count.
    #[arg(long, env = "DLLM_QUEUE", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub queue: u32,
    /// Serve Streamable HTTP at this loopback address instead of stdio (as `127.0.0.1:10835`).
    #[arg(long, env = "DLLM_HTTP")]
    pub http: Option<SocketAddr>,
    /// Token that HTTP callers must send as `Authorization: Bearer`. Environment only: arguments are visible to others.
    #[arg(skip = std::env::var("DLLM_HTTP_TOKEN").ok().filter(|token| !token.is_empty()))]
    pub http_token: Option<String>,
    /// What is logged: `off`, `error`, `warn`, `info`, `debug`, `trace`, or a filter as `dllm_mcp=debug`.
    #[arg(long, env = "DLLM_LOG", default_value = "warn")]
    pub log: String,
    /// Time between two signs of life while a request waits. Tests shorten it.
    #[arg(skip = Duration::from_secs(5))]
    pub heartbeat: Duration,
}

impl Config {
    /// Reads arguments and environment; ends the program with a message where they are wrong. An empty variable counts as
    /// none: hosts pass those for settings that were left blank.
    pub fn read() -> Self {
        let command = Self::command().mut_args(|arg| match arg.get_env().and_then(std::env::var_os) {
            Some(value) if value.is_empty() => arg.env(None::<&str>),
            _ => arg,
        });
        Self::from_arg_matches(&command.get_matches()).unwrap_or_else(|e| e.exit())
    }

    /// Refuses a token that no caller could send.
    ///
    /// # Errors
    /// A sentence for the operator.
    pub fn check_token(&self) -> Result<(), String> {
        match &self.http_token {
            Some(token) if token.trim() != token || !token.chars().all(|c| c == ' ' || c.is_ascii_graphic()) => {
                Err("DLLM_HTTP_TOKEN is blank, or has characters that cannot be sent: use printable ASCII without blanks around".into())
            }
            _ => Ok(()),
        }
    }

    /// The defaults, with everything written below one folder: for tests and embedding.
    pub fn in_folder(state_dir: impl Into<PathBuf>) -> Self {
        Self {
            model: None,
            model_dir: None,
            roots: Vec::new(),
            state_dir: Some(state_dir.into()),
            device: None,
            lanes: 4,
            context: 0,
            threads: 0,
            idle_minutes: 15.0,
            queue: 64,
            http: None,
            http_token: None,
            log: "warn".into(),
            heartbeat: Duration::from_secs(5),
        }
    }

    /// The state folder: as set, else where the system keeps such things, else below the temporary folder.
    pub fn state_dir(&self) -> PathBuf {
        self.state_dir.clone().or_else(default_state_dir).unwrap_or_else(|| std::env::temp_dir().join("dllm"))
    }

    /// Folder of the results that have no file of their own.
    pub fn results_dir(&self) -> PathBuf {
        self.state_dir().join("results")
    }

    /// After how long without work the model is unloaded.
    pub fn idle(&self) -> Option<Duration> {
        (self.idle_minutes > 0.0).then(|| Duration::from_secs_f64(self.idle_minutes * 60.0))
    }
}

fn minutes(text: &str) -> Result<f64, String> {
    let minutes: f64 = text.parse().map_err(|e| format!("{e}"))?;
    if (0.0..=525_600.0).contains(&minutes) { Ok(minutes) } else { Err("it is not in 0..=525600".into()) }
}

fn default_state_dir() -> Option<PathBuf> {
    // Hosts pass almost no environment, so each of these may be missing.
    let folder = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if cfg!(windows) {
        folder("LOCALAPPDATA").map(|base| base.join("dllm"))
    } else if cfg!(target_os = "macos") {
        folder("HOME").map(|home| home.join("Library/Application Support/dllm"))
    } else {
        let state = folder("XDG_STATE_HOME").or_else(|| folder("HOME").map(|home| home.join(".local/state")));
        state.map(|base| base.join("dllm"))
    }
}
