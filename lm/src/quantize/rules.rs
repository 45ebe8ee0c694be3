//! Quantizes whole weights by the [rules](Rule) of the tools.

use anyhow::{Result, ensure};
use nvfp4_formats::ptq::{BlockQuantizer, Rule, ScaleChoice, round_rows, values};
use nvfp4_formats::{Amax, BLOCK, QuantParams, Rounding, Usage, reference};

use crate::interchange::{Dialect, PackedWeight};

/// Returns the rule of a dialect's tool in f32.
pub const fn rule_of(dialect: Dialect) -> Rule {
    match dialect {
        Dialect::ModelOpt => Rule::ModelOpt,
        Dialect::CompressedTensors => Rule::CompressedTensors,
    }
}

/// Quantizes by `rule` the weight `values` `[n, k]`. `amax` is its largest magnitude, or that of all
/// weights that share its global scale.
///
/// # Errors
/// Returns an error if `k` is not a multiple of 16, the length does not match, or a value or
/// `amax` is not finite.
pub fn quantize(rule: Rule, values: &[f32], [n, k]: [usize; 2], amax: f32) -> Result<PackedWeight> {
    check_matrix(values, [n, k], amax)?;
    if rule == Rule::TransformerEngine {
        let policy = QuantParams::nvfp4(Rounding::Nearest);
        let amax = Amax::Tensor(amax);
        let tensor = reference::quantize(values, n, k, Usage::Rowwise, &amax, &policy, 0)?;
        return PackedWeight::from_quantized(&tensor);
    }
    let global = rule.global(amax);
    global.check()?;
    let quantizer = BlockQuantizer {
        rule,
        global,
        choice: ScaleChoice::Max,
    };
    // Errors are not weighted: the amax alone decides.
    let (codes, scales) = round_rows(values, &quantizer, &vec![1.0; k]);
    PackedWeight::new([n, k], codes, scales, global, None)
}

/// Returns the largest magnitude of all `weights`.
pub(super) fn amax_of<'a>(weights: impl IntoIterator<Item = &'a [f32]>) -> f32 {
    weights.into_iter().map(values::amax).fold(0.0, f32::max)
}

/// Returns an error unless `values` is a finite matrix `[n, k]` of whole blocks, and `amax` bounds
/// it.
pub(super) fn check_matrix(values: &[f32], [n, k]: [usize; 2], amax: f32) -> Result<()> {
    ensure!(
        k.is_multiple_of(BLOCK) && k > 0,
        "the weight has {k} input features, but blocks need a multiple of {BLOCK}"
    );
    ensure!(
        n.checked_mul(k) == Some(values.len()),
        "{} values for a weight of {n} x {k}",
        values.len()
    );
    let largest = values::amax(values);
    if !largest.is_finite()
        && let Some(at) = values.iter().position(|value| !value.is_finite())
    {
        anyhow::bail!(
            "the value of row {}, column {} is {}, but weights must be finite",
            at / k,
            at % k,
            values[at]
        );
    }
    ensure!(
        amax.is_finite() && amax >= largest,
        "amax is {amax}, but it must be finite and at least {largest}, the weight's own"
    );
    Ok(())
}
