//! The policy `weighbridge.policy/v1` (TOML): ordered rules, gates, channel, retention.
//!
//! A person writes it by hand, so an unknown field is an error. The digest that goes into snapshot manifests
//! covers the parsed *rules* alone: moving a gate's bound or a channel's name makes no other snapshot.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::canonical;
use crate::encoding::Encoding;
use crate::error::{DocumentError, shorten};
use crate::ids::RulesDigest;
use crate::limits;
use crate::names::{ChannelName, TensorName};

mod artifacts;
mod encode;
mod keep_rows;
mod list;
mod promotion;
mod retention;
mod rule;

pub use artifacts::{Artifacts, ArtifactsFile};
pub use encode::{CastDtype, EncodeFile, EncodeTable, OddWidth, Wanted};
pub use keep_rows::{INDEX_REMAPPING, KeepRows, KeepRowsFile, KeepRowsTensor};
pub use promotion::Promotion;
pub use retention::Retention;
use rule::{CanonicalRule, Rule, substitute};
pub use rule::{RuleFile, Treatment};

const DOCUMENT: &str = "policy";

/// The default policy, used where none is given: optimizer state is dropped, embedding tables become `int8`, all
/// else is kept. It is ordinary TOML, to copy and change.
pub const DEFAULT_POLICY: &str = include_str!("default_policy.toml");

/// The `schema` field of a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum PolicySchema {
    /// Version 1.
    #[default]
    #[serde(rename = "weighbridge.policy/v1")]
    V1,
}

/// A policy as a person writes it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PolicyFile {
    /// Always `weighbridge.policy/v1`.
    pub schema: PolicySchema,
    /// In order; the first match wins; what matches no rule is kept as it is.
    #[serde(default, rename = "rule", deserialize_with = "rules")]
    pub rules: Vec<RuleFile>,
    /// Which files beside the checkpoint are published with it.
    #[serde(default, skip_serializing_if = "ArtifactsFile::is_empty")]
    pub artifacts: ArtifactsFile,
    /// What has to hold before a channel moves.
    #[serde(default)]
    pub gates: Gates,
    /// Which channel a publish moves, and when.
    #[serde(default)]
    pub channel: ChannelPolicy,
    /// How a queued publish goes about its work.
    #[serde(default)]
    pub job: JobPolicy,
    /// Where a snapshot goes that has stood on the channel for a while.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promotion: Option<Promotion>,
    /// What `gc` keeps.
    #[serde(default)]
    pub retention: Retention,
}

fn rules<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<RuleFile>, D::Error> {
    list::deserialize(deserializer, "a list of rules, each of which begins with [[rule]]")
}

/// What to do about values that a gate finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Quarantine the snapshot.
    #[default]
    Reject,
    /// Publish all the same; the report counts them.
    Allow,
}

/// Bounds. One that is not set is not applied; `non_finite` rejects unless told otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Gates {
    /// NaN or infinity in a tensor, or a finite value that overflows when it is encoded.
    #[serde(default)]
    pub non_finite: Verdict,
    /// Largest root-mean-square reconstruction error of a tensor, relative to the tensor's root mean square.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rms_error: Option<f64>,
    /// Largest absolute reconstruction error of any element.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_abs_error: Option<f64>,
}

/// Which channel a publish moves, and when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChannelPolicy {
    /// The channel's name.
    #[serde(default = "prod")]
    pub name: ChannelName,
    /// Whether a waiting older step gives way to a newer one that is queued behind it. It concerns queued publishes
    /// alone, and changes nothing where a checkpoint is published at once.
    #[serde(default = "yes")]
    pub latest_wins: bool,
    /// Whether another training run may take the channel by publishing.
    #[serde(default)]
    pub other_run: OtherRun,
}

/// Whether another training run may take a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OtherRun {
    /// Only `promote` hands the channel to another run.
    #[default]
    Refuse,
    /// Any run's publish takes it.
    Take,
}

impl Default for ChannelPolicy {
    fn default() -> Self {
        Self { name: prod(), latest_wins: true, other_run: OtherRun::Refuse }
    }
}

#[expect(clippy::unwrap_used, reason = "the literal is a valid name; a test parses the default policy")]
fn prod() -> ChannelName {
    "prod".parse().unwrap()
}

