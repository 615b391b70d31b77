//! Public keys: from a file or a text to a key that can verify, and the trust in some of them.

use std::fmt;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ed25519_dalek::pkcs8::DecodePublicKey;
use ed25519_dalek::pkcs8::spki::der::zeroize::Zeroizing;
use ed25519_dalek::{Signature as Ed25519Signature, VerifyingKey};

use weighbridge_schemas::error::shorten;
use weighbridge_schemas::limits;
use weighbridge_schemas::signature::{Signature, pre_authentication};

use super::signer::Signers;

/// What stands before the base64 of a public key, and before its id.
const PREFIX: &str = "ed25519:";
/// The bytes of a key's BLAKE3 that its id shows.
const ID_BYTES: usize = 8;

/// What is wrong with a key, or its file. No message holds anything of a private key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The file cannot be read, or written.
    #[error("key file {path}: {why}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why not, and the way out.
        why: String,
    },
    /// Others may read a private key.
    #[error(
        "key file {path} can be read by others (mode {mode:04o}): `chmod 600 {path}`, and ask yourself who has it by \
         now"
    )]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// The file holds no key of the kind that is wanted.
    #[error("key file {path} holds no {wanted}")]
    NoKey {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        wanted: &'static str,
    },
    /// A text that is no public key.
    #[error(
        "{text:?} is no public key: it is written ed25519: and the base64 of 32 bytes, as `weighbridge keys show` \
         prints it (an id of 16 digits stands for a key, but cannot be one)"
    )]
    Text {
        /// The text, shortened.
        text: String,
    },
    /// No keys, or too many.
    #[error("{found} {what}; there must be 1 to {most}")]
    Count {
        /// How many were given.
        found: usize,
        /// Of what.
        what: &'static str,
        /// The most that may be.
        most: usize,
    },
}

impl KeyError {
    pub(super) fn file(path: &Path, why: impl fmt::Display) -> Self {
        Self::File { path: path.to_owned(), why: why.to_string() }
    }
}

/// A public key of Ed25519.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PublicKey(VerifyingKey);

/// What a key is called among people: `ed25519:` and the first 16 hexadecimal digits of the BLAKE3 of its 32 bytes. As
/// a signature's `keyid` it is a hint alone: another key with the same id can be searched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyId([u8; ID_BYTES]);

