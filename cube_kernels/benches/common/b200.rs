//! Estimates for NVFP4 or MXFP8 GEMMs on a B200: a roofline, and the figures of NVIDIA's model, as
//! written by `benches/model_b200.py`. Nothing here is measured.

use std::fs;

use nvfp4_formats::Format;
use serde_json::Value;

/// Dense FP4 operations per second of a B200; FP8 has half as many.
const FP4_OPERATIONS: f64 = 9.0e15;
/// Memory bandwidth in bytes per second.
const BANDWIDTH: f64 = 7.67e12;
/// Results file of the model.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../results/model-b200.json");

/// Prefix of MXFP8 rows.
const MXFP8: &str = "MXFP8, ";

/// A GEMM of packed operands with bf16 output: format, M, N, K and groups of M.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub format: Format,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub groups: usize,
}

impl Shape {
    /// Returns the microseconds of its operations or of its bytes (codes, scales and the output),
    /// whichever are more.
    pub fn roofline(self) -> f64 {
        let Self {
            m, n, k, groups, ..
        } = self;
        let rate = FP4_OPERATIONS * 4.0 / self.format.code_bits() as f64;
        let operations = 2.0 * (m * n * k) as f64 / rate;
        let moved = (m * k + groups * n * k) as f64 * self.element_bytes() + 2.0 * (m * n) as f64;
        1e6 * operations.max(moved / BANDWIDTH)
    }

    /// Returns the bytes of a packed element, including its share of a scale.
    pub fn element_bytes(self) -> f64 {
        self.format.code_bits() as f64 / 8.0 + 1.0 / self.format.block() as f64
    }

    /// Parses the name of a row of the model, such as `DeepSeek-V3, 8 experts, 8192 x 4096 x 7168`.
    fn of_row(name: &str) -> Option<Self> {
        let (format, name) = match name.strip_prefix(MXFP8) {
            Some(name) => (Format::Mxfp8, name),
            None => (Format::Nvfp4, name),
        };
        let mut parts = name.rsplit(", ");
        let sizes = parts.next()?.split(" x ");
        let sizes: Vec<usize> = sizes.map(|size| size.parse().ok()).collect::<Option<_>>()?;
        let experts = parts.next().and_then(|part| part.strip_suffix(" experts"));
        let &[m, n, k] = &sizes[..] else { return None };
        let groups = experts.map_or(Some(1), |count| count.parse().ok())?;
        Some(Self {
            format,
            m,
            n,
            k,
            groups,
        })
    }
}

/// Returns the shapes of the model's file, with microseconds; empty if there is no file.
pub fn modelled() -> Vec<(Shape, f64)> {
    let text = fs::read_to_string(MODEL).unwrap_or_default();
    let file: Value = serde_json::from_str(&text).unwrap_or_default();
    let rows = file["rows"].as_array().cloned().unwrap_or_default();
    rows.iter()
        .filter_map(|row| {
            Some((
                Shape::of_row(row["name"].as_str()?)?,
                row["values"][1].as_f64()?,
            ))
        })
        .collect()
}