const fn yes() -> bool {
    true
}

/// How a queued publish goes about its work. It changes nothing where a checkpoint is published at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JobPolicy {
    /// For how long a checkpoint that is not complete yet is waited for, in seconds.
    #[serde(default = "quarter_of_an_hour")]
    pub grace_seconds: u32,
    /// For how long what fails, but may succeed later, is tried again, in seconds.
    #[serde(default = "hour")]
    pub retry_seconds: u32,
    /// Which workers convert it.
    #[serde(default)]
    pub device: JobDevice,
    /// How long a part for a GPU waits for one, in seconds, before any worker takes it.
    #[serde(default = "ten_minutes")]
    pub gpu_wait_seconds: u32,
}

/// Which workers convert a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobDevice {
    /// Those without a GPU.
    Cpu,
    /// Those with one; any, once a part has waited for `gpu_wait_seconds`.
    Gpu,
    /// Whoever comes first.
    #[default]
    Auto,
}

impl Default for JobPolicy {
    fn default() -> Self {
        Self {
            grace_seconds: quarter_of_an_hour(),
            retry_seconds: hour(),
            device: JobDevice::Auto,
            gpu_wait_seconds: ten_minutes(),
        }
    }
}

const fn quarter_of_an_hour() -> u32 {
    900
}

const fn hour() -> u32 {
    3600
}

const fn ten_minutes() -> u32 {
    600
}

/// A policy that has been checked: every pattern, name and encoding in it is good.
#[derive(Debug, Clone)]
pub struct Policy {
    rules: Vec<Rule>,
    /// Whether a person wrote the rules, and so wants to hear of those that match nothing.
    written_by_hand: bool,
    /// Which files beside the checkpoint are published with it.
    pub artifacts: Artifacts,
    /// What has to hold before a channel moves.
    pub gates: Gates,
    /// Which channel a publish moves, and when.
    pub channel: ChannelPolicy,
    /// How a queued publish goes about its work.
    pub job: JobPolicy,
    /// Where a snapshot goes that has stood on the channel for a while.
    pub promotion: Option<Promotion>,
    /// What `gc` keeps.
    pub retention: Retention,
}

impl Policy {
    /// Reads a policy.
    ///
    /// # Errors
    /// [`DocumentError`] where the text is over 64 KiB, is no TOML, has an unknown field, or where a rule makes no
    /// sense; the message tells the line or the rule.
    pub fn parse(text: &str) -> Result<Self, DocumentError> {
        if text.len() > limits::POLICY_BYTES {
            let why = format!("{} bytes of TOML; at most {}", text.len(), limits::POLICY_BYTES);
            return Err(DocumentError::OverLimit { document: DOCUMENT, why });
        }
        let file: PolicyFile = toml::from_str(text).map_err(|error| {
            let start = error.span().map_or(0, |span| span.start);
            let line = 1 + text.bytes().take(start).filter(|&byte| byte == b'\n').count();
            DocumentError::malformed(DOCUMENT, format!("line {line}: {}", error.message()))
        })?;
        Self::check(file)
    }

    fn check(file: PolicyFile) -> Result<Self, DocumentError> {
        if file.rules.len() > limits::POLICY_RULES {
            let why = format!("{} rules; at most {}", file.rules.len(), limits::POLICY_RULES);
            return Err(DocumentError::OverLimit { document: DOCUMENT, why });
        }
        let rules = file.rules.into_iter().enumerate().map(|(index, rule)| {
            let place = place(index, &rule.pattern);
            Rule::check(rule).map_err(|error| match error {
                DocumentError::Malformed { why, .. } => {
                    DocumentError::malformed(DOCUMENT, format!("{place}: {why}"))
                }
                other => other,
            })
        });
        let rules = rules.collect::<Result<_, _>>()?;
        for (name, bound) in
            [("max_rms_error", file.gates.max_rms_error), ("max_abs_error", file.gates.max_abs_error)]
        {
            if bound.is_some_and(|bound| !bound.is_finite() || bound < 0.0) {
                return Err(DocumentError::malformed(
                    DOCUMENT,
                    format!("gates.{name} is a number from 0 on"),
                ));
            }
        }
        if file.promotion.as_ref().is_some_and(|promotion| promotion.to == file.channel.name) {
            let why = "promotion.to is another channel than channel.name, which it comes from";
            return Err(DocumentError::malformed(DOCUMENT, why));
        }
        file.retention.check().map_err(|why| DocumentError::malformed(DOCUMENT, why))?;
        Ok(Self {
            rules,
            written_by_hand: true,
            artifacts: Artifacts::check(file.artifacts)?,
            gates: file.gates,
            channel: file.channel,
            job: file.job,
            promotion: file.promotion,
            retention: file.retention,
        })
    }

