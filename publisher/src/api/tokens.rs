//! Who may ask for what: bearer tokens, of which a file keeps only hashes, with their roles and models.
//!
//! ```toml
//! [[token]]
//! name = "ranking-hosts"
//! hash = "BLAKE3 of the token, 64 hexadecimal digits"
//! roles = ["fetch"]
//! models = ["ranking-*"]
//! expires = "2027-06-30T00:00:00Z"   # may be left out
//! ```
//!
//! A token is 32 bytes of chance, so that a fast hash keeps it as well as a slow one would. The file is read again when
//! it changes; where it cannot be read then, what was known last goes on being known, and that is said.

use std::collections::HashMap;
use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use wildmatch::WildMatch;

use weighbridge_schemas::names::ModelName;
use weighbridge_schemas::time::Timestamp;

use crate::clock;
use crate::config::read_text;
use crate::error::{Failure, Result};

/// What every token begins with, so that one that was left lying about is recognised.
const PREFIX: &str = "wb_";
/// Bytes of chance in a token.
const SECRET_BYTES: usize = 32;
/// Most tokens of a file.
const MOST_TOKENS: usize = 10_000;
/// Longest name of a token, in bytes.
const NAME_BYTES: usize = 128;
/// How often the file is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// What a caller may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Hand over checkpoints, and follow what comes of them.
    Drop,
    /// Move channels, publish again, look after what is stuck.
    Operate,
    /// Fetch and watch snapshots, and tell how a host stands.
    Fetch,
}

impl Role {
    /// The stable name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Drop => "drop",
            Self::Operate => "operate",
            Self::Fetch => "fetch",
        }
    }
}

/// One entry of a file of tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Whose it is, for logs and for the channel's log.
    pub name: String,
    /// The BLAKE3 of the token.
    pub hash: String,
    /// What its bearer may do.
    pub roles: Vec<Role>,
    /// For which models: names in which `*` stands for anything; absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models: Option<Vec<String>>,
    /// Until when; absent: for ever.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<Timestamp>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    token: Vec<Entry>,
}

type Hash = [u8; blake3::OUT_LEN];

/// Who asks, once that is known.
#[derive(Debug, Clone)]
pub struct Caller {
    known: Arc<Known>,
}

#[derive(Debug)]
struct Known {
    name: String,
    hash: Hash,
    roles: Vec<Role>,
    /// Absent: all.
    models: Option<Vec<WildMatch>>,
    expires: Option<Timestamp>,
}

impl Caller {
    /// Who may do anything: whoever is on this machine, where there are no tokens.
    #[must_use]
    pub fn local() -> Self {
        let known = Known {
            name: "local".to_owned(),
            hash: Hash::default(),
            roles: vec![Role::Drop, Role::Operate, Role::Fetch],
            models: None,
            expires: None,
        };
        Self { known: Arc::new(known) }
    }

    /// Whether they are let in for being on this machine, where there are no tokens.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.known.hash == Hash::default()
    }

    /// The token's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.known.name
    }

    /// Whether it has `role` at all.
    #[must_use]
    pub fn has(&self, role: Role) -> bool {
        self.known.roles.contains(&role)
    }

    /// Whether it has `role` for `model`.
    #[must_use]
    pub fn may(&self, role: Role, model: &ModelName) -> bool {
        self.has(role) && self.sees(model)
    }

    /// Whether it has anything to do with `model`.
    #[must_use]
    pub fn sees(&self, model: &ModelName) -> bool {
        let patterns = self.known.models.as_ref();
        patterns.is_none_or(|patterns| patterns.iter().any(|pattern| pattern.matches(model.as_str())))
    }

    /// Whether it is for all models.
    #[must_use]
    pub fn sees_all(&self) -> bool {
        self.known.models.is_none()
    }
}

/// The tokens that are known now.
#[derive(Debug)]
pub struct Tokens {
    path: PathBuf,
    /// What was read first, hashed.
    first: blake3::Hash,
    known: ArcSwap<HashMap<Hash, Arc<Known>>>,
}

impl Tokens {
    /// Reads the tokens in the file at `path`.
    ///
    /// # Errors
    /// Where it cannot be read, does not parse, or everybody may write it: exit code 2.
    pub fn read(path: &Path) -> Result<Self> {
        let text = text(path)?;
        let known = parse(&text).map_err(|failure| failure.while_doing(path.display()))?;
        let first = blake3::hash(text.as_bytes());
        Ok(Self { path: path.to_path_buf(), first, known: ArcSwap::from_pointee(known) })
    }

    /// Whose token `token` is; `None` where it is nobody's, or is nobody's any more.
    #[must_use]
    pub fn caller(&self, token: &str) -> Option<Caller> {
        let known = self.known.load().get(blake3::hash(token.as_bytes()).as_bytes()).cloned()?;
        Some(Caller { known }).filter(in_time)
    }

    /// Who `caller` is now: what is known of the token may have changed, or it is nobody's any more.
    #[must_use]
    pub fn again(&self, caller: &Caller) -> Option<Caller> {
        let known = self.known.load().get(&caller.known.hash).cloned()?;
        Some(Caller { known }).filter(in_time)
    }

