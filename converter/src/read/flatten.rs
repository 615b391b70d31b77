//! The nested dicts and lists of a trainer's object, flattened: one dotted name for every tensor in it.
//!
//! Names are the dict keys and list indices on the way to a leaf, joined by dots, as `torch.distributed.checkpoint`
//! flattens them: `{"model": {"w": x}, "optimizer": {"state": {0: {"step": y}}}}` holds `model.w` and
//! `optimizer.state.0.step`. A list or tuple without tensors and containers in it is a leaf. An object that is one
//! tensor has no key; it is named `tensor`.
//!
//! Containers may be shared, or hold themselves: depth, the number of values on all ways, and the bytes of all names
//! have limits. A set has no order, so a tensor in one has no name that would be the same in the next run: the set is
//! given as one tensor that cannot be read.

use std::collections::HashSet;

use weighbridge_schemas::error::shorten;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;

use super::pickle::{Global, Pickle, Value};
use super::room::Room;
use crate::checkpoint::Others;
use crate::error::{Class, ReadError, Result};

/// The name of an object that is one tensor.
const BARE: &str = "tensor";

/// What an object holds.
#[derive(Debug)]
pub(super) struct Flat<'p> {
    /// The tensors, and sets that hold some, sorted by name, each name once.
    pub(super) tensors: Vec<(TensorName, Value<'p>)>,
    /// The other leaves, in the order of writing.
    pub(super) others: Others,
}

/// Flattens the object of `pickle`, if there is room for the listing of what it holds.
///
/// # Errors
/// [`Class::DuplicateKey`] for two tensors of one name, and two equal keys of one dict, [`Class::UnsafeName`],
/// [`Class::LimitExceeded`], [`Class::UnsupportedObject`] for keys that are no names, and containers that hold
/// themselves.
pub(super) fn flatten<'p>(pickle: &'p Pickle<'p>, room: &mut Room) -> Result<Flat<'p>> {
    pickle.dicts().try_for_each(check_keys)?;
    let mut flat = Flat { tensors: Vec::new(), others: Others::default() };
    let mut name_bytes = 0usize;
    Walk::new(pickle).run(&mut |path, value, is_tensor| {
        if !is_tensor {
            flat.others.add(&path.name, kind(pickle, value));
            return Ok(());
        }
        room.tensor(path.name.len())?;
        let name = path.tensor_name()?;
        name_bytes = name_bytes.saturating_add(name.as_str().len());
        if flat.tensors.len() >= limits::TENSORS || name_bytes > limits::TENSOR_NAMES_BYTES {
            let why = format!(
                "it holds more tensors, or longer names, than the {} tensors and {} bytes of names that may be",
                limits::TENSORS,
                limits::TENSOR_NAMES_BYTES
            );
            return Err(ReadError::new(Class::LimitExceeded, why));
        }
        flat.tensors.push((name, value));
        Ok(())
    })?;
    flat.tensors.sort_by(|(first, _), (second, _)| first.cmp(second));
    let twice = flat.tensors.windows(2).find_map(|pair| match pair {
        [(first, _), (second, _)] if first == second => Some(first),
        _ => None,
    });
    match twice {
        Some(name) => Err(collision(pickle, name)),
        None => Ok(flat),
    }
}

/// Refuses a dict with two equal keys. Python keeps the last, and no pickler writes them.
fn check_keys(pairs: &[(Value<'_>, Value<'_>)]) -> Result<()> {
    let mut keys = HashSet::with_capacity(pairs.len());
    for &(key, _) in pairs {
        let (number, text) = match key {
            Value::Text(text) => (None, Some(text)),
            Value::Int(number) => (Some(number), None),
            Value::Bool(number) => (Some(number.into()), None),
            // Python takes 1.0 for 1.
            Value::Float(number) => match format!("{number:.0}").parse() {
                Ok(whole) if number.fract() == 0.0 => (Some(whole), None),
                _ => continue,
            },
            _ => continue,
        };
        if !keys.insert((number, text)) {
            let key =
                text.map_or_else(|| spelled(key).unwrap_or_default(), |text| format!("{:?}", shorten(text)));
            let why = format!(
                "a dict in it has the key {key} twice, of which Python keeps the last: the file is damaged or crafted"
            );
            return Err(ReadError::new(Class::DuplicateKey, why));
        }
    }
    Ok(())
}

