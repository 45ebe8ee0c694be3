#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nvfp4_lm::fuzz::experts(data));
