//! Selects the layers of a model to quantize, and those that share a global scale.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};
use nvfp4_formats::BLOCK;
use regex::Regex;

use super::budget::Choices;
use super::weight_format::WeightFormat;
use crate::hf::TensorFolder;
use crate::interchange::names::{
    FusedGroup, expert_layer, fused_group, is_head, is_linear, is_router,
};

/// Reason why a linear layer is not quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// It is a router.
    Router,
    /// It is the output head.
    Head,
    /// The user excluded it, or a projection or expert that readers fuse with it.
    Excluded,
    /// The number of its input features is not a multiple of 16.
    Width,
    /// It is sensitive to quantization, and the number of bits allows it.
    Bits,
}

impl Kept {
    /// Returns the reason for tables.
    pub const fn reason(self) -> &'static str {
        match self {
            Self::Router => "router",
            Self::Head => "head",
            Self::Excluded => "excluded",
            Self::Width => "width not in 16s",
            Self::Bits => "chosen by bits",
        }
    }
}

/// Treatment of each tensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Modules to quantize, in groups that share their global scales, in the order of the model's
    /// names. Most groups have one member.
    pub groups: Vec<Vec<String>>,
    /// Modules of `groups` to quantize to FP8 instead of NVFP4: whole groups, and all experts of a
    /// layer.
    pub fp8: BTreeSet<String>,
    /// Linear layers that are not quantized, with the reason.
    pub kept: BTreeMap<String, Kept>,
    /// Tensors that are copied, including those of the layers in `kept`.
    pub copied: Vec<String>,
}

impl Plan {
    /// Makes the plan for the tensors of a model. A module is skipped if one of the regular
    /// expressions `exclude` matches anywhere in its name, and quantized to FP8 if one of `fp8`
    /// does.
    ///
    /// Projections that readers fuse with such a one are treated like it: q/k/v, gate/up, and the
    /// experts of a layer.
    ///
    /// # Errors
    /// Returns an error if the model is already quantized, a weight is not a float matrix, an
    /// expression matches no linear layer, `exclude` and `fp8` match the same layer or layers that
    /// readers fuse, or nothing is left to quantize.
    pub fn new(tensors: &TensorFolder, exclude: &[Regex], fp8: &[Regex]) -> Result<Self> {
        let mut plan = Self::default();
        let mut groups: BTreeMap<FusedGroup, Vec<String>> = BTreeMap::new();
        let mut order = Vec::new();
        let (mut used, mut used_fp8) = (BTreeSet::new(), BTreeSet::new());
        for tensor in tensors.iter() {
            let module = tensor.name.strip_suffix(".weight");
            let module = module.filter(|module| is_linear(module));
            let Some(module) = module else {
                let is_quantized = [".weight_scale", ".weight_packed"];
                ensure!(
                    !is_quantized.iter().any(|leaf| tensor.name.ends_with(leaf)),
                    "{tensor}: the model is quantized already"
                );
                plan.copied.push(tensor.name.to_owned());
                continue;
            };
            ensure!(
                tensor.shape.len() == 2 && tensor.is_float(),
                "{tensor} is {:?}{:?}, but the weight of a linear layer is a matrix of F32, BF16 \
                 or F16",
                tensor.dtype,
                tensor.shape
            );
            let mut matching = (0..exclude.len())
                .filter(|&at| exclude[at].is_match(module))
                .peekable();
            let is_excluded = matching.peek().is_some();
            used.extend(matching);
            let matching = (0..fp8.len()).filter(|&at| fp8[at].is_match(module));
            let matching: Vec<usize> = matching.collect();
            if !matching.is_empty() && !is_router(module) && !is_head(module) {
                plan.fp8.insert(module.to_owned());
                used_fp8.extend(matching);
            }
            let kept = if is_router(module) {
                Some(Kept::Router)
            } else if is_head(module) {
                Some(Kept::Head)
            } else if is_excluded {
                Some(Kept::Excluded)
            } else if !tensor.shape[1].is_multiple_of(BLOCK) {
                Some(Kept::Width)
            } else {
                None
            };
            if let Some(kept) = kept {
                plan.kept.insert(module.to_owned(), kept);
            }
            match fused_group(module) {
                Some(group) => {
                    let members = groups.entry(group.clone()).or_default();
                    if members.is_empty() {
                        order.push(Err(group));
                    }
                    members.push(module.to_owned());
                }
                None => order.push(Ok(module.to_owned())),
            }
        }
        for (option, regexes, used) in [("exclude", exclude, used), ("fp8", fp8, used_fp8)] {
            if let Some(unused) = (0..regexes.len()).find(|at| !used.contains(at)) {
                bail!(
                    "{option} is {:?}, which matches no linear layer of the model, such as {}",
                    regexes[unused].as_str(),
                    first_linear(tensors).unwrap_or("none")
                );
            }
        }
        // Readers build the experts of a layer as one.
        let experts = plan.kept.iter();
        let experts =
            experts.filter_map(|(module, kept)| Some((expert_layer(module)?.to_owned(), *kept)));
        let experts: BTreeMap<String, Kept> = experts.collect();
        for module in tensors
            .names()
            .filter_map(|name| name.strip_suffix(".weight"))
        {
            if let Some(kept) = expert_layer(module).and_then(|layer| experts.get(layer)) {
                plan.kept.entry(module.to_owned()).or_insert(*kept);
            }
        }
        let fp8_experts = plan.fp8.iter().filter_map(|module| expert_layer(module));
        let fp8_experts: BTreeSet<String> = fp8_experts.map(String::from).collect();
        for entry in order {
            let members = match entry {
                Ok(module) => vec![module],
                Err(group) => groups.remove(&group).context("every group has members")?,
            };
            let kept = members
                .iter()
                .find_map(|member| plan.kept.get(member).copied());
            let in_fp8 = members.iter().find(|member| {
                let layer = expert_layer(member);
                plan.fp8.contains(*member) || layer.is_some_and(|it| fp8_experts.contains(it))
            });
            if let (Some(module), Some(Kept::Excluded)) = (in_fp8, kept) {
                bail!(
                    "fp8 and exclude both match {module}, or layers that readers fuse with it ({})",
                    members.join(", ")
                );
            }
            for member in &members {
                match (in_fp8.is_some(), kept) {
                    (true, None) => plan.fp8.insert(member.clone()),
                    _ => plan.fp8.remove(member),
                };
            }
            match kept {
                None => plan.groups.push(members),
                Some(kept) => {
                    for member in members {
                        plan.copied.push(format!("{member}.weight"));
                        plan.kept.entry(member).or_insert(kept);
                    }
                }
            }
        }
        ensure!(
            !plan.groups.is_empty(),
            "nothing is left to quantize: every linear layer is excluded"
        );
        plan.copied.sort();
        Ok(plan)
    }