impl PublicKey {
    /// The key with these bytes; `None` where they are no point of the curve, or one of those for which a signature
    /// proves nothing.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; 32]) -> Option<Self> {
        VerifyingKey::from_bytes(bytes).ok().filter(|key| !key.is_weak()).map(Self)
    }

    pub(super) const fn of(key: VerifyingKey) -> Self {
        Self(key)
    }

    /// Reads a key file: PEM as `openssl pkey -pubout` writes it, or the text `ed25519:BASE64`.
    ///
    /// # Errors
    /// [`KeyError`] where the file cannot be read, or holds none.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let file = read_file(path)?;
        let text = file.text().trim();
        let key = if text.starts_with(PREFIX) {
            text.parse().ok()
        } else {
            VerifyingKey::from_public_key_pem(text).ok().and_then(|key| Self::from_bytes(key.as_bytes()))
        };
        let wanted = "public key of Ed25519 (PEM as `openssl pkey -pubout` writes it, or ed25519:BASE64)";
        key.ok_or_else(|| KeyError::NoKey { path: path.to_owned(), wanted })
    }

    /// The key that `text` is (`ed25519:BASE64`), or that the file of that name holds.
    ///
    /// # Errors
    /// As [`Self::read`], and for a text that is no key.
    pub fn named(text: &str) -> Result<Self, KeyError> {
        if text.starts_with(PREFIX) { text.parse() } else { Self::read(Path::new(text)) }
    }

    /// What people call it.
    #[must_use]
    pub fn id(&self) -> KeyId {
        let digest = blake3::hash(self.0.as_bytes());
        let mut id = [0; ID_BYTES];
        id.iter_mut().zip(digest.as_bytes()).for_each(|(byte, digit)| *byte = *digit);
        KeyId(id)
    }

    /// Whether `signature` is this key's on `message`.
    #[must_use]
    pub fn verifies(&self, message: &[u8], signature: &Signature) -> bool {
        let signature = Ed25519Signature::from_slice(&signature.sig.0);
        signature.is_ok_and(|signature| self.0.verify_strict(message, &signature).is_ok())
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", STANDARD.encode(self.0.as_bytes()))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

impl FromStr for PublicKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let bytes = text.strip_prefix(PREFIX).and_then(|text| STANDARD.decode(text).ok());
        let key = bytes.and_then(|bytes| Self::from_bytes(&bytes.try_into().ok()?));
        key.ok_or_else(|| KeyError::Text { text: shorten(text) })
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Public keys, any of which is enough.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trust(Vec<PublicKey>);

impl Trust {
    /// Trust in `keys`.
    ///
    /// # Errors
    /// [`KeyError::Count`] where there are none, or more than [`limits::TRUSTED_KEYS`].
    pub fn new(mut keys: Vec<PublicKey>) -> Result<Self, KeyError> {
        let mut seen = Vec::new();
        keys.retain(|key| !seen.contains(key) && (seen.push(*key), true).1);
        let (found, most) = (keys.len(), limits::TRUSTED_KEYS);
        if (1..=most).contains(&found) {
            return Ok(Self(keys));
        }
        Err(KeyError::Count { found, what: "public keys to trust", most })
    }

    /// Trust in one's own keys, and in whom one trusts besides.
    pub(crate) fn in_own(own: &Signers, others: Option<&Self>) -> Self {
        Self(own.public().chain(others.into_iter().flat_map(|others| others.0.iter().copied())).collect())
    }

    /// Whether `key` is one of those that are trusted.
    #[must_use]
    pub fn holds(&self, key: &PublicKey) -> bool {
        self.0.contains(key)
    }

    /// The trusted key that signed `body`, which is of `payload_type`, if one did. Every key is tried on every
    /// signature, whatever its `keyid` says.
    #[must_use]
    pub fn signer_of(&self, payload_type: &str, body: &[u8], signatures: &[Signature]) -> Option<&PublicKey> {
        let message = pre_authentication(payload_type, body);
        let mut pairs =
            signatures.iter().flat_map(|signature| self.0.iter().map(move |key| (key, signature)));
        pairs.find(|(key, signature)| key.verifies(&message, signature)).map(|(key, _)| key)
    }
}

impl fmt::Display for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids: Vec<_> = self.0.iter().map(|key| key.id().to_string()).collect();
        f.write_str(&ids.join(" or "))
    }
}

/// For a message: whose signatures these say that they are. Nothing of it is proved.
pub(super) fn claimed<'s>(signatures: impl IntoIterator<Item = &'s Signature>) -> String {
    const MOST: usize = 5;
    let mut names: Vec<_> = signatures
        .into_iter()
        .map(|signature| match signature.keyid.as_str() {
            "" => "a key that it does not name".to_owned(),
            keyid => shorten(keyid),
        })
        .collect();
    names.sort();
    names.dedup();
    let more = if names.len() > MOST { ", ..." } else { "" };
    names.truncate(MOST);
    format!("{}{more}", names.join(", "))
}

/// A key file's content, which is wiped from memory when it is dropped.
pub(super) struct KeyFile {
    text: Zeroizing<Vec<u8>>,
    pub(super) metadata: std::fs::Metadata,
}

impl KeyFile {
    /// The text; nothing where it is not UTF-8.
    pub(super) fn text(&self) -> &str {
        str::from_utf8(&self.text).unwrap_or_default()
    }
}

/// Reads a key file: a regular one of at most [`limits::KEY_FILE_BYTES`], or a link to one.
pub(super) fn read_file(path: &Path) -> Result<KeyFile, KeyError> {
    let failed = |error: io::Error| KeyError::file(path, format!("it cannot be read: {error}"));
    // A pipe must not be waited for.
    let opened = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = opened.map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(KeyError::file(path, "it is not a regular file"));
    }
    let most = limits::KEY_FILE_BYTES;
    // Room for all of it at once: what is moved to a larger place is not wiped at the old one.
    let mut text = Zeroizing::new(Vec::with_capacity(most + 1));
    file.take(most as u64 + 1).read_to_end(&mut text).map_err(failed)?;
    if text.len() > most {
        return Err(KeyError::file(path, format!("it has more than {most} bytes, and so is no key")));
    }
    Ok(KeyFile { text, metadata })
}
