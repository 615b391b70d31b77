//! The stack machine behind [`super::parse`].
//!
//! Bounds: every value held in a container, object or memo takes one of as many units as the pickle has bytes (and
//! some to start with), which real checkpoints stay well under; so memory is a small multiple of the pickle's length.
//! The stack, open marks and opcodes have limits of their own.

use weighbridge_schemas::limits;

use super::{Dict, Global, List, Made, Object, Pickle, Place, Tuple, Value};
use crate::error::{Class, ReadError, Result};

/// Most values on the stack. Picklers write containers out in batches of a thousand.
const STACK_VALUES: usize = 1 << 20;
/// How many values a pickle may hold beyond one a byte.
const SPARE_VALUES: usize = 1024;

/// The machine, in the middle of one pickle.
pub(super) struct Machine<'a> {
    input: &'a [u8],
    /// The next byte.
    at: usize,
    /// The opcode at work, for messages.
    opcode_at: usize,
    place: Place,
    stack: Vec<Value<'a>>,
    /// The stack's height at each open mark.
    marks: Vec<usize>,
    memo: Vec<Value<'a>>,
    /// How many more values may be held.
    room: usize,
    made: Pickle<'a>,
}

impl<'a> Machine<'a> {
    pub(super) fn new(input: &'a [u8], place: Place) -> Self {
        Self {
            input,
            at: 0,
            opcode_at: 0,
            place,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
            room: input.len().saturating_add(SPARE_VALUES),
            made: Pickle {
                root: Value::None,
                tuples: Vec::new(),
                lists: Vec::new(),
                dicts: Vec::new(),
                objects: Vec::new(),
            },
        }
    }