/// Two ways to tensors lead to one name: both, as Python would write them.
fn collision(pickle: &Pickle<'_>, name: &TensorName) -> ReadError {
    let mut ways = Vec::new();
    let found = Walk::new(pickle).run(&mut |path, _, is_tensor| {
        if path.name == name.as_str() && ways.len() < 2 && is_tensor {
            ways.push(path.way());
        }
        Ok(())
    });
    if let Err(error) = found {
        return error;
    }
    let why = format!("{} have this name once flattened; rename a key before saving", ways.join(" and "));
    ReadError::new(Class::DuplicateKey, why).of_tensor(name.as_str())
}

fn is_tensor(pickle: &Pickle<'_>, value: Value<'_>) -> bool {
    matches!(
        pickle.maker(value),
        Some(
            Global::RebuildTensorV2
                | Global::RebuildTensorV3
                | Global::RebuildParameter
                | Global::RebuildParameterWithState
                | Global::RebuildFromType
                | Global::OtherTensor(_)
        )
    )
}

/// What a leaf is, by Python's name.
fn kind(pickle: &Pickle<'_>, value: Value<'_>) -> &'static str {
    match (value, pickle.maker(value)) {
        (Value::None, _) => "None",
        (Value::Bool(_), _) => "bool",
        (Value::Int(_) | Value::LongInt, _) => "int",
        (Value::Float(_), _) => "float",
        (Value::Text(_), _) => "str",
        (Value::Bytes(_), _) | (_, Some(Global::Encode)) => "bytes",
        (_, Some(Global::ByteArray)) => "bytearray",
        (_, Some(Global::Path)) => "path",
        (Value::Tuple(_), _) => "tuple",
        (Value::List(_), _) => "list",
        (Value::Dict(_), _) => "dict",
        (Value::Global(Global::Dtype(_) | Global::OtherDtype(_)), _) => "dtype",
        (Value::PersistentId(_), _) => "storage",
        (_, Some(Global::Device)) => "device",
        (_, Some(Global::Set)) => "set",
        (_, Some(Global::Complex)) => "complex",
        (_, Some(Global::GetLayout)) => "layout",
        _ => "object",
    }
}

/// The way to a value.
struct Path<'p> {
    /// The keys, joined by dots; long ones are shortened.
    name: String,
    /// How many of the keys are too long for a tensor's name.
    too_long: usize,
    keys: Vec<Value<'p>>,
}

impl Path<'_> {
    fn tensor_name(&self) -> Result<TensorName> {
        if self.too_long > 0 {
            let why = format!("its name has more than {} bytes", limits::TENSOR_NAME_BYTES);
            return Err(ReadError::new(Class::UnsafeName, why).of_tensor(shorten(&self.name)));
        }
        let name = if self.keys.is_empty() { BARE } else { &self.name };
        name.parse().map_err(|error: weighbridge_schemas::error::DocumentError| {
            ReadError::new(Class::UnsafeName, error.to_string())
        })
    }

    /// The keys as Python writes them: `["a"][0]`.
    fn way(&self) -> String {
        let key = |key: &Value<'_>| match key {
            Value::Text(text) => format!("[{:?}]", shorten(text)),
            other => format!("[{}]", spelled(*other).unwrap_or_default()),
        };
        self.keys.iter().map(key).collect()
    }
}

/// A key that is no text, as `str()` spells it.
fn spelled(key: Value<'_>) -> Option<String> {
    match key {
        Value::Int(number) => Some(number.to_string()),
        Value::Bool(true) => Some("True".to_owned()),
        Value::Bool(false) => Some("False".to_owned()),
        Value::None => Some("None".to_owned()),
        Value::Float(number) => Some(format!("{number:?}")),
        _ => None,
    }
}

/// A walk over an object, to all of its leaves.
struct Walk<'p> {
    pickle: &'p Pickle<'p>,
    path: Path<'p>,
    /// The containers on the way, one for each of its keys.
    containers: Vec<Value<'p>>,
    /// How many more values may be looked at.
    left: usize,
}

/// What is done at each leaf; it is told whether there are tensors in it.
type Visit<'v, 'p> = dyn FnMut(&Path<'p>, Value<'p>, bool) -> Result<()> + 'v;

impl<'p> Walk<'p> {
    fn new(pickle: &'p Pickle<'p>) -> Self {
        let path = Path { name: String::new(), too_long: 0, keys: Vec::new() };
        Self { pickle, path, containers: Vec::new(), left: limits::OBJECT_VALUES }
    }

    fn run(mut self, visit: &mut Visit<'_, 'p>) -> Result<()> {
        self.value(self.pickle.root(), visit)
    }

