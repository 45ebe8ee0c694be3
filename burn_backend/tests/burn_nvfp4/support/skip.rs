//! How a test says that it cannot run here.

/// Leave the test with the line that `cargo xtask test` counts a skipped test by; libtest alone
/// would call it passed. The name is that of the function around it, whatever thread it runs on.
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
