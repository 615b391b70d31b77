//! The API: how it is offered, and how it is asked.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::net::TcpListener;

use weighbridge_snapshots::api::{Api as Client, Options};

use super::worker::Opened;
use super::{Context, LISTENING, given};
use crate::api;
use crate::api::audit::Audit;
use crate::api::deeds::Deeds;
use crate::api::guard::Gate;
use crate::api::hub::Hub;
use crate::api::listen::{self, Lives};
use crate::api::objects::Objects;
use crate::api::shared::Shared;
use crate::api::tls::{Files, Tls};
use crate::api::tokens::Tokens;
use crate::config::{DEFAULT_API_LISTEN, Limits};
use crate::error::{Failure, Result};
use crate::http::cannot_listen;
use crate::sources::Allowed;
use crate::worker::Stop;

/// How long what was begun may take when the server stops: answers, and then changes that were asked for. Whoever stops
/// it with 40 s (`deploy/`) does not cut them off.
const GRACE: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));

/// How the API is offered.
#[derive(Debug, Args)]
#[command(next_help_heading = "API")]
pub(super) struct ServerOptions {
    /// The address where the API answers [default: 127.0.0.1:7461].
    #[arg(long, value_name = "ADDRESS:PORT")]
    api_listen: Option<SocketAddr>,
    /// Who may ask for what: a file of tokens, as `weighbridge token new` makes it. It is read again when it changes
    /// [default: none, and only this machine is answered].
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
    /// The server's certificate in PEM, with those that lead to its root. It is read again when it changes.
    #[arg(long, value_name = "FILE")]
    tls_certificate: Option<PathBuf>,
    /// Its private key in PEM.
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// Certificates in PEM by one of which every client's has to be signed (mutual TLS).
    #[arg(long, value_name = "FILE")]
    client_ca: Option<PathBuf>,
    /// Answer other machines without TLS: because something before the API ends TLS. Tokens go over the wire as they
    /// are then.
    #[arg(long)]
    plain_http: bool,
    /// Append who moved which channel, pinned what or published again to this file, a JSON object a line.
    #[arg(long, value_name = "FILE")]
    audit_log: Option<PathBuf>,
}

/// How an API is asked.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "API")]
pub(super) struct ApiOptions {
    /// Ask this API instead of the store: https://HOST:PORT, or http:// on this machine [default: [client] url].
    #[arg(long, env = "WEIGHBRIDGE_API", value_name = "URL")]
    api: Option<String>,
    /// A file that holds the API's token; without one the variable WEIGHBRIDGE_API_TOKEN is taken.
    #[arg(long, value_name = "FILE")]
    api_token_file: Option<PathBuf>,
    /// Certificates in PEM by one of which the API's has to be signed [default: those that this machine trusts].
    #[arg(long, value_name = "FILE")]
    api_ca: Option<PathBuf>,
    /// This client's certificate in PEM, where the API asks for one.
    #[arg(long, value_name = "FILE", requires = "api_key")]
    api_certificate: Option<PathBuf>,
    /// Its private key in PEM.
    #[arg(long, value_name = "FILE", requires = "api_certificate")]
    api_key: Option<PathBuf>,
    /// Let the token go over plain http to another machine.
    #[arg(long)]
    allow_http: bool,
}

impl ApiOptions {
    /// The API that is to be asked; `None` where none is named.
    pub(super) fn open(&self, context: &Context) -> Result<Option<Arc<Client>>> {
        let Some((url, options)) = self.named(context) else { return Ok(None) };
        Ok(Some(Arc::new(Client::new(url, &options)?)))
    }

    /// Each server of the API that is to be asked.
    pub(super) async fn each(&self, context: &Context) -> Result<Vec<Client>> {
        match self.named(context) {
            Some((url, options)) => Ok(Client::each(url, &options).await?),
            None => Err(Failure::usage(
                "which API is to be asked? Give --api URL, or WEIGHBRIDGE_API, or [client] url",
            )),
        }
    }

    fn named<'a>(&'a self, context: &'a Context) -> Option<(&'a str, Options)> {
        let configured = &context.config.client;
        let url = given(self.api.as_ref()).or(configured.url.as_deref())?;
        let or = |option: &Option<PathBuf>, other: &Option<PathBuf>| option.clone().or_else(|| other.clone());
        let options = Options {
            token_file: or(&self.api_token_file, &configured.token_file),
            ca: or(&self.api_ca, &configured.ca),
            identity: or(&self.api_certificate, &configured.certificate)
                .zip(or(&self.api_key, &configured.key)),
            allow_http: self.allow_http || configured.allow_http.unwrap_or(false),
            ..Options::from_environment()
        };
        if let Some(path) = options.token_file.as_deref().filter(|path| everybody_reads(path)) {
            let path = path.display();
            context
                .output
                .tell(&format!("{path}: everybody on this machine may read this token; chmod o-r\n"));
        }
        Some((url, options))
    }
}

/// Whether a file may be read by whoever is on this machine.
fn everybody_reads(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.permissions().mode() & 0o004 != 0)
}

/// The API, ready to answer.
pub(super) struct Server {
    listener: TcpListener,
    tokens: Option<Arc<Tokens>>,
    tls: Option<Arc<Tls>>,
    audit: Audit,
    sources: Option<Allowed>,
    limits: Limits,
}

