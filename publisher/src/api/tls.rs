//! TLS, and mutual TLS: certificates out of files, which are read again when they change.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::RootCertStore;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::config::read_text;
use crate::error::{Failure, Result};

/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(10);

/// Where certificates lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The server's certificate in PEM, with those that lead to its root.
    pub certificate: PathBuf,
    /// Its private key in PEM.
    pub key: PathBuf,
    /// Certificates in PEM by one of which a client's has to be signed; absent: clients need none.
    pub client_ca: Option<PathBuf>,
}

/// What secures connections.
pub struct Tls {
    files: Files,
    /// What was read first.
    first: Texts,
    config: ArcSwap<ServerConfig>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

/// The files' texts: what is compared to tell whether they changed.
type Texts = (String, String, Option<String>);

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// Where one cannot be read, or holds no certificate or key, or they do not fit: exit code 2.
    pub fn read(files: Files) -> Result<Self> {
        let first = texts(&files)?;
        let config = config(&files, &first)?;
        Ok(Self { files, first, config: ArcSwap::from_pointee(config) })
    }

    /// Secures a connection.
    ///
    /// # Errors
    /// As the other side fails to.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        TlsAcceptor::from(self.config.load_full()).accept(stream).await
    }

    /// Reads the files again when they change, for as long as this runs. Connections that are there go on.
    pub async fn follow(self: Arc<Self>) {
        let (mut last, mut told) = (self.first.clone(), false);
        loop {
            tokio::time::sleep(LOOK).await;
            let files = self.files.clone();
            let Ok(read) = tokio::task::spawn_blocking(move || texts(&files)).await else { continue };
            let found = read.and_then(|now| {
                if now == last {
                    Ok(None)
                } else {
                    config(&self.files, &now).map(|config| Some((config, now)))
                }
            });
            match found {
                Ok(None) => told = false,
                Ok(Some((config, now))) => {
                    tracing::info!(path = %self.files.certificate.display(), "certificates were read again");
                    self.config.store(Arc::new(config));
                    (last, told) = (now, false);
                }
                // Certificate and key are seldom replaced in one moment: looked at again the next time.
                Err(failure) if !told => {
                    told = true;
                    tracing::warn!(%failure, "certificates cannot be used; those before stay");
                }
                Err(_) => {}
            }
        }
    }
}

fn texts(files: &Files) -> Result<Texts> {
    let read = |path: &Path| {
        read_text(path)
            .map_err(|error| Failure::usage(format!("{}: it cannot be read: {error}", path.display())))
    };
    Ok((read(&files.certificate)?, read(&files.key)?, files.client_ca.as_deref().map(read).transpose()?))
}

fn config(files: &Files, (certificate, key, client_ca): &Texts) -> Result<ServerConfig> {
    let bad = |path: &Path, why: String| Failure::usage(format!("{}: {why}", path.display()));
    let chain = certificates(certificate).map_err(|why| bad(&files.certificate, why))?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes())
        .map_err(|error| bad(&files.key, format!("it holds no private key in PEM: {error}")))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| Failure::internal("TLS", error))?;
    let builder = match (client_ca, &files.client_ca) {
        (Some(text), Some(path)) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(text).map_err(|why| bad(path, why))? {
                roots.add(certificate).map_err(|error| bad(path, error.to_string()))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
            builder.with_client_cert_verifier(verifier.map_err(|error| bad(path, error.to_string()))?)
        }
        _ => builder.with_no_client_auth(),
    };
    let mut config = builder
        .with_single_cert(chain, key)
        .map_err(|error| bad(&files.certificate, format!("certificate and key do not fit: {error}")))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

fn certificates(text: &str) -> std::result::Result<Vec<CertificateDer<'static>>, String> {
    let found: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
    match found {
        Ok(found) if found.is_empty() => Err("it holds no certificate in PEM".to_owned()),
        Ok(found) => Ok(found),
        Err(error) => Err(format!("its PEM does not parse: {error}")),
    }
}