    /// Reads the file again when it changes, for as long as this runs.
    pub async fn follow(self: Arc<Self>) {
        let mut last = self.first;
        loop {
            tokio::time::sleep(LOOK).await;
            let tokens = Arc::clone(&self);
            let Ok(read) = tokio::task::spawn_blocking(move || text(&tokens.path)).await else { continue };
            // What cannot be read is as a text of its own: it is told once.
            let (now, parsed) = match read {
                Ok(text) => (blake3::hash(text.as_bytes()), parse(&text)),
                Err(failure) => (blake3::hash(failure.to_string().as_bytes()), Err(failure)),
            };
            if now == last {
                continue;
            }
            last = now;
            match parsed {
                Ok(known) => {
                    tracing::info!(tokens = known.len(), path = %self.path.display(), "tokens were read again");
                    self.known.store(Arc::new(known));
                }
                Err(failure) => {
                    let path = self.path.display();
                    tracing::error!(%path, %failure, "tokens cannot be read again; those known so far stay");
                }
            }
        }
    }
}

fn in_time(caller: &Caller) -> bool {
    caller.known.expires.is_none_or(|expires| clock::now() < expires)
}

fn text(path: &Path) -> Result<String> {
    let bad =
        |why: &dyn fmt::Display| Failure::usage(format!("{}: the file of tokens: {why}", path.display()));
    let found = std::fs::metadata(path).map_err(|error| bad(&error))?;
    if found.permissions().mode() & 0o002 != 0 {
        return Err(bad(&"everybody may write it, and let anybody in; chmod o-w"));
    }
    read_text(path).map_err(|error| bad(&error))
}

fn entries(text: &str) -> Result<Vec<Entry>> {
    let file: File = toml::from_str(text).map_err(|error| {
        let line =
            error.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
        Failure::usage(format!("line {line}: {}", error.message()))
    })?;
    if file.token.len() > MOST_TOKENS {
        return Err(Failure::usage(format!("it has more than {MOST_TOKENS} tokens")));
    }
    Ok(file.token)
}

fn parse(text: &str) -> Result<HashMap<Hash, Arc<Known>>> {
    let mut known = HashMap::new();
    for entry in entries(text)? {
        let name = entry.name.clone();
        let bad = |why: &str| Failure::usage(format!("token {name:?}: {why}"));
        check_name(&entry.name)?;
        let hash = blake3::Hash::from_hex(&entry.hash)
            .map_err(|_| bad("its hash is not 64 hexadecimal digits; `weighbridge token new` writes it"))?;
        if entry.roles.is_empty() {
            return Err(bad("it has no roles; name some of drop, operate, fetch"));
        }
        if entry.models.as_ref().is_some_and(Vec::is_empty) {
            return Err(bad("its list of models is empty; leave it out for all models"));
        }
        let models = entry.models.map(|models| models.iter().map(|model| WildMatch::new(model)).collect());
        let (name, roles, expires) = (entry.name, entry.roles, entry.expires);
        let one = Known { name, hash: *hash.as_bytes(), roles, models, expires };
        if known.insert(*hash.as_bytes(), Arc::new(one)).is_some() {
            return Err(bad("another entry has the same hash"));
        }
    }
    Ok(known)
}

/// Checks what a token is called.
///
/// # Errors
/// Where it is empty, too long, or would spoil a log.
fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name.len() > NAME_BYTES || name.chars().any(char::is_control) {
        return Err(Failure::usage(format!(
            "a token's name has 1 to {NAME_BYTES} bytes, and no control characters"
        )));
    }
    Ok(())
}

/// A token that was just made: the only time it is seen.
pub struct Secret(String);

impl Secret {
    /// The token.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// A new token, and the lines that make it known.
///
/// # Errors
/// Where the name, a pattern or the roles are no good, or the system gives no chance.
pub fn new(
    name: &str,
    roles: &[Role],
    models: Option<&[String]>,
    expires: Option<Timestamp>,
) -> Result<(Secret, String)> {
    let mut bytes = [0; SECRET_BYTES];
    getrandom::fill(&mut bytes).map_err(|error| Failure::internal("random bytes", error))?;
    let secret = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes));
    let entry = Entry {
        name: name.to_owned(),
        hash: blake3::hash(secret.as_bytes()).to_hex().to_string(),
        roles: roles.to_vec(),
        models: models.map(<[String]>::to_vec),
        expires,
    };
    let text = toml::to_string(&File { token: vec![entry] })
        .map_err(|error| Failure::internal("writing a token", error))?;
    parse(&text)?;
    Ok((Secret(secret), text))
}

/// The names in a file's text, with what else is known of each.
///
/// # Errors
/// Where it does not parse.
pub fn listed(text: &str) -> Result<Vec<Entry>> {
    parse(text)?;
    entries(text)
}

