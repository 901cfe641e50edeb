//! Attention to the tokens that a query needs: flags that every command with an engine has.

use std::path::PathBuf;

use clap::Args as ClapArgs;
use nuthatch_engine::topk::Policy;

#[derive(Clone, Debug, Default, ClapArgs)]
#[command(next_help_heading = "Top-k attention")]
pub(crate) struct SparseArgs {
    /// Attend only to the tokens that matter, chosen by this policy, such as auto or
    /// hata:256,k=10%; a wrong one shows all that can be said. An approximation: without it attention
    /// is exact
    #[arg(long, value_name = "POLICY")]
    pub(crate) sparse: Option<Policy>,
    /// What `nuthatch profile` measured of the model's heads [default: found by the model]
    #[arg(long, value_name = "FILE")]
    pub(crate) head_profile: Option<PathBuf>,
}
