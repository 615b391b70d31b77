//! Fuzzes `weighbridge::api::fuzzing::api_requests`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| weighbridge::api::fuzzing::api_requests(input));
