//! Checks of the layers that readers fuse: their formats and scales must agree.

use std::collections::BTreeMap;

use super::super::GlobalScale;
use super::super::fp8::INPUT;
use super::super::names::{FusedGroup, expert_layer, fused_group};
use super::super::{LayerFormat, PreQuantScale};
use super::Checkpoint;

impl Checkpoint {
    /// Consumers fuse q/k/v and gate/up, and use one member's global scale for all.
    pub(super) fn check_groups(&mut self) {
        let Some(leaves) = self.config.as_ref().map(|config| config.dialect.leaves()) else {
            return;
        };
        let mut groups: BTreeMap<FusedGroup, Vec<&String>> = BTreeMap::new();
        for module in self.layers.keys() {
            if let Some(group) = fused_group(module) {
                groups.entry(group).or_default().push(module);
            }
        }
        let mut found = Vec::new();
        for (group, members) in &groups {
            let first = &self.layers[members[0]];
            let bits = |scale: Option<GlobalScale>| scale.map(|scale| scale.value().to_bits());
            for member in &members[1..] {
                let layer = &self.layers[*member];
                for (leaf, ours, theirs) in [
                    (leaves.global, Some(layer.global), Some(first.global)),
                    (leaves.input, layer.input_global, first.input_global),
                ] {
                    if bits(ours) != bits(theirs) {
                        let value = |scale: Option<GlobalScale>| scale.map_or(0.0, |s| s.value());
                        let what = format!(
                            "is {:e}, but {} has {:e}: readers fuse them to one {} with one scale",
                            value(ours),
                            members[0],
                            value(theirs),
                            group.kind
                        );
                        found.push((format!("{member}.{leaf}"), what));
                    }
                }
            }
        }
        for (group, members) in &groups {
            let scale = |module: &str| -> Option<PreQuantScale> {
                self.weight(module).ok()?.pre_quant().cloned()
            };
            if !members.iter().any(|member| self.layers[*member].pre_quant) {
                continue;
            }
            let first = scale(members[0]);
            for member in &members[1..] {
                if scale(member) != first {
                    let what = format!(
                        "its input is multiplied by another scale than that of {}: readers fuse \
                         them to one {}",
                        members[0], group.kind
                    );
                    found.push(((*member).clone(), what));
                }
            }
        }
        found.extend(self.unlike());
        for (name, what) in found {
            self.problem(&name, what);
        }
    }

    /// Returns the layers whose format differs from that of others that readers fuse with them:
    /// projections, and the experts of a layer.
    fn unlike(&self) -> Vec<(String, String)> {
        let quantized = self.quantized().map(|module| (module, self.format(module)));
        let all = quantized.chain(self.unquantized().map(|module| (module, None)));
        let mut firsts: BTreeMap<(String, &str), (&str, Option<LayerFormat>)> = BTreeMap::new();
        let mut found = Vec::new();
        for (module, format) in all {
            let fused = fused_group(module).map(|group| (group.parent, group.kind));
            let experts = expert_layer(module).map(|layer| (layer.to_owned(), "experts"));
            for (key, them) in [(fused, "them"), (experts, "the experts of a layer")] {
                let Some(key) = key else { continue };
                let (first, other) = *firsts.entry(key).or_insert((module, format));
                let what = match (format, other) {
                    (format, other) if format == other => continue,
                    (None, _) => format!("is not quantized, but {first} is: readers fuse {them}"),
                    (Some(format), Some(other)) => {
                        format!("is {format}, but {first} is {other}: readers fuse {them}")
                    }
                    // Unquantized layers come last.
                    (Some(_), None) => continue,
                };
                found.push((module.to_owned(), what));
                break;
            }
        }
        let scale = |module: &str| self.fp8.get(module)?.input_scale;
        let mut inputs: BTreeMap<FusedGroup, &String> = BTreeMap::new();
        for module in self.fp8.keys() {
            let Some(group) = fused_group(module) else {
                continue;
            };
            let kind = group.kind;
            let first = *inputs.entry(group).or_insert(module);
            if let (Some(own), Some(other)) = (scale(module), scale(first))
                && own.to_bits() != other.to_bits()
            {
                let what = format!(
                    "is {own:e}, but {first} has {other:e}: readers fuse them to one {kind} with \
                     one scale"
                );
                found.push((format!("{module}.{INPUT}"), what));
            }
        }
        found
    }
}
