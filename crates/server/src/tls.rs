//! Encrypted connections.

use std::path::PathBuf;
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject as _};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig, crypto};

use crate::TlsFiles;

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is not what it should be.
    #[error("{}: {error}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: pem::Error,
    },
    /// Certificate and key do not belong together.
    #[error(transparent)]
    Rustls(#[from] rustls::Error),
}

/// Reads the files, and makes what greets connections.
pub(crate) fn acceptor(files: &TlsFiles) -> Result<TlsAcceptor, TlsError> {
    let wrong = |path: &PathBuf| {
        let path = path.clone();
        move |error| TlsError::Pem { path, error }
    };
    let certificates = CertificateDer::pem_file_iter(&files.certificates)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(wrong(&files.certificates))?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(wrong(&files.key))?;
    let provider = Arc::new(crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(certificates, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
