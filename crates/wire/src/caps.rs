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
/// Tools that a model may call.
pub const TOOLS: usize = 128;
/// Bytes of all tools of a request, of one grammar or schema, and of the variables of a template.
pub const SCHEMA_BYTES: usize = 256 << 10;
/// Tool calls of one message.
pub const TOOL_CALLS: usize = 128;
/// Texts of which an answer may have to be one.
pub const ALTERNATIVES: usize = 1024;
/// Longest time that pages may be asked to stay, in seconds: a year.
pub const RETENTION_SECONDS: f64 = 31_536_000.0;
/// Texts that one request may have embedded.
pub const INPUTS: usize = 2048;
/// Bytes of a name: of a model, a user, a salt, a custom id.
pub const NAME_BYTES: usize = 512;
