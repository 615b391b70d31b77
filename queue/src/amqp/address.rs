//! From an `amqp://` or `amqps://` URL to where the broker is, and how to speak with it.
//!
//! Options that RabbitMQ's own clients have in URLs have the same names here
//! (<https://www.rabbitmq.com/docs/uri-query-parameters>).

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo, SASLMechanism};
use percent_encoding::percent_decode_str;
use url::{Host, Url};
use weighbridge_schemas::error::shorten;

use super::certificates::Files;
use crate::error::Error;

/// Longest name of a queue, in bytes: the names that are made from it have to fit into 255.
const NAME_BYTES: usize = 127;
/// The options, for messages.
const OPTIONS: &str = "queue, heartbeat, connection_timeout, delivery_timeout, auth_mechanism, cacertfile, certfile \
                       and keyfile";

/// Where a broker is, and how to speak with it.
#[derive(Clone)]
pub(crate) struct Address {
    pub(super) uri: AMQPUri,
    pub(super) files: Files,
    /// What all exchanges and queues are named after.
    pub(super) queue: String,
    /// How long making a connection may take.
    pub(super) connecting: Duration,
    /// For how long the broker lets somebody hold a message.
    pub(super) delivery: Duration,
    /// For people: without the password.
    pub(super) shown: String,
}

impl std::fmt::Debug for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Address").field(&self.shown).finish()
    }
}

impl Address {
    /// What `text` says.
    ///
    /// # Errors
    /// [`Error::Refused`] where it is no such URL.
    pub(crate) fn parse(text: &str) -> Result<Self, Error> {
        let url = Url::parse(text).map_err(|error| refused("the URL", error.to_string()))?;
        // Everything that belongs in front of the host has to be there: what follows is shown to people.
        let behind =
            text.split_once("://").and_then(|(_, rest)| rest.find(['/', '?', '#']).map(|at| &rest[at..]));
        if behind.is_some_and(|behind| behind.contains(['@', '#'])) {
            return Err(refused(
                "the URL",
                "there is an @ or a # behind the host; in a user or a password write / as %2F, ? as %3F, # as %23, and \
                 @ as %40, and in a path or an option too",
            ));
        }
        let tls = url.scheme() == "amqps";
        let scheme = if tls { AMQPScheme::AMQPS } else { AMQPScheme::AMQP };
        let host = match url.host() {
            Some(Host::Domain(name)) if !name.is_empty() => decoded(name)?,
            Some(Host::Ipv4(address)) => address.to_string(),
            Some(Host::Ipv6(address)) => address.to_string(),
            _ => {
                return Err(refused("the URL", "it names no host; use amqp://USER:PASSWORD@HOST:5672/VHOST"));
            }
        };
        let user = match url.username() {
            "" => AMQPUserInfo::default(),
            name => AMQPUserInfo {
                username: decoded(name)?,
                password: decoded(url.password().unwrap_or_default())?,
            },
        };
        // As RabbitMQ's own clients take it: no path is the virtual host "/", and "/%2F" too.
        let vhost = match url.path().strip_prefix('/') {
            None | Some("") => "/".to_owned(),
            Some(path) => decoded(path)?,
        };
        let port = url.port().unwrap_or_else(|| scheme.default_port());
        let mut address = Self {
            shown: shown(&url),
            uri: AMQPUri {
                scheme,
                authority: AMQPAuthority { userinfo: user, host, port },
                vhost,
                query: AMQPQueryString { heartbeat: Some(10), ..AMQPQueryString::default() },
            },
            files: Files::default(),
            queue: "weighbridge".to_owned(),
            connecting: Duration::from_secs(5),
            delivery: Duration::from_secs(1800),
        };
        address.options(&url)?;
        Ok(address)
    }

    /// The URL without its password, for people.
    pub(crate) fn shown(&self) -> &str {
        &self.shown
    }

    fn options(&mut self, url: &Url) -> Result<(), Error> {
        let (mut certificate, mut key) = (None, None);
        let mut seen = BTreeSet::new();
        for (name, value) in url.query_pairs() {
            if !seen.insert(name.clone()) {
                return Err(option(&name, "it is there twice"));
            }
            let file = || Some(PathBuf::from(value.as_ref()));
            match name.as_ref() {
                "queue" => self.queue = queue(&value)?,
                "heartbeat" => {
                    let seconds = number(&name, &value, 1, 600)?;
                    self.uri.query.heartbeat = u16::try_from(seconds).ok();
                }
                "connection_timeout" => {
                    self.connecting = Duration::from_millis(number(&name, &value, 1, 600_000)?);
                }
                "delivery_timeout" => {
                    self.delivery = Duration::from_secs(number(&name, &value, 1, 31_536_000)?);
                }
                "auth_mechanism" => {
                    self.uri.query.auth_mechanism = Some(match value.as_ref() {
                        "plain" => SASLMechanism::Plain,
                        "external" => SASLMechanism::External,
                        _ => {
                            return Err(option(
                                &name,
                                "it is plain, or external (who the client's certificate names)",
                            ));
                        }
                    });
                }
                "cacertfile" => self.files.authorities = file(),
                "certfile" => certificate = file(),
                "keyfile" => key = file(),
                _ => return Err(option(&name, &format!("there is no such option; there are {OPTIONS}"))),
            }
        }
        let files = self.files.authorities.is_some() || certificate.is_some() || key.is_some();
        if files && self.uri.scheme != AMQPScheme::AMQPS {
            return Err(refused("the URL", "certificates are for amqps://; amqp:// uses none"));
        }
        self.files.client = match (certificate, key) {
            (None, None) => None,
            (Some(certificate), Some(key)) => Some((certificate, key)),
            _ => return Err(refused("the URL", "certfile and keyfile go together")),
        };
        Ok(())
    }
}

