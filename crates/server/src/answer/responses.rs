//! A chat in the words of OpenAI's newer API: a response has items, and a stream says what happens to
//! each.

use nuthatch_wire::{ApiError, Finish, ToolCall};
use serde_json::{Value, json};

use super::body::{Event, Heading};
use super::job::{Job, Piece, Shown};

impl Job {
    /// The body of a response that is whole.
    pub(super) fn responses_body(&self, heading: &Heading) -> Value {
        let shown = self.shown();
        let finish = shown.first().map_or(Finish::Abort, |shown| shown.finish);
        let status = match finish {
            Finish::Stop | Finish::ToolCalls => "completed",
            Finish::Length => "incomplete",
            Finish::Abort => "cancelled",
            Finish::Error => "failed",
        };
        let mut body = frame(heading, status);
        body["output"] = shown.iter().flat_map(|shown| items(heading, shown)).collect();
        if finish == Finish::Length {
            body["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        let usage = self.usage();
        let cached = usage.prompt_tokens_details.cached_tokens;
        body["usage"] = json!({
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": { "cached_tokens": cached },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": { "reasoning_tokens": 0 },
            "total_tokens": usage.total_tokens,
        });
        body
    }

    pub(super) fn responses_opening(&mut self, heading: &Heading) -> Vec<Event> {
        let response = frame(heading, "in_progress");
        let item = message(heading, "in_progress", None);
        let part = json!({ "type": "output_text", "text": "", "annotations": [] });
        vec![
            self.event("response.created", json!({ "response": response })),
            self.event("response.in_progress", json!({ "response": response })),
            self.event("response.output_item.added", json!({ "output_index": 0, "item": item })),
            self.event("response.content_part.added", placed(heading, json!({ "part": part }))),
        ]
    }

    pub(super) fn responses_piece(&mut self, heading: &Heading, piece: &Piece) -> Vec<Event> {
        if piece.text.is_empty() {
            return Vec::new();
        }
        let data = placed(heading, json!({ "delta": piece.text, "logprobs": [] }));
        vec![self.event("response.output_text.delta", data)]
    }

    pub(super) fn responses_closing(&mut self, heading: &Heading) -> Vec<Event> {
        let shown = self.shown();
        let text = shown.first().map_or_else(String::new, |shown| shown.text.to_owned());
        let calls: Vec<ToolCall> = shown.first().map_or_else(Vec::new, |s| s.calls.to_vec());
        let part = json!({ "type": "output_text", "text": text, "annotations": [] });
        let item = message(heading, "completed", Some(&text));
        let done = placed(heading, json!({ "text": text, "logprobs": [] }));
        let mut events = vec![
            self.event("response.output_text.done", done),
            self.event("response.content_part.done", placed(heading, json!({ "part": part }))),
            self.event(
                "response.output_item.done",
                json!({ "output_index": 0, "item": item.clone() }),
            ),
        ];
        for (index, call) in (1..).zip(&calls) {
            let (item, item_id) = (function_call(call), &call.id);
            let added = json!({ "output_index": index, "item": item });
            events.push(self.event("response.output_item.added", added.clone()));
            let arguments = json!({ "item_id": item_id, "output_index": index,
                                    "name": call.name, "arguments": call.arguments });
            events.push(self.event("response.function_call_arguments.done", arguments));
            events.push(self.event("response.output_item.done", added));
        }
        let mut body = self.responses_body(heading);
        // The stream has begun with a message, so there is one at its place.
        if let Some(items) = body["output"].as_array_mut()
            && text.is_empty()
            && !calls.is_empty()
        {
            items.insert(0, item);
        }
        let is_incomplete = body["status"] == "incomplete";
        let name = if is_incomplete { "response.incomplete" } else { "response.completed" };
        events.push(self.event(name, json!({ "response": body })));
        events
    }

    pub(super) fn responses_error(&mut self, error: &ApiError) -> Event {
        let data = json!({ "code": error.code, "message": error.message, "param": error.param });
        self.event("error", data)
    }

    /// An event with its type and number.
    fn event(&mut self, name: &'static str, mut data: Value) -> Event {
        data["type"] = json!(name);
        data["sequence_number"] = json!(self.n_events);
        self.n_events += 1;
        Event { name: Some(name), data: data.to_string() }
    }
}

/// A response without its items.
fn frame(heading: &Heading, status: &str) -> Value {
    json!({
        "id": heading.id, "object": "response", "created_at": heading.created, "status": status,
        "background": false, "error": null, "incomplete_details": null, "instructions": null,
        "metadata": {}, "model": heading.model, "output": [], "parallel_tool_calls": true,
        "previous_response_id": null, "store": false, "text": { "format": { "type": "text" } },
        "tool_choice": "auto", "tools": [], "usage": null,
    })
}

/// The items of an answer: what the model says, and what it calls.
fn items(heading: &Heading, shown: &Shown<'_>) -> Vec<Value> {
    let says = !shown.text.is_empty() || shown.calls.is_empty();
    let said = says.then(|| message(heading, "completed", Some(shown.text)));
    said.into_iter().chain(shown.calls.iter().map(function_call)).collect()
}

fn message(heading: &Heading, status: &str, text: Option<&str>) -> Value {
    let part = |text: &str| json!({ "type": "output_text", "text": text, "annotations": [] });
    json!({
        "id": item_id(heading), "type": "message", "role": "assistant", "status": status,
        "content": text.map(part).into_iter().collect::<Vec<Value>>(),
    })
}

fn function_call(call: &ToolCall) -> Value {
    json!({
        "id": call.id, "call_id": call.id, "type": "function_call", "status": "completed",
        "name": call.name, "arguments": call.arguments,
    })
}

/// Data about the text of the one message.
fn placed(heading: &Heading, mut data: Value) -> Value {
    data["item_id"] = json!(item_id(heading));
    data["output_index"] = json!(0);
    data["content_index"] = json!(0);
    data
}

fn item_id(heading: &Heading) -> String {
    format!("msg_{}", heading.id.trim_start_matches("resp_"))
}
