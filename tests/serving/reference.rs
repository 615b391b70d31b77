//! `docs/api.md`: what stands there of the gRPC services is made of the protobuf and its comments, and what it has of
//! paths and limits is so.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet,
};
use weighbridge::api::METHODS;
use weighbridge::api::proto::DESCRIPTOR_SET;

const PACKAGE: &str = "weighbridge.v1";
/// Between these lines stands what is made.
const BEGIN: &str = "<!-- services -->\n";
const END: &str = "<!-- end -->\n";

// Numbers of fields in the descriptors, which lead to a comment.
const SYNTAX: i32 = 12;
const SERVICE: i32 = 6;
const MESSAGE: i32 = 4;
const ENUM: i32 = 5;
const INNER: i32 = 2;

fn path() -> PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/api.md")
}

/// The files of our own, with their comments by where they stand.
fn files() -> Vec<(FileDescriptorProto, BTreeMap<Vec<i32>, String>)> {
    let set = FileDescriptorSet::decode(DESCRIPTOR_SET).unwrap();
    let own = set.file.into_iter().filter(|file| file.package() == PACKAGE);
    own.map(|file| {
        let locations = file.source_code_info.iter().flat_map(|info| &info.location);
        let comments = locations.filter_map(|location| {
            Some((location.path.clone(), location.leading_comments.as_ref()?.clone()))
        });
        let comments = comments.collect();
        (file, comments)
    })
    .collect()
}

/// A comment's paragraphs, each on one line.
fn text(comments: &BTreeMap<Vec<i32>, String>, path: &[i32]) -> String {
    let comment = comments.get(path).unwrap_or_else(|| panic!("no comment at {path:?}"));
    let paragraphs = comment.split("\n\n").map(|paragraph| {
        paragraph.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ")
    });
    paragraphs.filter(|paragraph| !paragraph.is_empty()).collect::<Vec<_>>().join("\n\n")
}

/// The last part of a type's full name, as a link where it is described here.
fn named(full: &str) -> String {
    match full.strip_prefix(&format!(".{PACKAGE}.")) {
        Some(name) => format!("[{name}](#{})", name.to_lowercase()),
        None => full.trim_start_matches('.').to_owned(),
    }
}

fn kind(message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
    let plain = match field.r#type() {
        Type::String => "string".to_owned(),
        Type::Bytes => "bytes".to_owned(),
        Type::Bool => "bool".to_owned(),
        Type::Uint32 => "uint32".to_owned(),
        Type::Uint64 => "uint64".to_owned(),
        Type::Message | Type::Enum => named(field.type_name()),
        other => panic!("{other:?} has no name here yet"),
    };
    let repeated = if field.label() == Label::Repeated { "repeated " } else { "" };
    let one_of = field
        .oneof_index
        .map(|index| format!(", one of `{}`", message.oneof_decl[usize::try_from(index).unwrap()].name()));
    format!("{repeated}{plain}{}", one_of.unwrap_or_default())
}

/// A table of a message's fields.
fn fields(comments: &BTreeMap<Vec<i32>, String>, at: usize, message: &DescriptorProto) -> String {
    let mut table = "| field | type | |\n|---|---|---|\n".to_owned();
    for (number, field) in (0..).zip(&message.field) {
        let text = text(comments, &[MESSAGE, i32::try_from(at).unwrap(), INNER, number]).replace("\n\n", " ");
        table.push_str(&format!(
            "| `{}` | {} | {} |\n",
            field.name(),
            kind(message, field),
            text.replace('|', "\\|")
        ));
    }
    table
}

fn values(comments: &BTreeMap<Vec<i32>, String>, at: i32, values: &EnumDescriptorProto) -> String {
    let mut table = "| value | |\n|---|---|\n".to_owned();
    for (number, value) in (0..).zip(&values.value) {
        table.push_str(&format!("| `{}` | {} |\n", value.name(), text(comments, &[ENUM, at, INNER, number])));
    }
    table
}

