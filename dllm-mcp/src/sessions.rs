//! How many sessions HTTP callers may hold: a caller that begins one after another and ends none would fill the memory.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use rmcp::transport::streamable_http_server::{SessionId, SessionManager as _};

/// The header with a session's id.
pub const SESSION: &str = "mcp-session-id";

/// How much a session is missed: first whether it was used after `initialize`, then when it was last.
type Worth = (bool, Instant);

/// The sessions of a service, at most so many.
pub struct Sessions {
    manager: Arc<LocalSessionManager>,
    limit: usize,
    known: Mutex<HashMap<SessionId, Worth>>,
}

impl Sessions {
    /// Keeps the number of a manager's sessions to a limit.
    pub fn new(manager: Arc<LocalSessionManager>, limit: usize) -> Self {
        Self { manager, limit, known: Mutex::default() }
    }

    /// A session is in use.
    pub fn used(&self, id: &str) {
        if let Some(worth) = self.known.lock().unwrap_or_else(PoisonError::into_inner).get_mut(id) {
            *worth = (true, Instant::now());
        }
    }

    /// A session began. Where there are too many, those that are missed least end: their callers are told by a 404, and
    /// begin anew as the protocol says.
    pub async fn began(&self, id: &str) {
        // Sessions also end by themselves.
        let alive: HashSet<SessionId> = self.manager.sessions.read().await.keys().cloned().collect();
        let surplus: Vec<SessionId> = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.retain(|id, _| alive.contains(id));
            known.insert(id.into(), (false, Instant::now()));
            let mut order: Vec<(Worth, SessionId)> = known.iter().map(|(id, worth)| (*worth, Arc::clone(id))).collect();
            order.sort();
            order.into_iter().take(known.len().saturating_sub(self.limit)).map(|(_, id)| id).collect()
        };
        for id in surplus {
            if let Err(error) = self.manager.close_session(&id).await {
                tracing::warn!("a session could not be ended: {error}");
            }
        }
    }
}
