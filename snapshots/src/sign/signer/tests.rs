//! Keys: the vectors of the RFCs, files in every state, and what is made.

use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::sign::Trust;

/// The first test vector of RFC 8032: the private key in PKCS#8, the public key, the signature on nothing.
const PRIVATE: &str = "-----BEGIN PRIVATE KEY-----\n\
                       MC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g\n\
                       -----END PRIVATE KEY-----\n";
const PUBLIC: &str = "ed25519:11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=";
const SIGNATURE: &str = "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b\
                         46bd25bf5f0595bbe24655141438e7a100b";
/// The second example of RFC 8410: with attributes, and with the public key behind them.
const WITH_PUBLIC: &str = "-----BEGIN PRIVATE KEY-----\n\
                           MHICAQEwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC\n\
                           oB8wHQYKKoZIhvcNAQkJFDEPDA1DdXJkbGUgQ2hhaXJzgSEAGb9ECWmEzf6FQbrB\n\
                           Z9w7lshQhqowtrbLDFw4rXAxZuE=\n\
                           -----END PRIVATE KEY-----\n";
const ITS_PUBLIC: &str = "-----BEGIN PUBLIC KEY-----\n\
                          MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n\
                          -----END PUBLIC KEY-----\n";

fn file(folder: &tempfile::TempDir, name: &str, text: &str, mode: u32) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    path
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn keys_and_signatures_are_those_of_the_rfcs() {
    let folder = tempfile::tempdir().unwrap();
    let signer = Signer::read(&file(&folder, "a", PRIVATE, 0o600)).unwrap();
    assert_eq!(signer.public().to_string(), PUBLIC);
    assert_eq!(PUBLIC.parse(), Ok(signer.public()));
    let signature = signer.sign(b"");
    assert_eq!(hex(&signature.sig.0), SIGNATURE);
    assert!(signer.public().verifies(b"", &signature) && !signer.public().verifies(b"x", &signature));
    let digest = blake3::hash(&base64_of(PUBLIC)).to_hex();
    assert_eq!(signer.public().id().to_string(), format!("ed25519:{}", &digest[..16]));

    let other = Signer::read(&file(&folder, "b", WITH_PUBLIC, 0o400)).unwrap();
    let public = PublicKey::read(&file(&folder, "b.pub", ITS_PUBLIC, 0o644)).unwrap();
    assert_eq!(other.public(), public);
    assert_eq!(PublicKey::named(folder.path().join("b.pub").to_str().unwrap()), Ok(public));
    let text = file(&folder, "b.txt", &format!("{public}\n"), 0o644);
    assert_eq!(PublicKey::read(&text), Ok(public));
    assert!(!public.verifies(b"", &signature), "another key's");
}

fn base64_of(text: &str) -> Vec<u8> {
    let json = format!("\"{}\"", text.trim_start_matches("ed25519:"));
    serde_json::from_str::<Base64>(&json).unwrap().0
}

#[test]
fn a_private_key_is_for_its_owner_and_is_never_shown() {
    let folder = tempfile::tempdir().unwrap();
    for (mode, good) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false), (0o620, false)] {
        let read = Signer::read(&file(&folder, &format!("{mode:o}"), PRIVATE, mode));
        assert_eq!(read.is_ok(), good, "{mode:o}");
        if let Err(error) = read {
            assert!(matches!(error, KeyError::Exposed { .. }) && error.to_string().contains("chmod 600"));
        }
    }
    let signer = Signer::read(&folder.path().join("600")).unwrap();
    let shown = format!("{:?}", Signers::new(vec![signer]).unwrap());
    assert!(shown.contains("ed25519:") && !shown.contains("9d61") && !shown.contains("157"), "{shown}");
}

#[test]
fn what_is_no_key_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let large = "x".repeat(limits::KEY_FILE_BYTES + 1);
    let encrypted = PRIVATE.replace("PRIVATE", "ENCRYPTED PRIVATE");
    // A public key that does not belong to the private one.
    let mismatched = WITH_PUBLIC.replace("oB8wHQYKKoZIhvcNAQkJFDEPDA1DdXJkbGUgQ2hhaXJzgSEAGb9ECWmE", {
        "oB8wHQYKKoZIhvcNAQkJFDEPDA1DdXJkbGUgQ2hhaXJzgSEAGb9ECWmF"
    });
    for (name, text) in [
        ("empty", ""),
        ("public", ITS_PUBLIC),
        ("encrypted", encrypted.as_str()),
        ("mismatched", mismatched.as_str()),
        ("large", large.as_str()),
        ("cut", &PRIVATE[..60]),
    ] {
        let error = Signer::read(&file(&folder, name, text, 0o600)).unwrap_err().to_string();
        assert!(error.contains(name) && !error.contains("MC4CAQ") && !error.contains("MHIC"), "{error}");
    }
    assert!(PublicKey::read(&file(&folder, "private", PRIVATE, 0o600)).is_err());
    for path in [folder.path().to_owned(), folder.path().join("absent"), PathBuf::from("/dev/zero")] {
        assert!(matches!(Signer::read(&path), Err(KeyError::File { .. })), "{}", path.display());
    }
    let pipe = folder.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    assert!(matches!(Signer::read(&pipe), Err(KeyError::File { .. })), "a pipe is not waited for");
    let weak = format!("ed25519:{}=", "A".repeat(43));
    for text in ["", "ed25519:", "ed25519:0123456789abcdef", &PUBLIC[8..], &weak] {
        assert!(matches!(text.parse::<PublicKey>(), Err(KeyError::Text { .. })), "{text}");
    }
    assert!(matches!(Signers::new(vec![]), Err(KeyError::Count { .. })));
    assert!(matches!(Trust::new(vec![]), Err(KeyError::Count { .. })));
}

#[test]
fn a_pair_is_made_once_and_works() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    let made = generate(&path).unwrap();
    assert_eq!(made.public_file, folder.path().join("key.pub"));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let signer = Signer::read(&path).unwrap();
    assert_eq!(PublicKey::read(&made.public_file), Ok(made.key));
    assert_eq!(signer.public(), made.key);
    let before = std::fs::read(&path).unwrap();
    assert!(matches!(generate(&path), Err(KeyError::File { .. })), "nothing is overwritten");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    std::fs::remove_file(&path).unwrap();
    assert!(generate(&path).is_err(), "the public file is in the way");
    assert!(!path.try_exists().unwrap(), "no private key is left without its public one");

    let other = generate(&folder.path().join("other")).unwrap();
    assert_ne!(other.key, made.key);
    let signers = Signers::new(vec![signer]).unwrap();
    let mut signatures = signers.sign("type", b"body");
    let trust = |keys: &[PublicKey]| Trust::new(keys.to_vec()).unwrap();
    assert_eq!(trust(&[other.key, made.key]).signer_of("type", b"body", &signatures), Some(&made.key));
    assert_eq!(trust(&[other.key]).signer_of("type", b"body", &signatures), None);
    assert_eq!(trust(&[made.key]).signer_of("typ", b"ebody", &signatures), None);
    // The keyid is a hint: a wrong one neither hinders nor helps.
    signatures[0].keyid = other.key.id().to_string();
    assert_eq!(trust(&[made.key]).signer_of("type", b"body", &signatures), Some(&made.key));
    assert_eq!(trust(&[other.key]).signer_of("type", b"body", &signatures), None);
    assert!(signers.have_all_signed("type", b"body", &signatures));
    signatures[0].sig.0.push(0);
    assert_eq!(trust(&[made.key]).signer_of("type", b"body", &signatures), None);
}