impl ServerOptions {
    /// Reads what the API needs, and takes its port.
    pub(super) async fn take(&self, context: &Context) -> Result<Server> {
        let configured = &context.config.api;
        let file = |option: &Option<PathBuf>, configured: &Option<PathBuf>| {
            option.clone().or_else(|| configured.clone())
        };
        let address = self.api_listen.or(configured.listen).unwrap_or(DEFAULT_API_LISTEN);
        let tokens = file(&self.tokens, &configured.tokens);
        let tokens = tokens.map(|path| Tokens::read(&path)).transpose()?.map(Arc::new);
        let certificate = file(&self.tls_certificate, &configured.tls_certificate);
        let (key, client_ca) =
            (file(&self.tls_key, &configured.tls_key), file(&self.client_ca, &configured.client_ca));
        let tls = match (certificate, key, client_ca) {
            (Some(certificate), Some(key), client_ca) => {
                Some(Arc::new(Tls::read(Files { certificate, key, client_ca })?))
            }
            (None, None, None) => None,
            (None, None, Some(_)) => {
                let why = "--client-ca asks for mutual TLS: give --tls-certificate and --tls-key too";
                return Err(Failure::usage(why));
            }
            _ => return Err(Failure::usage("--tls-certificate and --tls-key go together: give both")),
        };
        let plain = self.plain_http || configured.plain_http.unwrap_or(false);
        check_exposure(address, tokens.is_some(), tls.is_some(), plain)?;
        let audit = match file(&self.audit_log, &configured.audit_log) {
            Some(path) => Audit::open(&path)?,
            None => Audit::default(),
        };
        let listener = TcpListener::bind(address)
            .await
            .map_err(|error| cannot_listen("--api-listen", address, &error))?;
        let sources =
            context.config.sources.allow.as_ref().map(|prefixes| Allowed::new(prefixes)).transpose()?;
        let server = Server { listener, tokens, tls, audit, sources, limits: configured.limits()? };
        server.say(context)?;
        Ok(server)
    }
}

/// Refuses to let others in without tokens, or to let tokens go over the wire as they are.
fn check_exposure(address: SocketAddr, tokens: bool, tls: bool, plain: bool) -> Result<()> {
    if address.ip().is_loopback() {
        return Ok(());
    }
    if !tokens {
        return Err(Failure::usage(format!(
            "--api-listen {address}: without tokens the API answers this machine alone; make a file of tokens with \
             `weighbridge token new` and give --tokens FILE, or listen on 127.0.0.1"
        )));
    }
    if !tls && !plain {
        return Err(Failure::usage(format!(
            "--api-listen {address}: without TLS tokens would go over the wire as they are; give --tls-certificate \
             and --tls-key; or --plain-http, where something before the API ends TLS"
        )));
    }
    Ok(())
}

impl Server {
    /// Tells where it is: whoever started it may have asked for any free port.
    fn say(&self, context: &Context) -> Result<()> {
        let address =
            self.listener.local_addr().map_err(|error| Failure::internal("the API's port", error))?;
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let who = if self.tokens.is_some() {
            ""
        } else {
            " for this machine alone, without tokens: everybody on it may do everything"
        };
        tracing::info!(target: LISTENING, "API on {scheme}://{address}{who}");
        if !context.logs_json() {
            // Nobody is left to tell that standard error is closed.
            let _ = io::stderr().write_all(format!("API on {scheme}://{address}{who}\n").as_bytes());
        }
        Ok(())
    }

    /// Answers until told to stop.
    pub(super) async fn answer(self, opened: &Opened, stop: Stop) -> Result<()> {
        let steps = &opened.steps;
        let figures = Arc::clone(steps.metrics().api());
        let limits = self.limits;
        let root = steps.root().clone();
        let shared = Arc::new(Shared {
            objects: Objects::new(root.clone(), limits.memory),
            hub: Hub::new(root.clone(), limits.watch),
            root,
            queue: steps.shared_queue(),
            gate: Arc::new(Gate::new(self.tokens.clone(), limits.bounds, Arc::clone(&figures))),
            audit: self.audit,
            sources: self.sources,
            figures: Arc::clone(&figures),
        });
        let deeds = Arc::new(Deeds::new(Arc::clone(&shared)));
        let router = api::router(&shared, &deeds)?;
        let mut followed = tokio::task::JoinSet::new();
        if let Some(tokens) = self.tokens {
            followed.spawn(tokens.follow());
        }
        if let Some(tls) = &self.tls {
            followed.spawn(Arc::clone(tls).follow());
        }
        let lives = Lives { connections: limits.connections, age: limits.age, grace: GRACE.0 };
        listen::serve(self.listener, self.tls, router, lives, figures, stop).await;
        deeds.end(GRACE.1).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_that_everybody_may_read_is_seen() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (mode, everybody) in [(0o600, false), (0o640, false), (0o644, true)] {
            std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(everybody_reads(file.path()), everybody, "{mode:o}");
        }
        assert!(!everybody_reads(Path::new("/absent")));
    }

    #[test]
    fn others_are_let_in_with_tokens_and_tls_alone() {
        let checked = |address: &str, tokens, tls, plain| {
            check_exposure(address.parse().unwrap(), tokens, tls, plain).is_ok()
        };
        assert!(checked("127.0.0.1:1", false, false, false) && checked("[::1]:1", false, false, false));
        assert!(!checked("0.0.0.0:1", false, true, true) && !checked("[::]:1", false, true, false));
        assert!(!checked("10.0.0.1:1", true, false, false));
        assert!(checked("10.0.0.1:1", true, true, false) && checked("10.0.0.1:1", true, false, true));
    }
}
