//! What was typed after `nuthatch bench serve`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args as ClapArgs, ValueEnum};

const EXAMPLES: &str = "\
Figures are defined as `vllm bench serve` does: TTFT until the first chunk with a token, ITL between two of
them, TPOT the time after the first token by the tokens after it, E2EL until the last. Prompts are
words; how many tokens they are, the server says.

FILE of --dataset-path has JSON lines: {\"prompt\": \"...\", \"output_tokens\": 32}, or OpenAI batch
requests as `nuthatch batch` takes them.

Examples:
  nuthatch bench serve --num-prompts 64 --max-concurrency 8
  nuthatch bench serve --base-url http://127.0.0.1:8080 --dataset-name shared-prefix --request-rate 2
  nuthatch bench serve --duration 600 --max-concurrency 64 --watch-pid 1234 --json load.json";

#[derive(Debug, ClapArgs)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchServeArgs {
    /// Where the server is
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub(crate) base_url: String,
    /// What to ask of it: /v1/completions or /v1/chat/completions
    #[arg(long, value_name = "PATH", default_value = "/v1/completions")]
    pub(crate) endpoint: String,
    /// The model's name [default: the first that the server has]
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// A key, if the server wants one
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Option<String>,
    /// Requests
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub(crate) num_prompts: u32,
    /// Send requests for so many seconds instead, and wait for those that run
    #[arg(long, value_name = "SECONDS", conflicts_with = "num_prompts")]
    pub(crate) duration: Option<f64>,
    /// Requests a second, at random times; `inf` sends each as soon as it may run
    #[arg(long, value_name = "RATE", default_value_t = f64::INFINITY)]
    pub(crate) request_rate: f64,
    /// Most requests at one time [default: any number]
    #[arg(long, value_name = "N")]
    pub(crate) max_concurrency: Option<u32>,
    /// What is asked
    #[arg(long, value_enum, default_value_t, value_name = "KIND")]
    pub(crate) dataset_name: DatasetArg,
    /// A file of requests
    #[arg(long, value_name = "FILE", required_if_eq("dataset_name", "file"))]
    pub(crate) dataset_path: Option<PathBuf>,
    /// Words of a prompt, without what it shares
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) random_input_len: u32,
    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) random_output_len: u32,
    /// With shared-prefix: words that prompts begin with
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(crate) prefix_len: u32,
    /// With shared-prefix: different beginnings
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) num_prefixes: u32,
    /// Same seed, same prompts and times
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Requests that are sent one by one before anything is measured
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) num_warmups: u32,
    /// What a good request keeps, in milliseconds: ttft:200 tpot:50 e2el:5000
    #[arg(long, value_name = "NAME:MS", num_args = 1..)]
    pub(crate) goodput: Vec<Goal>,
    /// Also record the memory of this process, each second
    #[arg(long, value_name = "PID")]
    pub(crate) watch_pid: Option<u32>,
    /// Also write JSON to a file; `-` prints it instead of the table
    #[arg(long, value_name = "FILE", alias = "result-filename")]
    pub(crate) json: Option<PathBuf>,
}

/// What is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum DatasetArg {
    #[default]
    Random,
    #[value(alias = "prefix_repetition")]
    SharedPrefix,
    #[value(alias = "custom")]
    File,
}

/// What a good request keeps.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Goal {
    pub(crate) what: Figure,
    pub(crate) ms: f64,
}

/// A time of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Figure {
    Ttft,
    Tpot,
    E2el,
}

impl FromStr for Goal {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = "use ttft:MS, tpot:MS or e2el:MS";
        let (name, ms) = text.split_once(':').ok_or(wrong)?;
        let what = match name {
            "ttft" => Figure::Ttft,
            "tpot" => Figure::Tpot,
            "e2el" => Figure::E2el,
            _ => return Err(wrong),
        };
        let ms: f64 = ms.parse().map_err(|_| wrong)?;
        if ms > 0.0 { Ok(Goal { what, ms }) } else { Err(wrong) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_have_a_name_and_a_time() {
        assert_eq!("ttft:200".parse(), Ok(Goal { what: Figure::Ttft, ms: 200.0 }));
        for wrong in ["ttft", "itl:5", "ttft:x", "ttft:-1", "ttft:nan"] {
            assert!(wrong.parse::<Goal>().is_err(), "{wrong}");
        }
    }
}
