//! Conversations that the server keeps: `session_id` in chat requests, and `/v1/sessions`.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::{Path, Request as HttpRequest, State};
use axum::response::Response;
use nuthatch_engine::Tenant;
use nuthatch_tokens::Message;
use nuthatch_wire::{ApiError, ChatMessage, ChatRequest, ErrorKind};
use serde_json::{Value, json as object};

use crate::app::App;
use crate::error::{Handled, internal, json};
use crate::router::{Caller, read_body};
use crate::sessions::{Session, SessionError, Sessions};

const PARAM: &str = "session_id";

/// A request in a session: what was said up to its question, and where its answer goes.
#[derive(Debug)]
pub(crate) struct Turn {
    sessions: Sessions,
    name: String,
    session: Session,
    _open: OpenTurn,
}

/// Conversations that are being answered: of two turns at once, one would be lost.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpenTurns(Arc<Mutex<BTreeSet<(Tenant, String)>>>);

/// One of them, until it is dropped.
#[derive(Debug)]
struct OpenTurn {
    of: OpenTurns,
    key: (Tenant, String),
}

impl OpenTurns {
    /// Nothing if somebody has it.
    fn take(&self, tenant: Tenant, name: &str) -> Option<OpenTurn> {
        let key = (tenant, name.to_owned());
        let is_new = self.lock().insert(key.clone());
        is_new.then(|| OpenTurn { of: self.clone(), key })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<(Tenant, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenTurn {
    fn drop(&mut self) {
        self.of.lock().remove(&self.key);
    }
}

impl Turn {
    /// Puts what was said before in front of what a request says; nothing if the request names no
    /// session, or if the server keeps none.
    ///
    /// Messages with an answer among them are the whole conversation, and take the place of what was
    /// kept; without one they are what is new. So does a system message at the beginning.
    pub(crate) fn begin(
        app: &App,
        tenant: Tenant,
        chat: &mut ChatRequest,
    ) -> Result<Option<Self>, ApiError> {
        let (Some(sessions), Some(name)) = (&app.config.sessions, chat.options.session.clone())
        else {
            return Ok(None);
        };
        let is_text = |m: &ChatMessage| {
            m.tool_calls.is_empty() && m.tool_call_id.is_none() && m.name.is_none()
        };
        if chat.options.best_of > 1 || !chat.tools.is_empty() || !chat.messages.iter().all(is_text)
        {
            let message = "a session takes one answer in words: not n, best_of, names or tools";
            return Err(ApiError::new(ErrorKind::InvalidRequest, message).about(PARAM));
        }
        let Some(open) = app.open_turns.take(tenant, &name) else {
            let message = "the session is being answered; its next turn comes after that";
            let error = ApiError::new(ErrorKind::Conflict, message).about(PARAM);
            return Err(error.with_code("session_busy"));
        };
        let sessions = sessions.of(tenant);
        let kept = sessions.load(&name).map_err(|error| api_error(&error))?;
        let mut session = kept.unwrap_or_else(|| Session::new(app.model()));
        session.model = app.model().to_owned();
        let is_system = |m: &ChatMessage| m.role == "system" || m.role == "developer";
        let mut said = std::mem::take(&mut chat.messages);
        if said.first().is_some_and(is_system) {
            session.system = Some(said.remove(0).content);
        }
        let is_whole = said.iter().any(|message| message.role == "assistant");
        let before = if is_whole { Vec::new() } else { session.messages() };
        let said = said.iter().map(|m| Message::new(m.role.as_str(), m.content.as_str()));
        session.set_messages(&before.into_iter().chain(said).collect::<Vec<_>>());
        let message = |role: &str, content: &str| ChatMessage {
            role: role.to_owned(),
            content: content.to_owned(),
            ..ChatMessage::default()
        };
        let system = session.system.iter().map(|system| message("system", system));
        let all = session.messages();
        chat.messages = system.chain(all.iter().map(|m| message(&m.role, &m.content))).collect();
        Ok(Some(Turn { sessions, name, session, _open: open }))
    }

    /// Keeps the conversation with its answer. An answer that cannot be kept is given all the same.
    pub(crate) fn end(mut self, answer: &str) {
        let mut messages = self.session.messages();
        messages.push(Message::new("assistant", answer));
        self.session.set_messages(&messages);
        if let Err(error) = self.sessions.save(&self.name, &self.session) {
            tracing::error!(%error, session = self.name, "a conversation is not kept");
        }
    }
}

/// `GET /v1/sessions`.
pub(crate) async fn list(state: State<Arc<App>>, request: HttpRequest) -> Handled<Response> {
    let data = on_files(state, Caller::of(&request), |sessions| {
        let card = |name: &String| match sessions.get(name) {
            Ok(session) => card(name, &session),
            // One that cannot be read does not hide the others.
            Err(error) => object!({ "id": name, "object": "session", "error": error.to_string() }),
        };
        Ok(sessions.names()?.iter().map(card).collect::<Vec<_>>())
    });
    Ok(json(&object!({ "object": "list", "data": data.await? })))
}

/// `GET /v1/sessions/NAME`: all of it, as `nuthatch sessions export` gives it.
pub(crate) async fn export(
    state: State<Arc<App>>,
    Path(name): Path<String>,
    request: HttpRequest,
) -> Handled<Response> {
    let caller = Caller::of(&request);
    let session = on_files(state, caller, move |sessions| sessions.get(&name)).await?;
    Ok(json(&session))
}

/// `PUT /v1/sessions/NAME`: what an export gave.
pub(crate) async fn import(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    request: HttpRequest,
) -> Handled<Response> {
    let caller = Caller::of(&request);
    let body = read_body(&app, request).await?;
    let card = on_files(State(app), caller, move |sessions| {
        let session = Session::parse(&body.bytes)?;
        sessions.add(&name, &session)?;
        Ok(card(&name, &session))
    });
    Ok(json(&card.await?))
}

/// `DELETE /v1/sessions/NAME`.
pub(crate) async fn delete(
    state: State<Arc<App>>,
    Path(name): Path<String>,
    request: HttpRequest,
) -> Handled<Response> {
    let deleted = on_files(state, Caller::of(&request), move |sessions| {
        sessions.delete(&name)?;
        Ok(object!({ "id": name, "object": "session.deleted", "deleted": true }))
    });
    Ok(json(&deleted.await?))
}

fn card(name: &str, session: &Session) -> Value {
    let Session { model, .. } = session;
    object!({ "id": name, "object": "session", "model": model, "messages": session.n_messages() })
}

/// Does something with the caller's sessions where files may take their time.
async fn on_files<T: Send + 'static>(
    State(app): State<Arc<App>>,
    caller: Caller,
    act: impl FnOnce(&Sessions) -> Result<T, SessionError> + Send + 'static,
) -> Result<T, ApiError> {
    let Some(sessions) = &app.config.sessions else {
        let message = "the server keeps no sessions; --session-dir has it do so";
        return Err(ApiError::new(ErrorKind::NotFound, message).with_code("not_found"));
    };
    let sessions = sessions.of(caller.tenant);
    let done = tokio::task::spawn_blocking(move || act(&sessions)).await;
    done.map_err(|_| internal())?.map_err(|error| api_error(&error))
}

/// An error as a client is told; where files are is not its business.
fn api_error(error: &SessionError) -> ApiError {
    let (kind, code) = match error {
        SessionError::Unknown(_) => (ErrorKind::NotFound, "session_not_found"),
        SessionError::Exists(_) => (ErrorKind::InvalidRequest, "session_exists"),
        SessionError::File { .. } | SessionError::Io(_) => {
            tracing::error!(%error, "a session cannot be read or written");
            return internal();
        }
        SessionError::Name(_)
        | SessionError::Version(_)
        | SessionError::TooLong
        | SessionError::Broken(_) => (ErrorKind::InvalidRequest, "invalid_session"),
    };
    ApiError::new(kind, error.to_string()).about(PARAM).with_code(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_has_one_turn_at_a_time() {
        let turns = OpenTurns::default();
        let birds = turns.take(Tenant(1), "birds").unwrap();
        assert!(turns.take(Tenant(1), "birds").is_none());
        let others = [turns.take(Tenant(2), "birds"), turns.take(Tenant(1), "trees")];
        assert!(others.iter().all(Option::is_some));
        drop(birds);
        assert!(turns.take(Tenant(1), "birds").is_some());
        assert_eq!(turns.lock().len(), 2);
    }
}
