//! Private keys. They are read from files, are never shown, and nothing but signatures comes out of them.

use std::ffi::OsString;
use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::spki::der::zeroize::Zeroizing;
use ed25519_dalek::pkcs8::{DecodePrivateKey, EncodePrivateKey, KeypairBytes, spki::EncodePublicKey};
use ed25519_dalek::{Signer as _, SigningKey};

use weighbridge_schemas::limits;
use weighbridge_schemas::signature::{Base64, Signature, pre_authentication};

use super::keys::{KeyError, PublicKey, read_file};

/// A private key of Ed25519.
pub struct Signer(SigningKey);

impl Signer {
    /// Reads a private key: PKCS#8 in PEM, not encrypted, as `openssl genpkey -algorithm ed25519` writes it. Like ssh,
    /// it refuses a file of this process's own user that others may read; one of another user (a mounted secret) is
    /// that user's business.
    ///
    /// # Errors
    /// [`KeyError`] where the file cannot be read, is open to others, or holds none.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let file = read_file(path)?;
        let key = SigningKey::from_pkcs8_pem(file.text().trim()).map_err(|_| {
            let wanted = "private key of Ed25519 (PKCS#8 in PEM without a passphrase, as `openssl genpkey -algorithm \
                          ed25519` writes it)";
            KeyError::NoKey { path: path.to_owned(), wanted }
        })?;
        // Only now: a public key may well be read by others.
        let mode = file.metadata.mode() & 0o7777;
        if mode & 0o077 != 0 && file.metadata.uid() == rustix::process::geteuid().as_raw() {
            return Err(KeyError::Exposed { path: path.to_owned(), mode });
        }
        Ok(Self(key))
    }

    /// The public key that belongs to it.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        PublicKey::of(self.0.verifying_key())
    }

    /// Its signature on `message`: the same every time.
    #[must_use]
    pub fn sign(&self, message: &[u8]) -> Signature {
        let sig = Base64(self.0.sign(message).to_vec());
        Signature { keyid: self.public().id().to_string(), sig }
    }
}

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Signer({})", self.public().id())
    }
}

/// Private keys that all sign: one, or the old and the new while hosts learn to trust the new one.
#[derive(Debug)]
pub struct Signers(Vec<Signer>);

impl Signers {
    /// All of `signers`, each once.
    ///
    /// # Errors
    /// [`KeyError::Count`] where there are none, or more than [`limits::SIGNATURES`].
    pub fn new(signers: Vec<Signer>) -> Result<Self, KeyError> {
        let mut each: Vec<Signer> = Vec::new();
        for signer in signers {
            if each.iter().all(|other| other.public() != signer.public()) {
                each.push(signer);
            }
        }
        let (found, most) = (each.len(), limits::SIGNATURES);
        if (1..=most).contains(&found) {
            return Ok(Self(each));
        }
        Err(KeyError::Count { found, what: "keys to sign with", most })
    }

    /// The keys' signatures on `body`, which is of `payload_type`.
    #[must_use]
    pub fn sign(&self, payload_type: &str, body: &[u8]) -> Vec<Signature> {
        let message = pre_authentication(payload_type, body);
        self.0.iter().map(|signer| signer.sign(&message)).collect()
    }

    /// Whether each of the keys has signed `body`.
    #[must_use]
    pub fn have_all_signed(&self, payload_type: &str, body: &[u8], signatures: &[Signature]) -> bool {
        let message = pre_authentication(payload_type, body);
        self.public().all(|key| signatures.iter().any(|signature| key.verifies(&message, signature)))
    }

    /// The public keys that belong to them.
    pub fn public(&self) -> impl Iterator<Item = PublicKey> {
        self.0.iter().map(Signer::public)
    }
}

/// A key pair that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// The public key.
    pub key: PublicKey,
    /// The file that it lies in, beside the private key's.
    pub public_file: PathBuf,
}

/// Makes a key pair: the private key goes to `path`, for this user's eyes alone, the public one to `path` with `.pub`
/// behind it. Nothing is overwritten.
///
/// # Errors
/// [`KeyError::File`] where one of the files is there already or cannot be written.
pub fn generate(path: &Path) -> Result<Generated, KeyError> {
    let mut secret = Zeroizing::new([0; 32]);
    getrandom::fill(&mut *secret).map_err(|error| KeyError::file(path, format!("no randomness: {error}")))?;
    // Without the public key in it: OpenSSL before 3.5 reads no other.
    let pair = KeypairBytes { secret_key: *secret, public_key: None };
    let private = pair.to_pkcs8_pem(LineEnding::LF).map_err(|error| KeyError::file(path, error))?;
    let key = SigningKey::from_bytes(&secret).verifying_key();
    let public = key.to_public_key_pem(LineEnding::LF).map_err(|error| KeyError::file(path, error))?;

    let mut public_file = OsString::from(path);
    public_file.push(".pub");
    let public_file = PathBuf::from(public_file);
    write_new(path, private.as_bytes(), 0o600)?;
    if let Err(error) = write_new(&public_file, public.as_bytes(), 0o644) {
        // A key that nobody was told of is of no use, and in the way of the next try.
        let _ = std::fs::remove_file(path);
        return Err(error);
    }
    Ok(Generated { key: PublicKey::of(key), public_file })
}

fn write_new(path: &Path, bytes: &[u8], mode: u32) -> Result<(), KeyError> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => KeyError::file(
            path,
            "there is something already, and keys are never overwritten; name another file",
        ),
        _ => KeyError::file(path, format!("it cannot be written: {error}")),
    };
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path).map_err(failed)?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(failed)
}

#[cfg(test)]
mod tests;
