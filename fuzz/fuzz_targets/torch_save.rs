//! Fuzzes `weighbridge_converter::read::fuzzing::torch_save`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| weighbridge_converter::read::fuzzing::torch_save(input));
