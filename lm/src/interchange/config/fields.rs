//! Fields of the quantization settings.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::hf::is_neutral;

/// Informational fields: calibration method, version of the writer, statistics.
const HARMLESS: &[&str] = &[
    "format",
    "global_compression_ratio",
    "observer",
    "observer_kwargs",
    "producer",
    "quant_method",
    "quantization_status",
    "run_compressed",
    "version",
];

/// ModelOpt's algorithm names of NVFP4, in the order of `Scheme`.
pub(super) const NVFP4_NAMES: [&str; 2] = ["W4A16_NVFP4", "NVFP4"];

/// Returns the names in the list `key`.
pub(super) fn strings(object: &Value, key: &str) -> Result<Vec<String>> {
    let list = object
        .get(key)
        .with_context(|| format!("{key} is missing"))?;
    let list = list
        .as_array()
        .with_context(|| format!("{key} is {list}, but it must be a list of names"))?;
    let name = |value: &Value| {
        let name = value.as_str().map(String::from);
        name.with_context(|| format!("{key} holds {value}, but it must hold names"))
    };
    list.iter().map(name).collect()
}

/// Returns the names in the list `key`, none if it is absent or null.
pub(super) fn strings_if_given(object: &Value, key: &str) -> Result<Vec<String>> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(vec![]),
        Some(_) => strings(object, key),
    }
}

/// Returns the text of the field `key`.
pub(super) fn text<'a>(object: &'a Value, key: &str) -> Result<&'a str> {
    let value = object
        .get(key)
        .with_context(|| format!("{key} is missing"))?;
    let text = value.as_str();
    text.with_context(|| format!("{key} is {value}, but it must be text"))
}

/// Returns an error unless field `key` of the quantization arguments `args` is `expected`.
pub(super) fn expect(args: &Value, key: &str, expected: &Value) -> Result<()> {
    let found = args.get(key).unwrap_or(&Value::Null);
    ensure!(
        found == expected,
        "{key} is {found}, but must be {expected}"
    );
    Ok(())
}

/// Returns an error unless field `key` of `args` is absent, null, or one of `allowed`.
pub(super) fn expect_if_given(args: &Value, key: &str, allowed: &[Value]) -> Result<()> {
    let found = args.get(key).unwrap_or(&Value::Null);
    let list = || -> Vec<String> { allowed.iter().map(Value::to_string).collect() };
    ensure!(
        found.is_null() || allowed.contains(found),
        "{key} is {found}, which is not supported: it may be {} or null",
        list().join(", ")
    );
    Ok(())
}

/// Returns an error if `object` has a field that is neither `known` nor harmless and whose value is
/// not neutral.
pub(super) fn refuse_unknown(object: &Value, known: &[&str]) -> Result<()> {
    let fields = object
        .as_object()
        .with_context(|| format!("it is {object}, but must be an object"))?;
    for (name, value) in fields {
        let is_known = known.contains(&name.as_str()) || HARMLESS.contains(&name.as_str());
        ensure!(
            is_known || is_neutral(name, value),
            "{name} is {value}, which may change what layers compute and is not supported"
        );
    }
    Ok(())
}
