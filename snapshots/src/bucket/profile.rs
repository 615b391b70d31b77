//! Keys of S3 in the files that Amazon's own tools keep: `~/.aws/credentials` and `~/.aws/config`.
//!
//! `AWS_PROFILE` names the profile (`default` where it does not), `AWS_SHARED_CREDENTIALS_FILE` and `AWS_CONFIG_FILE`
//! the files. Of a profile are taken static keys, the region and the endpoint, each only where the environment says
//! none; and nothing at all where it says who asks: by a key, a web identity, a container's role, or nobody
//! (`AWS_SKIP_SIGNATURE`). A profile that has to be asked for keys (a sign-on, a role, a program) is refused: Amazon's
//! tools can put such keys into the environment. What a file says is never shown: it may be secret.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey as Key};
use rustix::fs::OFlags;

/// Most bytes of such a file.
const FILE_BYTES: u64 = 1 << 20;
/// What a profile may say that takes more than reading it, and what that is.
const NEEDS_MORE: [(&str, &str); 9] = [
    ("role_arn", "a role that has to be taken on"),
    ("source_profile", "a role that has to be taken on"),
    ("credential_source", "a role that has to be taken on"),
    ("web_identity_token_file", "a web identity"),
    ("sso_session", "a single sign-on"),
    ("sso_start_url", "a single sign-on"),
    ("sso_account_id", "a single sign-on"),
    ("login_session", "a login by a browser"),
    ("credential_process", "a program that gives keys"),
];

/// Why a profile cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProfileError {
    #[error("{path}: it cannot be read: {why}", path = path.display())]
    Unreadable { path: PathBuf, why: io::Error },
    #[error("{path}: it is too large, or no text; at most {FILE_BYTES} bytes of UTF-8 are read", path = path.display())]
    NoText { path: PathBuf },
    #[error(
        "{path}: line {line} is neither [a profile], nor NAME = VALUE, nor a comment; mend it",
        path = path.display()
    )]
    Malformed { path: PathBuf, line: usize },
    #[error("AWS_PROFILE names {name:?}, which stands neither in {credentials} nor in {config}",
        credentials = credentials.display(), config = config.display())]
    Absent { name: String, credentials: PathBuf, config: PathBuf },
    #[error("the profile {name:?} has one of aws_access_key_id and aws_secret_access_key without the other")]
    Half { name: String },
    #[error(
        "the profile {name:?} says {setting}, {what}, which is not done here; `eval $(aws configure export-credentials \
         --profile {name} --format env)` puts its keys into the environment for as long as they last"
    )]
    NeedsMore { name: String, setting: &'static str, what: &'static str },
}

/// What a profile says, by lower-case names.
type Settings = BTreeMap<String, String>;

