//! The files that a checkpoint manifest declares: there, of the size that it says, and of the digest.

use std::sync::Arc;

use weighbridge_schemas::checkpoint::ManifestFile;

use super::digest::{FileDigests, on_threads};
use super::{Source, SourceFile, lock};
use crate::error::{Class, ReadError, Result};

impl Source {
    /// Declares files, before any other is looked at. Each has to be there with its size; what is read of those with a
    /// digest is hashed, and [`Source::check_digests`] hashes the rest. Names are relative to the folder, also where
    /// one file of it was named.
    ///
    /// # Errors
    /// [`Class::FileMissing`], [`Class::FileSizeMismatch`], [`Class::DuplicateKey`] for a file that is declared twice,
    /// [`Class::IndexPathEscape`] for a name or link that leads out, [`Class::Unreadable`].
    pub fn declare(mut self, files: &[ManifestFile]) -> Result<Self> {
        for file in files {
            if self.declared.insert(file.path.clone(), file.clone()).is_some() {
                let detail = "the checkpoint manifest declares it twice";
                return Err(ReadError::new(Class::DuplicateKey, detail).in_file(&file.path));
            }
        }
        for file in files {
            self.file(&file.path).map_err(|error| match error.class() {
                Class::NotFound => missing(file),
                _ => error,
            })?;
        }
        Ok(self)
    }

    /// Checks a file's size, where one is declared.
    pub(super) fn check_size(&self, name: &str, found: u64) -> Result<()> {
        let Some(declared) = self.declared.get(name) else { return Ok(()) };
        if declared.size == found {
            return Ok(());
        }
        let detail = format!(
            "it has {found} bytes, but the checkpoint manifest declares {}: it was cut or replaced, or is still being \
             written; save or copy the checkpoint again",
            declared.size
        );
        Err(ReadError::new(Class::FileSizeMismatch, detail))
    }

    /// What is to be checked of the bytes of a file of this name and length.
    pub(super) fn digests_of(&self, name: &str, length: u64) -> FileDigests {
        let declared = self.declared.get(name).and_then(|file| file.blake3);
        FileDigests::new(declared, length, &self.digest_budget)
    }

    /// How many bytes of the declared files have not been hashed yet.
    #[must_use]
    pub fn unhashed_bytes(&self) -> u64 {
        self.declared_files().iter().map(|file| file.digests.missing_bytes()).sum()
    }

    /// Reads what has not been hashed of every file that has a declared digest, on up to `threads` threads, and
    /// compares the digests. `advance` is told how many bytes were read.
    ///
    /// # Errors
    /// [`Class::FileDigestMismatch`] naming the file; else as [`SourceFile::read_exact_at`].
    pub fn check_digests(&self, threads: usize, advance: &(dyn Fn(u64) + Sync)) -> Result<()> {
        let files = self.declared_files();
        files.iter().for_each(|file| file.digests.finish());
        let (mut rest, mut from) = (files.iter(), 0);
        let mut file = rest.next();
        let next = || {
            while let Some(found) = file {
                if let Some(range) = found.digests.missing(from) {
                    from = range.end;
                    return Some((found, range));
                }
                (file, from) = (rest.next(), 0);
            }
            None
        };
        on_threads(threads, next, |(file, range), buffer| {
            let length = range.end.saturating_sub(range.start);
            buffer.resize(usize::try_from(length).unwrap_or(0), 0);
            file.read_exact_at(buffer, range.start)?;
            advance(length);
            Ok(())
        })?;
        files.iter().try_for_each(|file| file.digests.check().map_err(|error| file.unless_changed(error)))
    }

    fn declared_files(&self) -> Vec<Arc<SourceFile>> {
        let files = lock(&self.files);
        self.declared.keys().filter_map(|name| files.get(name).cloned()).collect()
    }
}

fn missing(file: &ManifestFile) -> ReadError {
    let detail = format!(
        "the checkpoint manifest declares it, of {} bytes, but it is absent: the save has not finished, or the \
         manifest is of another one",
        file.size
    );
    ReadError::new(Class::FileMissing, detail).in_file(&file.path)
}
