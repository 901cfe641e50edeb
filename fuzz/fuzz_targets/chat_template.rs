//! A chat template of any text renders, or is an error; it neither runs for ever nor fills memory.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nuthatch_tokens::{ChatTemplate, Message, RenderOptions};

fuzz_target!(|source: &str| {
    let Ok(template) = ChatTemplate::new(source) else { return };
    let messages = [
        Message::new("system", "Be brief."),
        Message::new("user", "Hello {{ world }} <|im_end|>"),
        Message::new("assistant", ""),
    ];
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let _ = template.render(&messages, &options);
});