/// A file's text without the tokens of a name, all or all but the last one in the file, and how many those were.
///
/// # Errors
/// Where it does not parse.
pub fn without(text: &str, name: &str, keep_newest: bool) -> Result<(String, usize)> {
    let mut kept = entries(text)?;
    let all = kept.len();
    let newest = kept.iter().rposition(|entry| entry.name == name).filter(|_| keep_newest);
    let mut place = 0;
    kept.retain(|entry| {
        place += 1;
        entry.name != name || newest == Some(place - 1)
    });
    let gone = all - kept.len();
    let text =
        toml::to_string(&File { token: kept }).map_err(|error| Failure::internal("writing tokens", error))?;
    Ok((text, gone))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(roles: &[Role], models: Option<&[&str]>, expires: Option<&str>) -> (Secret, String) {
        let models: Option<Vec<_>> =
            models.map(|models| models.iter().map(|model| (*model).to_owned()).collect());
        new("n", roles, models.as_deref(), expires.map(|text| text.parse().unwrap())).unwrap()
    }

    fn kept(text: &str) -> (tempfile::TempDir, Tokens) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens.toml");
        std::fs::write(&path, text).unwrap();
        let tokens = Tokens::read(&path).unwrap();
        (folder, tokens)
    }

    #[test]
    fn a_token_lets_its_roles_in_for_its_models_and_nobody_else() {
        let (secret, text) = made(&[Role::Fetch], Some(&["ranking-*", "dlrm"]), None);
        assert!(!text.contains(secret.reveal()), "only its hash is kept");
        let (_folder, tokens) = kept(&text);
        let caller = tokens.caller(secret.reveal()).unwrap();
        let may = |role, model: &str| caller.may(role, &model.parse().unwrap());
        assert!(may(Role::Fetch, "ranking-a.b") && may(Role::Fetch, "dlrm"));
        assert!(!may(Role::Fetch, "dlrm2") && !may(Role::Fetch, "my-ranking-a") && !caller.sees_all());
        assert!(!may(Role::Operate, "dlrm") && !may(Role::Drop, "dlrm"));
        for wrong in ["", "wb_", &secret.reveal()[1..], &secret.reveal().to_uppercase()] {
            assert!(tokens.caller(wrong).is_none());
        }
    }

    #[test]
    fn a_token_ends_when_it_expires_or_is_taken_out() {
        let (past, text) = made(&[Role::Drop], None, Some("2020-01-01T00:00:00Z"));
        let (future, more) = made(&[Role::Drop], None, Some("2100-01-01T00:00:00Z"));
        let (folder, tokens) = kept(&format!("{text}{more}"));
        assert!(tokens.caller(past.reveal()).is_none());
        let caller = tokens.caller(future.reveal()).unwrap();
        assert!(caller.sees_all() && tokens.again(&caller).is_some());
        tokens.known.store(Arc::default());
        assert!(tokens.again(&caller).is_none() && tokens.caller(future.reveal()).is_none());
        drop(folder);
    }

    #[test]
    fn tokens_of_a_name_are_taken_out_all_or_all_but_the_newest() {
        let (old, text) = made(&[Role::Drop], None, None);
        let (new, more) = made(&[Role::Drop], None, None);
        let text = format!("{text}\n{more}");
        let (kept, gone) = without(&text, "n", true).unwrap();
        let (_folder, tokens) = self::kept(&kept);
        assert!(gone == 1 && tokens.caller(old.reveal()).is_none() && tokens.caller(new.reveal()).is_some());
        assert_eq!(without(&kept, "n", true).unwrap().1, 0);
        assert_eq!(without(&text, "n", false).unwrap().1, 2);
        assert_eq!(without(&text, "other", false).unwrap().1, 0);
    }

    #[test]
    fn files_that_would_let_in_more_or_less_than_was_meant_are_refused() {
        let (_, good) = made(&[Role::Drop], Some(&["a"]), None);
        parse(&good).unwrap();
        for (from, to) in [
            ("roles = [\"drop\"]", "roles = []"),
            ("models = [\"a\"]", "models = []"),
            ("models = ", "model = "),
            ("name = \"n\"", "name = \"\""),
            ("name = \"n\"", "name = \"a\\nb\""),
            ("hash = \"", "hash = \"0"),
            ("\"drop\"", "\"admin\""),
        ] {
            let bad = good.replace(from, to);
            assert!(bad != good && parse(&bad).is_err(), "{bad}");
        }
        assert!(parse(&format!("{good}{good}")).unwrap_err().message.contains("same hash"));
    }

    #[tokio::test]
    async fn the_file_is_read_again_when_it_changes_and_kept_when_it_is_damaged() {
        let (secret, text) = made(&[Role::Fetch], None, None);
        let (folder, tokens) = kept("");
        let (path, tokens) = (folder.path().join("tokens.toml"), Arc::new(tokens));
        let following = tokio::spawn(Arc::clone(&tokens).follow());
        let known = async |wanted: bool| {
            for _ in 0..100 {
                if tokens.caller(secret.reveal()).is_some() == wanted {
                    return true;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            false
        };
        std::fs::write(&path, &text).unwrap();
        assert!(known(true).await);
        std::fs::write(&path, "damaged").unwrap();
        tokio::time::sleep(2 * LOOK).await;
        assert!(known(true).await);
        std::fs::write(&path, "").unwrap();
        assert!(known(false).await);
        following.abort();
    }
}
