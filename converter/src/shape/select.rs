//! Which tensors of a checkpoint are published, under which names, in which encodings.

use std::collections::{BTreeMap, BTreeSet};

use weighbridge_schemas::dtype::Dtype;
use weighbridge_schemas::encoding::{Encoding, Form};
use weighbridge_schemas::error::DocumentError;
use weighbridge_schemas::limits;
use weighbridge_schemas::names::TensorName;
use weighbridge_schemas::policy::{INDEX_REMAPPING, KeepRows, OddWidth, Policy, Treatment, Wanted};

use crate::checkpoint::{Checkpoint, Tensor};
use crate::error::{Class, ReadError};

/// One tensor that is published.
#[derive(Debug)]
pub struct Selected<'c> {
    /// The checkpoint's tensor.
    pub tensor: &'c Tensor,
    /// Its name in the snapshot.
    pub name: TensorName,
    /// How it is stored.
    pub form: Form,
    /// What of the tensor is published.
    pub content: Content,
}

/// What of a checkpoint's tensor is published under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// All of it.
    Whole,
    /// Of a table, the rows that this list names.
    Rows(KeepRows),
    /// Not the table itself, but where each of its rows went when it was pruned to the rows that this list names.
    Remapping(KeepRows),
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
    #[error("tensor {:?} under {rule}: {source}; change the rule's rename or keep_rows", tensor.as_str())]
    BadName {
        /// The tensor that the rule applies to.
        tensor: TensorName,
        /// The rule, by number and pattern.
        rule: String,
        /// What is wrong with the new name.
        source: DocumentError,
    },
    /// Two tensors would have one name.
    #[error(
        "the policy gives both {:?} and {:?} the name {:?}, by {rules}; change a rename",
        first.as_str(), second.as_str(), name.as_str()
    )]
    Collision {
        /// The name.
        name: TensorName,
        /// One of the tensors.
        first: TensorName,
        /// The other.
        second: TensorName,
        /// Their rules, by number and pattern.
        rules: String,
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
    /// Rows to keep of what is no table.
    #[error(
        "tensor {:?}: keep_rows takes tables, of two dimensions and at most {} rows; its shape is {shape:?}; narrow \
         the pattern of {rule}, or put a rule for this tensor in front of it",
        tensor.as_str(), limits::PRUNED_ROWS
    )]
    NotPrunable {
        /// The tensor.
        tensor: TensorName,
        /// Its shape.
        shape: Vec<u64>,
        /// The rule, by number and pattern.
        rule: String,
    },
    /// A list of rows to keep that the checkpoint does not hold, or that is no list of numbers.
    #[error("{0}")]
    BadRowList(ReadError),
    /// A row too wide for a row-wise encoding.
    #[error(
        "tensor {:?}: a row of {bytes} bytes is too wide for {encoding}, whose limit is {limit}; \
         keep it, or cast it, in {rule} or in a rule in front of it", tensor.as_str()
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
        /// The rule, by number and pattern.
        rule: String,
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
/// numbers, a cast to integers) leaves it as it is, with a note. So does a rule that no tensor falls to.
/// Beside a table of which only some rows are kept stands another tensor, the remapping of its rows.
///
/// # Errors
/// [`SelectError`]
pub fn select<'c>(checkpoint: &'c Checkpoint, policy: &Policy) -> Result<Selection<'c>, SelectError> {
    let mut published: BTreeMap<TensorName, Selected<'c>> = BTreeMap::new();
    let mut selection = Selection { published: Vec::new(), dropped: Vec::new(), notes: Vec::new() };
    let mut used = BTreeSet::new();
    for tensor in &checkpoint.tensors {
        let (rule, treatment) =
            policy.treat(&tensor.name).map_err(|source| bad_name(&tensor.name, policy, source))?;
        used.extend(rule);
        let Treatment::Publish { name, wanted, keep_rows } = treatment else {
            selection.dropped.push(tensor.name.clone());
            continue;
        };
        let form = match unfit(tensor, wanted.encoding, policy)? {
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
        let mut content = Content::Whole;
        if let Some(list) = keep_rows {
            check_prunable(checkpoint, tensor, &list, policy)?;
            let remapping = remapping(tensor, &name, list.clone());
            let remapping = remapping.map_err(|source| bad_name(&tensor.name, policy, source))?;
            insert(&mut published, remapping, policy)?;
            content = Content::Rows(list);
        }
        insert(&mut published, Selected { tensor, name, form, content }, policy)?;
    }
    for (name, error) in &checkpoint.unreadable {
        let (rule, treatment) = policy.treat(name).map_err(|source| bad_name(name, policy, source))?;
        used.extend(rule);
        if !matches!(treatment, Treatment::Drop) {
            return Err(SelectError::Unreadable(error.clone()));
        }
        selection.dropped.push(name.clone());
    }
    if published.is_empty() {
        return Err(SelectError::NothingLeft { count: selection.dropped.len() });
    }
    let encodes = |selected: &Selected<'_>| selected.form.encoding.is_row_wise();
    if policy.is_default() && !published.values().any(encodes) {
        selection.notes.push(NO_TABLE.to_owned());
    }
    selection.published = published.into_values().collect();
    selection.notes.extend(unused_rules(policy, &used));
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
                rule: rule_of(policy, &tensor.name),
            });
        }
    }
    Ok(form)
}

