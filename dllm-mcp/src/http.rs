//! Streamable HTTP on a loopback address: `/mcp`, and `GET /health` for watchers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rmcp::model::JsonRpcMessage;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use url::Url;

use crate::lines;
use crate::server::Server;
use crate::sessions::{SESSION, Sessions};

/// Longest body: as the longest line of the other transport.
const MAX_BODY: usize = 16 * 1024 * 1024;
/// Names of this machine for itself, as a parsed address has them.
const LOCAL: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// What one caller may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// For the head of a request, counted from the connection or the end of the request before: also the time that a
    /// connection may be idle. And for its body.
    pub read: Duration,
    /// Connections at the same time; more wait until one ends.
    pub connections: usize,
    /// Sessions at the same time; a new one ends the one that is missed least.
    pub sessions: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { read: Duration::from_secs(30), connections: 256, sessions: 256 }
    }
}

/// Takes an address.
///
/// # Errors
/// A sentence for the operator: it is no loopback address, or is taken.
pub async fn bind(address: SocketAddr) -> Result<TcpListener, String> {
    if !address.ip().is_loopback() {
        return Err(format!("--http {address} is refused: only loopback addresses, as 127.0.0.1:{}", address.port()));
    }
    let listener = TcpListener::bind(address).await.map_err(|e| {
        format!("--http {address} cannot be used: {e}; give another port or end the program that holds it")
    })?;
    announce(&format!("listening on http://{}/mcp", listener.local_addr().unwrap_or(address)));
    Ok(listener)
}

/// Serves until `end` returns. Open event streams would hold up a graceful end for ever, so they are dropped then.
pub async fn serve(
    server: Server,
    listener: TcpListener,
    token: Option<&str>,
    limits: Limits,
    end: impl Future<Output = ()>,
) {
    let ending = CancellationToken::new();
    let app = router(server, token, limits, ending.clone());
    let places = Arc::new(Semaphore::new(limits.connections));
    let accept = async {
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let (app, ending) = (app.clone(), ending.clone());
                    tokio::spawn(async move {
                        ending.run_until_cancelled(connection(stream, app, limits)).await;
                        drop(place);
                    });
                }
                Err(error) => {
                    // One that hung up at once, or too many open files: others may end meanwhile.
                    tracing::warn!("a connection was not accepted: {error}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    };
    tokio::select! {
        () = accept => {}
        () = end => {}
    }
    ending.cancel();
}

async fn connection(stream: TcpStream, app: Router, limits: Limits) {
    // Replies are small and must not wait for more to send.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!("no-delay: {error}");
    }
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.read);
    if let Err(error) = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app)).await {
        tracing::debug!("a connection ended: {error}");
    }
}

