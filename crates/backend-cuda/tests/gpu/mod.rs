//! The machine's GPU, for tests that open it in several ways.

use nuthatch_backend_cuda::{Cuda, CudaConfig, FarPages, OpenError};

/// The first GPU, or none where there is no driver, which the output shows. Anything else that is wrong is a
/// failure.
pub(crate) fn open(far: Option<FarPages>) -> Option<Cuda> {
    let cache_dir = Some(std::env::temp_dir().join("nuthatch-test-kernels"));
    match Cuda::open(0, CudaConfig { cache_dir, far, ..CudaConfig::default() }) {
        Ok(cuda) => Some(cuda),
        Err(error @ (OpenError::NoDriver | OpenError::NoDevice { .. })) => {
            println!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}