/// What a method takes or gives.
fn side(
    (file, comments): &(FileDescriptorProto, BTreeMap<Vec<i32>, String>),
    verb: &str,
    full: &str,
    streams: bool,
) -> String {
    let name = full.rsplit('.').next().unwrap();
    let at = file.message_type.iter().position(|message| message.name() == name).unwrap();
    let stream = if streams { "a stream of " } else { "" };
    let message = &file.message_type[at];
    if message.field.is_empty() {
        return format!("{verb} {stream}`{name}`, which is empty.\n");
    }
    format!("{verb} {stream}`{name}`:\n\n{}", fields(comments, at, message))
}

/// All services, as Markdown.
fn made() -> String {
    let mut made = String::new();
    for both in files() {
        let (file, comments) = &both;
        let mut sides = BTreeSet::new();
        for (at, service) in (0..).zip(&file.service) {
            let name = service.name();
            made.push_str(&format!("\n## Service `{PACKAGE}.{name}`\n\n"));
            made.push_str(&format!("{}\n\n{}\n", text(comments, &[SYNTAX]), text(comments, &[SERVICE, at])));
            for (number, method) in (0..).zip(&service.method) {
                sides.extend([method.input_type().to_owned(), method.output_type().to_owned()]);
                made.push_str(&format!(
                    "\n### {name}.{}\n\n{}\n\n{}\n{}",
                    method.name(),
                    text(comments, &[SERVICE, at, INNER, number]),
                    side(&both, "Takes", method.input_type(), method.client_streaming()),
                    side(&both, "Gives", method.output_type(), method.server_streaming()),
                ));
            }
        }
        for (at, message) in file.message_type.iter().enumerate() {
            let full = format!(".{PACKAGE}.{}", message.name());
            // One that several methods give stands beside each, and has a heading too where others lead to it.
            if !sides.contains(&full) {
                let text = text(comments, &[MESSAGE, i32::try_from(at).unwrap()]);
                made.push_str(&format!("\n### {}\n\n{text}\n\n", message.name()));
                made.push_str(&fields(comments, at, message));
            }
        }
        for (at, one) in (0..).zip(&file.enum_type) {
            let text = text(comments, &[ENUM, at]);
            made.push_str(&format!("\n### {}\n\n{text}\n\n{}", one.name(), values(comments, at, one)));
        }
    }
    made
}

/// `UPDATE_API=1` writes the part anew.
#[test]
fn the_services_are_what_the_reference_says() {
    let made = made();
    let page = std::fs::read_to_string(path()).unwrap();
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (written, behind) = rest.rsplit_once(END).unwrap();
    if std::env::var_os("UPDATE_API").is_some() {
        std::fs::write(path(), format!("{before}{BEGIN}{made}\n{END}{behind}")).unwrap();
        return;
    }
    assert!(
        written.strip_suffix('\n') == Some(&made),
        "docs/api.md has drifted; run the tests with UPDATE_API=1 and look at the diff"
    );
}

/// What is counted by name is what there is.
#[test]
fn every_method_that_is_answered_is_described() {
    let mut described = BTreeSet::new();
    for (file, _) in files() {
        for service in &file.service {
            let methods =
                service.method.iter().map(|method| format!("{PACKAGE}.{}/{}", service.name(), method.name()));
            described.extend(methods);
        }
    }
    for method in METHODS {
        assert!(described.contains(method), "{method}");
    }
}

/// Links within the page lead somewhere.
#[test]
fn links_within_the_page_lead_to_headings() {
    let page = std::fs::read_to_string(path()).unwrap();
    let kept = |character: &char| character.is_alphanumeric() || " -_".contains(*character);
    let headings: BTreeSet<String> = page
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| line.trim_start_matches('#').trim().to_lowercase())
        .map(|heading| heading.chars().filter(kept).collect::<String>().replace(' ', "-"))
        .collect();
    for link in page.split("](#").skip(1).filter_map(|rest| rest.split_once(')')) {
        assert!(headings.contains(link.0), "#{}", link.0);
    }
}
