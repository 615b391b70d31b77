//! Small file systems, which are soon full.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system of `size` bytes at `folder/volume`, for as long as the value lives; `None` where this user may not
/// mount.
pub(crate) struct Volume(pub(crate) PathBuf);

impl Volume {
    pub(crate) fn mount(folder: &Path, size: &str) -> Option<Self> {
        let path = folder.join("volume");
        std::fs::create_dir(&path).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(&path)
            .output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Self(path));
        }
        println!("skipped: this user may not mount a small file system");
        None
    }

    pub(crate) fn remount_read_only(&self) {
        assert!(Command::new("mount").args(["-o", "remount,ro"]).arg(&self.0).status().unwrap().success());
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
