//! Fuzzes `weighbridge_converter::read::fuzzing::pickle_tensors`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| weighbridge_converter::read::fuzzing::pickle_tensors(input));
