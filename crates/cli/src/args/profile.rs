//! Flags of `nuthatch profile`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::EngineArgs;
use crate::size::parse_tokens;

const PROFILE_EXAMPLES: &str = "\
The profile says how important each query head is (how far the model's output moves when the head
sees only the first and the last tokens of a question about a needle), how similar the queries of
adjacent tokens are, averages and principal directions of the keys, and with `--hash-bits` what hash
codes (`hata`) project them on, learnt from the model's own queries. `--sparse` finds it by the model.

Examples:
  nuthatch profile
  nuthatch profile model.gguf --text book.txt --plot heads.svg
  nuthatch profile --hash-bits 256 --hash-length 8K
  nuthatch profile ./Llama-3-8B --import full_attention_heads.tsv";

#[derive(Debug, ClapArgs)]
#[command(after_help = PROFILE_EXAMPLES)]
pub(crate) struct ProfileArgs {
    /// File, directory, hub id or short name
    #[arg(value_name = "MODEL")]
    pub(crate) first: Option<String>,
    /// The model, said explicitly
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// Text for averages and haystacks [default: a short one that comes with the program]
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Questions that importance is measured on
    #[arg(long, value_name = "N", default_value_t = 24)]
    pub(crate) samples: u32,
    /// Tokens of each question
    #[arg(long, value_name = "N", default_value = "1536", value_parser = parse_tokens)]
    pub(crate) length: u32,
    /// Also learn hash codes of so many bits, for `hata:N`; 0 learns none, and they are random
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = parse_bits)]
    pub(crate) hash_bits: u32,
    /// Tokens of the texts that hash codes are learnt from; in longer ones they find less than random ones
    #[arg(long, value_name = "N", default_value = "8192", value_parser = parse_tokens)]
    pub(crate) hash_length: u32,
    /// Take the importance of heads from a table of DuoAttention instead
    #[arg(long, value_name = "FILE.tsv")]
    pub(crate) import: Option<PathBuf>,
    /// Where to write it [default: where --sparse finds it]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Draw importance and similarity of all heads
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

fn parse_bits(text: &str) -> Result<u32, String> {
    let bits = text.parse().ok().filter(|&bits: &u32| bits.is_multiple_of(64) && bits <= 1024);
    bits.ok_or_else(|| "a multiple of 64, up to 1024, such as 128 or 256".to_owned())
}