    /// What the first matching rule says about the tensor `name`, and which rule that is, counted from 0. Without a
    /// match it is kept as it is.
    ///
    /// # Errors
    /// [`DocumentError::UnsafeTensorName`] where a rule makes a name that tensors may not have.
    pub fn treat(&self, name: &TensorName) -> Result<(Option<usize>, Treatment), DocumentError> {
        let Some((at, rule, captures)) = self.matching(name) else {
            let wanted = Wanted::plain(Encoding::Keep);
            return Ok((None, Treatment::Publish { name: name.clone(), wanted, keep_rows: None }));
        };
        let CanonicalRule { drop, wanted, rename, keep_rows, .. } = &rule.written;
        if *drop {
            return Ok((Some(at), Treatment::Drop));
        }
        let name = match rename {
            Some(template) => substitute(template, &captures).parse()?,
            None => name.clone(),
        };
        let keep_rows = keep_rows.as_ref().map(|rows| rows.resolve(&captures)).transpose()?;
        Ok((Some(at), Treatment::Publish { name, wanted: *wanted, keep_rows }))
    }

    /// The rule that the tensor `name` falls under, for people: its number and its pattern.
    #[must_use]
    pub fn place_of_rule(&self, name: &TensorName) -> Option<String> {
        let (index, rule, _) = self.matching(name)?;
        Some(place(index, &rule.written.pattern))
    }

    /// The first rule whose pattern matches: its index, and what its wildcards stand for.
    fn matching<'n>(&self, name: &'n TensorName) -> Option<(usize, &Rule, Vec<&'n str>)> {
        let mut rules = self.rules.iter().enumerate();
        rules.find_map(|(index, rule)| Some((index, rule, rule.pattern.captures(name.as_str())?)))
    }

    /// Whether it is the default policy, which nobody wrote for the model at hand.
    #[must_use]
    pub const fn is_default(&self) -> bool {
        !self.written_by_hand
    }

    /// The rules (their number from 1 on, and their pattern) that are not in `used`, which counts from 0. None of the
    /// default policy, which speaks of what a checkpoint may hold.
    pub fn unused_rules(&self, used: &BTreeSet<usize>) -> impl Iterator<Item = (usize, &str)> {
        let rules =
            self.rules.iter().enumerate().filter(|(at, _)| self.written_by_hand && !used.contains(at));
        rules.map(|(at, rule)| (at + 1, rule.written.pattern.as_str()))
    }

    /// The digest of the rules, whatever way they were written; and of the patterns of artifacts, where there are any.
    #[must_use]
    pub fn rules_digest(&self) -> RulesDigest {
        let rules: Vec<_> = self.rules.iter().map(|rule| &rule.written).collect();
        if self.artifacts.is_empty() {
            return RulesDigest::of(&canonical::bytes(&rules));
        }
        let mut object = canonical::Object::default();
        object.field("artifacts", &self.artifacts.written);
        object.array("rules", &rules);
        RulesDigest::of(&object.finish())
    }
}

/// A rule for people, who count from 1.
fn place(index: usize, pattern: &str) -> String {
    format!("rule {} ({:?})", index + 1, shorten(pattern))
}

