//! Flags of `nuthatch profile`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::EngineArgs;
use crate::size::parse_tokens;

const PROFILE_EXAMPLES: &str = "\
The profile says how important each query head is (how far the model's output moves when the head
sees only the first and the last tokens of a question about a needle), how similar the queries of
adjacent tokens are, and averages of the keys. `--sparse` finds it by the model.

Examples:
  nuthatch profile
  nuthatch profile model.gguf --text book.txt --plot heads.svg
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
