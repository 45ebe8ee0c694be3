//! Figures of a part of the benchmarks.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

/// Figures of one part, as `bench/run.py` writes them.
pub struct Part {
    pub value: Value,
}

impl Part {
    /// Returns the figures of a job that did not fail.
    pub fn job(&self, name: &str) -> Result<&Value> {
        let jobs = self.value["jobs"].as_array().context("no jobs")?;
        let job = jobs.iter().find(|job| job["name"] == name);
        let job = job.with_context(|| format!("no job {name}"))?;
        match &job["status"] {
            status if *status == json!(0) => Ok(&job["figures"]),
            status => bail!("{name} failed: {status}"),
        }
    }

    /// Returns the fields of a results file that say where and when it was measured.
    ///
    /// # Errors
    /// Returns an error if one is missing.
    pub fn origin(&self) -> Result<Value> {
        let text = |name: &str| {
            let value = self.value[name].as_str();
            value.with_context(|| format!("{name} is not a text"))
        };
        Ok(json!({
            "title": "",
            "gpu": text("gpu")?,
            "driver": text("driver")?,
            "date": text("date")?,
            "commit": text("commit")?,
            "command": format!("cargo xtask bench gpu, part {}", text("part")?),
        }))
    }
}

/// Heading of a table, as a results file has it.
pub struct Heading {
    pub title: &'static str,
    pub method: &'static str,
    pub notes: Vec<String>,
    /// Folders of the measured code.
    pub about: &'static [&'static str],
    pub row: &'static str,
    /// Name and number of digits.
    pub units: &'static [(&'static str, usize)],
}

/// Name, setting and values of a row.
pub type Row = (String, Option<String>, Vec<Option<f64>>);

/// Makes a results file of `table`.
pub fn results(part: &Part, heading: Heading, table: Vec<Row>) -> Result<Value> {
    ensure!(!table.is_empty(), "no figure for {}", heading.title);
    let mut file = part.origin()?;
    let unit = |(name, digits): &(&str, usize)| json!({"name": name, "digits": digits});
    let table = table.into_iter().map(|(name, at, values)| {
        let values: Vec<Option<f64>> = values.into_iter().map(|one| one.map(rounded)).collect();
        match at {
            Some(at) => json!({"name": name, "at": at, "values": values}),
            None => json!({"name": name, "values": values}),
        }
    });
    let own = json!({
        "title": heading.title,
        "method": heading.method,
        "notes": heading.notes,
        "about": heading.about,
        "row": heading.row,
        "units": heading.units.iter().map(unit).collect::<Vec<_>>(),
        "rows": table.collect::<Vec<_>>(),
    });
    let own = own.as_object().context("a results file is an object")?;
    for (key, value) in own {
        file[key] = value.clone();
    }
    Ok(file)
}

/// Rounds to three decimal places.
pub fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// Returns the number `name` of `value`.
pub fn number(value: &Value, name: &str) -> Result<f64> {
    let found = value[name].as_f64();
    found.with_context(|| format!("{name} is not a number in {value}"))
}

/// Returns the list `name` of `figures`.
pub fn rows<'a>(figures: &'a Value, name: &str) -> Result<&'a Vec<Value>> {
    figures[name]
        .as_array()
        .with_context(|| format!("no {name}"))
}
