//! A chat template of any text renders, or is an error, and does not run for ever. A string that
//! doubles itself can still fill memory: the template engine has no hook to stop it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nuthatch_tokens::{ChatTemplate, Message, RenderOptions};

// The library's panics are caught and become errors, so they must not end the process.
fuzz_target!(init: std::panic::set_hook(Box::new(|_| {})), |source: &str| {
    let Ok(template) = ChatTemplate::new(source) else { return };
    let messages = [
        Message::new("system", "Be brief."),
        Message::new("user", "Hello {{ world }} <|im_end|>"),
        Message::new("assistant", ""),
    ];
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let _ = template.render(&messages, &options);
});
