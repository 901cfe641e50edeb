//! How much a client may send. Beyond these a request is refused before anything is computed.

/// Bytes of a body, and of a line of a batch file.
pub const BODY_BYTES: usize = 32 << 20;
/// Messages of a conversation.
pub const MESSAGES: usize = 16_384;
/// Parts of one message.
pub const PARTS: usize = 1024;
/// Bytes of a role, such as `assistant`.
pub const ROLE_BYTES: usize = 64;
/// Prompts of one completion request.
pub const PROMPTS: usize = 256;
/// Tokens of a prompt that is given as tokens.
pub const PROMPT_TOKENS: usize = 4 << 20;
/// Answers to one prompt.
pub const N: u32 = 128;
/// Answers of one request, over all its prompts.
pub const CHOICES: usize = 1024;
/// Stop strings.
pub const STOPS: usize = 16;
/// Bytes of one stop string.
pub const STOP_BYTES: usize = 1024;
/// Stop tokens.
pub const STOP_TOKENS: usize = 256;
/// Tokens with a bias.
pub const LOGIT_BIASES: usize = 1024;
/// Alternatives that are reported with each token.
pub const TOP_LOGPROBS: u32 = 20;
/// Bytes of a name: of a model, a user, a salt, a custom id.
pub const NAME_BYTES: usize = 512;
