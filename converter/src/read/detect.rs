//! Which format a checkpoint has, told by content and not by name: a `.pt` file may be called anything.
//!
//! A folder is told by the files in it. A file is told by its first bytes; its name counts only where those say
//! nothing. What is no checkpoint that this version reads is refused with the name of what it is.

use weighbridge_schemas::checkpoint::Format;
use weighbridge_schemas::limits;

use crate::error::{Class, ReadError, Result};
use crate::read::index;
use crate::source::{Source, SourceFile};

/// The first bytes of a zip archive.
pub(crate) const ZIP: &[u8] = b"PK\x03\x04";
/// How much of a file is looked at.
const FIRST_BYTES: u64 = 4096;
/// The length of a zip archive's end record, which stands last.
const ZIP_END_BYTES: u64 = 22;

/// The folder for files of ranks.
const SHARDED: &str = "sharded/";

/// What the first torch versions wrote, and `_use_new_zipfile_serialization=False` writes: pickles and bytes in a row.
const LEGACY: &[u8] = b"\x80\x02\x8A\x0A\x6C\xFC\x9C\x46\xF9\x20\x6A\xA8\x50\x19";
/// How a file of another kind becomes one that is read.
const SAVE_ANEW: &str =
    "load it with torch.load(..., weights_only=True), and save that with torch.save of torch 1.6 or later";

/// First bytes of files that are no checkpoint, and what they are of.
const FOREIGN: &[(&[u8], &str)] = &[
    (LEGACY, "a torch.save file in the layout from before PyTorch 1.6, which is no zip archive"),
    (b"version https://git-lfs", "a Git LFS pointer, whose content was not fetched (git lfs pull)"),
    (b"\x1F\x8B", "a gzip file; unpack it first"),
    (b"\x28\xB5\x2F\xFD", "a zstd file; unpack it first"),
    (b"\xFD7zXZ\0", "an xz file; unpack it first"),
    (b"BZh", "a bzip2 file; unpack it first"),
    (b"\x89HDF\r\n\x1A\n", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array file"),
    (b"GGUF", "a GGUF file"),
    (b"<!DOCTYPE", "a web page, not the file that was to be fetched"),
    (b"<html", "a web page, not the file that was to be fetched"),
];

/// What the file that begins with `first` is, where it is known to be no checkpoint that is read.
pub(crate) fn foreign_kind(first: &[u8]) -> Option<&'static str> {
    FOREIGN.iter().find(|(magic, _)| first.starts_with(magic)).map(|&(_, kind)| kind)
}

/// Finds out the format of the checkpoint at `source`.
///
/// # Errors
/// [`Class::UnsupportedFormat`], naming what is there instead.
pub fn format(source: &Source) -> Result<Format> {
    match source.entry() {
        Some(name) => of_file(source, source.file(name)?.as_ref()),
        None => {
            let names = source.names()?;
            match of_folder(&names).map_err(|error| in_sharded(source, &names).unwrap_or(error))? {
                Format::TorchSave => of_file(source, source.file(&only_torch_save(&names)?)?.as_ref()),
                format => Ok(format),
            }
        }
    }
}

/// The refusal of a folder in which there is but `sharded/`: where PyTorch's HuggingFaceStorageWriter leaves the files
/// of ranks that it was not asked to put together.
fn in_sharded(source: &Source, names: &[String]) -> Option<ReadError> {
    let mut is_there = false;
    if names.is_empty() {
        source
            .tree(&mut |path| {
                is_there |= path.starts_with(SHARDED) && path.ends_with(".safetensors");
                false
            })
            .ok()?;
    }
    let why = "the folder holds no file itself, but the safetensors files of ranks lie in a folder of it; name \
               FOLDER/sharded";
    is_there.then(|| unsupported(why))
}

fn of_folder(names: &[String]) -> Result<Format> {
    let dcp = names.iter().any(|name| is_dcp(name));
    let safetensors = names.iter().any(|name| name.ends_with(".safetensors") || index::is_index_name(name));
    match (dcp, safetensors) {
        (true, false) => Ok(Format::Dcp),
        (false, true) => Ok(Format::Safetensors),
        (true, true) => Err(unsupported(
            "the folder holds both a distributed checkpoint and safetensors files; say which one with --format dcp \
             or --format safetensors",
        )),
        (false, false) => only_torch_save(names).map(|_| Format::TorchSave),
    }
}

/// Whether a file of this name is one that `torch.save` wrote, by custom.
fn is_torch_save(name: &str) -> bool {
    [".pt", ".pth", ".bin", ".ckpt"].iter().any(|suffix| name.ends_with(suffix))
}

/// The only torch.save file of a folder.
pub(crate) fn only_torch_save(names: &[String]) -> Result<String> {
    let found: Vec<_> = names.iter().filter(|name| is_torch_save(name)).collect();
    match found.as_slice() {
        [] => Err(no_checkpoint(names)),
        [name] => Ok((*name).clone()),
        several => Err(unsupported(format!(
            "the folder holds {} files that torch.save may have written ({}), which are not read together; name one \
             of them, or save them as one state dict or as safetensors",
            several.len(),
            index::list(several)
        ))),
    }
}