    /// Gives the groups the formats of `choices`, which were made for this plan.
    ///
    /// # Errors
    /// Returns an error if a group has no format, or several, or if nothing is left to quantize.
    pub fn choose(&mut self, choices: &Choices) -> Result<()> {
        let formats = choices.formats();
        let mut kept = Vec::new();
        for group in std::mem::take(&mut self.groups) {
            let own = group
                .iter()
                .map(|module| formats.get(module.as_str()).copied());
            let own: BTreeSet<Option<WeightFormat>> = own.collect();
            match (own.len(), own.first().copied().flatten()) {
                (1, Some(WeightFormat::High)) => {
                    kept.extend(group);
                    continue;
                }
                (1, Some(WeightFormat::Fp8)) => self.fp8.extend(group.iter().cloned()),
                (1, Some(WeightFormat::Nvfp4)) => {}
                _ => bail!("{}: the chosen formats are {own:?}", group.join(", ")),
            }
            self.groups.push(group);
        }
        ensure!(
            !self.groups.is_empty(),
            "nothing is left to quantize: every layer was chosen to stay as it is"
        );
        for module in kept {
            self.copied.push(format!("{module}.weight"));
            self.kept.insert(module, Kept::Bits);
        }
        self.copied.sort();
        Ok(())
    }

    /// Returns the format of the weight of `module`.
    pub fn format(&self, module: &str) -> WeightFormat {
        if self.kept.contains_key(module) {
            WeightFormat::High
        } else if self.fp8.contains(module) {
            WeightFormat::Fp8
        } else {
            WeightFormat::Nvfp4
        }
    }

    /// Returns the groups of each decoder layer, in order; those outside of any layer are a
    /// separate part.
    pub fn parts(&self) -> Vec<Vec<Vec<String>>> {
        let mut parts: Vec<Vec<Vec<String>>> = Vec::new();
        for group in &self.groups {
            match parts.last_mut() {
                Some(part) if layer_of(&part[0][0]) == layer_of(&group[0]) => {
                    part.push(group.clone());
                }
                _ => parts.push(vec![group.clone()]),
            }
        }
        parts
    }
}

/// Returns the first linear layer of the model that is not a router.
fn first_linear(tensors: &TensorFolder) -> Option<&str> {
    let mut modules = tensors
        .names()
        .filter_map(|name| name.strip_suffix(".weight"));
    modules.find(|module| is_linear(module) && !is_router(module) && !is_head(module))
}

/// Returns the common prefix of all modules in the decoder layer of `module`: `model.layers.0`.
/// Empty outside of any layer.
pub(super) fn layer_of(module: &str) -> &str {
    let Some(begin) = module.find(".layers.").map(|at| at + ".layers.".len()) else {
        return "";
    };
    let digits = module[begin..].bytes().take_while(u8::is_ascii_digit);
    &module[..begin + digits.count()]
}

/// Returns the index of the decoder layer of `module`, if it is in one.
pub(super) fn layer_index(module: &str) -> Option<usize> {
    let (_, digits) = layer_of(module).rsplit_once('.')?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_decoder_layers() {
        let groups = [
            vec!["m.layers.1.mlp.down_proj"],
            vec!["m.layers.1.self_attn.q_proj", "m.layers.1.self_attn.k_proj"],
            vec!["m.layers.10.mlp.down_proj"],
            vec!["m.other_proj"],
            vec!["m.more_proj"],
        ];
        let owned = |group: &Vec<&str>| group.iter().map(|name| (*name).to_owned()).collect();
        let plan = Plan {
            groups: groups.iter().map(owned).collect(),
            ..Plan::default()
        };
        let counts: Vec<usize> = plan.parts().iter().map(Vec::len).collect();
        assert_eq!(counts, [2, 1, 2]);
        assert_eq!(plan.parts().concat(), plan.groups);
        let indices = plan.groups.iter().map(|group| layer_index(&group[0]));
        let indices: Vec<Option<usize>> = indices.collect();
        assert_eq!(indices, [Some(1), Some(1), Some(10), None, None]);
    }
}
