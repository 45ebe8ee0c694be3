//! What a B200 should take for an NVFP4 GEMM, without one: a roofline, and the figures of NVIDIA's
//! model that `benches/model_b200.py` has written. Nothing here is measured.

use std::fs;

use serde_json::Value;

/// Dense FP4 operations a second of a B200.
const OPERATIONS: f64 = 9.0e15;
/// Bytes a second of its memory.
const BANDWIDTH: f64 = 7.67e12;
/// The results file of the model.
const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../results/model-b200.json");

/// The sizes of a GEMM of packed operands into bf16: M, N, K and groups of M.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub groups: usize,
}

impl Shape {
    /// Microseconds of its operations or of its bytes, whichever are more: codes, scales and the
    /// output.
    pub fn roofline(self) -> f64 {
        let Self { m, n, k, groups } = self;
        let operations = 2.0 * (m * n * k) as f64 / OPERATIONS;
        let moved = (m * k + groups * n * k) as f64 * 9.0 / 16.0 + 2.0 * (m * n) as f64;
        1e6 * operations.max(moved / BANDWIDTH)
    }

    /// Of the name of a row of the model, such as `DeepSeek-V3, 8 experts, 8192 x 4096 x 7168`.
    fn of_row(name: &str) -> Option<Self> {
        let mut parts = name.rsplit(", ");
        let sizes = parts.next()?.split(" x ");
        let sizes: Vec<usize> = sizes.map(|size| size.parse().ok()).collect::<Option<_>>()?;
        let experts = parts.next().and_then(|part| part.strip_suffix(" experts"));
        let &[m, n, k] = &sizes[..] else { return None };
        let groups = experts.map_or(Some(1), |count| count.parse().ok())?;
        Some(Self { m, n, k, groups })
    }
}

/// The shapes of the model's file, with microseconds; none where there is no file.
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