/// The URL without its password, for people.
fn shown(url: &Url) -> String {
    let user = match url.username() {
        "" => String::new(),
        name => format!("{name}@"),
    };
    let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
    let queue = url.query_pairs().find(|(name, _)| name == "queue").map(|(_, value)| value.into_owned());
    let queue = queue.map(|name| format!("?queue={name}")).unwrap_or_default();
    shorten(&format!(
        "{}://{user}{}{port}{}{queue}",
        url.scheme(),
        url.host_str().unwrap_or_default(),
        url.path()
    ))
    .to_owned()
}

pub(super) fn refused(what: &str, why: impl Into<String>) -> Error {
    Error::Refused { what: format!("queue amqp: {what}"), why: why.into() }
}

fn option(name: &str, why: &str) -> Error {
    refused(&format!("option {:?}", shorten(name)), why)
}

fn decoded(text: &str) -> Result<String, Error> {
    let decoded = percent_decode_str(text).decode_utf8();
    let decoded =
        decoded.map_err(|_| refused("the URL", "something in it that is percent-encoded is no UTF-8"))?;
    Ok(decoded.into_owned())
}

fn queue(name: &str) -> Result<String, Error> {
    let fits = (1..=NAME_BYTES).contains(&name.len()) && !name.chars().any(char::is_control);
    if !fits || name.starts_with("amq.") {
        let why = format!(
            "a queue's name has 1 to {NAME_BYTES} bytes, no control characters, and not amq. in front"
        );
        return Err(option("queue", &why));
    }
    Ok(name.to_owned())
}

fn number(name: &str, text: &str, least: u64, most: u64) -> Result<u64, Error> {
    let number = text.parse().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| option(name, &format!("it is a number from {least} to {most}")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_a_url_says() {
        let address = Address::parse("amqp://me:se%2Fcret@broker/a%2Fb?queue=q%201&heartbeat=2").unwrap();
        assert_eq!(address.uri.authority.userinfo.password, "se/cret");
        assert_eq!((address.uri.authority.host.as_str(), address.uri.authority.port), ("broker", 5672));
        assert_eq!((address.uri.vhost.as_str(), address.queue.as_str()), ("a/b", "q 1"));
        assert_eq!(address.uri.query.heartbeat, Some(2));
        for shown in [address.shown.clone(), format!("{address:?}")] {
            assert!(shown.contains("me@broker") && !shown.contains("cret"), "{shown}");
        }
        let address = Address::parse("amqps://[::1]").unwrap();
        assert_eq!((address.uri.authority.host.as_str(), address.uri.authority.port), ("::1", 5671));
        assert_eq!((address.uri.vhost.as_str(), address.queue.as_str()), ("/", "weighbridge"));
        assert_eq!(address.uri.authority.userinfo.username, "guest");
        for (host, path) in [("1.2.3.4:7", "/%2F"), ("1.2.3.4:7", "/"), ("1.2.3.4:7", "")] {
            let address = Address::parse(&format!("amqp://a+b:c+d@{host}{path}?delivery_timeout=6")).unwrap();
            assert_eq!((address.uri.vhost.as_str(), address.uri.authority.port), ("/", 7));
            assert_eq!(address.uri.authority.userinfo.username, "a+b");
            assert_eq!(address.delivery, Duration::from_secs(6));
        }
    }

    proptest! {
        #[test]
        fn whatever_is_written_is_a_url_or_is_not(rest: String, password in "[a-z]{12}") {
            for url in [format!("amqp://{rest}"), format!("amqps://u:{password}@h/{rest}")] {
                let said = match Address::parse(&url) {
                    Ok(address) => address.shown().to_owned(),
                    Err(error) => error.to_string(),
                };
                prop_assert!(!said.contains(&password), "{said}");
            }
        }
    }

    #[test]
    fn what_is_wrong_is_said_without_secrets() {
        for (url, said) in [
            ("amqp://", "host"),
            ("amqp:x", "host"),
            ("amqp://u:secret@h:99999", "port"),
            ("amqp://u:secret@h?heartbeat=0", "heartbeat"),
            ("amqp://u:secret@h?heartbeat=many", "1 to 600"),
            ("amqp://u:secret@h?queue=", "queue"),
            ("amqp://u:secret@h?queue=amq.x", "amq."),
            ("amqp://u:secret@h?que=x", "delivery_timeout"),
            ("amqp://u:secret@h?auth_mechanism=x", "external"),
            ("amqp://u:secret@h?cacertfile=/dev/null", "amqps"),
            ("amqps://u:secret@h?certfile=/dev/null", "together"),
            ("amqp://u:2024/secret@h/v", "%2F"),
            ("amqp://u:12?secret@h/v", "%3F"),
            ("amqp://u:12#secret@h/v", "%23"),
            ("amqp://u:p@h/v#secret", "%23"),
            ("amqp://u:secret@h?queue=a&queue=b", "twice"),
            ("amqp://u:%FFsecret@h", "UTF-8"),
        ] {
            let error = Address::parse(url).unwrap_err();
            assert!(matches!(error, Error::Refused { .. }), "{url}");
            let text = error.to_string();
            assert!(text.contains(said) && !text.contains("secret"), "{url}: {text}");
        }
    }
}
