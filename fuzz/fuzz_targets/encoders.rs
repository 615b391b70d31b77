//! Fuzzes `weighbridge_converter::encode::fuzzing::encoders`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| weighbridge_converter::encode::fuzzing::encoders(input));
