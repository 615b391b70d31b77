//! Whom to trust, and how to show who one is: certificates and keys as PEM files.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use lapin::tcp::{RustlsConnector, RustlsConnectorConfig};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::address::refused;
use crate::error::Error;

/// Largest certificate or key file, in bytes.
const FILE_BYTES: u64 = 1 << 20;

/// The files that a URL names.
#[derive(Debug, Clone, Default)]
pub(super) struct Files {
    /// Who may sign the broker's certificate, instead of those that the system trusts.
    pub(super) authorities: Option<PathBuf>,
    /// The client's certificate, with those between, and its key.
    pub(super) client: Option<(PathBuf, PathBuf)>,
}

impl Files {
    /// What makes connections safe; all files are read and checked.
    ///
    /// # Errors
    /// [`Error::Refused`], with the file's name, where one cannot be read, is no such file, or does not fit the other.
    pub(super) fn connector(&self) -> Result<RustlsConnector, Error> {
        let config = match &self.authorities {
            None => RustlsConnectorConfig::new_with_native_certs()
                .map_err(|error| refused("the system's certificates", error.to_string()))?,
            Some(path) => {
                let mut config = RustlsConnectorConfig::default();
                config.add_parsable_certificates(certificates("cacertfile", path)?);
                config
            }
        };
        let Some((certificate, key)) = &self.client else {
            let plain = config.connector_with_no_client_auth();
            return plain.map_err(|error| refused("certificates", error.to_string()));
        };
        let chain = certificates("certfile", certificate)?;
        let bytes = read("keyfile", key)?;
        let parsed = PrivateKeyDer::from_pem_slice(&bytes).map_err(|_| {
            let why = "it holds no private key as PEM without a password (PKCS#8, PKCS#1 or SEC1)";
            refused(&format!("keyfile {}", key.display()), why)
        })?;
        config.connector_with_single_cert(chain, parsed).map_err(|error| {
            let files = format!("certfile {} and keyfile {}", certificate.display(), key.display());
            refused(&files, format!("they do not go together: {error}"))
        })
    }
}

fn certificates(option: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let bytes = read(option, path)?;
    let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    parsed
        .ok()
        .filter(|certificates| !certificates.is_empty())
        .ok_or_else(|| refused(&format!("{option} {}", path.display()), "it holds no certificate as PEM"))
}

/// Reads a file that is one, and no larger than it may be: what else has a name may have no end.
fn read(option: &str, path: &Path) -> Result<Vec<u8>, Error> {
    let wrong = |why: String| refused(&format!("{option} {}", path.display()), why);
    let failed = |error: std::io::Error| wrong(error.to_string());
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(wrong("it is no file".to_owned()));
    }
    let mut bytes = Vec::new();
    File::open(path).map_err(failed)?.take(FILE_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_BYTES {
        return Err(wrong(format!("it has more than {FILE_BYTES} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_certificate_or_key_is_said_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let (empty, junk) = (write("empty", ""), write("junk", "-----BEGIN CERTIFICATE-----\nno\n"));
        let large = write("large", &"x".repeat(2 << 20));
        let paths =
            [empty, junk, large, folder.path().to_path_buf(), "/dev/zero".into(), "/nowhere/at/all".into()];
        for path in paths {
            let authorities = Files { authorities: Some(path.clone()), client: None };
            let client = Files { authorities: None, client: Some((path.clone(), path.clone())) };
            for files in [authorities, client] {
                let error = files.connector().map(drop).unwrap_err();
                assert!(matches!(error, Error::Refused { .. }), "{error}");
                let text = error.to_string();
                // A machine may trust nobody.
                let named =
                    text.contains(path.to_str().unwrap()) || text.contains("the system's certificates");
                assert!(named, "{text}");
            }
        }
    }
}