/// The rule that a tensor falls under, for people.
fn rule_of(policy: &Policy, name: &TensorName) -> String {
    policy.place_of_rule(name).unwrap_or_else(|| "no rule".to_owned())
}

fn bad_name(tensor: &TensorName, policy: &Policy, source: DocumentError) -> SelectError {
    SelectError::BadName { tensor: tensor.clone(), rule: rule_of(policy, tensor), source }
}

fn insert<'c>(
    published: &mut BTreeMap<TensorName, Selected<'c>>,
    selected: Selected<'c>,
    policy: &Policy,
) -> Result<(), SelectError> {
    let (name, second) = (selected.name.clone(), selected.tensor.name.clone());
    let Some(first) = published.insert(name.clone(), selected) else { return Ok(()) };
    let first = first.tensor.name.clone();
    let rules = format!("{} and {}", rule_of(policy, &first), rule_of(policy, &second));
    Err(SelectError::Collision { name, first, second, rules })
}

/// The name of the remapping of the pruned table `name`.
///
/// # Errors
/// [`DocumentError::UnsafeTensorName`] where that is longer than names may be.
pub fn remapping_name(name: &TensorName) -> Result<TensorName, DocumentError> {
    format!("{name}{INDEX_REMAPPING}").parse()
}

/// What stands beside the pruned table `name`.
fn remapping<'c>(
    tensor: &'c Tensor,
    name: &TensorName,
    list: KeepRows,
) -> Result<Selected<'c>, DocumentError> {
    let name = remapping_name(name)?;
    let form = Form::plain(Encoding::Keep);
    Ok(Selected { tensor, name, form, content: Content::Remapping(list) })
}

/// Whether `tensor` is a table, and `list` a list of numbers as far as metadata tells.
fn check_prunable(
    checkpoint: &Checkpoint,
    tensor: &Tensor,
    list: &KeepRows,
    policy: &Policy,
) -> Result<(), SelectError> {
    let rule = || rule_of(policy, &tensor.name);
    let rows = match tensor.shape.as_slice() {
        &[rows, _] => Some(rows).filter(|&rows| rows <= limits::PRUNED_ROWS),
        _ => None,
    };
    if rows.is_none() {
        let shape = tensor.shape.clone();
        return Err(SelectError::NotPrunable { tensor: tensor.name.clone(), shape, rule: rule() });
    }
    let KeepRows::Tensor(list) = list else { return Ok(()) };
    let (class, why) = match checkpoint.tensor(list) {
        None => (Class::RowListMissing, "which the checkpoint does not hold".to_owned()),
        Some(list) if list.dtype.is_float() || list.dtype == Dtype::Bool || list.shape.len() != 1 => {
            let (dtype, shape) = (list.dtype.as_str(), &list.shape);
            let why =
                format!("which is {dtype} of shape {shape:?}: a list of rows is integers, of one dimension");
            (Class::RowListBad, why)
        }
        Some(_) => return Ok(()),
    };
    let detail =
        format!("keep_rows of {} names the tensor {:?}, {why}; change the rule", rule(), list.as_str());
    Err(SelectError::BadRowList(ReadError::new(class, detail).of_tensor(tensor.name.as_str())))
}

/// A line for each rule that no tensor falls to, up to a bound.
fn unused_rules(policy: &Policy, used: &BTreeSet<usize>) -> Vec<String> {
    let mut notes: Vec<_> = policy
        .unused_rules(used)
        .map(|(number, pattern)| {
            format!("rule {number} ({pattern:?}) matches no tensor, or none that is left to it")
        })
        .collect();
    let more = notes.len().saturating_sub(RULES_NAMED);
    notes.truncate(RULES_NAMED);
    if more > 0 {
        notes.push(format!("and {more} more rules match no tensor"));
    }
    notes
}

/// The default policy goes by names that only some libraries give.
const NO_TABLE: &str = "no table has a name that the default policy knows (**.embedding_bags.*.weight, \
                        **.embeddings.*.weight), so none is encoded; write a policy: weighbridge config default-policy";