/// For the operator, and for programs that asked for port 0.
fn announce(line: &str) {
    use std::io::Write as _;
    // Nobody may be listening.
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn router(server: Server, token: Option<&str>, limits: Limits, ending: CancellationToken) -> Router {
    let config = StreamableHttpServerConfig::default()
        .with_allowed_hosts(["localhost", "127.0.0.1", "::1"])
        .with_allowed_origins(["http://localhost:*", "http://127.0.0.1:*", "http://[::1]:*"])
        .with_cancellation_token(ending);
    let manager = Arc::<LocalSessionManager>::default();
    let sessions = Arc::new(Sessions::new(Arc::clone(&manager), limits.sessions));
    let mcp = StreamableHttpService::new(move || Ok(server.clone()), manager, config);
    let mut app = Router::new().nest_service("/mcp", mcp);
    // What is added last is asked first.
    app = app.layer(middleware::from_fn(move |request, next| whole_body(limits, Arc::clone(&sessions), request, next)));
    if let Some(token) = token {
        let expected = token.to_owned();
        app = app.layer(middleware::from_fn(move |request, next| check(expected.clone(), request, next)));
    }
    app.route("/health", get(|| async { "ok\n" })).layer(middleware::from_fn(local_only))
}

/// Refuses pages of other hosts, and names of this one that others gave it.
async fn local_only(request: Request, next: Next) -> Response {
    let refused = |what: &str| (StatusCode::FORBIDDEN, format!("this {what} is not allowed: only local ones are\n"));
    let headers = request.headers();
    if !every(headers, &header::HOST, |host| is_local(&format!("http://{host}"))) {
        return refused("Host").into_response();
    }
    if !every(headers, &header::ORIGIN, is_local) {
        return refused("Origin").into_response();
    }
    next.run(request).await
}

fn every(headers: &HeaderMap, name: &HeaderName, fits: impl Fn(&str) -> bool) -> bool {
    headers.get_all(name).iter().all(|value| value.to_str().is_ok_and(&fits))
}

/// Whether a text is the origin of a local page, and nothing else: parsed, then compared as a whole.
fn is_local(origin: &str) -> bool {
    let Ok(url) = Url::parse(origin) else { return false };
    let local = url.scheme() == "http" && url.host_str().is_some_and(|host| LOCAL.contains(&host));
    local && url.origin().ascii_serialization().eq_ignore_ascii_case(origin.strip_suffix(":80").unwrap_or(origin))
}

/// Reads the body before the request goes on, so that a slow one holds a connection for a limited time.
async fn whole_body(limits: Limits, sessions: Arc<Sessions>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    match tokio::time::timeout(limits.read, to_bytes(body, MAX_BODY)).await {
        Ok(Ok(bytes)) => {
            let request = match read(&parts, &bytes) {
                Ok(request) => request,
                Err(answer) => return *answer,
            };
            let session = session_of(&parts.headers);
            if let (Some(id), true) = (&session, request) {
                sessions.used(id);
            }
            let response = next.run(Request::from_parts(parts, Body::from(bytes))).await;
            if let (None, Some(id)) = (&session, session_of(response.headers())) {
                sessions.began(&id).await;
            }
            response
        }
        Ok(Err(_)) => {
            (StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {MAX_BODY} bytes, or was broken off\n"))
                .into_response()
        }
        Err(_) => {
            (StatusCode::REQUEST_TIMEOUT, [(header::CONNECTION, "close")], "the body came too slowly\n").into_response()
        }
    }
}

fn session_of(headers: &HeaderMap) -> Option<String> {
    headers.get(SESSION).and_then(|id| id.to_str().ok()).map(str::to_owned)
}

/// Reads the message of a body, to answer by the protocol what is none. Tells whether it wants an answer; opening the
/// stream of a session counts as that, too.
fn read(head: &Parts, body: &[u8]) -> Result<bool, Box<Response>> {
    let kind = head.headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
    // What is not said to be JSON is refused for that.
    if head.method != Method::POST || !kind.trim_start().to_ascii_lowercase().starts_with("application/json") {
        return Ok(head.method == Method::GET);
    }
    let refused = |response: Response| Err(Box::new(response));
    match lines::message(body) {
        Ok(message) => Ok(matches!(message, JsonRpcMessage::Request(_))),
        Err(Some(answer)) => refused((StatusCode::BAD_REQUEST, Json(answer)).into_response()),
        Err(None) if body.trim_ascii().is_empty() => {
            refused((StatusCode::BAD_REQUEST, "the body is empty: it wants a JSON-RPC message\n").into_response())
        }
        // A notification that cannot be read: nobody waits for an answer.
        Err(None) => refused(StatusCode::ACCEPTED.into_response()),
    }
}

async fn check(expected: String, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let token = given.and_then(|given| given.split_at_checked("Bearer ".len()));
    // The scheme's case does not matter, the token's does.
    if token.is_some_and(|(scheme, token)| scheme.eq_ignore_ascii_case(b"Bearer ") && same(token, expected.as_bytes()))
    {
        return next.run(request).await;
    }
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], "a bearer token is needed\n").into_response()
}

/// Compares without telling by its time where the first difference is.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |diff, (x, y)| diff | (x ^ y)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_origins_of_this_machine_are_local() {
        for good in [
            "http://localhost",
            "http://localhost:3000",
            "HTTP://LOCALHOST:80",
            "http://127.0.0.1:65535",
            "http://[::1]:9",
            "http://[::1]",
        ] {
            assert!(is_local(good), "{good}");
        }
        for bad in [
            "",
            "null",
            "localhost",
            "http://",
            "http://evil.com",
            "http://localhost.evil.com",
            "http://localhost:3000.evil.com",
            "http://localhost:3000@evil.com",
            "http://evil.com@localhost:3000",
            "http://@localhost",
            "http://localhost:3000/",
            "http://localhost/evil.com",
            "http://localhost\\.evil.com",
            "http://localhost#.evil.com",
            "http://localhost?.evil.com",
            "http://localhost:99999",
            "http://localhost:",
            "http://localhost.",
            "http://localhost, http://evil.com",
            "http://localhost http://evil.com",
            "http://127.0.0.1.evil.com",
            "http://127.1",
            "http://0.0.0.0",
            "http://[::ffff:127.0.0.1]",
            "https://localhost",
            "file://localhost",
            "http://loc\talhost",
        ] {
            assert!(!is_local(bad), "{bad}");
        }
    }
}