impl Default for Policy {
    /// The policy in [`DEFAULT_POLICY`].
    #[expect(clippy::expect_used, reason = "the text is a constant, and a test parses it")]
    fn default() -> Self {
        let policy = Self::parse(DEFAULT_POLICY).expect("the default policy parses");
        Self { written_by_hand: false, ..policy }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(rules: &str) -> Result<Policy, DocumentError> {
        Policy::parse(&format!("schema = \"weighbridge.policy/v1\"\n{rules}"))
    }

    fn treat(policy: &Policy, name: &str) -> Treatment {
        policy.treat(&name.parse().unwrap()).unwrap().1
    }

    fn published(name: &str, encoding: Encoding) -> Treatment {
        Treatment::Publish { name: name.parse().unwrap(), wanted: Wanted::plain(encoding), keep_rows: None }
    }

    #[test]
    fn the_default_drops_optimizer_state_and_encodes_tables() {
        let policy = Policy::default();
        for name in [
            "optim.state.ebc.embedding_bags.t1.weight.t1.momentum1",
            "optimizer.state.0.exp_avg",
            "ebc.embedding_bags.t1.weight.t1.momentum1",
            "state.optimizer.param_groups.0.lr",
        ] {
            assert_eq!(treat(&policy, name), Treatment::Drop, "{name}");
        }
        for name in ["model.ebc.embedding_bags.t1.weight", "embedding_bags.t.weight", "m.embeddings.u.weight"]
        {
            assert_eq!(treat(&policy, name), published(name, Encoding::Int8Sbf32));
        }
        for name in ["model.over.0.weight", "model.optimism.weight", "step"] {
            assert_eq!(treat(&policy, name), published(name, Encoding::Keep));
        }
        assert_eq!(policy.channel.name.as_str(), "prod");
        assert_eq!(policy.gates.non_finite, Verdict::Reject);
    }

    #[test]
    fn the_first_match_wins_and_renames() {
        let policy = policy(
            r#"
            [[rule]]
            match = "model.ebc.embedding_bags.*.weight"
            encode = { encoding = "int8" }
            rename = "ebc.$1"
            [[rule]]
            match = "**"
            encode = "bf16"
            "#,
        )
        .unwrap();
        let table = treat(&policy, "model.ebc.embedding_bags.t1.weight");
        assert_eq!(table, published("ebc.t1", Encoding::Int8Sbf32));
        assert_eq!(treat(&policy, "x"), published("x", Encoding::Bf16));
    }

    #[test]
    fn captures_are_put_together_in_any_order_and_number() {
        let renamed = |pattern: &str, template: &str, name: &str| {
            let policy = policy(&format!("[[rule]]\nmatch = '{pattern}'\nrename = '{template}'")).unwrap();
            let Treatment::Publish { name, .. } = treat(&policy, name) else { panic!("dropped") };
            name.to_string()
        };
        assert_eq!(renamed("*.*.weight", "$2/$1.$2", "a.b.weight"), "b/a.b");
        assert_eq!(renamed("model.**.bags.*.weight", "$1:$2", "model.x.y.bags.t.weight"), "x.y:t");
        assert_eq!(renamed("**.weight", "w$1", "weight"), "w", "what matched nothing is empty");
        assert_eq!(renamed("a.*", "$10", "a.x"), "x0", "one digit");
        assert_eq!(renamed("a.*", "plain", "a.x"), "plain");
        assert_eq!(renamed("a.*", "$$1.$1$$$1$$", "a.x"), "$1.x$x$", "two stand for one");
        let nine = ["*"; 9].join(".");
        assert_eq!(renamed(&nine, "$9$8$7$6$5$4$3$2$1", "1.2.3.4.5.6.7.8.9"), "987654321");
    }

    #[test]
    fn rows_to_keep_are_named_by_file_or_tensor() {
        let kept = |rule: &str, name: &str| {
            let rule = format!("[[rule]]\nmatch = 'bags.*.*'\nkeep_rows = {rule}");
            let Treatment::Publish { keep_rows, .. } = treat(&policy(&rule).unwrap(), name) else {
                panic!("dropped")
            };
            keep_rows.unwrap()
        };
        assert_eq!(kept("'pruned/$2-$1.ids'", "bags.a.b"), KeepRows::File("pruned/b-a.ids".into()));
        let tensor = kept("{ tensor = 'prune.$1.kept' }", "bags.a.b");
        assert_eq!(tensor, KeepRows::Tensor("prune.a.kept".parse().unwrap()));
    }

    #[test]
    fn the_digest_of_rules_that_say_nothing_new_is_what_it_was() {
        let plain = policy("[[rule]]\nmatch = 'a'").unwrap();
        let written = canonical::bytes(&plain.rules[0].written);
        assert!(
            !String::from_utf8(written).unwrap().contains("keep_rows"),
            "else every snapshot gets another id"
        );
        let digest = |text: &str| policy(text).unwrap().rules_digest();
        let rule = "rule = [{ match = 'a', encode = 'int8' }]";
        assert_eq!(digest(rule), digest(&format!("{rule}\n[artifacts]\ninclude = []")));
        let one = digest(&format!("{rule}\n[artifacts]\ninclude = ['a', 'b']"));
        assert_eq!(one, digest(&format!("{rule}\n[artifacts]\ninclude = ['b', 'a', 'b']")));
        assert_ne!(one, digest(rule));
        assert_ne!(one, digest(&format!("{rule}\n[artifacts]\ninclude = ['a', 'b']\nexclude = ['c']")));
        assert_ne!(digest(rule), digest("rule = [{ match = 'a', encode = 'int8', keep_rows = 'a.ids' }]"));
    }

    #[test]
    fn rules_that_match_nothing_are_told_unless_nobody_wrote_them() {
        let policy = policy("rule = [{ match = 'a', drop = true }, { match = 'b', drop = true }]").unwrap();
        assert_eq!(policy.unused_rules(&BTreeSet::from([0])).collect::<Vec<_>>(), [(2, "b")]);
        assert_eq!(Policy::default().unused_rules(&BTreeSet::new()).count(), 0);
    }

    #[test]
    fn the_digest_covers_meaning_not_spelling() {
        let digest = |text: &str| policy(text).unwrap().rules_digest();
        let long = "[[rule]]\nmatch = \"a\"\nencode = { encoding = \"int8_sbf32\", layout = \"trailing\" }";
        assert_eq!(digest("rule = [{ match = 'a', encode = 'int8' }]"), digest(long));
        assert_eq!(digest(long), digest(&format!("{long}\n[gates]\nmax_rms_error = 0.1")));
        assert_ne!(digest(long), digest("[[rule]]\nmatch = \"a\"\nencode = \"f16\""));
    }

    #[test]
    fn mistakes_are_named() {
        for (rules, word) in [
            ("rules = 1", "rules"),
            ("[[rule]]\nmatch = 'a'\nencode = 'int9'", "int9"),
            ("[[rule]]\nmatch = 'a'\ndrop = true\nencode = 'f16'", "drop"),
            ("[[rule]]\nmatch = 'a.*'\nrename = '$2'", "rename"),
            ("[[rule]]\nmatch = 'a.*'\nrename = '$'", "rename"),
            ("[[rule]]\nmatch = 'a.*'\nrename = '$$$'", "rename"),
            (
                "[rule]\nmatch = 'a'",
                "line 2: invalid type: map, expected a list of rules, each of which begins with [[rule]]",
            ),
            (
                "[artifacts]\ninclude = '*.json'",
                "expected a list of patterns in brackets, such as [\"*.json\"]",
            ),
            ("[[rule]]\nmatch = 'a'\ndrop = true\nkeep_rows = 'x'", "drop"),
            ("[[rule]]\nmatch = 'a'\nkeep_rows = '$1.ids'", "keep_rows"),
            ("[[rule]]\nmatch = 'a'\nkeep_rows = 1", "a file's path"),
            ("[[rule]]\nmatch = 'a'\nkeep_rows = { file = 'x' }", "unknown field"),
            ("[artifacts]\nexclude = ['x']", "artifacts.include"),
            ("[artifacts]\ninclude = ['']", "artifacts.include"),
            ("[gates]\nmax_rms_error = -1.0", "max_rms_error"),
            ("[gates]\nmax_rms_error = nan", "max_rms_error"),
            ("[channel]\nname = '../prod'", "channel"),
            ("[[rule]]\nmatch = 'a'\nencode = { encoding = 'int8', align = 16 }", "line 4: unknown field"),
            ("[[rule]]\nmatch = 'a'\nencode = 8", "an encoding's name"),
        ] {
            let error = policy(rules).unwrap_err().to_string();
            assert!(error.contains(word), "{rules}: {error}");
        }
        assert!(Policy::parse("").is_err(), "schema is required");
        assert!(Policy::parse(&"#".repeat(limits::POLICY_BYTES + 1)).is_err());
    }
}