/// Adds to `builder` what the profile says and the environment does not; `variable` reads the environment.
pub(super) fn add(
    mut builder: AmazonS3Builder,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<AmazonS3Builder, ProfileError> {
    let says =
        |builder: &AmazonS3Builder, key: Key| builder.get_config_value(&key).is_some_and(|v| !v.is_empty());
    let identified = [
        Key::AccessKeyId,
        Key::SecretAccessKey,
        Key::WebIdentityTokenFile,
        Key::ContainerCredentialsRelativeUri,
        Key::ContainerCredentialsFullUri,
    ];
    let unsigned = builder.get_config_value(&Key::SkipSignature).is_some_and(|value| value == "true");
    if unsigned || identified.into_iter().any(|key| says(&builder, key)) {
        return Ok(builder);
    }
    let Some(settings) = find(variable)? else { return Ok(builder) };
    let taken = [
        (Key::Region, "region"),
        (Key::Endpoint, "endpoint_url"),
        (Key::AccessKeyId, "aws_access_key_id"),
        (Key::SecretAccessKey, "aws_secret_access_key"),
        (Key::Token, "aws_session_token"),
    ];
    for (key, name) in taken {
        let said = key != Key::Token && says(&builder, key);
        if let Some(value) = settings.get(name).filter(|_| !said) {
            builder = builder.with_config(key, value);
        }
    }
    Ok(builder)
}

/// What the profile that rules says; `None` where no profile is named and there is no default one.
fn find(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Settings>, ProfileError> {
    let named = variable("AWS_PROFILE").or_else(|| variable("AWS_DEFAULT_PROFILE"));
    let place = |name: &str, file: &str| {
        let home = || Some(PathBuf::from(variable("HOME")?).join(".aws").join(file));
        variable(name).map(PathBuf::from).or_else(home)
    };
    let places = (place("AWS_SHARED_CREDENTIALS_FILE", "credentials"), place("AWS_CONFIG_FILE", "config"));
    let (Some(credentials), Some(config)) = places else { return Ok(None) };
    let name = named.clone().unwrap_or_else(|| "default".to_owned());
    let mut of_config = profile(&config, &name, true)?;
    let of_credentials = profile(&credentials, &name, false)?;
    if of_config.is_none() && of_credentials.is_none() {
        return match named {
            None => Ok(None),
            Some(name) => Err(ProfileError::Absent { name, credentials, config }),
        };
    }
    let mut settings = of_config.take().unwrap_or_default();
    // The file of keys goes first; a token belongs to the keys beside which it stands.
    let keys = ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"];
    if of_credentials.as_ref().is_some_and(|own| keys.iter().any(|key| own.contains_key(*key))) {
        settings.retain(|setting, _| !keys.contains(&setting.as_str()));
    }
    settings.extend(of_credentials.unwrap_or_default());
    check(&name, &settings)?;
    Ok(Some(settings))
}

fn check(name: &str, settings: &Settings) -> Result<(), ProfileError> {
    let keys = ["aws_access_key_id", "aws_secret_access_key"].map(|key| settings.contains_key(key));
    if keys[0] != keys[1] {
        return Err(ProfileError::Half { name: name.to_owned() });
    }
    // Keys go before everything else but a role, to which they may be the way.
    let mut more = NEEDS_MORE.iter().filter(|(setting, _)| settings.contains_key(*setting));
    match more.next() {
        Some(&(setting, what)) if !keys[0] || setting == "role_arn" => {
            Err(ProfileError::NeedsMore { name: name.to_owned(), setting, what })
        }
        _ => Ok(()),
    }
}

/// The profile `name` of the file at `path`; `None` where there is no such file, or it has no such profile.
fn profile(path: &Path, name: &str, prefixed: bool) -> Result<Option<Settings>, ProfileError> {
    let unreadable = |why| ProfileError::Unreadable { path: path.to_path_buf(), why };
    let mut bytes = Vec::new();
    // It may be a link, as mounted secrets are; a pipe is not waited for.
    match File::options().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path) {
        Ok(file) => file.take(FILE_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    let text = String::from_utf8(bytes).ok().filter(|text| text.len() as u64 <= FILE_BYTES);
    let text = text.ok_or_else(|| ProfileError::NoText { path: path.to_path_buf() })?;
    settings(&text, name, prefixed).map_err(|line| ProfileError::Malformed { path: path.to_path_buf(), line })
}

/// The settings of profile `name` in `text`, or the line that makes no sense. In a configuration sections are named
/// `profile NAME`, except `default`, which may be either.
fn settings(text: &str, name: &str, prefixed: bool) -> Result<Option<Settings>, usize> {
    let mut found: Option<Settings> = None;
    let mut within = false;
    // How far the setting is indented that has none but nested ones, which are indented further.
    let mut nesting = None;
    for (at, line) in text.lines().enumerate() {
        let content = line.trim();
        let indent = line.len() - line.trim_start().len();
        if content.is_empty() || content.starts_with(['#', ';']) {
            continue;
        }
        if let Some(rest) = content.strip_prefix('[') {
            let (section, _) = rest.split_once(']').ok_or(at + 1)?;
            within = is_profile(section.trim(), name, prefixed);
            nesting = None;
            if within {
                found.get_or_insert_default();
            }
            continue;
        }
        if nesting.is_some_and(|outer| indent > outer) {
            continue;
        }
        let (setting, value) = content.split_once('=').ok_or(at + 1)?;
        // A comment behind a value begins with a space.
        let value = [" #", " ;", "\t#", "\t;"]
            .iter()
            .fold(value, |value, mark| value.split(mark).next().unwrap_or(value));
        nesting = value.trim().is_empty().then_some(indent);
        if let Some(settings) = found.as_mut().filter(|_| within) {
            settings.insert(setting.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    Ok(found)
}

fn is_profile(section: &str, name: &str, prefixed: bool) -> bool {
    let quoted = |text: &str| text.trim().trim_matches(['"', '\'']) == name;
    let of_prefix = section.strip_prefix("profile").filter(|rest| rest.starts_with([' ', '\t']));
    match of_prefix {
        Some(rest) if prefixed => quoted(rest),
        _ => (!prefixed || name == "default") && section == name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREDENTIALS: &str = "# keys\n[default]\naws_access_key_id = AKDEFAULT\naws_secret_access_key=SK=1 # why\n\n\
                               [other]\naws_access_key_id=AKOTHER\naws_secret_access_key = hidden\n\
                               aws_session_token = T\n[half]\naws_access_key_id = AKHALF\n";
    const CONFIG: &str = "[default]\n region = eu-1\n s3 =\n   max_concurrent_requests = 20\n\
                          \x20  endpoint_url = http://no\n\
                          [profile other]\nregion=eu-2\nendpoint_url = https://s3.example.org\n\
                          [profile sso]\nsso_session = corp\n[sso-session corp]\nsso_region = x\n\
                          [profile program]\ncredential_process = /bin/hidden\n\
                          [profile role]\nrole_arn = arn:hidden\nsource_profile = default\n\
                          [profile region only]\nregion = eu-3\n[other2]\nregion = never\n";

    struct Home(tempfile::TempDir);

    impl Home {
        fn new(credentials: &str, config: &str) -> Self {
            let home = tempfile::tempdir().unwrap();
            std::fs::create_dir(home.path().join(".aws")).unwrap();
            std::fs::write(home.path().join(".aws/credentials"), credentials).unwrap();
            std::fs::write(home.path().join(".aws/config"), config).unwrap();
            Self(home)
        }

        /// The builder with what the profile adds to it.
        fn add(
            &self,
            builder: AmazonS3Builder,
            profile: Option<&str>,
        ) -> Result<AmazonS3Builder, ProfileError> {
            add(builder, |name| match name {
                "HOME" => Some(self.0.path().to_str().unwrap().to_owned()),
                "AWS_PROFILE" => profile.map(ToOwned::to_owned),
                _ => None,
            })
        }

        fn refused(&self, profile: &str) -> String {
            let error = self.add(AmazonS3Builder::new(), Some(profile)).unwrap_err().to_string();
            assert!(!error.contains("hidden") && !error.contains("AK"), "{error}");
            error
        }
    }

    fn of(builder: &AmazonS3Builder, key: Key) -> Option<String> {
        builder.get_config_value(&key)
    }

    #[test]
    fn keys_region_and_endpoint_come_from_the_profile_that_is_named() {
        let home = Home::new(CREDENTIALS, CONFIG);
        let default = home.add(AmazonS3Builder::new(), None).unwrap();
        assert_eq!(of(&default, Key::AccessKeyId).as_deref(), Some("AKDEFAULT"));
        assert_eq!(of(&default, Key::SecretAccessKey).as_deref(), Some("SK=1"));
        assert_eq!(of(&default, Key::Region).as_deref(), Some("eu-1"));
        assert_eq!((of(&default, Key::Endpoint), of(&default, Key::Token)), (None, None));
        let other = home.add(AmazonS3Builder::new(), Some("other")).unwrap();
        assert_eq!(of(&other, Key::AccessKeyId).as_deref(), Some("AKOTHER"));
        assert_eq!(of(&other, Key::Token).as_deref(), Some("T"));
        assert_eq!(of(&other, Key::Endpoint).as_deref(), Some("https://s3.example.org"));
        let region = home.add(AmazonS3Builder::new(), Some("region only")).unwrap();
        assert_eq!(
            (of(&region, Key::AccessKeyId), of(&region, Key::Region)),
            (None, Some("eu-3".to_owned()))
        );
    }

    #[test]
    fn the_environment_goes_first() {
        let home = Home::new(CREDENTIALS, CONFIG);
        for key in [Key::AccessKeyId, Key::WebIdentityTokenFile, Key::ContainerCredentialsFullUri] {
            let built = home.add(AmazonS3Builder::new().with_config(key, "mine"), Some("sso")).unwrap();
            assert_eq!(of(&built, Key::SecretAccessKey), None);
        }
        let unsigned = AmazonS3Builder::new().with_skip_signature(true);
        assert_eq!(of(&home.add(unsigned, None).unwrap(), Key::AccessKeyId), None);
        let here = AmazonS3Builder::new().with_region("here").with_endpoint("https://mine.example.org");
        let built = home.add(here, Some("other")).unwrap();
        assert_eq!(of(&built, Key::Region).as_deref(), Some("here"));
        assert_eq!(of(&built, Key::Endpoint).as_deref(), Some("https://mine.example.org"));
        assert_eq!(of(&built, Key::AccessKeyId).as_deref(), Some("AKOTHER"));
    }

    #[test]
    fn what_cannot_be_used_is_refused_without_its_content() {
        let home = Home::new(CREDENTIALS, CONFIG);
        assert!(home.refused("half").contains("without the other"));
        assert!(home.refused("sso").contains("single sign-on"));
        assert!(home.refused("program").contains("credential_process"));
        assert!(home.refused("role").contains("role_arn"));
        for absent in ["nobody", "other2", "profile other", "corp"] {
            assert!(home.refused(absent).contains("neither"), "{absent}");
        }
        assert!(Home::new("[default]\nhidden\n", "").refused("default").contains("line 2"));
        assert!(Home::new("", "[hidden\n").refused("default").contains("line 1"));
        let large = "#".repeat(usize::try_from(FILE_BYTES).unwrap() + 1);
        assert!(Home::new(&large, "").refused("default").contains("too large"));
        std::fs::write(home.0.path().join(".aws/config"), b"\xff").unwrap();
        assert!(home.refused("default").contains("no text"));
        std::fs::remove_file(home.0.path().join(".aws/config")).unwrap();
        std::fs::create_dir(home.0.path().join(".aws/config")).unwrap();
        assert!(home.refused("default").contains("cannot be read"));
    }

    #[test]
    fn without_files_nothing_is_added_and_nothing_is_wrong() {
        let home = Home(tempfile::tempdir().unwrap());
        assert_eq!(of(&home.add(AmazonS3Builder::new(), None).unwrap(), Key::AccessKeyId), None);
        assert!(home.refused("other").contains("AWS_PROFILE"));
        let nowhere = add(AmazonS3Builder::new(), |_| None).unwrap();
        assert_eq!(of(&nowhere, Key::AccessKeyId), None);
    }
}
