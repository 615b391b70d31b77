//! Which tensors of a checkpoint are published, under which names, in which encodings.

use std::collections::BTreeMap;

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form};
use weighbridge_schemas::error::DocumentError;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;
use weighbridge_schemas::policy::{OddWidth, Policy, Treatment, Wanted};

use crate::checkpoint::{Checkpoint, Tensor};
use crate::error::ReadError;

/// One tensor that is published.
#[derive(Debug)]
pub struct Selected<'c> {
    /// The checkpoint's tensor.
    pub tensor: &'c Tensor,
    /// Its name in the snapshot.
    pub name: TensorName,
    /// How it is stored.
    pub form: Form,
}

/// What a policy makes of a checkpoint.
#[derive(Debug)]
pub struct Selection<'c> {
    /// What is published, sorted by the name in the snapshot.
    pub published: Vec<Selected<'c>>,
    /// The names of what is dropped.
    pub dropped: Vec<TensorName>,
    /// Where the policy could not be followed to the letter: one line each, for people.
    pub notes: Vec<String>,
}

/// Why a policy does not fit a checkpoint. Always permanent.
#[derive(Debug, thiserror::Error)]
pub enum SelectError {
    /// A rename makes a name that tensors may not have.
    #[error("renaming {:?}: {source}", tensor.as_str())]
    BadName {
        /// The tensor that is renamed.
        tensor: TensorName,
        /// What is wrong with the new name.
        source: DocumentError,
    },
    /// Two tensors would have one name.
    #[error(
        "the policy gives both {:?} and {:?} the name {:?}; change a rename",
        first.as_str(), second.as_str(), name.as_str()
    )]
    Collision {
        /// The name.
        name: TensorName,
        /// One of the tensors.
        first: TensorName,
        /// The other.
        second: TensorName,
    },
    /// A tensor that cannot be read, and that the policy does not drop.
    #[error("{0}")]
    Unreadable(ReadError),
    /// The policy drops every tensor.
    #[error("the policy drops all {count} tensors of the checkpoint; nothing is left to publish")]
    NothingLeft {
        /// How many tensors there are.
        count: usize,
    },
    /// A row too wide for a row-wise encoding.
    #[error(
        "tensor {:?}: a row of {bytes} bytes is too wide for {encoding}, whose limit is {limit}; \
         keep it, or cast it", tensor.as_str()
    )]
    RowTooWide {
        /// The tensor.
        tensor: TensorName,
        /// The row's size in the source dtype.
        bytes: u64,
        /// The encoding's name.
        encoding: &'static str,
        /// The limit in bytes.
        limit: u64,
    },
    /// A width that the field's operators cannot read, under a rule that does not say what to do about it.
    #[error(
        "tensor {:?}: its width of {width} is no multiple of {multiple}, as {encoding} needs by {rule}; keep or cast \
         the table, or take int8, whose widths are free; or set odd_width = \"pad\" (zeros up to {padded}) or \
         \"write\" (rows that PyTorch's and FBGEMM's operators do not read) in the rule's encode table",
        tensor.as_str()
    )]
    OddWidth {
        /// The tensor.
        tensor: TensorName,
        /// Its width, in elements.
        width: u64,
        /// What widths are multiples of.
        multiple: u64,
        /// The next width that would do.
        padded: u64,
        /// The encoding's name.
        encoding: &'static str,
        /// The rule, by number and pattern.
        rule: String,
    },
}

/// Applies `policy` to the tensors of `checkpoint`.
///
/// An encoding that cannot apply to a tensor (a row-wise one to a tensor that is not a table of floating-point
/// numbers, a cast to integers) leaves it as it is, with a note.
///
/// # Errors
/// [`SelectError`]
pub fn select<'c>(checkpoint: &'c Checkpoint, policy: &Policy) -> Result<Selection<'c>, SelectError> {
    let mut published: BTreeMap<TensorName, Selected<'c>> = BTreeMap::new();
    let mut selection = Selection { published: Vec::new(), dropped: Vec::new(), notes: Vec::new() };
    for tensor in &checkpoint.tensors {
        let treatment = policy
            .treat(&tensor.name)
            .map_err(|source| SelectError::BadName { tensor: tensor.name.clone(), source })?;
        let Treatment::Publish { name, wanted } = treatment else {
            selection.dropped.push(tensor.name.clone());
            continue;
        };
        let form = match unfit(tensor, wanted.encoding)? {
            Some(why) => {
                let encoding = wanted.encoding.as_str();
                selection.notes.push(format!("{}: kept, not {encoding}: {why}", tensor.name));
                Form::plain(Encoding::Keep)
            }
            None => form(tensor, &wanted, policy)?,
        };
        if tensor.dtype == Dtype::F64 && form.encoding != Encoding::Keep {
            let note = "F64 is rounded to F32 before encoding, and measured from there";
            selection.notes.push(format!("{}: {note}", tensor.name));
        }
        let selected = Selected { tensor, name: name.clone(), form };
        if let Some(first) = published.insert(name.clone(), selected) {
            let first = first.tensor.name.clone();
            return Err(SelectError::Collision { name, first, second: tensor.name.clone() });
        }
    }
    for (name, error) in &checkpoint.unreadable {
        let treatment = policy.treat(name);
        let treatment = treatment.map_err(|source| SelectError::BadName { tensor: name.clone(), source })?;
        if !matches!(treatment, Treatment::Drop) {
            return Err(SelectError::Unreadable(error.clone()));
        }
        selection.dropped.push(name.clone());
    }
    if published.is_empty() {
        return Err(SelectError::NothingLeft { count: selection.dropped.len() });
    }
    selection.published = published.into_values().collect();
    Ok(selection)
}

