//! Reading what was fetched, in a process that serves: a version opened and mapped, rows looked up in it, and the next
//! version taken when `current` flips.
//!
//! [`Version`] is one snapshot, mapped into memory; [`Serving`] holds the one that `DIR/current` points at, and swaps.
//!
//! ```no_run
//! # use std::{path::Path, sync::Arc, time::Duration};
//! # use weighbridge_snapshots::reader::{Event, Options, Serving};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let serving = Arc::new(Serving::open(Path::new("/srv/dlrm"), Options::default())?);
//! let watch = serving.watch(Duration::from_secs(1), |event| match event {
//!     Event::Swapped(swap) => println!("serving {}", swap.to),
//!     Event::Failed(error) => eprintln!("still serving the old one: {error}"),
//! })?;
//!
//! // For each request, or batch:
//! let version = serving.current();
//! let table = version.table("model.ebc.embedding_bags.t1.weight")?;
//! let ids = [17, 4, 93];
//! let mut rows = vec![0.0; ids.len() * table.width()];
//! table.decode_rows(&ids, &mut rows)?;
//! # Ok(())
//! # }
//! ```
//!
//! **Never half a snapshot, never another one.** A version is opened by its folder's name, which is the snapshot's id:
//! the manifest in it has to have that hash, every file that it names has to be there with its size, and every tensor
//! has to lie within its file. The bytes themselves were hashed by the fetch that brought them; [`Options::verify`]
//! hashes them once more. The link is read once, and everything else is opened through the folder that it named, so a
//! flip in between changes nothing.
//!
//! **One batch, one snapshot.** [`Serving::current`] gives a reference-counted version. Whoever holds it reads that
//! version to the end, whatever `current` points at meanwhile. Nobody waits for a swap: the new version is opened
//! beside the old one, and then a pointer is exchanged. Where opening fails, the old one serves on.
//!
//! **Going back is going on.** Whatever the link points at is served, an older step too: what a channel may do was
//! decided by whoever flipped the link (`fetch` refuses a channel's log that was cut). A link that is gone is an error,
//! and the old version serves on.
//!
//! **When memory is given back.** A version that was swapped out is unmapped by the first look ([`Serving::refresh`],
//! or the watch) after the last reader has dropped it: unmapping many gigabytes takes a while, and no request should be
//! the one that pays for it. [`Serving::retired`] tells how many still wait.
//!
//! **Mapped files must keep their bytes.** Versions are immutable: a fetch writes elsewhere and renames, and a damaged
//! version is replaced as a whole, never in place, so that maps of the old files stay as they were, also after these
//! have been deleted. A version that was replaced under its name (another folder, by device and number) is opened anew.
//! Against everything else no program can defend itself: whoever writes into a live version's file changes what is
//! served, and whoever truncates it has the process killed by `SIGBUS` at its next look at what is gone. So let the
//! server run as a user that may only read the folder: maps are read-only, and the files are opened only to be read.

mod element;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod mapped;
mod place;
mod serving;
mod table;
mod tensor;
#[cfg(test)]
mod tests;
mod version;
mod watch;

pub use element::Element;
pub use error::LookupError;
pub use mapped::{Options, Pages};
pub use serving::{Serving, Swap};
pub use table::{Row, Table};
pub use tensor::Tensor;
pub use version::Version;
pub use watch::{Event, Watch};
