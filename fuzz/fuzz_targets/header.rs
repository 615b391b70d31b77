//! Fuzzes `weighbridge_converter::read::fuzzing::header`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| weighbridge_converter::read::fuzzing::header(input));
