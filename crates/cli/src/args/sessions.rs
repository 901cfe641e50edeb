//! What was typed after `nuthatch sessions`.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Subcommand};

const EXAMPLES: &str = "\
Examples:
  nuthatch run --session birds \"Which bird hides seeds?\"
  nuthatch run --session birds                  go on with it
  nuthatch sessions list
  nuthatch sessions export birds birds.json
  nuthatch sessions import birds.json --name birds-2";

#[derive(Debug, ClapArgs)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SessionsArgs {
    #[command(subcommand)]
    pub(crate) what: SessionsCommand,
}

/// What is done with conversations.
#[derive(Debug, Subcommand)]
pub(crate) enum SessionsCommand {
    /// Print their names, models and lengths
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print one as JSON, or write it to a file
    Export {
        /// Its name
        name: String,
        /// The file
        file: Option<PathBuf>,
    },
    /// Take one from a file that `export` wrote
    Import {
        /// The file
        file: PathBuf,
        /// Its name here [default: the file's]
        #[arg(long)]
        name: Option<String>,
    },
    /// Forget some
    Delete {
        /// Their names
        #[arg(required = true)]
        names: Vec<String>,
    },
}
