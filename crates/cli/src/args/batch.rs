//! What was typed after `nuthatch batch`.

use std::path::PathBuf;

use clap::Args as ClapArgs;

use super::EngineArgs;

const EXAMPLES: &str = "\
FILE holds one request a line, in the format of OpenAI's batch API:
  {\"custom_id\": \"a\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\",
   \"body\": {\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"max_tokens\": 100}}
Answers are appended to FILE.out.jsonl as they come, in any order. What is already answered there is
not computed again, so that the same command goes on after an interruption.

Examples:
  nuthatch batch requests.jsonl
  nuthatch batch requests.jsonl -m model.gguf -o answers.jsonl --max-num-seqs 32 -c 4K";

#[derive(Debug, ClapArgs)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BatchArgs {
    /// Requests, one JSON object a line
    #[arg(value_name = "FILE")]
    pub(crate) input: PathBuf,
    /// File, directory, hub id or short name of the model
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
    /// Where answers go [default: FILE with .out.jsonl]
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Print the summary as JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}
