//! A model's words: its tokenizer, its chat template, and the tokens that end an answer.
//!
//! The files know where these are, the `tokens` crate knows what they mean; this is the way between.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, anyhow};
use nuthatch_model::{Gguf, ModelFiles, TokenizerFiles};
use nuthatch_tokens::{
    ChatTemplate, DecodeOptions, EncodeOptions, Message, RenderOptions, TokenKind, Tokenizer,
    TokenizerConfig, Vocab,
};
use nuthatch_types::TokenId;

/// Largest description of a tokenizer that is read.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// A model's words.
#[derive(Debug)]
pub(crate) struct Text {
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Tokens that end an answer.
    pub(crate) ends: Vec<TokenId>,
    template: Option<ChatTemplate>,
}

impl Text {
    /// Reads them from the model's files. The template is left out if `is_raw`.
    pub(crate) fn load(files: &ModelFiles, is_raw: bool) -> anyhow::Result<Self> {
        let (tokenizer, source) = match files.tokenizer() {
            TokenizerFiles::Gguf(gguf) => from_gguf(gguf),
            TokenizerFiles::Directory { tokenizer, tokenizer_config, chat_template, .. } => {
                let tokenizer = tokenizer.ok_or_else(|| {
                    anyhow!(
                        "there is no tokenizer.json beside the weights (a tokenizer.model alone \
                             must be converted first, for example by transformers' save_pretrained)"
                    )
                })?;
                from_directory(&tokenizer, tokenizer_config.as_deref(), chat_template.as_deref())
            }
        }
        .with_context(|| format!("cannot read the tokenizer of {}", files.path().display()))?;
        let template = match source.filter(|_| !is_raw) {
            None => None,
            Some(source) => Some(
                ChatTemplate::new(&source)
                    .context("the model's chat template is not usable; --raw goes without it")?,
            ),
        };
        let mut ends: Vec<TokenId> =
            files.config().eos.iter().copied().chain(tokenizer.end_tokens()).collect();
        ends.sort_unstable();
        ends.dedup();
        Ok(Text { tokenizer: Arc::new(tokenizer), ends, template })
    }

    /// Whether the model can chat.
    pub(crate) fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// The tokens of a conversation, up to where the answer begins; `None` without a template.
    pub(crate) fn conversation(
        &self,
        messages: &[Message],
    ) -> Option<anyhow::Result<Vec<TokenId>>> {
        let template = self.template.as_ref()?;
        let spelling = |id: Option<TokenId>| {
            let bytes = id.and_then(|id| self.tokenizer.token_bytes(id)).unwrap_or_default();
            String::from_utf8_lossy(bytes).into_owned()
        };
        let options = RenderOptions {
            add_generation_prompt: true,
            bos_token: spelling(self.tokenizer.bos()),
            eos_token: spelling(self.tokenizer.eos()),
            // Without a clock the same words give the same tokens on any day.
            ..RenderOptions::default()
        };
        Some(self.render(template, messages, &options))
    }

    fn render(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        options: &RenderOptions,
    ) -> anyhow::Result<Vec<TokenId>> {
        let text = template.render(messages, options)?;
        let encode = EncodeOptions { special: true, ..EncodeOptions::default() };
        Ok(self.tokenizer.encode(&text, encode)?)
    }

    /// The tokens of a text that the model is to continue as it is. Spellings of special tokens
    /// count as these tokens, so that a conversation can be written by hand.
    pub(crate) fn raw(&self, text: &str) -> anyhow::Result<Vec<TokenId>> {
        let add_bos = self.tokenizer.adds_bos();
        let options = EncodeOptions { special: true, add_bos, ..EncodeOptions::default() };
        Ok(self.tokenizer.encode(text, options)?)
    }

    /// The tokens of a text that stands inside another: nothing before or after it is added.
    pub(crate) fn inner(&self, text: &str) -> anyhow::Result<Vec<TokenId>> {
        Ok(self.tokenizer.encode(text, EncodeOptions::default())?)
    }

    /// The text of some tokens, special ones left out.
    pub(crate) fn spell(&self, tokens: &[TokenId]) -> String {
        self.tokenizer.decode(tokens, DecodeOptions::default())
    }

    /// One token for people; bytes that are no text become U+FFFD.
    pub(crate) fn piece(&self, id: TokenId) -> String {
        String::from_utf8_lossy(self.tokenizer.token_bytes(id).unwrap_or_default()).into_owned()
    }
}

type TokenizerAndTemplate = (Tokenizer, Option<String>);

fn from_gguf(gguf: &Gguf) -> anyhow::Result<TokenizerAndTemplate> {
    let text = |key| Ok::<_, anyhow::Error>(gguf.text(key)?.unwrap_or_default().to_owned());
    let token = |key| Ok::<_, anyhow::Error>(gguf.u32(key)?.map(TokenId));
    let kinds = gguf.i32s("tokenizer.ggml.token_type")?.unwrap_or_default();
    let vocab = Vocab {
        model: text("tokenizer.ggml.model")?,
        pre: text("tokenizer.ggml.pre")?,
        tokens: gguf.texts("tokenizer.ggml.tokens")?.unwrap_or_default().to_vec(),
        scores: gguf.f32s("tokenizer.ggml.scores")?,
        kinds: kinds.into_iter().map(TokenKind::from_gguf).collect(),
        merges: gguf.texts("tokenizer.ggml.merges")?.unwrap_or_default().to_vec(),
        bos: token("tokenizer.ggml.bos_token_id")?,
        eos: token("tokenizer.ggml.eos_token_id")?,
        unk: token("tokenizer.ggml.unknown_token_id")?,
        add_bos: gguf.bool("tokenizer.ggml.add_bos_token")?,
        add_eos: gguf.bool("tokenizer.ggml.add_eos_token")?,
        add_space_prefix: gguf.bool("tokenizer.ggml.add_space_prefix")?,
    };
    let template = gguf.text("tokenizer.chat_template")?.map(str::to_owned);
    Ok((Tokenizer::from_vocab(&vocab)?, template))
}

fn from_directory(
    tokenizer: &Path,
    config: Option<&Path>,
    template: Option<&Path>,
) -> anyhow::Result<TokenizerAndTemplate> {
    let tokenizer = Tokenizer::from_json(read(tokenizer)?)?;
    let config = match config {
        None => TokenizerConfig::default(),
        Some(path) => TokenizerConfig::from_json(read(path)?)?,
    };
    let template = match template {
        Some(path) => {
            Some(String::from_utf8(read(path)?).context("the chat template is not UTF-8")?)
        }
        None => {
            let first = || config.chat_templates.first().map(|(_, source)| source.as_str());
            config.chat_template("default").or_else(first).map(str::to_owned)
        }
    };
    Ok((tokenizer.with_config(&config)?, template))
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let show = || path.display().to_string();
    let bytes = std::fs::metadata(path).with_context(show)?.len();
    anyhow::ensure!(bytes <= FILE_BYTES_MAX, "{} has {bytes} bytes, too many", show());
    std::fs::read(path).with_context(show)
}
