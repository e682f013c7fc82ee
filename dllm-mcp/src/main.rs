//! The `dllm-mcp` program: stdio by default, Streamable HTTP with `--http`.
#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use dllm_mcp::backend::Host as _;
use dllm_mcp::host::EngineHost;
use dllm_mcp::http::Limits;
use dllm_mcp::lines::Lines;
use dllm_mcp::log::Log;
use dllm_mcp::{Config, Server, http, stdio};
use rmcp::ServiceExt;
use tokio_util::sync::CancellationToken;

/// For replies that are being written when the input ends.
const GRACE: Duration = Duration::from_millis(400);
/// For the engine to give back the device's memory. Hosts kill after 2 s.
const RELEASE: Duration = Duration::from_millis(400);

fn main() -> ExitCode {
    let config = Config::read();
    stdio::outlive_file_limits();
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("cannot start: {error}")),
    };
    let code = match runtime.block_on(run(config)) {
        Ok(()) => 0,
        Err(message) => {
            fail(&message);
            1
        }
    };
    // A pending read of standard input cannot be cancelled, so the runtime would not shut down by itself. Exit handlers of
    // C and C++ must not run: a step that did not end in time still computes.
    signal_hook::low_level::exit(code)
}

async fn run(config: Config) -> Result<(), String> {
    let folder = config.state_dir().join("log");
    let unwritable = |e| format!("cannot write the log in {}: {e}; name another --state-dir", folder.display());
    let log = Log::open(&folder).map_err(unwritable)?;
    let file = log.file().map_err(unwritable)?;
    log.init(&config.log)?;
    if config.http.is_some() {
        config.check_token()?;
    }
    let host = Arc::new(EngineHost::new(&config));
    // No reason not to start: callers may load another model, or the file may come later.
    for problem in host.problems() {
        tracing::warn!("{problem}");
        say(&format!("warning: {problem}"));
    }
    let server = Server::new(config.clone(), host).map_err(|fault| fault.to_string())?;
    let result = match config.http {
        Some(address) => serve_http(server.clone(), address, config.http_token.as_deref()).await,
        None => serve_stdio(server.clone(), &file).await,
    };
    server.stop(RELEASE).await;
    result
}

async fn serve_http(server: Server, address: SocketAddr, token: Option<&str>) -> Result<(), String> {
    let listener = http::bind(address).await?;
    http::serve(server, listener, token, Limits::default(), stdio::signal()).await;
    Ok(())
}

async fn serve_stdio(server: Server, log: &std::fs::File) -> Result<(), String> {
    let replies = stdio::claim_stdout(log).map_err(|e| format!("cannot take standard output: {e}"))?;
    let ended = CancellationToken::new();
    let input = stdio::Watched::new(tokio::io::stdin(), ended.clone());
    let output = stdio::Watched::new(tokio::fs::File::from_std(replies), ended.clone());
    let service = async {
        match server.serve(Lines::new(input, output)).await {
            Ok(running) => drop(running.waiting().await),
            Err(error) => tracing::warn!("the client left before the session began: {error}"),
        }
    };
    let host_gone = async {
        ended.cancelled().await;
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        () = service => {}
        () = host_gone => {}
        () = stdio::signal() => {}
        () = stdio::parent_gone() => {}
    }
    Ok(())
}

fn fail(message: &str) -> ExitCode {
    say(message);
    ExitCode::FAILURE
}

/// The only words to the terminal: what is wrong at the start.
fn say(message: &str) {
    use std::io::Write as _;
    // Nobody may be listening.
    let _ = writeln!(std::io::stderr(), "dllm-mcp: {message}");
}
