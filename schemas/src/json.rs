//! Documents in JSON, each of which is an object.

use serde::de::DeserializeOwned;

use crate::error::DocumentError;

/// Reads `json` as a `document`. serde would take the fields of a struct from an array too, by their order, which no
/// document promises.
pub(crate) fn object<T: DeserializeOwned>(document: &'static str, json: &[u8]) -> Result<T, DocumentError> {
    let first = json.iter().find(|byte| !byte.is_ascii_whitespace());
    if first.is_some_and(|&byte| byte != b'{') {
        let why = "it is no JSON object: its first character is not {";
        return Err(DocumentError::malformed(document, why));
    }
    serde_json::from_slice(json).map_err(|error| DocumentError::malformed(document, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_is_an_object() {
        #[derive(Debug, serde::Deserialize)]
        struct Small {
            a: u8,
        }
        let read = |json: &str| object::<Small>("document", json.as_bytes()).map(|small| small.a);
        assert_eq!(read(" \n{\"a\": 1}"), Ok(1));
        for json in ["[1]", "1", "\"a\"", "null", "\u{feff}{\"a\": 1}"] {
            let error = read(json).unwrap_err().to_string();
            assert!(error.starts_with("document: it is no JSON object"), "{error}");
        }
        assert!(read("").is_err() && read("{}").is_err());
    }
}
