//! JSON from outside, read strictly: no key twice at any level, and every refusal with its class.
//!
//! serde_json's own maps keep the last of two equal keys, so that a file can say one thing to this reader and
//! another to the next; the visitors here refuse it. They build the wanted values directly, never a tree of the
//! whole text: a hostile header of 100 MB must not become gigabytes. Depth is bounded by serde_json (128 levels).
//!
//! serde's errors carry text alone. A visitor therefore leaves what it found in a [`Failure`] beside the parse, and
//! [`parse`] hands that out in the end.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::error::Category;
use weighbridge_schemas::error::shorten;
use weighbridge_schemas::limits;

use crate::error::{Class, ReadError, Result};

/// Most members of an object whose size nothing else bounds, such as `__metadata__`.
pub(crate) const MEMBERS: usize = 100_000;
/// Longest part of a parser's message that is passed on: it may quote the input.
const MESSAGE_CHARACTERS: usize = 300;

/// What was refused in a parse, with its class.
#[derive(Debug, Default)]
pub(crate) struct Failure(RefCell<Option<ReadError>>);

impl Failure {
    /// Keeps `error` for [`parse`] to return. What comes back only stops the parser.
    pub(crate) fn stop<E: de::Error>(&self, error: ReadError) -> E {
        self.0.borrow_mut().get_or_insert(error);
        E::custom("refused")
    }

    /// Stops at a key that stands twice in one object.
    pub(crate) fn twice<E: de::Error>(&self, key: &str) -> E {
        self.stop(ReadError::new(Class::DuplicateKey, format!("the key {:?} stands twice", shorten(key))))
    }

    /// Stops at an object of more than `most` members.
    pub(crate) fn too_many<E: de::Error>(&self, most: usize) -> E {
        self.stop(ReadError::new(Class::LimitExceeded, format!("an object has more than {most} members")))
    }

    /// Gives a value that failed its `class` and `what` it is, unless what failed inside has a class of its own.
    pub(crate) fn classify<T, E: de::Error>(
        &self,
        value: std::result::Result<T, E>,
        class: Class,
        what: &str,
    ) -> std::result::Result<T, E> {
        value.inspect_err(|error| {
            let mut refused = self.0.borrow_mut();
            refused.get_or_insert_with(|| {
                ReadError::new(class, format!("{what}: {}", clip(&error.to_string())))
            });
        })
    }

    /// Names the `tensor` that a refused value is of.
    pub(crate) fn of_tensor<T, E>(
        &self,
        value: std::result::Result<T, E>,
        tensor: &str,
    ) -> std::result::Result<T, E> {
        value.inspect_err(|_| {
            let refused = self.0.take().map(|error| error.of_tensor(tensor));
            self.0.replace(refused);
        })
    }
}

/// Reads `text`, one JSON value, into what `seed` makes of it.
///
/// # Errors
/// What the seed left in `failure`; `malformed` for text that is not JSON, or not the JSON that the seed expects.
pub(crate) fn parse<'de, S: DeserializeSeed<'de>>(
    text: &'de str,
    malformed: Class,
    failure: &Failure,
    seed: S,
) -> Result<S::Value> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = seed.deserialize(&mut deserializer).and_then(|value| deserializer.end().map(|()| value));
    value.map_err(|error| {
        let refused = failure.0.take().filter(|_| error.classify() == Category::Data);
        refused.unwrap_or_else(|| {
            ReadError::new(malformed, format!("not the JSON it should be: {}", clip(&error.to_string())))
        })
    })
}

fn clip(message: &str) -> String {
    message.chars().take(MESSAGE_CHARACTERS).collect()
}

/// An array of at most [`limits::DIMENSIONS`] whole numbers of 64 bits: a shape, or offsets.
pub(crate) struct Numbers<'f> {
    /// Where refusals go.
    pub(crate) failure: &'f Failure,
    /// The class of a negative, fractional or too large number.
    pub(crate) class: Class,
}

impl<'de> DeserializeSeed<'de> for Numbers<'_> {
    type Value = Vec<u64>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Vec<u64>, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Numbers<'_> {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of whole numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> std::result::Result<Vec<u64>, A::Error> {
        let mut numbers = Vec::new();
        while let Some(number) =
            elements.next_element_seed(Number { failure: self.failure, class: self.class })?
        {
            if numbers.len() == limits::DIMENSIONS {
                let detail = format!("it has more than {} dimensions", limits::DIMENSIONS);
                return Err(self.failure.stop(ReadError::new(Class::LimitExceeded, detail)));
            }
            numbers.push(number);
        }
        Ok(numbers)
    }
}

struct Number<'f> {
    failure: &'f Failure,
    class: Class,
}

impl Number<'_> {
    fn refuse<E: de::Error>(&self, number: impl fmt::Display) -> E {
        let detail = format!("{number} is not a whole number from 0 to 2^64 - 1");
        self.failure.stop(ReadError::new(self.class, detail))
    }
}

impl<'de> DeserializeSeed<'de> for Number<'_> {
    type Value = u64;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<u64, D::Error> {
        deserializer.deserialize_u64(self)
    }
}

impl Visitor<'_> for Number<'_> {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> std::result::Result<u64, E> {
        Ok(number)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> std::result::Result<u64, E> {
        u64::try_from(number).map_err(|_| self.refuse(number))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> std::result::Result<u64, E> {
        Err(self.refuse(number))
    }
}

/// An object whose values are all strings, of at most `most` members.
pub(crate) struct Strings<'f> {
    /// Where refusals go.
    pub(crate) failure: &'f Failure,
    /// The most members.
    pub(crate) most: usize,
}

impl<'de> DeserializeSeed<'de> for Strings<'_> {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Strings<'_> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> std::result::Result<Self::Value, A::Error> {
        let mut strings = BTreeMap::new();
        while let Some(key) = members.next_key::<String>()? {
            if strings.contains_key(&key) {
                return Err(self.failure.twice(&key));
            }
            if strings.len() == self.most {
                return Err(self.failure.too_many(self.most));
            }
            strings.insert(key, members.next_value()?);
        }
        Ok(strings)
    }
}

/// Any value, passed over; but no key twice in it, and at most [`MEMBERS`] in one object.
pub(crate) struct PassedOver<'f>(pub(crate) &'f Failure);

impl<'de> DeserializeSeed<'de> for PassedOver<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PassedOver<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E: de::Error>(self) -> std::result::Result<(), E> {
        Ok(())
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> std::result::Result<(), E> {
        Ok(())
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> std::result::Result<(), E> {
        Ok(())
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> std::result::Result<(), E> {
        Ok(())
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> std::result::Result<(), E> {
        Ok(())
    }

    fn visit_str<E: de::Error>(self, _: &str) -> std::result::Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> std::result::Result<(), A::Error> {
        while elements.next_element_seed(PassedOver(self.0))?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> std::result::Result<(), A::Error> {
        let mut keys = BTreeSet::new();
        while let Some(key) = members.next_key::<String>()? {
            members.next_value_seed(PassedOver(self.0))?;
            if keys.contains(&key) {
                return Err(self.0.twice(&key));
            }
            if keys.len() == MEMBERS {
                return Err(self.0.too_many(MEMBERS));
            }
            keys.insert(key);
        }
        Ok(())
    }
}
