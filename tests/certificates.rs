//! Certificates for tests, as PEM files: an authority, a server's certificate and a client's.

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};

/// Where the files lie.
#[derive(Debug, Clone)]
pub struct Certificates {
    /// The authority's certificate.
    pub authority: PathBuf,
    /// The server's certificate, for `127.0.0.1` and `localhost`.
    pub server: PathBuf,
    /// The key of the server's certificate.
    pub server_key: PathBuf,
    /// The client's certificate; its common name is the user's.
    pub client: PathBuf,
    /// The key of the client's certificate.
    pub client_key: PathBuf,
    /// A client's certificate that holds no more.
    pub expired: PathBuf,
    /// The key of that one.
    pub expired_key: PathBuf,
}

impl Certificates {
    /// Writes new ones into `folder`; the client's is for `user`.
    ///
    /// # Panics
    /// Where they cannot be made or written.
    #[must_use]
    #[expect(clippy::unwrap_used, reason = "only tests use it")]
    pub fn make(folder: &Path, user: &str) -> Self {
        let write = |name: &str, text: String| {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let key = KeyPair::generate().unwrap();
        let mut authority = parameters("tests' authority", &[]);
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = authority.self_signed(&key).unwrap().pem();
        let issuer = Issuer::new(authority, key);
        let signed = |mut parameters: CertificateParams, usage| {
            parameters.extended_key_usages = vec![usage];
            parameters.key_usages = vec![KeyUsagePurpose::DigitalSignature];
            parameters.use_authority_key_identifier_extension = true;
            let key = KeyPair::generate().unwrap();
            (parameters.signed_by(&key, &issuer).unwrap().pem(), key.serialize_pem())
        };
        let server = parameters("localhost", &["127.0.0.1", "localhost"]);
        let (server, server_key) = signed(server, ExtendedKeyUsagePurpose::ServerAuth);
        let (client, client_key) = signed(parameters(user, &[]), ExtendedKeyUsagePurpose::ClientAuth);
        let mut expired = parameters(user, &[]);
        expired.not_after = rcgen::date_time_ymd(2020, 1, 1);
        expired.not_before = rcgen::date_time_ymd(2019, 1, 1);
        let (expired, expired_key) = signed(expired, ExtendedKeyUsagePurpose::ClientAuth);
        Self {
            expired: write("expired.pem", expired),
            expired_key: write("expired_key.pem", expired_key),
            authority: write("authority.pem", certificate),
            server: write("server.pem", server),
            server_key: write("server_key.pem", server_key),
            client: write("client.pem", client),
            client_key: write("client_key.pem", client_key),
        }
    }
}

/// A certificate of this common name alone, for these hosts.
#[expect(clippy::unwrap_used, reason = "only tests use it")]
fn parameters(common_name: &str, hosts: &[&str]) -> CertificateParams {
    let hosts: Vec<_> = hosts.iter().map(|&host| host.to_owned()).collect();
    let mut parameters = CertificateParams::new(hosts).unwrap();
    parameters.distinguished_name = DistinguishedName::new();
    parameters.distinguished_name.push(DnType::CommonName, common_name);
    parameters
}