    /// Runs to STOP.
    pub(super) fn run(mut self) -> Result<Pickle<'a>> {
        self.protocol()?;
        for _ in 0..limits::PICKLE_OPCODES {
            self.opcode_at = self.at;
            let code = self.byte()?;
            if code == b'.' {
                return self.stop();
            }
            self.step(code)?;
        }
        Err(self.over(format!("it has more than {} opcodes", limits::PICKLE_OPCODES)))
    }

    fn protocol(&mut self) -> Result<()> {
        match self.array()? {
            [0x80, 2..=5] => Ok(()),
            [0x80, version] => Err(self.malformed(format!("protocol {version} is not one of 2 to 5"))),
            _ => Err(self.malformed("it does not begin with a protocol")),
        }
    }

    fn stop(mut self) -> Result<Pickle<'a>> {
        self.made.root = self.pop()?;
        if !self.stack.is_empty() || !self.marks.is_empty() {
            return Err(self.malformed("values are left over at the end"));
        }
        let rest = self.input.len().saturating_sub(self.at);
        if rest != 0 {
            return Err(self.malformed(format!("{rest} bytes follow the end")));
        }
        Ok(self.made)
    }

    fn step(&mut self, code: u8) -> Result<()> {
        match code {
            b'(' => self.mark(),
            b']' => self.new_list(),
            b'}' => self.new_dict(),
            b'a' => self.append(),
            b'e' => self.append_marked(),
            b's' => self.set_item(),
            b'u' => self.set_marked(),
            b't' => {
                let start = self.close_mark()?;
                self.new_tuple(start)
            }
            0x85..=0x87 => {
                let start = self.start_of_last(usize::from(code - 0x84))?;
                self.new_tuple(start)
            }
            b'q' => {
                let index = self.byte()?.into();
                self.memoize(index)
            }
            b'r' => {
                let index = self.length4()?;
                self.memoize(index)
            }
            0x94 => self.memoize(self.memo.len()),
            b'h' => {
                let index = self.byte()?.into();
                self.recall(index)
            }
            b'j' => {
                let index = self.length4()?;
                self.recall(index)
            }
            b'c' | b'i' => self.global_by_lines(code),
            0x93 => self.global_by_stack(),
            b'R' => self.reduce(),
            0x81 => self.new_object(),
            b'b' => self.build(),
            b'Q' => self.persistent_id(),
            0x95 => self.frame(),
            _ => {
                let value = self.literal(code)?;
                self.push(value)
            }
        }
    }

    /// The opcodes that are one value.
    fn literal(&mut self, code: u8) -> Result<Value<'a>> {
        Ok(match code {
            b'N' => Value::None,
            0x88 => Value::Bool(true),
            0x89 => Value::Bool(false),
            b')' => Value::Tuple(Tuple::default()),
            b'K' => Value::Int(self.byte()?.into()),
            b'M' => Value::Int(u16::from_le_bytes(self.array()?).into()),
            b'J' => Value::Int(i32::from_le_bytes(self.array()?).into()),
            0x8a => self.long()?,
            b'G' => Value::Float(f64::from_be_bytes(self.array()?)),
            b'X' | 0x8c | 0x8d | b'U' => self.text(code)?,
            b'B' | b'C' | 0x8e => Value::Bytes(self.counted(code)?),
            _ => return Err(self.refused(code)),
        })
    }

    /// Bytes behind their length, whose width depends on the opcode.
    fn counted(&mut self, code: u8) -> Result<&'a [u8]> {
        let length = match code {
            b'U' | b'C' | 0x8c => self.byte()?.into(),
            b'X' | b'B' => self.length4()?,
            _ => usize::try_from(u64::from_le_bytes(self.array()?)).unwrap_or(usize::MAX),
        };
        self.take(length)
    }

    fn text(&mut self, code: u8) -> Result<Value<'a>> {
        let bytes = self.counted(code)?;
        let text = std::str::from_utf8(bytes).map_err(|_| self.malformed("a text is not UTF-8"))?;
        Ok(Value::Text(text))
    }

    /// A little-endian two's complement number of as many bytes as it says.
    fn long(&mut self) -> Result<Value<'a>> {
        let length = self.byte()?;
        let bytes = self.take(length.into())?;
        let sign = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
        let mut number = [sign; 8];
        let Some(low) = number.get_mut(..bytes.len()) else {
            return Err(self.over(format!("it holds an integer of {length} bytes; 8 are the most")));
        };
        low.copy_from_slice(bytes);
        Ok(Value::Int(i64::from_le_bytes(number)))
    }

    /// A frame announces how many bytes belong together; nothing depends on it but that they are there.
    fn frame(&mut self) -> Result<()> {
        let length = u64::from_le_bytes(self.array()?);
        let left = self.input.len().saturating_sub(self.at);
        if usize::try_from(length).is_ok_and(|length| length <= left) {
            return Ok(());
        }
        Err(self.malformed(format!("a frame of {length} bytes is announced, but {left} are left")))
    }

    fn mark(&mut self) -> Result<()> {
        if self.marks.len() >= limits::PICKLE_DEPTH {
            return Err(self.over(format!("values are nested more than {} deep", limits::PICKLE_DEPTH)));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// Closes the innermost mark: where its values start on the stack.
    fn close_mark(&mut self) -> Result<usize> {
        self.marks.pop().ok_or_else(|| self.malformed("a mark is missing"))
    }

    fn push(&mut self, value: Value<'a>) -> Result<()> {
        if self.stack.len() >= STACK_VALUES {
            return Err(self.over(format!("more than {STACK_VALUES} values are on the stack")));
        }
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value<'a>> {
        let at = self.start_of_last(1)?;
        let value = self.stack.get(at).copied().unwrap_or(Value::None);
        self.stack.truncate(at);
        Ok(value)
    }

    fn top(&self) -> Result<Value<'a>> {
        let at = self.start_of_last(1)?;
        Ok(self.stack.get(at).copied().unwrap_or(Value::None))
    }

    /// Where the last `count` values start on the stack; none of them may lie below the innermost mark.
    fn start_of_last(&self, count: usize) -> Result<usize> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let start = self.stack.len().checked_sub(count).filter(|&start| start >= floor);
        start.ok_or_else(|| self.malformed("the stack runs empty"))
    }

    /// Takes room for `count` more values.
    fn hold(&mut self, count: usize) -> Result<()> {
        self.room = self.room.checked_sub(count).ok_or_else(|| {
            self.over(format!(
                "it holds more values than any checkpoint's pickle of {} bytes",
                self.input.len()
            ))
        })?;
        Ok(())
    }

    fn new_tuple(&mut self, start: usize) -> Result<()> {
        let values = self.stack.get(start..).unwrap_or_default();
        let tuple = Tuple { start: self.made.tuples.len(), length: values.len() };
        self.hold(tuple.length)?;
        self.made.tuples.extend(self.stack.drain(start..));
        self.push(Value::Tuple(tuple))
    }

    fn new_list(&mut self) -> Result<()> {
        self.hold(1)?;
        let list = List(self.made.lists.len());
        self.made.lists.push(Vec::new());
        self.push(Value::List(list))
    }

    fn new_dict(&mut self) -> Result<()> {
        self.hold(1)?;
        let dict = Dict(self.made.dicts.len());
        self.made.dicts.push(Vec::new());
        self.push(Value::Dict(dict))
    }

    fn append(&mut self) -> Result<()> {
        let start = self.start_of_last(1)?;
        self.append_from(start)
    }

    fn append_marked(&mut self) -> Result<()> {
        let start = self.close_mark()?;
        self.append_from(start)
    }

    /// Moves the stack's values from `start` on to the list below them.
    fn append_from(&mut self, start: usize) -> Result<()> {
        let count = self.stack.len().saturating_sub(start);
        self.hold(count)?;
        let target = self.below(start)?;
        let Value::List(List(index)) = target else {
            return Err(self.malformed("values are appended to something that is no list"));
        };
        if let Some(list) = self.made.lists.get_mut(index) {
            // Most lists are written at once, and many are short.
            if list.is_empty() {
                list.reserve_exact(count);
            }
            list.extend(self.stack.drain(start..));
        }
        Ok(())
    }

    fn set_item(&mut self) -> Result<()> {
        let start = self.start_of_last(2)?;
        self.set_from(start)
    }

    fn set_marked(&mut self) -> Result<()> {
        let start = self.close_mark()?;
        self.set_from(start)
    }

    /// Moves the stack's keys and values from `start` on to the dict below them.
    fn set_from(&mut self, start: usize) -> Result<()> {
        let count = self.stack.len().saturating_sub(start);
        self.hold(count)?;
        let target = self.below(start)?;
        let Value::Dict(Dict(index)) = target else {
            return Err(self.malformed("items are set on something that is no dict"));
        };
        let (pairs, []) = self.stack.get(start..).unwrap_or_default().as_chunks::<2>() else {
            return Err(self.malformed("a key has no value"));
        };
        if let Some(dict) = self.made.dicts.get_mut(index) {
            if dict.is_empty() {
                dict.reserve_exact(pairs.len());
            }
            dict.extend(pairs.iter().map(|&[key, value]| (key, value)));
        }
        self.stack.truncate(start);
        Ok(())
    }

    /// The value just below `start`, above the innermost mark.
    fn below(&self, start: usize) -> Result<Value<'a>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let at = start.checked_sub(1).filter(|&at| at >= floor);
        let value = at.and_then(|at| self.stack.get(at)).copied();
        value.ok_or_else(|| self.malformed("the stack runs empty"))
    }

    /// Picklers count their memo up, so an index is at most one past the last.
    fn memoize(&mut self, index: usize) -> Result<()> {
        let value = self.top()?;
        if let Some(place) = self.memo.get_mut(index) {
            *place = value;
            return Ok(());
        }
        if index != self.memo.len() {
            return Err(self.malformed(format!("memo {index} is set before memo {}", self.memo.len())));
        }
        self.hold(1)?;
        self.memo.push(value);
        Ok(())
    }

    fn recall(&mut self, index: usize) -> Result<()> {
        let value = self.memo.get(index).copied();
        let value = value.ok_or_else(|| self.malformed(format!("memo {index} was never set")))?;
        self.push(value)
    }

    /// GLOBAL, and INST, which would call what it names.
    fn global_by_lines(&mut self, code: u8) -> Result<()> {
        let (module, name) = (self.line()?, self.line()?);
        let global = Global::find(module, name, self.place)?;
        if code == b'i' {
            return Err(self.refused(code));
        }
        self.push(Value::Global(global))
    }

    fn global_by_stack(&mut self) -> Result<()> {
        let (name, module) = (self.pop()?, self.pop()?);
        let (Value::Text(module), Value::Text(name)) = (module, name) else {
            return Err(self.malformed("a global is not named by texts"));
        };
        let global = Global::find(module, name, self.place)?;
        self.push(Value::Global(global))
    }

    fn callee(&mut self) -> Result<(Global, Tuple)> {
        let (arguments, callee) = (self.pop()?, self.pop()?);
        match (callee, arguments) {
            (Value::Global(global), Value::Tuple(arguments)) => Ok((global, arguments)),
            (Value::Global(_), _) => Err(self.malformed("arguments are not a tuple")),
            _ => Err(self.unsupported("something is called that is neither a function nor a class")),
        }
    }

    /// Containers become values at once; other functions become objects, which readers understand or refuse.
    fn reduce(&mut self) -> Result<()> {
        let (function, arguments) = self.callee()?;
        match (function, self.made.tuple(arguments)) {
            (Global::OrderedDict | Global::Counter, []) => self.new_dict(),
            (Global::Counter, &[counts @ Value::Dict(_)]) => self.push(counts),
            (Global::Size, &[sizes @ Value::Tuple(_)]) => self.push(sizes),
            (function, _) if function.is_function() => self.object(function, arguments),
            (other, _) => Err(self.unsupported(format!("{other:?} is called in an unknown way"))),
        }
    }

    fn new_object(&mut self) -> Result<()> {
        let (class, arguments) = self.callee()?;
        if !class.is_class() || arguments != Tuple::default() {
            return Err(self.unsupported(format!("an object of {class:?} is made in an unknown way")));
        }
        self.object(class, arguments)
    }

    fn object(&mut self, by: Global, arguments: Tuple) -> Result<()> {
        self.hold(1)?;
        let object = Object(self.made.objects.len());
        self.made.objects.push(Made { by, arguments, state: Value::None });
        self.push(Value::Object(object))
    }

    fn build(&mut self) -> Result<()> {
        let state = self.pop()?;
        match self.top()? {
            // What a module's state_dict() carries besides its entries: `_metadata`, an attribute.
            Value::Dict(_) => return Ok(()),
            Value::Object(Object(index)) => {
                let object = self.made.objects.get_mut(index);
                if let Some(object) =
                    object.filter(|object| object.by.is_class() && object.state == Value::None)
                {
                    object.state = state;
                    return Ok(());
                }
            }
            _ => {}
        }
        Err(self.unsupported("a state is set on something that has none, or has one already"))
    }

    fn persistent_id(&mut self) -> Result<()> {
        match (self.place, self.pop()?) {
            (Place::Tensors, Value::Tuple(id)) => self.push(Value::PersistentId(id)),
            (Place::Tensors, _) => Err(self.malformed("a storage is not named by a tuple")),
            (Place::Metadata, _) => Err(self.unsupported("a storage stands where none can lie")),
        }
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let found = self.input.get(self.at..).and_then(|rest| rest.first_chunk()).copied();
        let bytes = found.ok_or_else(|| self.malformed("it breaks off"))?;
        self.at += N;
        Ok(bytes)
    }

    fn length4(&mut self) -> Result<usize> {
        Ok(usize::try_from(u32::from_le_bytes(self.array()?)).unwrap_or(usize::MAX))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(length);
        let bytes = end.and_then(|end| self.input.get(self.at..end));
        let bytes = bytes.ok_or_else(|| self.malformed(format!("it breaks off within {length} bytes")))?;
        self.at += length;
        Ok(bytes)
    }

    /// The text up to the next line feed.
    fn line(&mut self) -> Result<&'a str> {
        let rest = self.input.get(self.at..).unwrap_or_default();
        let length = rest.iter().position(|&byte| byte == b'\n');
        let bytes = self.take(length.ok_or_else(|| self.malformed("it breaks off within a name"))?)?;
        self.at += 1;
        std::str::from_utf8(bytes).map_err(|_| self.malformed("a name is not UTF-8"))
    }

    /// An opcode that exists, and could do more than build values, or that no checkpoint needs.
    fn refused(&self, code: u8) -> ReadError {
        let name = match code {
            b'i' => "INST",
            b'o' => "OBJ",
            0x82 => "EXT1",
            0x83 => "EXT2",
            0x84 => "EXT4",
            b'P' => "PERSID",
            0x92 => "NEWOBJ_EX",
            0x8f => "EMPTY_SET",
            0x90 => "ADDITEMS",
            0x91 => "FROZENSET",
            0x96 => "BYTEARRAY8",
            0x97 => "NEXT_BUFFER",
            0x98 => "READONLY_BUFFER",
            0x8b => "LONG4",
            b'0' => "POP",
            b'1' => "POP_MARK",
            b'2' => "DUP",
            b'T' => "BINSTRING",
            b'd' => "DICT",
            b'l' => "LIST",
            b'F' | b'I' | b'L' | b'S' | b'V' | b'g' | b'p' => "of protocol 0",
            _ => return self.malformed(format!("there is no opcode 0x{code:02x}")),
        };
        self.unsupported(format!("the opcode {name} (0x{code:02x}) is refused"))
    }

    fn malformed(&self, why: impl std::fmt::Display) -> ReadError {
        self.error(Class::PickleMalformed, "is broken", why)
    }

    fn over(&self, why: impl std::fmt::Display) -> ReadError {
        self.error(Class::LimitExceeded, "is over a limit", why)
    }

    fn unsupported(&self, why: impl std::fmt::Display) -> ReadError {
        self.error(Class::UnsupportedObject, "is not one of tensors", why)
    }

    fn error(&self, class: Class, what: &str, why: impl std::fmt::Display) -> ReadError {
        ReadError::new(class, format!("the pickle {what} at its byte {}: {why}", self.opcode_at))
    }
}
