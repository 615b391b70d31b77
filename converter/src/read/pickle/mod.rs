//! An allow-list machine for pickles: it builds plain values, and never runs anything.
//!
//! A pickle is a program for a small stack machine, and Python's own reader lets it call any function it names.
//! This one reads the same opcodes (protocols 2 to 5, the ones that `torch.save` and `torch.distributed.checkpoint`
//! write; Python's `pickletools.py` describes each), but a global is a mere token, which has to stand on the list in
//! `globals.rs`, and "calling" one of the listed functions or classes builds an [`Object`] with its arguments. An
//! unlisted global ends the reading at once, as does every opcode that could do something else.
//!
//! Values lie in flat tables and refer to each other by index. So containers that are shared (a pickle can nest
//! twenty shared pairs and mean a million leaves) cost what they take in the pickle, loops leak nothing, and dropping
//! never recurses. Whoever follows values has to bound its own walk: readers go down a fixed number of steps.
//! Memory is bounded by the pickle's own length (see `machine.rs`).

mod globals;
mod input;
mod machine;

pub use globals::{Global, Place};

use crate::error::Result;

/// A value of a pickle. Text and bytes lie in the pickle itself; containers lie in the tables of [`Pickle`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer of at most 64 bits.
    Int(i64),
    /// A longer integer, whose value is not kept.
    LongInt,
    /// A floating-point number.
    Float(f64),
    /// A `str`.
    Text(&'a str),
    /// A `bytes`.
    Bytes(&'a [u8]),
    /// A `tuple`, or a `torch.Size`.
    Tuple(Tuple),
    /// A `list`, or a `deque` without a length.
    List(List),
    /// A `dict`, `OrderedDict`, `defaultdict` or `Counter`.
    Dict(Dict),
    /// A function, class or constant of the allow list.
    Global(Global),
    /// What a function or class of the allow list was asked to make.
    Object(Object),
    /// The tuple by which `torch.save` names a storage.
    PersistentId(Tuple),
}

/// A tuple in [`Pickle`]'s table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tuple {
    start: usize,
    length: usize,
}

/// A list in [`Pickle`]'s table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct List(usize);

/// A dict in [`Pickle`]'s table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dict(usize);

/// An object in [`Pickle`]'s table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Object(usize);

/// What is known of an object: which function or class was to make it, of what.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Made<'a> {
    /// The function or class.
    pub by: Global,
    /// The arguments.
    pub arguments: Tuple,
    /// What BUILD set on it; [`Value::None`] without one.
    pub state: Value<'a>,
}

/// A pickle that was read: its one value, and the tables in which containers lie.
#[derive(Debug)]
pub struct Pickle<'a> {
    root: Value<'a>,
    tuples: Vec<Value<'a>>,
    lists: Vec<Vec<Value<'a>>>,
    dicts: Vec<Vec<(Value<'a>, Value<'a>)>>,
    objects: Vec<Made<'a>>,
}

impl<'a> Pickle<'a> {
    /// The pickle's value.
    #[must_use]
    pub const fn root(&self) -> Value<'a> {
        self.root
    }

    /// The elements of a tuple.
    #[must_use]
    pub fn tuple(&self, tuple: Tuple) -> &[Value<'a>] {
        let end = tuple.start.saturating_add(tuple.length);
        self.tuples.get(tuple.start..end).unwrap_or_default()
    }

    /// The elements of a list.
    #[must_use]
    pub fn list(&self, list: List) -> &[Value<'a>] {
        self.lists.get(list.0).map(Vec::as_slice).unwrap_or_default()
    }

    /// The pairs of a dict, in the order of writing. A key may stand there twice; Python would keep the last.
    #[must_use]
    pub fn dict(&self, dict: Dict) -> &[(Value<'a>, Value<'a>)] {
        self.dicts.get(dict.0).map(Vec::as_slice).unwrap_or_default()
    }

    /// The pairs of every dict.
    pub(in crate::read) fn dicts(&self) -> impl Iterator<Item = &[(Value<'a>, Value<'a>)]> {
        self.dicts.iter().map(Vec::as_slice)
    }

    /// What made an object; `None` for anything else.
    #[must_use]
    pub fn maker(&self, value: Value<'_>) -> Option<Global> {
        self.object(value).map(|made| made.by)
    }

    /// How an object was made; `None` for anything else.
    #[must_use]
    pub fn object(&self, value: Value<'_>) -> Option<Made<'a>> {
        let Value::Object(object) = value else { return None };
        self.objects.get(object.0).copied()
    }

    /// How an object was made, where `by` (and nothing else) was to make it.
    #[must_use]
    pub fn made(&self, value: Value<'_>, by: Global) -> Option<Made<'a>> {
        self.object(value).filter(|made| made.by == by)
    }

    /// How many values it holds, in all tables.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(in crate::read) fn values(&self) -> usize {
        let in_lists: usize = self.lists.iter().map(|list| 1 + list.len()).sum();
        let in_dicts: usize = self.dicts.iter().map(|dict| 1 + 2 * dict.len()).sum();
        self.tuples.len() + in_lists + in_dicts + self.objects.len()
    }
}

/// Reads the pickle that `input` is, all of it, in a place where only some globals may stand.
///
/// # Errors
/// [`crate::error::Class::ForbiddenGlobal`] naming what is not on the list,
/// [`crate::error::Class::UnsupportedObject`] for what is known and not supported,
/// [`crate::error::Class::PickleMalformed`] for broken opcodes, [`crate::error::Class::LimitExceeded`].
pub fn parse(input: &[u8], place: Place) -> Result<Pickle<'_>> {
    machine::Machine::new(input, place).run()
}

#[cfg(test)]
mod tests;