/// How many rules that match nothing are named.
const RULES_NAMED: usize = 20;

/// Why `encoding` cannot apply to `tensor`, if it cannot.
fn unfit(tensor: &Tensor, encoding: Encoding, policy: &Policy) -> Result<Option<&'static str>, SelectError> {
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
            rule: rule_of(policy, &tensor.name),
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
    fn a_pruned_table_stands_beside_its_remapping() {
        let checkpoint = checkpoint(&[("ids", Dtype::I64, &[2]), ("t", Dtype::F32, &[4, 2])]);
        let rule = "match = 't'\nrename = 'u'\nencode = 'int8'\nkeep_rows = { tensor = 'ids' }";
        let selection = select(&checkpoint, &policy(&[rule])).unwrap();
        assert_eq!(
            published(&selection),
            [
                ("ids", "ids", Encoding::Keep),
                ("t", "u", Encoding::Int8Sbf32),
                ("t", "u.index_remapping", Encoding::Keep),
            ]
        );
        let list = KeepRows::Tensor("ids".parse().unwrap());
        let contents: Vec<_> = selection.published.into_iter().map(|one| one.content).collect();
        assert_eq!(contents, [Content::Whole, Content::Rows(list.clone()), Content::Remapping(list)]);
    }

    #[test]
    fn the_default_policy_says_where_it_knows_no_table() {
        let of = |name| {
            let checkpoint = checkpoint(&[(name, Dtype::F32, &[4, 2])]);
            select(&checkpoint, &Policy::default()).unwrap().notes.len()
        };
        assert_eq!((of("model.items.weight"), of("model.embeddings.items.weight")), (1, 0));
    }

    #[test]
    fn rules_that_no_tensor_falls_to_are_noted_up_to_a_bound() {
        let checkpoint = checkpoint(&[("a", Dtype::F32, &[2])]);
        let rules = vec!["match = 'x'\ndrop = true"; RULES_NAMED + 5];
        let selection = select(&checkpoint, &policy(&rules)).unwrap();
        assert_eq!(selection.notes.len(), RULES_NAMED + 1);
        assert!(selection.notes[0].starts_with("rule 1 (\"x\") matches no tensor"));
        assert!(selection.notes[RULES_NAMED].contains("5 more rules"));
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
            ("c.index_remapping", Dtype::F32, &[1]),
            ("tall", Dtype::F32, &[limits::PRUNED_ROWS + 1, 1]),
            ("v", Dtype::F32, &[2]),
            ("wide", Dtype::F32, &[1, limits::ROW_BYTES]),
        ]);
        for (rule, message) in [
            ("match = 'v'\nkeep_rows = 'x'", "tensor \"v\": keep_rows takes tables"),
            ("match = 'tall'\nkeep_rows = 'x'", "at most 2147483647 rows; its shape is [2147483648, 1]"),
            ("match = 'a.x'\nkeep_rows = { tensor = 'none' }", "which the checkpoint does not hold"),
            ("match = 'a.x'\nkeep_rows = { tensor = 'b.x' }", "which is F32 of shape [2, 2]"),
            ("match = 'a.x'\nrename = 'c'\nkeep_rows = 'x'", "the name \"c.index_remapping\""),
            ("match = '*.x'\nrename = 'same'", "both \"a.x\" and \"b.x\" the name \"same\""),
            ("match = 'a.*'\nrename = 'b.$1'", "both \"a.x\" and \"b.x\" the name \"b.x\""),
            ("match = 'a.*'\nrename = 'b.$1'", "by rule 1 (\"a.*\") and no rule; change a rename"),
            ("match = '[v]'\n[[rule]]\nmatch = 'v'\nkeep_rows = 'x'", "narrow the pattern of rule 2 (\"v\")"),
            ("match = '*.x'\nkeep_rows = { tensor = 'none' }", "keep_rows of rule 1 (\"*.x\") names"),
            ("match = 'wi*'\nencode = 'int8'", "or cast it, in rule 1 (\"wi*\") or in a rule in front"),
            ("match = 'b.*'\nrename = '../$1'", "under rule 1 (\"b.*\"): tensor name \"../x\" is refused"),
            ("match = '**'\ndrop = true", "drops all 6 tensors"),
            ("match = 'wide'\nencode = 'int8'", "tensor \"wide\": a row of 33554432 bytes is too wide"),
        ] {
            let error = select(&checkpoint, &policy(&[rule])).unwrap_err().to_string();
            assert!(error.contains(message), "{rule}: {error}");
        }
    }
}