/// How `tensor`, which `wanted` applies to, is stored.
fn form(tensor: &Tensor, wanted: &Wanted, policy: &Policy) -> Result<Form, SelectError> {
    let Wanted { encoding, layout, row_alignment, odd_width } = *wanted;
    let mut form = Form { encoding, layout, row_alignment, stored_width: None };
    let (width, multiple) = (tensor.shape.last().copied().unwrap_or(0), encoding.width_multiple());
    if width.is_multiple_of(multiple) {
        return Ok(form);
    }
    let padded = width.div_ceil(multiple).saturating_mul(multiple);
    match odd_width {
        OddWidth::Write => {}
        OddWidth::Pad => form.stored_width = Some(padded),
        OddWidth::Refuse => {
            return Err(SelectError::OddWidth {
                tensor: tensor.name.clone(),
                width,
                multiple,
                padded,
                encoding: encoding.as_str(),
                rule: policy.place_of_rule(&tensor.name).unwrap_or_default(),
            });
        }
    }
    Ok(form)
}

/// Why `encoding` cannot apply to `tensor`, if it cannot.
fn unfit(tensor: &Tensor, encoding: Encoding) -> Result<Option<&'static str>, SelectError> {
    if encoding == Encoding::Keep {
        return Ok(None);
    }
    if !matches!(tensor.dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::Bf16) {
        return Ok(Some("only F64, F32, F16 and BF16 are encoded"));
    }
    if !encoding.is_row_wise() {
        return Ok(None);
    }
    let &[_, width] = tensor.shape.as_slice() else {
        return Ok(Some("only tables, of two dimensions, have rows to encode"));
    };
    if width == 0 {
        return Ok(Some("its rows have no elements"));
    }
    let bytes = width.saturating_mul(tensor.dtype.size());
    if bytes > limits::ROW_BYTES {
        return Err(SelectError::RowTooWide {
            tensor: tensor.name.clone(),
            bytes,
            encoding: encoding.as_str(),
            limit: limits::ROW_BYTES,
        });
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use weighbridge_schemas::checkpoint::Format;
    use weighbridge_schemas::ids::Fingerprint;

    use super::*;
    use crate::checkpoint::Others;
    use crate::source::Source;

    fn checkpoint(tensors: &[(&str, Dtype, &[u64])]) -> Checkpoint {
        let tensors = tensors.iter().map(|&(name, dtype, shape)| Tensor {
            name: name.parse().unwrap(),
            dtype,
            shape: shape.to_vec(),
            slices: Vec::new(),
        });
        let folder = tempfile::tempdir().unwrap();
        Checkpoint {
            source: Source::open(folder.path()).unwrap(),
            format: Format::Safetensors,
            fingerprint: Fingerprint::of(b""),
            tensors: tensors.collect(),
            unreadable: Vec::new(),
            others: Others::default(),
            notes: Vec::new(),
        }
    }

    fn policy(rules: &[&str]) -> Policy {
        let rules: String = rules.iter().map(|rule| format!("[[rule]]\n{rule}\n")).collect();
        Policy::parse(&format!("schema = \"weighbridge.policy/v1\"\n{rules}")).unwrap()
    }

    /// Name in the checkpoint, name in the snapshot, encoding.
    fn published<'s>(selection: &'s Selection<'_>) -> Vec<(&'s str, &'s str, Encoding)> {
        let published = selection.published.iter();
        published.map(|one| (one.tensor.name.as_str(), one.name.as_str(), one.form.encoding)).collect()
    }

    #[test]
    fn rules_drop_rename_and_encode() {
        let checkpoint = checkpoint(&[
            ("a.weight", Dtype::F32, &[4, 2]),
            ("b.weight", Dtype::F32, &[4, 2]),
            ("c", Dtype::I64, &[]),
            ("optim.a", Dtype::F32, &[4]),
        ]);
        let policy = policy(&[
            "match = 'optim.**'\ndrop = true",
            "match = 'a.*'\nencode = 'int8'\nrename = 'z.$1'",
            "match = 'b.*'\nencode = 'f16'",
        ]);
        let selection = select(&checkpoint, &policy).unwrap();
        assert_eq!(
            published(&selection),
            [
                ("b.weight", "b.weight", Encoding::F16),
                ("c", "c", Encoding::Keep),
                ("a.weight", "z.weight", Encoding::Int8Sbf32),
            ]
        );
        assert_eq!(selection.dropped.iter().map(TensorName::as_str).collect::<Vec<_>>(), ["optim.a"]);
        assert!(selection.notes.is_empty(), "{:?}", selection.notes);
    }

    #[test]
    fn what_cannot_be_encoded_is_kept_with_a_note() {
        let unfit: [(&str, Dtype, &[u64]); 4] = [
            ("integers", Dtype::I32, &[4, 2]),
            ("no_width", Dtype::F32, &[4, 0]),
            ("scalar", Dtype::F32, &[]),
            ("vector", Dtype::F32, &[4]),
        ];
        let checkpoint = checkpoint(&unfit);
        let selection = select(&checkpoint, &policy(&["match = '**'\nencode = 'int8'"])).unwrap();
        assert!(selection.published.iter().all(|one| one.form.encoding == Encoding::Keep));
        assert_eq!(selection.notes.len(), unfit.len());
        for (note, (name, ..)) in selection.notes.iter().zip(unfit) {
            assert!(note.starts_with(&format!("{name}: kept, not int8_sbf32: ")), "{note}");
        }
        let cast = select(&checkpoint, &policy(&["match = '**'\nencode = 'bf16'"])).unwrap();
        let kept = cast.published.iter().filter(|one| one.form.encoding == Encoding::Keep);
        assert_eq!(kept.map(|one| one.name.as_str()).collect::<Vec<_>>(), ["integers"]);
    }

    #[test]
    fn doubles_are_encoded_with_a_note() {
        let checkpoint = checkpoint(&[("doubles", Dtype::F64, &[4, 2]), ("singles", Dtype::F32, &[4, 2])]);
        for encoding in ["int8", "int2_sbf16", "f32", "f16"] {
            let rule = format!("match = '**'\nencode = {{ encoding = '{encoding}' }}");
            let rule =
                if encoding == "int2_sbf16" { rule.replace(" }", ", odd_width = 'pad' }") } else { rule };
            let selection = select(&checkpoint, &policy(&[&rule])).unwrap();
            assert!(selection.published.iter().all(|one| one.form.encoding != Encoding::Keep));
            assert_eq!(selection.notes.len(), 1);
            assert!(selection.notes[0].starts_with("doubles: F64 is rounded to F32 before encoding"));
        }
    }

    #[test]
    fn odd_widths_are_refused_padded_or_written() {
        for (encoding, widths, multiple) in [("int4", [1, 3, 7], 2), ("int2", [5, 2, 1023], 4)] {
            for width in widths {
                let checkpoint = checkpoint(&[("t.w", Dtype::F32, &[3, width]), ("u", Dtype::F32, &[3, 8])]);
                let under = |odd: &str| {
                    let encode = format!("{{ encoding = '{encoding}'{odd} }}");
                    let rules = ["match = 'x'".to_owned(), format!("match = '**'\nencode = {encode}")];
                    select(&checkpoint, &policy(&[&rules[0], &rules[1]])).map(|selection| {
                        selection.published.iter().map(|one| one.form.stored_width).collect::<Vec<_>>()
                    })
                };
                for odd in ["", ", odd_width = 'refuse'"] {
                    let error = under(odd).unwrap_err().to_string();
                    for word in
                        ["\"t.w\"", &format!("width of {width} "), "rule 2 (\"**\")", "pad", "write", "int8"]
                    {
                        assert!(error.contains(word), "{word}: {error}");
                    }
                }
                let padded = width.next_multiple_of(multiple);
                assert_eq!(under(", odd_width = 'pad'").unwrap(), [Some(padded), None]);
                assert_eq!(under(", odd_width = 'write'").unwrap(), [None, None]);
            }
        }
    }

    #[test]
    fn a_table_without_rows_and_a_row_at_the_limit_are_encoded() {
        let widest = limits::ROW_BYTES / 2;
        let checkpoint = checkpoint(&[("none", Dtype::F32, &[0, 8]), ("widest", Dtype::Bf16, &[1, widest])]);
        let selection = select(&checkpoint, &policy(&["match = '*'\nencode = 'int8'"])).unwrap();
        assert!(selection.published.iter().all(|one| one.form.encoding == Encoding::Int8Sbf32));
    }

    #[test]
    fn policies_that_do_not_fit_say_so() {
        let checkpoint = checkpoint(&[
            ("a.x", Dtype::F32, &[2, 2]),
            ("b.x", Dtype::F32, &[2, 2]),
            ("wide", Dtype::F32, &[1, limits::ROW_BYTES]),
        ]);
        for (rule, message) in [
            ("match = '*.x'\nrename = 'same'", "both \"a.x\" and \"b.x\" the name \"same\""),
            ("match = 'a.*'\nrename = 'b.$1'", "both \"a.x\" and \"b.x\" the name \"b.x\""),
            ("match = 'b.*'\nrename = '../$1'", "renaming \"b.x\": tensor name \"../x\" is refused"),
            ("match = '**'\ndrop = true", "drops all 3 tensors"),
            ("match = 'wide'\nencode = 'int8'", "tensor \"wide\": a row of 33554432 bytes is too wide"),
        ] {
            let error = select(&checkpoint, &policy(&[rule])).unwrap_err().to_string();
            assert!(error.contains(message), "{rule}: {error}");
        }
    }
}
