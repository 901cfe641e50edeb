//! A request of any bytes is within the caps, or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nuthatch_types::Sampling;
use nuthatch_wire::{
    BatchAnswered, BatchLine, ChatRequest, CompletionRequest, DetokenizeRequest, Options,
    ResponsesRequest, TokenizeRequest, caps,
};

fn check(options: &Options) {
    assert!(options.sampling.apply(Sampling::default()).validate().is_ok());
    assert!((1..=caps::N).contains(&options.n));
    assert!(options.stop.len() <= caps::STOPS);
}

fuzz_target!(|bytes: &[u8]| {
    if let Ok(chat) = ChatRequest::parse(bytes) {
        assert!((1..=caps::MESSAGES).contains(&chat.messages.len()));
        check(&chat.options);
    }
    if let Ok(completion) = CompletionRequest::parse(bytes) {
        assert!((1..=caps::PROMPTS).contains(&completion.prompts.len()));
        check(&completion.options);
    }
    if let Ok(line) = BatchLine::parse(bytes) {
        let _ = line.custom_id();
        let _ = line.request();
    }
    let _ = BatchAnswered::parse(bytes);
    if let Ok(request) = ResponsesRequest::parse(bytes) {
        check(&request.chat.options);
    }
    let _ = TokenizeRequest::parse(bytes);
    let _ = DetokenizeRequest::parse(bytes);
});
