//! The stack machine behind [`super::parse`].
//!
//! Bounds: every value held in a container, object or memo takes one of as many units as the pickle has bytes (and
//! some to start with), which real checkpoints stay well under; so memory is a small multiple of the pickle's length.
//! The stack, open marks and opcodes have limits of their own.

use weighbridge_schemas::limits;

use super::input::Input;
use super::{Dict, Global, List, Made, Object, Pickle, Place, Tuple, Value};
use crate::error::Result;

/// Most values on the stack. Picklers write containers out in batches of a thousand.
const STACK_VALUES: usize = 1 << 20;
/// How many values a pickle may hold beyond one for every two bytes; those that torch writes hold fewer than 0.4 a
/// byte.
const SPARE_VALUES: usize = 1024;

/// The machine, in the middle of one pickle.
pub(super) struct Machine<'a> {
    input: Input<'a>,
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
            input: Input::new(input),
            place,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Vec::new(),
            room: (input.len() / 2).saturating_add(SPARE_VALUES),
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
        self.input.protocol()?;
        for _ in 0..limits::PICKLE_OPCODES {
            let code = self.input.opcode()?;
            if code == b'.' {
                return self.stop();
            }
            self.step(code)?;
        }
        Err(self.input.over(format!("it has more than {} opcodes", limits::PICKLE_OPCODES)))
    }

    fn stop(mut self) -> Result<Pickle<'a>> {
        self.made.root = self.pop()?;
        if !self.stack.is_empty() || !self.marks.is_empty() {
            return Err(self.input.malformed("values are left over at the end"));
        }
        let rest = self.input.left();
        if rest != 0 {
            return Err(self.input.malformed(format!("{rest} bytes follow the end")));
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
                let index = self.input.byte()?.into();
                self.memoize(index)
            }
            b'r' => {
                let index = self.input.length4()?;
                self.memoize(index)
            }
            0x94 => self.memoize(self.memo.len()),
            b'h' => {
                let index = self.input.byte()?.into();
                self.recall(index)
            }
            b'j' => {
                let index = self.input.length4()?;
                self.recall(index)
            }
            b'c' | b'i' => self.global_by_lines(code),
            0x93 => self.global_by_stack(),
            b'R' => self.reduce(),
            0x81 => self.new_object(),
            b'b' => self.build(),
            b'Q' => self.persistent_id(),
            0x8f => self.new_set(),
            0x90 | 0x91 => self.set_of_marked(code),
            0x95 => self.input.frame(),
            _ => {
                let value = self.input.literal(code)?;
                self.push(value)
            }
        }
    }

    fn mark(&mut self) -> Result<()> {
        if self.marks.len() >= limits::PICKLE_DEPTH {
            return Err(self
                .input
                .over(format!("values are nested more than {} deep", limits::PICKLE_DEPTH)));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    /// Closes the innermost mark: where its values start on the stack.
    fn close_mark(&mut self) -> Result<usize> {
        self.marks.pop().ok_or_else(|| self.input.malformed("a mark is missing"))
    }

    fn push(&mut self, value: Value<'a>) -> Result<()> {
        if self.stack.len() >= STACK_VALUES {
            return Err(self.input.over(format!("more than {STACK_VALUES} values are on the stack")));
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
        start.ok_or_else(|| self.input.malformed("the stack runs empty"))
    }

    /// Takes room for `count` more values.
    fn hold(&mut self, count: usize) -> Result<()> {
        self.room = self.room.checked_sub(count).ok_or_else(|| {
            self.input.over(format!(
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
            return Err(self.input.malformed("values are appended to something that is no list"));
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
            return Err(self.input.malformed("items are set on something that is no dict"));
        };
        let (pairs, []) = self.stack.get(start..).unwrap_or_default().as_chunks::<2>() else {
            return Err(self.input.malformed("a key has no value"));
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
        value.ok_or_else(|| self.input.malformed("the stack runs empty"))
    }

    /// Picklers count their memo up, so an index is at most one past the last.
    fn memoize(&mut self, index: usize) -> Result<()> {
        let value = self.top()?;
        if let Some(place) = self.memo.get_mut(index) {
            *place = value;
            return Ok(());
        }
        if index != self.memo.len() {
            return Err(self.input.malformed(format!("memo {index} is set before memo {}", self.memo.len())));
        }
        self.hold(1)?;
        self.memo.push(value);
        Ok(())
    }

    fn recall(&mut self, index: usize) -> Result<()> {
        let value = self.memo.get(index).copied();
        let value = value.ok_or_else(|| self.input.malformed(format!("memo {index} was never set")))?;
        self.push(value)
    }

    /// GLOBAL, and INST, which would call what it names.
    fn global_by_lines(&mut self, code: u8) -> Result<()> {
        let (module, name) = (self.input.line()?, self.input.line()?);
        let global = Global::find(module, name, self.place)?;
        if code == b'i' {
            return Err(self.input.refused(code));
        }
        self.push(Value::Global(global))
    }

    fn global_by_stack(&mut self) -> Result<()> {
        let (name, module) = (self.pop()?, self.pop()?);
        let (Value::Text(module), Value::Text(name)) = (module, name) else {
            return Err(self.input.malformed("a global is not named by texts"));
        };
        let global = Global::find(module, name, self.place)?;
        self.push(Value::Global(global))
    }

    fn callee(&mut self) -> Result<(Global, Tuple)> {
        let (arguments, callee) = (self.pop()?, self.pop()?);
        match (callee, arguments) {
            (Value::Global(global), Value::Tuple(arguments)) => Ok((global, arguments)),
            (Value::Global(_), _) => Err(self.input.malformed("arguments are not a tuple")),
            _ => Err(self.input.unsupported("something is called that is neither a function nor a class")),
        }
    }

    /// Containers become values at once; other functions become objects, which readers understand or refuse.
    fn reduce(&mut self) -> Result<()> {
        let (function, arguments) = self.callee()?;
        match (function, self.made.tuple(arguments)) {
            (Global::OrderedDict | Global::Counter, []) => self.new_dict(),
            (Global::Counter, &[counts @ Value::Dict(_)]) => self.push(counts),
            (Global::Size, &[sizes @ Value::Tuple(_)]) => self.push(sizes),
            (Global::DefaultDict, [] | [Value::Global(_) | Value::None]) => self.new_dict(),
            (Global::Deque, []) => self.new_list(),
            (function, _) if function.is_function() => self.object(function, arguments),
            (other, _) => Err(self.input.unsupported(format!("{other:?} is called in an unknown way"))),
        }
    }

    fn new_object(&mut self) -> Result<()> {
        let (class, arguments) = self.callee()?;
        if !class.is_class() || arguments != Tuple::default() {
            return Err(self.input.unsupported(format!("an object of {class:?} is made in an unknown way")));
        }
        self.object(class, arguments)
    }

    fn object(&mut self, by: Global, arguments: Tuple) -> Result<()> {
        self.hold(1)?;
        let object = Object(self.made.objects.len());
        self.made.objects.push(Made { by, arguments, state: Value::None });
        self.push(Value::Object(object))
    }

    /// EMPTY_SET makes what earlier protocols write as a call: `set([...])`, of a list without values so far.
    fn new_set(&mut self) -> Result<()> {
        self.new_list()?;
        let list = self.start_of_last(1)?;
        self.new_tuple(list)?;
        match self.pop()? {
            Value::Tuple(arguments) => self.object(Global::Set, arguments),
            _ => Err(self.input.malformed("the stack runs empty")),
        }
    }

    /// ADDITEMS, and FROZENSET, which makes the set too.
    fn set_of_marked(&mut self, code: u8) -> Result<()> {
        let start = self.close_mark()?;
        let values = self.stack.split_off(start);
        if code == 0x91 {
            self.new_set()?;
        }
        let set = self.top()?;
        let set = self.made.made(set, Global::Set).map(|set| self.made.tuple(set.arguments));
        let Some(&[Value::List(List(index))]) = set else {
            return Err(self.input.malformed("values are added to something that is no set"));
        };
        self.hold(values.len())?;
        if let Some(list) = self.made.lists.get_mut(index) {
            list.extend(values);
        }
        Ok(())
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
        Err(self.input.unsupported("a state is set on something that has none, or has one already"))
    }

    fn persistent_id(&mut self) -> Result<()> {
        match (self.place, self.pop()?) {
            (Place::Tensors, Value::Tuple(id)) => self.push(Value::PersistentId(id)),
            (Place::Tensors, _) => Err(self.input.malformed("a storage is not named by a tuple")),
            (Place::Metadata, _) => Err(self.input.unsupported("a storage stands where none can lie")),
        }
    }
}
