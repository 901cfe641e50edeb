//! Prompts as a model reads them: as long as they may be, in the turns of its conversations.

use std::path::Path;

use anyhow::{Context as _, ensure};
use nuthatch_model::ModelFiles;
use nuthatch_tokens::{Conversation, DecodeOptions, EncodeOptions, Message, Words};
use nuthatch_types::TokenId;

use super::longbench::Dataset;
use super::tasks::{Sample, TaskName};
use super::words;
use crate::text;

/// A model's words, and the prose that haystacks are made of.
pub(crate) struct Prompts {
    pub(super) text: Words,
    prose: String,
}

impl Prompts {
    /// Reads the model's words, and the prose from a file if there is one.
    pub(crate) fn load(files: &ModelFiles, path: Option<&Path>) -> anyhow::Result<Self> {
        let prose = match path {
            Some(path) => std::fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?,
            None => words::PROSE.to_owned(),
        };
        ensure!(!prose.trim().is_empty(), "the text is empty");
        Ok(Prompts { text: text::load(files, false)?.words, prose })
    }

    /// All of the prose.
    pub(crate) fn prose_tokens(&self) -> anyhow::Result<Vec<TokenId>> {
        Ok(self.text.raw(&self.prose)?)
    }

    /// A question of a task, up to where its answer begins.
    pub(crate) fn question(
        &self,
        task: TaskName,
        length: u32,
        seed: u64,
    ) -> anyhow::Result<Vec<TokenId>> {
        let made = self.fit(task, length, seed)?;
        let (_, prompt) =
            made.with_context(|| format!("{} does not fit into {length} tokens", task.name()))?;
        Ok(prompt)
    }

    /// The longest prompt of the task that leaves room for the answer, if there is one.
    pub(super) fn fit(
        &self,
        task: TaskName,
        length: u32,
        seed: u64,
    ) -> anyhow::Result<Option<(Sample, Vec<TokenId>)>> {
        let build = |size: usize| {
            let sample = task.sample((size, length), seed, &self.prose);
            self.prompt(&sample).map(|tokens| (sample, tokens))
        };
        let fits = |(sample, tokens): &(Sample, Vec<TokenId>)| {
            tokens.len() + sample.n_answer as usize <= length as usize
        };
        let mut best = build(1)?;
        if !fits(&best) {
            return Ok(None);
        }
        let (mut low, mut high) = (1, 2);
        loop {
            let next = build(high)?;
            if !fits(&next) || high > length as usize {
                break;
            }
            (best, low, high) = (next, high, 2 * high);
        }
        // Prompts grow with their size, but not evenly; a few tokens more or less do not matter.
        while high - low > 1 + low / 64 {
            let middle = low.midpoint(high);
            let next = build(middle)?;
            if fits(&next) {
                (best, low) = (next, middle);
            } else {
                high = middle;
            }
        }
        Ok(Some(best))
    }

    /// A question of LongBench; what is too long loses its middle, as LongBench has it.
    pub(super) fn cut(
        &self,
        dataset: &Dataset,
        length: u32,
        sample: u32,
    ) -> anyhow::Result<Option<Vec<TokenId>>> {
        let Some(prompt) = dataset.prompt(sample) else { return Ok(None) };
        let tokenizer = &self.text.tokenizer;
        let whole = tokenizer.encode(&prompt, EncodeOptions::default())?;
        let room = length.saturating_sub(dataset.n_answer) as usize;
        let mut n = room.min(whole.len());
        // A chat's turns take a few tokens, and the cut may add one.
        while n > 0 {
            let (first, last) = (&whole[..n.div_ceil(2)], &whole[whole.len() - n / 2..]);
            let kept = match n == whole.len() {
                true => prompt.clone(),
                false => {
                    [first, last].map(|t| tokenizer.decode(t, DecodeOptions::default())).concat()
                }
            };
            let tokens = match self.text.template.is_some() && dataset.is_chat {
                true => self
                    .text
                    .conversation(&Conversation::Plain(vec![Message::new("user", kept)]))?,
                false => self.text.raw(&kept)?,
            };
            if tokens.len() <= room {
                return Ok(Some(tokens));
            }
            n = n.saturating_sub(tokens.len() - room);
        }
        Ok(None)
    }

    /// The sample as a conversation, with the answer begun.
    fn prompt(&self, sample: &Sample) -> anyhow::Result<Vec<TokenId>> {
        if self.text.template.is_none() {
            return Ok(self.text.raw(&format!("{}{}", sample.prompt, sample.answer))?);
        }
        let messages = vec![Message::new("user", sample.prompt.as_str())];
        let mut tokens = self.text.conversation(&Conversation::Plain(messages))?;
        let begun = sample.answer.trim_start();
        tokens.extend(self.text.tokenizer.encode(begun, EncodeOptions::default())?);
        Ok(tokens)
    }
}
