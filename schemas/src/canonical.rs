//! Canonical bytes: one byte string for one document, on every machine and in every version of every library.
//!
//! The form is JSON as in RFC 8785, restricted to what documents with an id may hold: objects with their keys in
//! order of UTF-16 code units, arrays, strings with the shortest escapes, integers, booleans, null; no white
//! space, no floating-point numbers.

use serde::Serialize;
use serde_json::Value;

/// The canonical bytes of `document`. Numbers that are no integers are written as null; documents with an id
/// hold none.
#[must_use]
pub fn bytes<T: Serialize + ?Sized>(document: &T) -> Vec<u8> {
    let mut out = Vec::new();
    // Only a map with keys that are no strings can fail here, and no document has one.
    if let Ok(value) = serde_json::to_value(document) {
        write(&value, &mut out);
    }
    out
}

/// Writes an object field by field, for documents that are too large to be held a second time as a tree of values.
#[derive(Debug, Default)]
pub(crate) struct Object(Vec<u8>);

impl Object {
    /// Adds a field; the caller adds them in the order of their names.
    pub(crate) fn field<T: Serialize + ?Sized>(&mut self, name: &str, value: &T) {
        self.name(name);
        self.0.extend(bytes(value));
    }

    /// Adds a field that is an array, an item at a time.
    pub(crate) fn array<T: Serialize>(&mut self, name: &str, items: &[T]) {
        self.name(name);
        self.0.push(b'[');
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.0.push(b',');
            }
            self.0.extend(bytes(item));
        }
        self.0.push(b']');
    }

    fn name(&mut self, name: &str) {
        self.0.push(if self.0.is_empty() { b'{' } else { b',' });
        write_string(name, &mut self.0);
        self.0.push(b':');
    }

    /// The object's bytes.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.0.push(b'}');
        self.0
    }
}

fn write(value: &Value, out: &mut Vec<u8>) {
    match value {
        Value::Null => out.extend(b"null"),
        Value::Bool(true) => out.extend(b"true"),
        Value::Bool(false) => out.extend(b"false"),
        Value::Number(number) if number.is_f64() => out.extend(b"null"),
        Value::Number(number) => out.extend(number.to_string().bytes()),
        Value::String(text) => write_string(text, out),
        Value::Array(items) => {
            out.push(b'[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(b',');
                }
                write(item, out);
            }
            out.push(b']');
        }
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            // The map is in order of bytes: another one where code points beyond 16 bits are.
            if !fields.iter().all(|(key, _)| key.is_ascii()) {
                fields.sort_by(|(a, _), (b, _)| a.encode_utf16().cmp(b.encode_utf16()));
            }
            out.push(b'{');
            for (index, (key, value)) in fields.into_iter().enumerate() {
                if index > 0 {
                    out.push(b',');
                }
                write_string(key, out);
                out.push(b':');
                write(value, out);
            }
            out.push(b'}');
        }
    }
}

fn write_string(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    // Nearly all text is written as it is, so it is copied in runs.
    let mut rest = text.as_bytes();
    while let Some(place) = rest.iter().position(|&byte| byte < b' ' || byte == b'"' || byte == b'\\') {
        let (plain, behind) = rest.split_at(place);
        out.extend_from_slice(plain);
        if let Some((&byte, behind)) = behind.split_first() {
            write_escape(byte, out);
            rest = behind;
        }
    }
    out.extend_from_slice(rest);
    out.push(b'"');
}

fn write_escape(byte: u8, out: &mut Vec<u8>) {
    match byte {
        b'"' => out.extend(b"\\\""),
        b'\\' => out.extend(b"\\\\"),
        8 => out.extend(b"\\b"),
        b'\t' => out.extend(b"\\t"),
        b'\n' => out.extend(b"\\n"),
        12 => out.extend(b"\\f"),
        b'\r' => out.extend(b"\\r"),
        _ => out.extend(format!("\\u{byte:04x}").bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn keys_are_sorted_and_strings_escaped_the_shortest_way() {
        // A code point beyond 16 bits stands before one below by its code units, and behind it by its bytes.
        let document = json!({ "\u{ffff}": 1, "\u{10000}": 2 });
        assert_eq!(String::from_utf8(bytes(&document)).unwrap(), "{\"\u{10000}\":2,\"\u{ffff}\":1}");
        let document = json!({ "b": [1, null, true], "a": "\u{1}\n\"é\\", "é": u64::MAX, "aa": -1 });
        let expected =
            "{\"a\":\"\\u0001\\n\\\"é\\\\\",\"aa\":-1,\"b\":[1,null,true],\"é\":18446744073709551615}";
        assert_eq!(String::from_utf8(bytes(&document)).unwrap(), expected);
    }

    proptest! {
        #[test]
        fn any_text_reads_back(text in any::<String>()) {
            let read: String = serde_json::from_slice(&bytes(&text)).unwrap();
            prop_assert_eq!(read, text);
        }
    }
}