/// Whether a file of this name makes its folder a distributed checkpoint: the metadata, that of one rank, or data
/// without either, which an unfinished save leaves.
fn is_dcp(name: &str) -> bool {
    name == ".metadata"
        || name.ends_with(".distcp")
        || (name.starts_with("__") && name.ends_with(".metadata"))
}

/// A folder in which there is nothing to read.
pub(crate) fn no_checkpoint(names: &[String]) -> ReadError {
    if names.is_empty() {
        return unsupported("the folder is empty: there is no file directly in it");
    }
    unsupported(format!("the folder holds no checkpoint that can be read, only {}", index::list(names)))
}

fn of_file(source: &Source, file: &SourceFile) -> Result<Format> {
    let name = file.name();
    let first = file.read_vec_at(0, file.len().min(FIRST_BYTES))?;
    if name == ".metadata" {
        return Ok(Format::Dcp);
    }
    if name.ends_with(".distcp") {
        let detail = "it is a data file of a distributed checkpoint; name the folder it lies in";
        return Err(unsupported(detail).in_file(name));
    }
    // Before the foreign kinds: a header's length may look like the first bytes of any of them.
    if is_safetensors(&first) || index::is_json(&first) {
        return Ok(Format::Safetensors);
    }
    if first.starts_with(ZIP) {
        // PyTorch's HuggingFaceStorageWriter can put a zip archive in front of a safetensors header: the
        // safetensors reader tells that one better.
        let is_torch_save = !name.ends_with(".safetensors") || ends_as_zip(file)?;
        return Ok(if is_torch_save { Format::TorchSave } else { Format::Safetensors });
    }
    if let Some(error) = foreign(&first) {
        return Err(error.in_file(name));
    }
    if is_pickle(&first) {
        return of_pickle(source, name);
    }
    // The safetensors reader says best what is wrong with these.
    let is_meant = first.get(8) == Some(&b'{') || name.ends_with(".safetensors") || name.ends_with(".json");
    if is_meant { Ok(Format::Safetensors) } else { Err(unknown(&first).in_file(name)) }
}

/// Whether `first` are a header length that may be and the first byte of a header.
pub(crate) fn is_safetensors(first: &[u8]) -> bool {
    let length = first.first_chunk().map(|&length| u64::from_le_bytes(length));
    length.is_some_and(|length| length <= limits::SAFETENSORS_HEADER_BYTES) && first.get(8) == Some(&b'{')
}

/// A pickle is a distributed checkpoint's metadata under another name, if it lies beside the data.
fn of_pickle(source: &Source, name: &str) -> Result<Format> {
    if source.names()?.iter().any(|name| name.ends_with(".distcp")) {
        return Ok(Format::Dcp);
    }
    Err(bare_pickle().in_file(name))
}

fn bare_pickle() -> ReadError {
    unsupported("it is a bare pickle, which is a program and no checkpoint; save tensors with torch.save")
}

/// Checks that `file` begins as `torch.save` begins it, and says what it is instead.
pub(crate) fn check_torch_save(file: &SourceFile) -> Result<()> {
    let first = file.read_vec_at(0, file.len().min(FIRST_BYTES))?;
    if first.starts_with(ZIP) {
        return Ok(());
    }
    Err(match foreign(&first) {
        Some(error) => error,
        None if is_pickle(&first) => bare_pickle(),
        None => unknown(&first),
    })
}

/// Protocols 2 to 5 begin with their number.
fn is_pickle(first: &[u8]) -> bool {
    matches!(first, [0x80, 2..=5, ..])
}

fn ends_as_zip(file: &SourceFile) -> Result<bool> {
    let Some(end) = file.len().checked_sub(ZIP_END_BYTES) else { return Ok(false) };
    Ok(file.read_vec_at(end, 4)? == b"PK\x05\x06")
}

/// What is wrong with a file that begins with `first`, where it is known to be no checkpoint.
fn foreign(first: &[u8]) -> Option<ReadError> {
    let kind = foreign_kind(first)?;
    let way_out = if first.starts_with(LEGACY) { format!("; {SAVE_ANEW}") } else { String::new() };
    Some(unsupported(format!("it is {kind}{way_out}")))
}

fn unknown(first: &[u8]) -> ReadError {
    if first.is_empty() {
        return unsupported("the file is empty");
    }
    let shown = first.get(..8).unwrap_or(first);
    unsupported(format!(
        "it is neither safetensors nor an index nor a torch.save file nor a distributed checkpoint; it begins with \
         bytes {shown:02X?}"
    ))
}

