//! Checkpoints as PyTorch writes them, of any size, without PyTorch: a `torch.save` file, and a distributed checkpoint
//! of any number of ranks.
//!
//! The form is that of torch 2.14: stored zip records whose data starts on multiples of 64 bytes, sizes in descriptors
//! and in the central directory alone, ZIP64 throughout; pickles of protocol 2.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::path::Path;

use crate::tables::{Cut, Piece, Table};

/// Writes a `torch.save` file of a state dict of `tables`.
///
/// # Errors
/// Where the file cannot be written.
pub fn state_dict(path: &Path, tables: &[Table<'_>]) -> io::Result<()> {
    let mut pickle = Pickler::new();
    pickle.raw(b"}(");
    for (key, table) in tables.iter().enumerate() {
        pickle.text(table.name).tensor([table.rows, table.width], key);
    }
    pickle.raw(b"u.");
    let mut file = File::create(path)?;
    let pieces: Vec<_> = tables.iter().map(Table::whole).collect();
    write_archive(&mut file, "model", &pickle.0, &pieces)
}

/// Where a piece lies: its file, and its archive's first byte and length in there.
struct Item<'a> {
    piece: Piece<'a>,
    file: String,
    begin: u64,
    length: u64,
}

/// Writes a distributed checkpoint into `folder`: a file a rank, with its pieces of all tables.
///
/// # Errors
/// Where a file cannot be written.
pub fn distributed(folder: &Path, tables: &[Table<'_>], cut: Cut) -> io::Result<()> {
    let (Cut::Rows(ranks) | Cut::Columns(ranks)) = cut;
    let pieces: Vec<_> = tables.iter().map(|table| table.pieces(cut)).collect();
    let mut items: Vec<Vec<Item<'_>>> = tables.iter().map(|_| Vec::new()).collect();
    for rank in 0..ranks.max(1) {
        let name = format!("__{rank}_0.distcp");
        let mut file = File::create(folder.join(&name))?;
        for (items, pieces) in items.iter_mut().zip(&pieces) {
            for piece in pieces.iter().filter(|piece| piece.rank == rank) {
                let mut pickle = Pickler::new();
                pickle.tensor(piece.sizes, 0).raw(b".");
                let begin = file.stream_position()?;
                write_archive(&mut file, "archive", &pickle.0, std::slice::from_ref(piece))?;
                let length = file.stream_position()? - begin;
                items.push(Item { piece: piece.clone(), file: name.clone(), begin, length });
            }
        }
    }
    std::fs::write(folder.join(".metadata"), metadata(tables, &items))
}

/// `.metadata` of tables and the items of each.
fn metadata(tables: &[Table<'_>], items: &[Vec<Item<'_>>]) -> Vec<u8> {
    const MODULE: &str = "torch.distributed.checkpoint.metadata";
    let mut pickle = Pickler::new();
    pickle.object(MODULE, "Metadata").raw(b"}(").text("state_dict_metadata").raw(b"}(");
    for (table, items) in tables.iter().zip(items) {
        pickle.text(table.name).object(MODULE, "TensorStorageMetadata").raw(b"}(").text("properties");
        pickle.object(MODULE, "TensorProperties").raw(b"(").global("torch", "float32");
        pickle.global("torch.serialization", "_get_layout").text("torch.strided").raw(b"\x85R\x89");
        pickle.global(MODULE, "_MEM_FORMAT_ENCODING").raw(b"K\0\x85R\x89tb");
        pickle.text("size").size(&[table.rows, table.width]).text("chunks").raw(b"](");
        for Item { piece, .. } in items {
            pickle.object(MODULE, "ChunkStorageMetadata").raw(b"}(").text("offsets").size(&piece.offsets);
            pickle.text("sizes").size(&piece.sizes).raw(b"ub");
        }
        pickle.raw(b"eub");
    }
    pickle.raw(b"u").text("planner_data").raw(b"N").text("storage_data").raw(b"}(");
    for (index, item) in items.iter().flat_map(|items| (0u64..).zip(items)) {
        pickle.object(MODULE, "MetadataIndex").raw(b"}(").text("fqn").text(item.piece.table.name);
        pickle.text("offset").size(&item.piece.offsets).text("index").int(index).raw(b"ub");
        pickle.object("torch.distributed.checkpoint.filesystem", "_StorageInfo").raw(b"}(");
        pickle.text("relative_path").text(&item.file).text("offset").int(item.begin);
        pickle.text("length").int(item.length).raw(b"ub");
    }
    pickle.raw(b"u").text("version").text("1.0.0").raw(b"ub.");
    pickle.0
}

/// Pickle opcodes of protocol 2, as torch's pickler chooses them, without a memo.
struct Pickler(Vec<u8>);

impl Pickler {
    fn new() -> Self {
        Self(b"\x80\x02".to_vec())
    }

    fn raw(&mut self, opcodes: &[u8]) -> &mut Self {
        self.0.extend(opcodes);
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
        self.raw(b"X").raw(&length.to_le_bytes()).raw(text.as_bytes())
    }

    fn int(&mut self, value: u64) -> &mut Self {
        self.raw(b"\x8a\x08").raw(&value.to_le_bytes())
    }

    fn global(&mut self, module: &str, name: &str) -> &mut Self {
        self.raw(b"c").raw(module.as_bytes()).raw(b"\n").raw(name.as_bytes()).raw(b"\n")
    }

    fn object(&mut self, module: &str, name: &str) -> &mut Self {
        self.global(module, name).raw(b")\x81")
    }

    /// A `torch.Size`.
    fn size(&mut self, sizes: &[u64]) -> &mut Self {
        self.global("torch", "Size").tuple(sizes).raw(b"\x85R")
    }

    fn tuple(&mut self, values: &[u64]) -> &mut Self {
        self.raw(b"(");
        for &value in values {
            self.int(value);
        }
        self.raw(b"t")
    }

    /// A dense tensor of rows and columns, alone in the storage `key`.
    fn tensor(&mut self, [rows, columns]: [u64; 2], key: usize) -> &mut Self {
        self.global("torch._utils", "_rebuild_tensor_v2").raw(b"((").text("storage");
        self.global("torch", "FloatStorage").text(&key.to_string()).text("cpu");
        self.int(rows * columns).raw(b"tQ").int(0);
        self.tuple(&[rows, columns]).tuple(&[columns, 1]).raw(b"\x89");
        self.global("collections", "OrderedDict").raw(b")RtR")
    }
}

/// Writes an archive at the file's position: the pickle, and every piece as a storage.
fn write_archive(file: &mut File, prefix: &str, pickle: &[u8], pieces: &[Piece<'_>]) -> io::Result<()> {
    let mut archive = Archive { file, begin: 0, directory: Vec::new(), entries: 0 };
    archive.begin = archive.file.stream_position()?;
    archive.small(&format!("{prefix}/data.pkl"), pickle)?;
    archive.small(&format!("{prefix}/byteorder"), b"little")?;
    for (key, piece) in pieces.iter().enumerate() {
        archive.storage(&format!("{prefix}/data/{key}"), piece)?;
    }
    archive.small(&format!("{prefix}/version"), b"3\n")?;
    archive.finish()
}

struct Archive<'f> {
    file: &'f mut File,
    begin: u64,
    directory: Vec<u8>,
    entries: u64,
}

impl Archive<'_> {
    fn at(&mut self) -> io::Result<u64> {
        Ok(self.file.stream_position()? - self.begin)
    }

    fn small(&mut self, name: &str, data: &[u8]) -> io::Result<()> {
        let header = self.header(name)?;
        self.file.write_all(data)?;
        self.close(name, header, crc32fast::hash(data), data.len() as u64)
    }

    fn storage(&mut self, name: &str, piece: &Piece<'_>) -> io::Result<()> {
        let header = self.header(name)?;
        let crc32 = piece.write(self.file)?;
        self.close(name, header, crc32, piece.bytes())
    }

    /// A local header, padded so that the data starts on a multiple of 64: where it starts itself.
    fn header(&mut self, name: &str) -> io::Result<u64> {
        let at = self.at()?;
        let name_length = u16::try_from(name.len()).unwrap_or(u16::MAX);
        let data = (at + 30 + u64::from(name_length) + 4).next_multiple_of(64);
        let padding = u16::try_from(data - at - 30 - u64::from(name_length) - 4).unwrap_or(0);
        self.file.write_all(b"PK\x03\x04\0\0\x08\x08\0\0")?;
        self.file.write_all(&[0; 16])?;
        self.file.write_all(&[name_length.to_le_bytes(), (padding + 4).to_le_bytes()].concat())?;
        self.file.write_all(name.as_bytes())?;
        self.file.write_all(&[&b"FB"[..], &padding.to_le_bytes(), &vec![b'Z'; padding.into()]].concat())?;
        Ok(at)
    }

    /// The descriptor behind the data, and the directory's entry.
    fn close(&mut self, name: &str, header: u64, crc32: u32, length: u64) -> io::Result<()> {
        let name_length = u16::try_from(name.len()).unwrap_or(u16::MAX).to_le_bytes();
        let (crc32, length, header) = (crc32.to_le_bytes(), length.to_le_bytes(), header.to_le_bytes());
        self.file.write_all(&[&b"PK\x07\x08"[..], &crc32, &length, &length].concat())?;
        self.directory.extend(b"PK\x01\x02\0\0\x2d\0\x08\x08\0\0\0\0\0\0");
        self.directory.extend([&crc32[..], &[0xff; 8], &name_length, &28u16.to_le_bytes()].concat());
        self.directory.extend([0; 10]);
        self.directory.extend([0xff; 4]);
        self.directory.extend(name.as_bytes());
        self.directory.extend([&b"\x01\0\x18\0"[..], &length, &length, &header].concat());
        self.entries += 1;
        Ok(())
    }

    fn finish(mut self) -> io::Result<()> {
        let (start, size) = (self.at()?, self.directory.len() as u64);
        let [entries, start_bytes, size_bytes] = [self.entries, start, size].map(u64::to_le_bytes);
        self.file.write_all(&self.directory)?;
        let end64 = [
            &b"PK\x06\x06\x2c\0\0\0\0\0\0\0\x1e\x03\x2d\0\0\0\0\0\0\0\0\0"[..],
            &entries,
            &entries,
            &size_bytes,
            &start_bytes,
        ];
        self.file.write_all(&end64.concat())?;
        let locator = [&b"PK\x06\x07\0\0\0\0"[..], &(start + size).to_le_bytes(), &[1, 0, 0, 0]];
        self.file.write_all(&locator.concat())?;
        self.file.write_all(b"PK\x05\x06\0\0\0\0")?;
        self.file.write_all(&[&[0xff; 12][..], &[0; 2]].concat())
    }
}
