//! Why a GPU cannot be used.

/// Why a device could not be opened. Each says what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is no driver.
    #[error("no NVIDIA driver: libcuda.so.1 cannot be loaded")]
    NoDriver,
    /// The driver is older than the libraries this program was made for.
    #[error(
        "the NVIDIA driver supports CUDA {}.{}, but 13.0 is needed: install driver 580 or newer",
        found / 1000, found % 1000 / 10
    )]
    OldDriver {
        /// What the driver says, as 1000 times the major version plus 10 times the minor one.
        found: i32,
    },
    /// There is no such device.
    #[error("no device cuda:{ordinal}: the driver knows {count}")]
    NoDevice {
        /// The device that was asked for.
        ordinal: usize,
        /// Devices that there are.
        count: usize,
    },
    /// The device lacks the instructions that the kernels use.
    #[error("{name} has compute capability {major}.{minor}, but 8.0 is needed")]
    OldDevice {
        /// Its name.
        name: String,
        /// Its compute capability.
        major: i32,
        /// The rest of it.
        minor: i32,
    },
    /// The run-time compiler is missing.
    #[error(
        "NVRTC is missing: libnvrtc.so.13 cannot be loaded; install the CUDA toolkit, or run `pip \
         install nvidia-cuda-nvrtc` and add its folder nvidia/cu13/lib to LD_LIBRARY_PATH"
    )]
    NoCompiler,
    /// A kernel does not compile.
    #[error("{0}")]
    Compile(#[from] CompileError),
    /// The driver refused.
    #[error("the NVIDIA driver failed: {0}")]
    Driver(String),
}

/// A program of kernels that does not compile.
#[derive(Debug, thiserror::Error)]
#[error("kernels {program} do not compile for {arch}: {reason}\n{log}")]
pub struct CompileError {
    /// Its name.
    pub program: String,
    /// What it was compiled for.
    pub arch: String,
    /// NVRTC's error.
    pub reason: String,
    /// NVRTC's log.
    pub log: String,
}
