//! Which files beside a checkpoint are published with it, as they are.

use std::path::Path;
use std::sync::Arc;

use weighbridge_schemas::policy::Artifacts;

use crate::error::{ReadError, Result};
use crate::source::{Source, SourceFile};

/// The files that a policy's patterns pick.
#[derive(Debug, Default)]
pub struct SelectedArtifacts {
    /// Pinned as they are now, sorted by their paths relative to the checkpoint's folder.
    pub files: Vec<Arc<SourceFile>>,
    /// What was passed over, and which patterns match nothing: a line each, for people.
    pub notes: Vec<String>,
}

/// Lists and pins the files below the checkpoint's folder that `artifacts` includes and does not exclude. Files that
/// were looked up in `source` before, since the checkpoint consists of them, are left out; so are those below `store`,
/// the folder that snapshots go to, which would grow with every publish.
///
/// # Errors
/// Those of [`Source::tree`] and [`Source::file`], which a link that leads out of the folder is one of.
pub fn select(source: &Source, artifacts: &Artifacts, store: Option<&Path>) -> Result<SelectedArtifacts> {
    if artifacts.is_empty() {
        return Ok(SelectedArtifacts::default());
    }
    let store = store.and_then(|store| source.relative(store)).map(|path| path + "/");
    let in_store = |path: &str| store.as_ref().is_some_and(|store| path.starts_with(store));
    let mut matched = vec![false; artifacts.include().len()];
    let tree = source.tree(&mut |path| {
        let own = source.has_looked_up(path) || in_store(path);
        let mut included = false;
        for at in artifacts.includes(path).filter(|_| !own) {
            included = true;
            if let Some(matched) = matched.get_mut(at) {
                *matched = true;
            }
        }
        included && !artifacts.excludes(path)
    })?;
    let mut notes = tree.notes;
    notes.extend(store.map(|path| format!("{path}: left out of the artifacts: the store lies there")));
    let unmatched = artifacts.include().iter().zip(matched).filter(|(_, matched)| !matched);
    notes.extend(unmatched.map(|(pattern, _)| {
        format!("artifacts.include: {pattern:?} matches no file but the checkpoint's own")
    }));
    let files = tree.files.iter().map(|path| source.file(path).map_err(way_out));
    Ok(SelectedArtifacts { files: files.collect::<Result<_>>()?, notes })
}

fn way_out(error: ReadError) -> ReadError {
    let detail = format!("{error}; exclude it under [artifacts] in the policy, or put the file itself there");
    ReadError::new(error.class(), detail)
}

#[cfg(test)]
mod tests {
    use weighbridge_schemas::policy::Policy;

    use super::*;
    use crate::error::Class;

    fn policy(artifacts: &str) -> Artifacts {
        let text = format!("schema = \"weighbridge.policy/v1\"\n[artifacts]\n{artifacts}");
        Policy::parse(&text).unwrap().artifacts
    }

    #[test]
    fn what_is_included_and_not_excluded_and_not_the_checkpoints_own() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("tokenizer")).unwrap();
        for name in ["model.safetensors", "config.json", "secret.json", "tokenizer/vocabulary"] {
            std::fs::write(folder.path().join(name), name).unwrap();
        }
        let select = |text: &str| {
            let source = Source::open(folder.path()).unwrap();
            source.file("model.safetensors").unwrap();
            select(&source, &policy(text), Some(Path::new("elsewhere")))
        };
        let names = |selected: &SelectedArtifacts| {
            selected.files.iter().map(|file| file.name().to_owned()).collect::<Vec<_>>()
        };
        let all = select("include = ['**']\nexclude = ['secret*']").unwrap();
        assert_eq!(names(&all), ["config.json", "tokenizer/vocabulary"]);
        assert!(all.notes.is_empty());
        let some = select("include = ['*.json', '*.txt', '*.safetensors']").unwrap();
        assert_eq!(names(&some), ["config.json", "secret.json"]);
        assert_eq!(some.notes.len(), 2, "{:?}", some.notes);
        assert!(some.notes[0].contains("\"*.safetensors\"") && some.notes[1].contains("\"*.txt\""));
        assert!(select("include = []").unwrap().files.is_empty());
    }

    #[test]
    fn links_lead_nowhere_else() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc/hostname", folder.path().join("name.json")).unwrap();
        let source = Source::open(folder.path()).unwrap();
        let select = |text: &str| select(&source, &policy(text), Some(folder.path()));
        let error = select("include = ['*.json']").unwrap_err();
        assert!(matches!(error.class(), Class::IndexPathEscape | Class::NotFound));
        assert!(error.to_string().contains("exclude it"), "{error}");
        assert!(select("include = ['*.json']\nexclude = ['name.*']").unwrap().files.is_empty());
    }

    #[test]
    fn a_store_in_the_checkpoints_folder_is_no_artifact() {
        let folder = tempfile::tempdir().unwrap();
        let linked = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("sub/store/models")).unwrap();
        for name in ["sub/store/models/chunk", "sub/store.json", "sub/other"] {
            std::fs::write(folder.path().join(name), name).unwrap();
        }
        let link = linked.path().join("store");
        std::os::unix::fs::symlink(folder.path().join("sub/store"), &link).unwrap();
        for store in [folder.path().join("sub/../sub/store/"), link] {
            let source = Source::open(folder.path()).unwrap();
            let selected = select(&source, &policy("include = ['**']"), Some(&store)).unwrap();
            let names: Vec<_> = selected.files.iter().map(|file| file.name()).collect();
            assert_eq!(names, ["sub/other", "sub/store.json"]);
            assert_eq!(selected.notes, ["sub/store/: left out of the artifacts: the store lies there"]);
        }
    }
}
