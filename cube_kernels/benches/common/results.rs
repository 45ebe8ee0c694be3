//! The results file of a benchmark, as `cargo xtask results` reads it: figures and their origin.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use serde_json::{Value, json};

/// Results of a benchmark.
pub struct Results {
    /// Name of the target: `cargo bench --bench NAME`.
    pub bench: &'static str,
    /// Name of the GPU, as reported by its driver.
    pub gpu: String,
    /// Heading of the table.
    pub title: &'static str,
    /// Folders of the measured code, from the root of the repository.
    pub about: &'static [&'static str],
    /// Method of timing.
    pub method: &'static str,
    /// Meaning of a row.
    pub row: &'static str,
    /// Measured quantities, and their decimal places.
    pub units: &'static [(&'static str, usize)],
    pub rows: Vec<Row>,
}

/// One line of a results file.
pub struct Row {
    pub name: String,
    /// Shape, if rows of one name were measured at several.
    pub at: Option<String>,
    /// Values, one per unit.
    pub values: Vec<Option<f64>>,
}

impl Results {
    /// Writes the file in `NVFP4_BENCH_JSON`, or `nvfp4-bench-NAME.json` in the target folder, and
    /// prints its path.
    pub fn write(&self) -> std::io::Result<()> {
        let path = self.path();
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(&path, serde_json::to_string_pretty(&self.to_json())? + "\n")?;
        println!("\n{}", path.display());
        Ok(())
    }

    fn path(&self) -> PathBuf {
        // A folder in the target folder, wherever that is; the working directory of a benchmark is
        // that of its package.
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent();
        env::var_os("NVFP4_BENCH_JSON").map_or_else(
            || {
                let target = target.expect("the folder is in another");
                target.join(format!("nvfp4-bench-{}.json", self.bench))
            },
            PathBuf::from,
        )
    }

    fn to_json(&self) -> Value {
        let unit = |(name, digits): &(&str, usize)| json!({"name": name, "digits": digits});
        let rows = self.rows.iter().map(|row| {
            let Row { name, at, values } = row;
            match at {
                None => json!({"name": name, "values": values}),
                Some(at) => json!({"name": name, "at": at, "values": values}),
            }
        });
        json!({
            "title": self.title,
            "gpu": self.gpu,
            "driver": known("NVFP4_BENCH_DRIVER", &[
                "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader",
            ]),
            "date": date(),
            // Empty if it is unknown: `cargo xtask results` refuses the file until it is filled in.
            "commit": known("NVFP4_BENCH_COMMIT", &["git", "describe", "--always", "--dirty"])
                .unwrap_or_default(),
            "command": self.command(),
            "method": self.method,
            "about": self.about,
            "row": self.row,
            "units": self.units.iter().map(unit).collect::<Vec<_>>(),
            "rows": rows.collect::<Vec<_>>(),
        })
    }

    /// Returns the command that the user typed.
    fn command(&self) -> String {
        let mut command = String::new();
        for name in [
            "NVFP4_BENCH_SHAPES",
            "NVFP4_BENCH_KERNELS",
            "NVFP4_BENCH_ONCE",
        ] {
            if let Ok(value) = env::var(name) {
                command += &format!("{name}='{value}' ");
            }
        }
        command += concat!(
            "cargo bench -p ",
            env!("CARGO_PKG_NAME"),
            " --features cuda --bench "
        );
        command += self.bench;
        // Cargo adds the last argument.
        let arguments: Vec<String> = env::args().skip(1).filter(|one| one != "--bench").collect();
        if !arguments.is_empty() {
            command += &format!(" -- '{}'", arguments.join("' '"));
        }
        command
    }
}

/// Returns the variable `name`, or the first line that `command` prints.
fn known(name: &str, command: &[&str]) -> Option<String> {
    env::var(name).ok().or_else(|| {
        let output = Command::new(command[0]).args(&command[1..]).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        let line = text.lines().next().unwrap_or_default().trim();
        (output.status.success() && !line.is_empty()).then(|| line.to_owned())
    })
}

/// Returns today's date in UTC, as YYYY-MM-DD.
fn date() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let days = now.expect("a clock after 1970").as_secs() / 86_400;
    // Days since 0000-03-01, so that a leap day is the last of its year.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}
