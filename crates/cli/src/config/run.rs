//! `nuthatch run`, checked.

use nuthatch_types::Streaming;

use nuthatch_server::check_name;

use super::{ConfigError, EngineConfig, SamplingConfig, model_or_default};
use crate::args::RunArgs;
use crate::resolve::{ModelSpec, looks_like_model};

/// Where the prompt comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    /// The command line.
    Text(String),
    /// Everything on stdin.
    Stdin,
    /// A person at a terminal.
    Chat,
}

/// `nuthatch run`, checked.
#[derive(Clone, Debug)]
pub(crate) struct RunConfig {
    pub(crate) model: ModelSpec,
    pub(crate) prompt: Prompt,
    pub(crate) system: Option<String>,
    /// The conversation to go on with.
    pub(crate) session: Option<String>,
    pub(crate) is_raw: bool,
    pub(crate) with_stats: bool,
    pub(crate) as_json: bool,
    /// What stays in the cache, if not everything does.
    pub(crate) streaming: Option<Streaming>,
    pub(crate) sampling: SamplingConfig,
    pub(crate) engine: EngineConfig,
}

impl RunConfig {
    /// Checks the arguments; `stdin_is_terminal` decides between a chat and a piped prompt.
    pub(crate) fn new(args: &RunArgs, stdin_is_terminal: bool) -> anyhow::Result<Self> {
        let (model, prompt) = split_positionals(args)?;
        let prompt = match prompt.as_deref() {
            Some("-") => Prompt::Stdin,
            Some(text) if text.trim().is_empty() => return Err(ConfigError::EmptyPrompt.into()),
            Some(text) => Prompt::Text(text.to_owned()),
            None if stdin_is_terminal => Prompt::Chat,
            None => Prompt::Stdin,
        };
        let is_many = args.sampling.n > 1;
        for (flag, is_set) in [("--json", args.json), ("--raw", args.raw), ("-n", is_many)] {
            if is_set && prompt == Prompt::Chat {
                return Err(ConfigError::NeedsPrompt(flag).into());
            }
        }
        if let Some(name) = &args.session {
            check_name(name)?;
            if is_many {
                return Err(ConfigError::SessionOfMany.into());
            }
        }
        let sampling = SamplingConfig::new(&args.sampling)?;
        let engine = EngineConfig::new(&args.engine, sampling.n_seats())?;
        Ok(RunConfig {
            model: model_or_default(model.as_deref())?,
            prompt,
            system: args.system.clone(),
            session: args.session.clone(),
            is_raw: args.raw,
            with_stats: args.stats,
            as_json: args.json,
            streaming: streaming(args)?,
            sampling,
            engine,
        })
    }
}

fn streaming(args: &RunArgs) -> Result<Option<Streaming>, ConfigError> {
    match args.streaming_window {
        Some(0) => Err(ConfigError::Zero("--streaming-window")),
        Some(window) => Ok(Some(Streaming { n_sinks: args.streaming_sinks, window })),
        None => Ok(None),
    }
}

/// Which positional argument is the model and which the prompt.
pub(super) fn split_positionals(
    args: &RunArgs,
) -> Result<(Option<String>, Option<String>), ConfigError> {
    let (mut model, mut prompt) = (args.model.clone(), args.prompt.clone());
    let put = |place: &mut Option<String>, what, value: &String| match place.replace(value.clone())
    {
        None => Ok(()),
        Some(first) => Err(ConfigError::Twice { what, first, second: value.clone() }),
    };
    match (&args.first, &args.second) {
        (None, _) => {}
        (Some(first), Some(second)) => {
            put(&mut model, "the model", first)?;
            put(&mut prompt, "the prompt", second)?;
        }
        (Some(only), None) => match (&model, &prompt) {
            (None, Some(_)) => put(&mut model, "the model", only)?,
            (None, None) if looks_like_model(only) => put(&mut model, "the model", only)?,
            (None, None) | (Some(_), _) => put(&mut prompt, "the prompt", only)?,
        },
    }
    Ok((model, prompt))
}