    fn value(&mut self, value: Value<'p>, visit: &mut Visit<'_, 'p>) -> Result<()> {
        match value {
            Value::Dict(dict) => self.pickle.dict(dict).iter().try_for_each(|&(key, inner)| {
                self.take(1)?;
                self.below(value, key, inner, visit)
            }),
            Value::List(list) => self.sequence(value, self.pickle.list(list), visit),
            Value::Tuple(tuple) => self.sequence(value, self.pickle.tuple(tuple), visit),
            leaf => {
                let with_tensors = is_tensor(self.pickle, leaf) || self.is_set_with_tensors(leaf, 0)?;
                visit(&self.path, leaf, with_tensors)
            }
        }
    }

    /// Whether `value` is a set with tensors in it, or in tuples and sets in it.
    fn is_set_with_tensors(&mut self, value: Value<'p>, depth: usize) -> Result<bool> {
        let values = match (value, self.pickle.made(value, Global::Set)) {
            (Value::Tuple(tuple), _) if depth > 0 => self.pickle.tuple(tuple),
            (_, Some(set)) => match self.pickle.tuple(set.arguments) {
                &[Value::List(list)] => self.pickle.list(list),
                _ => return Ok(false),
            },
            _ => return Ok(false),
        };
        if depth >= limits::PICKLE_DEPTH {
            return Err(self.too_deep());
        }
        self.take(values.len())?;
        for &value in values {
            if is_tensor(self.pickle, value) || self.is_set_with_tensors(value, depth + 1)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// A list or tuple: a leaf, if there are but numbers and texts in it.
    fn sequence(
        &mut self,
        whole: Value<'p>,
        values: &'p [Value<'p>],
        visit: &mut Visit<'_, 'p>,
    ) -> Result<()> {
        self.take(values.len())?;
        let is_inner = |&value: &Value<'p>| {
            matches!(value, Value::Dict(_) | Value::List(_) | Value::Tuple(_))
                || is_tensor(self.pickle, value)
                || self.pickle.maker(value) == Some(Global::Set)
        };
        if !values.iter().any(is_inner) {
            return visit(&self.path, whole, false);
        }
        values.iter().enumerate().try_for_each(|(index, &value)| {
            self.below(whole, Value::Int(i64::try_from(index).unwrap_or(i64::MAX)), value, visit)
        })
    }

    /// Goes on to `value`, which `container` has at `key`.
    fn below(
        &mut self,
        container: Value<'p>,
        key: Value<'p>,
        value: Value<'p>,
        visit: &mut Visit<'_, 'p>,
    ) -> Result<()> {
        if self.path.keys.len() >= limits::PICKLE_DEPTH {
            return Err(self.too_deep());
        }
        let (length, too_long) = (self.path.name.len(), self.path.too_long);
        if !self.path.keys.is_empty() {
            self.path.name.push('.');
        }
        match key {
            Value::Text(text) if text.len() > limits::TENSOR_NAME_BYTES => {
                self.path.name.push_str(&shorten(text));
                self.path.too_long += 1;
            }
            Value::Text(text) => self.path.name.push_str(text),
            other => self.path.name.push_str(&spelled(other).ok_or_else(|| self.odd_key())?),
        }
        self.path.keys.push(key);
        self.containers.push(container);
        self.value(value, visit)?;
        self.containers.pop();
        self.path.keys.pop();
        self.path.name.truncate(length);
        self.path.too_long = too_long;
        Ok(())
    }

    /// A way that does not end: because a container holds itself, where one is on it twice.
    fn too_deep(&self) -> ReadError {
        let last = self.containers.last();
        let loops = last.is_some_and(|last| self.containers.iter().filter(|&one| one == last).count() > 1);
        if loops {
            let why =
                "a dict or list in it holds itself, so what is in it has no end; save one that does not";
            return ReadError::new(Class::UnsupportedObject, why);
        }
        let why = format!("its object is nested more than {} deep", limits::PICKLE_DEPTH);
        ReadError::new(Class::LimitExceeded, why)
    }

    fn odd_key(&self) -> ReadError {
        let place = match self.path.keys.as_slice() {
            [] => "at the top level".to_owned(),
            _ => format!("at {}", shorten(&self.path.way())),
        };
        let why = format!(
            "the dict {place} has a key that is neither text nor number (a tuple, or bytes), so what it holds has no \
             name; save a dict with plain keys"
        );
        ReadError::new(Class::UnsupportedObject, why)
    }

    fn take(&mut self, count: usize) -> Result<()> {
        self.left = self.left.checked_sub(count).ok_or_else(|| {
            let why = format!("its object holds more than {} values", limits::OBJECT_VALUES);
            ReadError::new(Class::LimitExceeded, why)
        })?;
        Ok(())
    }
}