fn unsupported(detail: impl Into<String>) -> ReadError {
    ReadError::new(Class::UnsupportedFormat, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The format of a folder of files with these contents, of which `entry` is named.
    fn detect(files: &[(&str, &[u8])], entry: Option<&str>) -> Result<Format> {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        let path = entry.map_or_else(|| folder.path().to_path_buf(), |entry| folder.path().join(entry));
        format(&Source::open(&path).unwrap())
    }

    fn of_names(names: &[&str]) -> Result<Format> {
        let files: Vec<(&str, &[u8])> = names.iter().map(|&name| (name, b"".as_slice())).collect();
        detect(&files, None)
    }

    fn of_content(name: &str, content: &[u8]) -> Result<Format> {
        detect(&[(name, content)], Some(name))
    }

    fn refusal(result: Result<Format>) -> String {
        let error = result.unwrap_err();
        assert_eq!(error.class(), Class::UnsupportedFormat);
        error.to_string()
    }

    #[test]
    fn a_folder_is_told_by_its_files() {
        for names in
            [&[".metadata", "__0_0.distcp"][..], &["__0_0.distcp"], &["__1.metadata"], &[".metadata", "x.pt"]]
        {
            assert_eq!(of_names(names), Ok(Format::Dcp), "{names:?}");
        }
        for names in
            [&["a.safetensors"][..], &["m.safetensors.index.json", "x.pt"], &["a.safetensors", "x.metadata"]]
        {
            assert_eq!(of_names(names), Ok(Format::Safetensors), "{names:?}");
        }
        assert!(refusal(of_names(&[".metadata", "a.safetensors"])).contains("--format"));
        assert!(refusal(of_names(&[])).contains("empty"));
        let zip = b"PK\x03\x04".as_slice();
        for name in ["model.pt", "pytorch_model.bin", "last.ckpt"] {
            let beside = [(name, zip), ("config.json", b"{}"), ("vocab.txt", b"")];
            assert_eq!(detect(&beside, None), Ok(Format::TorchSave), "{name}");
        }
        assert!(refusal(of_names(&["model.pt"])).contains("empty"));
        let shards = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"];
        for names in [&["model.pt", "optimizer.pt"][..], &shards] {
            let message = refusal(of_names(names));
            assert!(message.contains(names[0]) && message.contains("name one of them"), "{message}");
        }
        assert!(refusal(of_names(&["config.json", "notes.txt"])).contains("config.json, notes.txt"));
    }

    #[test]
    fn files_of_ranks_in_a_folder_below_are_pointed_to() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("sharded")).unwrap();
        std::fs::write(folder.path().join("sharded/a.safetensors"), b"").unwrap();
        let refused = format(&Source::open(folder.path()).unwrap());
        assert!(refusal(refused).contains("name FOLDER/sharded"));
    }

    #[test]
    fn a_file_is_told_by_content() {
        let header = b"\x02\0\0\0\0\0\0\0{}";
        for (name, content) in [
            ("model.bin", header.as_slice()),
            ("model.pt", b"{\"weight_map\":{}}"),
            ("model.safetensors", b""),
            ("model.safetensors", b"\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF"),
            ("x", b"\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF{"),
            ("m.safetensors.index.json", b""),
            // Header lengths that look like a gzip file, a pickle and a zip archive.
            ("x", b"\x1F\x8B\0\0\0\0\0\0{"),
            ("x", b"\x80\x04\0\0\0\0\0\0{"),
            ("x", b"PK\x03\x04\0\0\0\0{"),
        ] {
            assert_eq!(of_content(name, content), Ok(Format::Safetensors), "{name} {content:?}");
        }
        let zip = b"PK\x03\x04\0\0\x08\x08\0\0\0\0\0\0";
        let whole = [zip.as_slice(), b"PK\x05\x06", &[0; 18]].concat();
        for (name, content) in [("model.pt", zip.as_slice()), ("x", zip), ("model.safetensors", &whole)] {
            assert_eq!(of_content(name, content), Ok(Format::TorchSave), "{name}");
        }
        assert_eq!(of_content(".metadata", b"\x80\x04"), Ok(Format::Dcp));
        assert_eq!(
            detect(&[("copy", b"\x80\x04\x95"), ("__0_0.distcp", b"")], Some("copy")),
            Ok(Format::Dcp)
        );
    }

    #[test]
    fn what_is_not_read_is_named() {
        let zip = b"PK\x03\x04\0\0\x08\x08\0\0\0\0\0\0";
        let whole = [zip.as_slice(), b"PK\x05\x06", &[0; 18]].concat();
        for (name, content, word) in [
            ("legacy.pt", b"\x80\x02\x8A\x0A\x6C\xFC\x9C\x46\xF9\x20\x6A\xA8\x50\x19.".as_slice(), "1.6"),
            ("model.pkl", b"\x80\x04\x95abc", "pickle"),
            ("__0_0.distcp", zip.as_slice(), "folder"),
            ("model.tar.gz", b"\x1F\x8B\x08\0", "gzip"),
            ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
            ("model.pt", b"P", "begins with bytes [50]"),
            ("model.pt", b"", "empty"),
        ] {
            let message = refusal(of_content(name, content));
            assert!(message.contains(word) && message.contains(name), "{message}");
        }
        // A zip archive in front of a safetensors header: its reader says what that is.
        let in_front = [whole.as_slice(), b"\x02\0\0\0\0\0\0\0{}", &[0; 30]].concat();
        assert_eq!(of_content("model.safetensors", &in_front), Ok(Format::Safetensors));
    }
}
