//! Attention to the tokens that a query needs: flags that every command with an engine has.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args as ClapArgs, ValueEnum};
use nuthatch_backend::RowCode;
use nuthatch_engine::topk::Policy;

use crate::device::FarWay;
use crate::size::parse_bytes;

#[derive(Clone, Debug, Default, ClapArgs)]
#[command(next_help_heading = "Top-k attention")]
pub(crate) struct SparseArgs {
    /// Attend to the most relevant ~10 % of a long context instead of all of it (approximate). Start
    /// with `auto`; `--sparse help` lists policies
    #[arg(long, value_name = "POLICY")]
    pub(crate) sparse: Option<Policy>,
    /// What `nuthatch profile` measured of the model's heads [default: found by the model]
    #[arg(long, value_name = "FILE")]
    pub(crate) head_profile: Option<PathBuf>,
    /// Keep the whole KV cache in host memory (host) or in a temporary file (disk:PATH, CPU only); the
    /// device keeps only what attention needs. Needs --sparse
    #[arg(long, value_name = "WHERE")]
    pub(crate) kv_offload: Option<OffloadArg>,
    /// Most device memory for KV with --kv-offload: index, selected rows, prompts' pages, resident
    /// layers or heads. Weights are extra [default: what the policy needs]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, requires = "kv_offload")]
    pub(crate) kv_device_budget: Option<u64>,
    /// Spend what is left of the budget on keeping the busiest layers or heads on the device
    #[arg(long, value_name = "on|off", default_value = "on", requires = "kv_offload")]
    pub(crate) kv_resident: Switch,
    /// Transfer selected rows as 8 bits: half the traffic, slightly different answers
    #[arg(long, value_name = "auto|fp8|int8", default_value = "auto", requires = "kv_offload")]
    pub(crate) kv_offload_dtype: RowsArg,
    /// How selected rows reach the GPU: its own gather kernel (device), or CPU threads and copies, to
    /// compare
    #[arg(
        long,
        value_name = "device|threads[=N]",
        default_value = "device",
        requires = "kv_offload"
    )]
    pub(crate) kv_transfer: TransferArg,
}

/// What rows come from far pages as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RowsArg(pub(crate) Option<RowCode>);

impl FromStr for RowsArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(RowsArg(None)),
            _ => {
                let code = text.parse();
                code.map(|code| RowsArg(Some(code)))
                    .map_err(|_| format!("{text:?} is none of auto, fp8 and int8"))
            }
        }
    }
}

/// Who brings rows to a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TransferArg {
    #[default]
    Device,
    /// Threads of this machine; as many as suit it if none is said.
    Threads(Option<NonZeroU32>),
}

impl TransferArg {
    /// Threads that bring rows; none if the device does.
    pub(crate) fn n_threads(self) -> u32 {
        /// More do not bring more: docs/sparse-speed.md.
        const MOST: u32 = 8;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        match self {
            TransferArg::Device => 0,
            TransferArg::Threads(Some(n)) => n.get(),
            TransferArg::Threads(None) => u32::try_from(cores / 2).unwrap_or(MOST).clamp(1, MOST),
        }
    }
}

impl FromStr for TransferArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is neither device nor threads, or threads=N of 1 to 64");
        match text.split_once('=') {
            None if text == "device" => Ok(TransferArg::Device),
            None if text == "threads" => Ok(TransferArg::Threads(None)),
            Some(("threads", n)) => {
                let n = n.parse::<NonZeroU32>().ok().filter(|n| n.get() <= 64);
                Ok(TransferArg::Threads(Some(n.ok_or_else(wrong)?)))
            }
            _ => Err(wrong()),
        }
    }
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
    /// How rows come from far pages.
    pub(crate) fn far_way(&self) -> FarWay {
        FarWay { code: self.kv_offload_dtype.0, n_threads: self.kv_transfer.n_threads() }
    }

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

    #[test]
    fn rows_come_as_they_are_or_in_eight_bits_and_by_somebody() {
        assert_eq!("auto".parse(), Ok(RowsArg(None)));
        assert_eq!("fp8".parse(), Ok(RowsArg(Some(RowCode::Fp8))));
        for bad in ["", "fp16", "int4", "FP8"] {
            assert!(bad.parse::<RowsArg>().is_err(), "{bad}");
        }
        let n_threads = |text: &str| text.parse().map(TransferArg::n_threads);
        assert_eq!((n_threads("device"), n_threads("threads=5")), (Ok(0), Ok(5)));
        assert!((1..=8).contains(&n_threads("threads").unwrap()));
        for bad in ["", "threads=", "threads=0", "threads=65", "threads=-1", "cpu", "device=2"] {
            assert!(bad.parse::<TransferArg>().is_err(), "{bad}");
        }
    }
}
