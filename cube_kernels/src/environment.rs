//! The environment variables that choose kernels, read once per process.

use std::sync::LazyLock;

use crate::attention::family::AttentionKernel;

/// The choices of the environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Environment {
    /// `NVFP4_GEMM`.
    pub gemm: GemmChoice,
    /// `NVFP4_ATTENTION`: the first kernel that may be taken.
    pub attention: AttentionKernel,
    /// `NVFP4_SCALES`: true if every device's layers write block scales in 128x4 tiles.
    pub scale_tiles: bool,
}

/// The kernel of sm_100's tensor cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GemmChoice {
    /// Taken for what cuBLASLt does not take, if its self-check passes.
    Default,
    /// Also taken where cuBLASLt would be, without the self-check.
    Tcgen05,
    /// Not taken.
    Portable,
}

impl Environment {
    /// Returns the choices of this process.
    ///
    /// # Panics
    /// If a variable has a value that it does not take.
    pub fn get() -> &'static Self {
        static ENVIRONMENT: LazyLock<Environment> = LazyLock::new(|| {
            let variable = |name: &str| std::env::var_os(name)?.into_string().ok();
            Environment::parse(variable).unwrap_or_else(|message| panic!("{message}"))
        });
        &ENVIRONMENT
    }

    fn parse(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let gemm = [
            ("tcgen05", GemmChoice::Tcgen05),
            ("portable", GemmChoice::Portable),
        ];
        let attention = [
            ("sm90", AttentionKernel::Sm90),
            ("mma", AttentionKernel::Mma),
            ("scalar", AttentionKernel::Scalar),
        ];
        let scales = [("tiles", true)];
        Ok(Self {
            gemm: choose(&variable, "NVFP4_GEMM", &gemm)?.unwrap_or(GemmChoice::Default),
            attention: choose(&variable, "NVFP4_ATTENTION", &attention)?
                .unwrap_or(AttentionKernel::Sm90),
            scale_tiles: choose(&variable, "NVFP4_SCALES", &scales)?.unwrap_or(false),
        })
    }
}

/// Returns the choice of the variable `name`; none if it is not set or empty.
fn choose<T: Copy>(
    variable: impl Fn(&str) -> Option<String>,
    name: &str,
    choices: &[(&str, T)],
) -> Result<Option<T>, String> {
    let Some(value) = variable(name).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
    match choices.iter().find(|(choice, _)| *choice == value) {
        Some((_, choice)) => Ok(Some(*choice)),
        None => Err(format!("{name} is {value:?}, but must be one of {names:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(name: &str, value: &str) -> Result<Environment, String> {
        Environment::parse(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn choices_are_read() {
        let default = parse("", "").unwrap();
        assert_eq!(default.gemm, GemmChoice::Default);
        assert_eq!(default.attention, AttentionKernel::Sm90);
        assert!(!default.scale_tiles);
        assert_eq!(parse("NVFP4_GEMM", "").unwrap(), default);
        assert_eq!(
            parse("NVFP4_GEMM", "portable").unwrap().gemm,
            GemmChoice::Portable
        );
        let attention = parse("NVFP4_ATTENTION", "mma").unwrap().attention;
        assert_eq!(attention, AttentionKernel::Mma);
        assert!(parse("NVFP4_SCALES", "tiles").unwrap().scale_tiles);
    }

    #[test]
    fn other_values_are_refused() {
        let error = parse("NVFP4_ATTENTION", "flash").unwrap_err();
        let expected =
            r#"NVFP4_ATTENTION is "flash", but must be one of ["sm90", "mma", "scalar"]"#;
        assert_eq!(error, expected);
        assert!(parse("NVFP4_GEMM", "tcgen5").is_err());
        assert!(parse("NVFP4_SCALES", "rows").is_err());
    }
}
