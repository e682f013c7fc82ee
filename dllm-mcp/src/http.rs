//! Streamable HTTP on a loopback address: `/mcp`, and `GET /health` for watchers.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use tokio_util::sync::CancellationToken;

use crate::server::Server;

/// Serves until `end` returns.
///
/// # Errors
/// A sentence for the operator: the address is no loopback address, or is taken.
pub async fn serve(
    server: Server,
    address: SocketAddr,
    token: Option<&str>,
    end: impl Future<Output = ()> + Send + 'static,
) -> Result<(), String> {
    if !address.ip().is_loopback() {
        return Err(format!("--http {address} is refused: only loopback addresses, as 127.0.0.1:{}", address.port()));
    }
    let listener = tokio::net::TcpListener::bind(address).await.map_err(|e| {
        format!("--http {address} cannot be used: {e}; give another port or end the program that holds it")
    })?;
    let bound = listener.local_addr().unwrap_or(address);
    announce(&format!("listening on http://{bound}/mcp"));
    let ending = CancellationToken::new();
    let app = router(server, token, ending.clone());
    let end = async move {
        end.await;
        ending.cancel();
    };
    // Open event streams would hold up a graceful end for ever: those are dropped after the token tripped.
    tokio::select! {
        result = axum::serve(listener, app).into_future() => result.map_err(|e| format!("http: {e}")),
        () = end => Ok(()),
    }
}

/// For the operator, and for programs that asked for port 0.
fn announce(line: &str) {
    use std::io::Write as _;
    // Nobody may be listening.
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn router(server: Server, token: Option<&str>, ending: CancellationToken) -> Router {
    let config = StreamableHttpServerConfig::default()
        .with_allowed_hosts(["localhost", "127.0.0.1", "::1"])
        .with_allowed_origins(["http://localhost:*", "http://127.0.0.1:*", "http://[::1]:*"])
        .with_cancellation_token(ending);
    let mcp = StreamableHttpService::new(move || Ok(server.clone()), Arc::new(LocalSessionManager::default()), config);
    let mut app = Router::new().nest_service("/mcp", mcp);
    if let Some(token) = token {
        let expected = format!("Bearer {token}");
        app = app.layer(middleware::from_fn(move |request, next| check(expected.clone(), request, next)));
    }
    app.route("/health", get(|| async { "ok\n" }))
}

async fn check(expected: String, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
    if given.is_some_and(|given| same(given, expected.as_bytes())) {
        return next.run(request).await;
    }
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], "a bearer token is needed\n").into_response()
}

/// Compares without telling by its time where the first difference is.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |diff, (x, y)| diff | (x ^ y)) == 0
}
