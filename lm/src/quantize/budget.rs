//! Chooses NVFP4, FP8 or high precision for each group of layers, within a budget of bits.
//!
//! Each format of a group has a number of bits and a cost: the KL divergence of the model in which
//! only this group has the format from the model in high precision. All groups begin with the fewest
//! bits. Then the steps along the lower convex hull of each group's formats are taken, the largest
//! decrease of the KL divergence per bit first, as long as they fit.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use serde::Serialize;

use super::weight_format::WeightFormat;

/// A group of layers that readers fuse, and the cost of each format.
#[derive(Debug, Clone, PartialEq)]
pub struct Sensitivity {
    /// Modules of the group.
    pub modules: Vec<String>,
    /// Number of weights.
    pub weights: usize,
    /// Formats with their bits of the whole group and their KL divergence, in nats per token.
    pub formats: Vec<Cost>,
}

/// Cost of a format.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// Format.
    pub format: WeightFormat,
    /// Bits of all weights of the group, including scales.
    pub bits: usize,
    /// KL divergence in nats per token; 0 in high precision.
    pub kl: f64,
}

/// Chosen formats.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choices {
    /// Budget in bits per weight.
    pub budget: f64,
    /// Bits per weight of the chosen formats.
    pub bits: f64,
    /// Tokens over which the KL divergences were measured.
    pub tokens: usize,
    /// Choice of each group.
    pub groups: Vec<Choice>,
}

impl Choices {
    /// Returns the format of each module.
    pub fn formats(&self) -> BTreeMap<&str, WeightFormat> {
        let groups = self.groups.iter();
        let modules = groups.flat_map(|group| {
            let modules = group.modules.iter();
            modules.map(|module| (module.as_str(), group.format))
        });
        modules.collect()
    }
}

/// Chosen format of a group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// Modules of the group.
    pub modules: Vec<String>,
    /// Number of weights.
    pub weights: usize,
    /// Chosen format.
    pub format: WeightFormat,
    /// Bits per weight of the chosen format.
    pub bits: f64,
    /// All formats.
    pub formats: Vec<Cost>,
    /// Reason of the choice.
    pub why: String,
}

/// A step of a group to its next format on the convex hull.
#[derive(Debug, Clone, Copy)]
struct Step {
    group: usize,
    from: usize,
    to: usize,
    /// Decrease of the KL divergence.
    gain: f64,
    bits: usize,
}

impl Step {
    fn slope(&self) -> f64 {
        self.gain / self.bits as f64
    }
}

/// Checks that `groups` can have `budget` bits per weight: at least those of the smallest formats,
/// and fewer than those of the model.
///
/// # Errors
/// Returns an error that names the possible range if the budget is outside of it.
pub fn check_budget(groups: &[Sensitivity], budget: f64) -> Result<()> {
    let weights: usize = groups.iter().map(|group| group.weights).sum();
    let smallest = |group: &Sensitivity| group.formats.iter().map(|cost| cost.bits).min();
    let least: usize = groups.iter().filter_map(smallest).sum();
    let most: usize = groups.iter().map(|group| high(group).bits).sum();
    let [least, most] = [least, most].map(|bits| bits as f64 / weights as f64);
    ensure!(
        budget >= least && budget < most,
        "bits is {budget}, but this model allows at least {:.4}, with every layer in its smallest \
         format, and less than {most:.4}, its own: choose a number between them",
        (least * 1e4).ceil() / 1e4
    );
    Ok(())
}

/// Chooses formats of `groups` with at most `budget` bits per weight; the KL divergences were
/// measured over `tokens` tokens.
///
/// # Errors
/// Returns the error of [`check_budget`], or an error if a KL divergence is not finite.
pub fn choose(groups: &[Sensitivity], budget: f64, tokens: usize) -> Result<Choices> {
    check_budget(groups, budget)?;
    let weights: usize = groups.iter().map(|group| group.weights).sum();
    for group in groups {
        for cost in &group.formats {
            ensure!(
                cost.kl.is_finite() && cost.kl >= 0.0,
                "{}: the KL divergence in {} is {}",
                group.modules.join(", "),
                cost.format.name(),
                cost.kl
            );
        }
    }
    let hulls: Vec<Vec<usize>> = groups.iter().map(|group| hull(&group.formats)).collect();
    let first = groups.iter().zip(&hulls);
    let least: usize = first.map(|(group, hull)| group.formats[hull[0]].bits).sum();
    let allowed = (budget * weights as f64).floor() as usize;
    let mut left = allowed.saturating_sub(least);
    let steps = hulls
        .iter()
        .enumerate()
        .flat_map(|(group, hull)| hull.windows(2).map(move |pair| (group, pair[0], pair[1])));
    let mut steps: Vec<Step> = steps
        .map(|(group, from, to)| {
            let [before, after] = [from, to].map(|at| groups[group].formats[at]);
            Step {
                group,
                from,
                to,
                gain: before.kl - after.kl,
                bits: after.bits - before.bits,
            }
        })
        .collect();
    // Sorting is stable: equal slopes keep the order of the model.
    steps.sort_by(|a, b| b.slope().total_cmp(&a.slope()));
    let mut chosen: Vec<usize> = hulls.iter().map(|hull| hull[0]).collect();
    let mut whys = vec![String::new(); groups.len()];
    for step in steps {
        let why = &mut whys[step.group];
        let name = groups[step.group].formats[step.to].format.name();
        let saved = format!("{:.3e} nats per token for {} bits", step.gain, step.bits);
        if chosen[step.group] != step.from {
            continue;
        }
        if step.bits > left {
            if why.is_empty() {
                *why = format!("{name} would save {saved}, but {left} are left");
            }
            continue;
        }
        left -= step.bits;
        chosen[step.group] = step.to;
        *why = format!("saves {saved}");
    }
    let mut bits = 0;
    let choice = |(at, group): (usize, &Sensitivity)| {
        let cost = group.formats[chosen[at]];
        bits += cost.bits;
        Choice {
            modules: group.modules.clone(),
            weights: group.weights,
            format: cost.format,
            bits: cost.bits as f64 / group.weights as f64,
            formats: group.formats.clone(),
            why: match whys[at].is_empty() {
                true => "more bits save nothing".into(),
                false => std::mem::take(&mut whys[at]),
            },
        }
    };
    let chosen: Vec<Choice> = groups.iter().enumerate().map(choice).collect();
    Ok(Choices {
        budget,
        bits: bits as f64 / weights as f64,
        tokens,
        groups: chosen,
    })
}

