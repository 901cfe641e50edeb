//! Attention to the tokens that a query needs: flags that every command with an engine has.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args as ClapArgs, ValueEnum};
use nuthatch_engine::topk::Policy;

use crate::size::parse_bytes;

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
    /// Keep KV pages far, and near only the rows that --sparse attends to: host, or disk:PATH for a
    /// file at or in PATH that is gone when the program ends; a GPU's pages go to the host only
    #[arg(long, value_name = "WHERE")]
    pub(crate) kv_offload: Option<OffloadArg>,
    /// Near memory, for rows and digests; on a GPU, its own, also for what it decides by [default: what
    /// the policy needs]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, requires = "kv_offload")]
    pub(crate) kv_device_budget: Option<u64>,
    /// Whether heads whose selections change most (on a GPU: the first layers) stay near whole, as far as
    /// the budget allows
    #[arg(long, value_name = "on|off", default_value = "on", requires = "kv_offload")]
    pub(crate) kv_resident: Switch,
}

/// Where KV pages are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OffloadArg {
    /// In this machine's memory.
    Host,
    /// In a file.
    Disk(PathBuf),
}

impl FromStr for OffloadArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "host" => Ok(OffloadArg::Host),
            Some(("disk", path)) if !path.is_empty() => Ok(OffloadArg::Disk(path.into())),
            _ => Err(format!("{text:?} is neither host nor disk:PATH")),
        }
    }
}

/// Something that is done or not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    #[default]
    On,
    Off,
}

impl SparseArgs {
    /// The file or folder for KV pages, if they are not in memory.
    pub(crate) fn kv_file(&self) -> Option<PathBuf> {
        match &self.kv_offload {
            Some(OffloadArg::Disk(path)) => Some(path.clone()),
            Some(OffloadArg::Host) | None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_is_the_host_or_a_path() {
        assert_eq!("host".parse(), Ok(OffloadArg::Host));
        assert_eq!("disk:/a:b".parse(), Ok(OffloadArg::Disk("/a:b".into())));
        for bad in ["", "disk", "disk:", "host:", "tape:/x"] {
            assert!(bad.parse::<OffloadArg>().is_err(), "{bad}");
        }
    }
}
