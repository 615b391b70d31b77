//! The bytes of a pickle: opcodes, their arguments, and where in it something is wrong.

use super::{Tuple, Value};
use crate::error::{Class, ReadError, Result};

/// A pickle's bytes, read from the front.
pub(super) struct Input<'a> {
    bytes: &'a [u8],
    /// The next byte.
    at: usize,
    /// The opcode at work, for messages.
    opcode_at: usize,
}

impl<'a> Input<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0, opcode_at: 0 }
    }

    pub(super) const fn len(&self) -> usize {
        self.bytes.len()
    }

    /// How many bytes are left.
    pub(super) const fn left(&self) -> usize {
        self.bytes.len().saturating_sub(self.at)
    }

    /// The next opcode.
    pub(super) fn opcode(&mut self) -> Result<u8> {
        self.opcode_at = self.at;
        self.byte()
    }

    pub(super) fn protocol(&mut self) -> Result<()> {
        match self.array()? {
            [0x80, 2..=5] => Ok(()),
            [0x80, version] => Err(self.malformed(format!("protocol {version} is not one of 2 to 5"))),
            _ => Err(self.malformed("it does not begin with a protocol")),
        }
    }

    /// The opcodes that are one value.
    pub(super) fn literal(&mut self, code: u8) -> Result<Value<'a>> {
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
            b'B' | b'C' | 0x8e | 0x96 => Value::Bytes(self.counted(code)?),
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
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let rest = bytes.get(error.valid_up_to()..).unwrap_or_default();
            // Python writes half of a UTF-16 pair as if it were a character: U+D800 to U+DFFF.
            match rest {
                [0xed, 0xa0..=0xbf, ..] => self.unsupported(
                    "a text holds a lone surrogate, half of a character, which is no Unicode text; rename the key, \
                     or take the text out, before it is saved",
                ),
                _ => self.malformed("a text is not UTF-8"),
            }
        })?;
        Ok(Value::Text(text))
    }

    /// A little-endian two's complement number of as many bytes as it says.
    fn long(&mut self) -> Result<Value<'a>> {
        let length = self.byte()?;
        let bytes = self.take(length.into())?;
        let sign = if bytes.last().is_some_and(|byte| byte & 0x80 != 0) { 0xff } else { 0 };
        let mut number = [sign; 8];
        // The seeds of random generators have up to 128 bits, and are passed over.
        let Some(low) = number.get_mut(..bytes.len()) else { return Ok(Value::LongInt) };
        low.copy_from_slice(bytes);
        Ok(Value::Int(i64::from_le_bytes(number)))
    }

    /// A frame announces how many bytes belong together; nothing depends on it but that they are there.
    pub(super) fn frame(&mut self) -> Result<()> {
        let length = u64::from_le_bytes(self.array()?);
        let left = self.left();
        if usize::try_from(length).is_ok_and(|length| length <= left) {
            return Ok(());
        }
        Err(self.malformed(format!("a frame of {length} bytes is announced, but {left} are left")))
    }

    pub(super) fn byte(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let found = self.bytes.get(self.at..).and_then(|rest| rest.first_chunk()).copied();
        let bytes = found.ok_or_else(|| self.malformed("it breaks off"))?;
        self.at += N;
        Ok(bytes)
    }

    pub(super) fn length4(&mut self) -> Result<usize> {
        Ok(usize::try_from(u32::from_le_bytes(self.array()?)).unwrap_or(usize::MAX))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let end = self.at.checked_add(length);
        let bytes = end.and_then(|end| self.bytes.get(self.at..end));
        let bytes = bytes.ok_or_else(|| self.malformed(format!("it breaks off within {length} bytes")))?;
        self.at += length;
        Ok(bytes)
    }

    /// The text up to the next line feed.
    pub(super) fn line(&mut self) -> Result<&'a str> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let length = rest.iter().position(|&byte| byte == b'\n');
        let bytes = self.take(length.ok_or_else(|| self.malformed("it breaks off within a name"))?)?;
        self.at += 1;
        std::str::from_utf8(bytes).map_err(|_| self.malformed("a name is not UTF-8"))
    }

    /// An opcode that exists, and could do more than build values, or that no checkpoint needs.
    pub(super) fn refused(&self, code: u8) -> ReadError {
        let name = match code {
            b'i' => "INST",
            b'o' => "OBJ",
            0x82 => "EXT1",
            0x83 => "EXT2",
            0x84 => "EXT4",
            b'P' => "PERSID",
            0x92 => "NEWOBJ_EX",
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

    pub(super) fn malformed(&self, why: impl std::fmt::Display) -> ReadError {
        self.error(Class::PickleMalformed, "is broken", why)
    }

    pub(super) fn over(&self, why: impl std::fmt::Display) -> ReadError {
        self.error(Class::LimitExceeded, "is over a limit", why)
    }

    pub(super) fn unsupported(&self, why: impl std::fmt::Display) -> ReadError {
        self.error(Class::UnsupportedObject, "is not one of tensors", why)
    }

    fn error(&self, class: Class, what: &str, why: impl std::fmt::Display) -> ReadError {
        ReadError::new(class, format!("the pickle {what} at its byte {}: {why}", self.opcode_at))
    }
}
