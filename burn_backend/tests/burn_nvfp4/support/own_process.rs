//! Marks tests that run in a separate process.

/// Returns from the test if it has run in a separate process, with only the tests of the module
/// `$module`.
macro_rules! own_process {
    ($module:literal) => {{
        fn here() {}
        let path = std::any::type_name_of_val(&here).trim_end_matches("::here");
        let (_, test) = path
            .split_once(concat!("::", $module, "::"))
            .expect("a test of the module");
        if crate::support::process::ran_in_own_process($module, test, &[]) {
            return;
        }
    }};
}
pub(crate) use own_process;
