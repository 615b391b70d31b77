//! The places where a store may lie. What is tested for one is tested for each of them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use futures::TryStreamExt;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;
use object_store::prefix::PrefixStore;
use object_store::{ObjectStore, ObjectStoreExt};
use tokio::runtime::Runtime;
use weighbridge_tests::buckets::{Kind, Server};

use crate::binary::Store;

/// Where a store lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Folder,
    SeaweedFs,
    Moto,
    Azurite,
}

pub(crate) const PLACES: [Place; 4] = [Place::Folder, Place::SeaweedFs, Place::Moto, Place::Azurite];

/// The server that all tests of this process share; each uses a prefix of its own. It ends with the process.
pub(crate) fn server(kind: Kind) -> Option<&'static Server> {
    static SERVERS: [OnceLock<Option<Server>>; 3] = [const { OnceLock::new() }; 3];
    let number = Kind::ALL.iter().position(|one| *one == kind).unwrap();
    SERVERS[number].get_or_init(|| Server::start(kind)).as_ref()
}

/// A store at a place, and a look at its objects past the binary.
pub(crate) struct House {
    pub(crate) place: Place,
    pub(crate) store: Store,
    /// Its objects' common prefix in the bucket.
    pub(crate) prefix: String,
    objects: Arc<dyn ObjectStore>,
    runtime: Runtime,
}

impl House {
    /// An empty store; `None` where the place's server cannot be had.
    pub(crate) fn at(place: Place) -> Option<Self> {
        let kind = match place {
            Place::Folder => {
                let store = Store::new();
                std::fs::create_dir(store.root()).unwrap();
                let objects = LocalFileSystem::new_with_prefix(store.root()).unwrap();
                return Some(Self::of(place, store, String::new(), Arc::new(objects)));
            }
            Place::SeaweedFs => Kind::SeaweedFs,
            Place::Moto => Kind::Moto,
            Place::Azurite => Kind::Azurite,
        };
        Some(Self::of_server(place, server(kind)?, None))
    }

    /// An empty store at a server, which the binary uses by way of `port`, if one is given.
    pub(crate) fn of_server(place: Place, server: &Server, port: Option<u16>) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let prefix = format!("stores/{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let store = Store::elsewhere(server.url(&prefix), server.environment(port));
        let objects = PrefixStore::new(server.client(None, 5), prefix.as_str());
        Self::of(place, store, prefix, Arc::new(objects))
    }

    fn of(place: Place, store: Store, prefix: String, objects: Arc<dyn ObjectStore>) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Self { place, store, prefix, objects, runtime }
    }

    /// Puts an object, over one that is there.
    pub(crate) fn put(&self, key: &str, bytes: impl Into<Vec<u8>>) {
        self.runtime.block_on(self.objects.put(&Key::from(key), bytes.into().into())).unwrap();
    }

    pub(crate) fn get(&self, key: &str) -> Vec<u8> {
        let got = self.runtime.block_on(async { self.objects.get(&Key::from(key)).await?.bytes().await });
        got.unwrap_or_else(|error| panic!("{key}: {error}")).into()
    }

    pub(crate) fn delete(&self, key: &str) {
        self.runtime.block_on(self.objects.delete(&Key::from(key))).unwrap();
    }

    /// All keys below `folder`, sorted.
    pub(crate) fn keys(&self, folder: &str) -> Vec<String> {
        let listed = self.objects.list(Some(&Key::from(folder))).try_collect::<Vec<_>>();
        let listed = self.runtime.block_on(listed).unwrap();
        let mut keys: Vec<String> = listed.into_iter().map(|object| object.location.into()).collect();
        keys.sort();
        keys
    }

    /// The files of the version that is served, by name.
    pub(crate) fn served(&self) -> BTreeMap<String, Vec<u8>> {
        files(&self.store.served().join("current"))
    }
}

/// The files of a folder, by name.
pub(crate) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    entries.filter(|path| path.is_file()).map(|path| (name(&path), std::fs::read(&path).unwrap())).collect()
}

/// Runs a scenario at every place that can be had.
pub(crate) fn everywhere(scenario: impl Fn(&House)) {
    for house in PLACES.iter().filter_map(|&place| House::at(place)) {
        println!("at {:?}", house.place);
        scenario(&house);
    }
}