/// Returns the cost of high precision.
fn high(group: &Sensitivity) -> Cost {
    let high = group
        .formats
        .iter()
        .find(|it| it.format == WeightFormat::High);
    *high.expect("every group can stay as it is")
}

/// Returns the indices of the formats on the lower convex hull, by increasing bits and decreasing
/// KL divergence.
fn hull(formats: &[Cost]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..formats.len()).collect();
    let key = |at: usize| (formats[at].bits, formats[at].kl);
    order.sort_by(|&a, &b| {
        let ((bits, kl), (other_bits, other_kl)) = (key(a), key(b));
        bits.cmp(&other_bits).then(kl.total_cmp(&other_kl))
    });
    let slope = |a: usize, b: usize| {
        let ((bits, kl), (more, less)) = (key(a), key(b));
        (kl - less) / (more - bits) as f64
    };
    let mut hull: Vec<usize> = Vec::new();
    for at in order {
        // A format must decrease the divergence.
        if hull
            .last()
            .is_some_and(|&last| formats[at].kl >= formats[last].kl)
        {
            continue;
        }
        while let [.., before, last] = hull[..]
            && slope(before, last) <= slope(last, at)
        {
            hull.pop();
        }
        hull.push(at);
    }
    hull
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(name: &str, kl: [f64; 2]) -> Sensitivity {
        let formats = [WeightFormat::Nvfp4, WeightFormat::Fp8, WeightFormat::High];
        let costs = formats
            .into_iter()
            .zip([450, 800, 1600])
            .zip([kl[0], kl[1], 0.0]);
        Sensitivity {
            modules: vec![name.into()],
            weights: 100,
            formats: costs
                .map(|((format, bits), kl)| Cost { format, bits, kl })
                .collect(),
        }
    }

    fn formats(groups: &[Sensitivity], budget: f64) -> Vec<&'static str> {
        let choices = choose(groups, budget, 10).unwrap();
        assert!(choices.bits <= budget, "{} of {budget}", choices.bits);
        let names = choices.groups.iter().map(|choice| choice.format.name());
        names.collect()
    }

    #[test]
    fn the_budget_goes_to_the_largest_decrease_per_bit() {
        let groups = [
            group("a", [0.1, 0.01]),
            group("b", [0.4, 0.05]),
            group("c", [0.01, 0.001]),
        ];
        assert_eq!(formats(&groups, 4.5), ["nvfp4", "nvfp4", "nvfp4"]);
        assert_eq!(formats(&groups, 5.7), ["nvfp4", "fp8", "nvfp4"]);
        assert_eq!(formats(&groups, 6.9), ["fp8", "fp8", "nvfp4"]);
        // c in FP8 saves 2.6e-5 per bit, b in high precision 6.3e-5.
        assert_eq!(formats(&groups, 8.1), ["fp8", "fp8", "fp8"]);
        assert_eq!(formats(&groups, 9.6), ["fp8", "high", "nvfp4"]);
        assert_eq!(formats(&groups, 15.99), ["high", "high", "fp8"]);
        let choices = choose(&groups, 5.7, 10).unwrap();
        assert!(choices.groups[1].why.starts_with("saves 3.500e-1 nats"));
        let why = &choices.groups[0].why;
        assert!(
            why.contains("fp8 would save 9.000e-2") && why.ends_with("10 are left"),
            "{why}"
        );
    }

    /// Formats above the hull are skipped: FP8 that is no better than NVFP4, or so little that high
    /// precision saves more per bit.
    #[test]
    fn only_formats_on_the_hull_are_chosen() {
        let groups = [group("worse", [0.1, 0.2]), group("little", [0.1, 0.099])];
        assert_eq!(formats(&groups, 8.0), ["nvfp4", "nvfp4"]);
        assert_eq!(formats(&groups, 10.5), ["high", "nvfp4"]);
        let none = [group("exact", [0.0, 0.0]), group("other", [0.2, 0.1])];
        assert_eq!(formats(&none, 15.0), ["nvfp4", "high"]);
        let choices = choose(&none, 15.0, 10).unwrap();
        assert_eq!(choices.groups[0].why, "more bits save nothing");
    }

    #[test]
    fn budgets_out_of_range_name_the_range() {
        let groups = [group("a", [0.1, 0.01])];
        for budget in [0.0, 4.49, 16.0, 17.0, f64::NAN, f64::INFINITY] {
            let error = choose(&groups, budget, 10).unwrap_err().to_string();
            assert!(error.contains("at least 4.5000") && error.contains("less than 16.0000"));
        }
        let error = choose(&[group("a", [f64::NAN, 0.0])], 5.0, 10).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("a: the KL divergence in nvfp4 is NaN")
        );
    }
}
