//! A store that opendal reaches.

use std::time::Duration;

use nuthatch_store::remote::{ObjectError, Objects};
use opendal::layers::{RetryLayer, TimeoutLayer};
use opendal::options::{ReadOptions, WriteOptions};
use opendal::{ErrorKind, HttpTransporter, Operator, blocking};
use opendal_http_transport_reqwest::ReqwestTransport;
use tokio::runtime::{Builder, Runtime};
use tokio_rustls::rustls::crypto::ring;

use crate::OpenError;

/// How long one try of a request may take. A page is megabytes, and a load that takes longer is given
/// up by the engine anyway.
const DEADLINE: Duration = Duration::from_secs(2);
/// How often a request is tried again, and how long is waited before that at least and at most.
const N_RETRIES: usize = 2;
const DELAYS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// A store somewhere else.
#[derive(Debug)]
pub struct Remote {
    operator: blocking::Operator,
    /// Drives requests that the callers wait for.
    _runtime: Runtime,
}

impl Remote {
    /// What an operator reaches.
    pub fn over(operator: Operator) -> Result<Self, OpenError> {
        // Another provider may have been chosen before, and the transport set: that is as good.
        let _ = ring::default_provider().install_default();
        HttpTransporter::install_default(ReqwestTransport::default());
        let (delay, delay_max) = DELAYS;
        let retry = RetryLayer::new().with_max_times(N_RETRIES).with_jitter();
        let retry = retry.with_min_delay(delay).with_max_delay(delay_max);
        // A try has a deadline, not all tries together: so the deadline is inside.
        let timeout = TimeoutLayer::new().with_timeout(DEADLINE).with_io_timeout(DEADLINE);
        let operator = operator.layer(timeout).layer(retry);
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("nuthatch-remote")
            .enable_all()
            .build()?;
        let guard = runtime.enter();
        let operator = blocking::Operator::new(operator);
        let operator = operator.map_err(|error| OpenError::Refused(error.to_string()))?;
        drop(guard);
        Ok(Remote { operator, _runtime: runtime })
    }

    fn write(&self, name: &str, bytes: &[u8], options: WriteOptions) -> Result<(), ObjectError> {
        match self.operator.write_options(name, bytes.to_vec(), options) {
            Ok(_) => Ok(()),
            // Somebody was faster.
            Err(error) if error.kind() == ErrorKind::ConditionNotMatch => Ok(()),
            Err(error) => Err(ObjectError::Failed(error.to_string())),
        }
    }
}

impl Objects for Remote {
    fn get(&self, name: &str, target: &mut [u8]) -> Result<usize, ObjectError> {
        let range = (0..target.len() as u64).into();
        let options = ReadOptions { range, ..ReadOptions::default() };
        match self.operator.read_options(name, options) {
            Ok(bytes) => {
                let bytes = bytes.to_bytes();
                let n = bytes.len().min(target.len());
                target[..n].copy_from_slice(&bytes[..n]);
                Ok(n)
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Err(ObjectError::Absent),
            // It is shorter.
            Err(error) if error.kind() == ErrorKind::RangeNotSatisfied => Ok(0),
            Err(error) => Err(ObjectError::Failed(error.to_string())),
        }
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        self.write(name, bytes, WriteOptions::default())
    }

    fn put_new(&self, name: &str, bytes: &[u8]) -> Result<(), ObjectError> {
        let if_not_exists = self.operator.info().capability().write_with_if_not_exists;
        self.write(name, bytes, WriteOptions { if_not_exists, ..WriteOptions::default() })
    }
}
