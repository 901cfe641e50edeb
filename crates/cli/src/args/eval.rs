//! Flags of `nuthatch eval`.

use std::ops::Range;
use std::path::PathBuf;

use clap::Args as ClapArgs;
use nuthatch_engine::topk::Policy;

use super::{ColdDtypeArg, EngineArgs, KvDtypeArg};
use crate::eval::TaskName;
use crate::size::parse_tokens;

const EVAL_EXAMPLES: &str = "\
Each prompt is computed once, exactly, and then continued by every policy. Tasks are made like
RULER's: TASKS. `ppl` continues a text and measures perplexity and the distance from exact
attention.

Examples:
  nuthatch eval --task niah_single_1,vt --length 2K,4K --samples 24 \\
      --policy full --policy hata:256,k=10% --policy quest --json results.json
  nuthatch eval --task ppl --text book.txt --length 8K --mass
  nuthatch eval --task ppl --policy full --cache int8,fp8 --cold int8,fp8,int4";

#[derive(Debug, ClapArgs)]
#[command(after_help = EVAL_EXAMPLES.replace("TASKS", &TaskName::list()))]
pub(crate) struct EvalArgs {
    /// File, directory, hub id or short name
    #[arg(value_name = "MODEL")]
    pub(crate) first: Option<String>,
    /// The model, said explicitly
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// What is asked; `all` for everything [default: niah_single_1, or nothing besides --longbench]
    #[arg(long, value_name = "TASK,...", value_delimiter = ',')]
    pub(crate) task: Vec<String>,
    /// Also ask LongBench's questions: a folder with its .jsonl files, and, in it, in its `config` or
    /// in the `config` beside it, dataset2prompt.json and dataset2maxlen.json
    #[arg(long, value_name = "FOLDER")]
    pub(crate) longbench: Option<PathBuf>,
    /// Tokens of prompt and answer together
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "2K")]
    #[arg(value_parser = parse_tokens)]
    pub(crate) length: Vec<u32>,
    /// Prompts of each task, or a range of them such as 8..24; one for all lengths, or one for each
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "8")]
    #[arg(value_parser = parse_range)]
    pub(crate) samples: Vec<Range<u32>>,
    /// How tokens are chosen, as --sparse has it; may be given more than once
    #[arg(long, value_name = "POLICY", default_values = ["full", "hata:256"])]
    pub(crate) policy: Vec<Policy>,
    /// Also continue exactly after a prompt whose KV pages were stored as --kv-cold-dtype has it
    #[arg(long, value_name = "TYPE,...", value_delimiter = ',', value_enum)]
    pub(crate) cold: Vec<ColdDtypeArg>,
    /// Also compute and continue exactly with the KV cache as --kv-cache-dtype has it
    #[arg(long, value_name = "TYPE,...", value_delimiter = ',', value_enum)]
    pub(crate) cache: Vec<KvDtypeArg>,
    /// Prose that needles are hidden in [default: a short text that comes with the program]
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Prompts are the same for the same seed
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub(crate) seed: u64,
    /// Also measure which share of attention falls on the chosen tokens; slow
    #[arg(long)]
    pub(crate) mass: bool,
    /// Keep results here, and go on with what is there
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Also take the records of these results of the same model; may be given more than once
    #[arg(long, value_name = "FILE")]
    pub(crate) add: Vec<PathBuf>,
    /// Ask only every N-th prompt, beginning with the I-th (from 0), so that processes share them
    #[arg(long, value_name = "I/N", default_value = "0/1", value_parser = parse_shard)]
    pub(crate) shard: (u32, u32),
    /// Write every decision of every step, layer and head, as JSON lines; large
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) record_trace: Option<PathBuf>,
    /// Draw accuracy against length
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// Draw how much of a selection stays while the query turns, of policies with reuse=qsac
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) overlap_plot: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

fn parse_range(text: &str) -> Result<Range<u32>, String> {
    let (first, end) = text.split_once("..").unwrap_or(("0", text));
    match (first.parse::<u32>(), end.parse::<u32>()) {
        (Ok(first), Ok(end)) if first <= end => Ok(first..end),
        _ => Err(format!("{text:?} is neither a number nor a range such as 8..24")),
    }
}

fn parse_shard(text: &str) -> Result<(u32, u32), String> {
    let parts = text.split_once('/').map(|(i, n)| (i.parse::<u32>(), n.parse::<u32>()));
    match parts {
        Some((Ok(i), Ok(n))) if i < n => Ok((i, n)),
        _ => Err(format!("{text:?} is not I/N with I below N, as in 0/4")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_a_number_or_a_range() {
        assert_eq!((parse_range("24"), parse_range("8..24")), (Ok(0..24), Ok(8..24)));
        for bad in ["", "9..8", "..", "1..", "-1", "8-24"] {
            assert!(parse_range(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_shard_is_one_of_many() {
        assert_eq!(parse_shard("2/7"), Ok((2, 7)));
        for bad in ["", "1", "7/7", "0/0", "-1/2", "a/b", "1/2/3"] {
            assert!(parse_shard(bad).is_err(), "{bad}");
        }
    }
}
