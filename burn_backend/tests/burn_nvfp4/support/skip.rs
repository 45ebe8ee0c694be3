//! How a test says that it cannot run here, or that it runs in a process of its own.

/// Leave the test with the line that `cargo xtask test` counts a skipped test by; libtest alone would call it
/// passed. The name is that of the function around it, whatever thread it runs on.
macro_rules! skip {
    ($($reason:tt)+) => {{
        fn here() {}
        let path = std::any::type_name_of_val(&here).trim_end_matches("::here");
        // Without the name of the binary, as libtest has it.
        let test = path.split_once("::").map_or(path, |(_, test)| test);
        println!("SKIPPED: {test}: {}", format_args!($($reason)+));
        return;
    }};
}
pub(crate) use skip;

/// Leave the test if it has run in a process of its own, with other tests of the module `$module` alone.
macro_rules! own_process {
    ($module:literal) => {{
        fn here() {}
        let path = std::any::type_name_of_val(&here).trim_end_matches("::here");
        let (_, test) = path
            .split_once(concat!("::", $module, "::"))
            .expect("a test of the module");
        if crate::support::process::ran_in_own_process($module, test) {
            return;
        }
    }};
}
pub(crate) use own_process;
