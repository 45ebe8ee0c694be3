//! Search for the linear layers of a model, for the heads and routers among them, and for
//! convolutions.

use std::collections::HashSet;

use burn_core::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn_core::tensor::Tensor;
use nvfp4_formats::Nvfp4Error;

use crate::recipe::patterns;

/// Names of modules whose linear layers compute a model's output; names that end in `_head` count
/// too.
const HEADS: [&str; 5] = ["head", "classifier", "logits", "unembed", "unembedding"];
/// Sibling module that makes a module called `gate` a router; without it `gate` is the gate of a
/// SwiGLU.
const EXPERTS: &str = "experts";

/// Linear layers of this crate, by the container names of Burn's traversals.
const OWN: [&str; 2] = ["Struct:Nvfp4Linear", "Struct:Nvfp4GroupedLinear"];

/// Modules of this crate that shard the weights of their linear layers over ranks.
const SHARDED: [&str; 4] = [
    "Struct:ColumnParallelLinear",
    "Struct:RowParallelLinear",
    "Struct:ExpertParallelMoe",
    "Struct:ExpertShard",
];

/// Linear layer.
#[cfg_attr(
    not(any(feature = "cpu", feature = "cuda")),
    allow(dead_code, reason = "Flex has no decorator")
)]
pub(crate) struct Found {
    pub path: String,
    /// True if the layer is one of this crate, which multiplies by the weight itself.
    pub is_own: bool,
    pub weight: ParamId,
    pub bias: Option<ParamId>,
    /// Shape of the weight, or of each matrix in a stack.
    pub dims: [usize; 2],
    /// Number of matrices in a stacked weight.
    pub experts: Option<usize>,
}

/// Reason why a linear layer is left in high precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeftAlone {
    /// Its name is that of an output head or a router.
    HeadOrRouter,
    /// Its weight is in `exclude`.
    Excluded,
    /// Its weight is sharded over ranks by the layer around it.
    Sharded,
}

/// Selection of linear layers.
#[derive(Clone, Copy)]
pub(crate) struct Selection<'a> {
    /// What is done to the layers, for messages: "decorate".
    pub verb: &'static str,
    /// True if layers of this crate are selected too.
    pub own: bool,
    pub include: Option<&'a ParamGroup>,
    pub exclude: Option<&'a ParamGroup>,
}

/// Visitor that finds the linear layers.
struct Survey<'a> {
    selection: Selection<'a>,
    path: Vec<String>,
    containers: Vec<String>,
    candidates: Vec<Candidate>,
    convolutions: Vec<String>,
    reparameterized: Option<String>,
    seen: HashSet<ParamId>,
    /// Paths of all modules.
    modules: HashSet<String>,
}

/// Weight that may belong to a selected layer.
struct Candidate {
    layer: Found,
    is_linear: bool,
    is_sharded: bool,
    in_include: bool,
    in_exclude: bool,
}

/// Result of a survey.
pub(crate) struct Surveyed {
    /// Selected layers, at least one.
    pub layers: Vec<Found>,
    /// Other linear layers.
    pub left_alone: Vec<(Found, LeftAlone)>,
    /// Paths of convolutions, and of stacks of weights that are not included.
    #[cfg_attr(
        not(any(feature = "cpu", feature = "cuda")),
        allow(dead_code, reason = "Flex has no decorator")
    )]
    pub convolutions: Vec<String>,
}

impl<'a> Selection<'a> {
    /// Returns the linear layers of `model`.
    ///
    /// # Errors
    /// Returns an error if a parameter has a reparameterization, no layer is selected, or `include`
    /// or `exclude` matches nothing.
    pub fn of<M: Module>(self, model: &M) -> Result<Surveyed, Nvfp4Error> {
        let mut survey = Survey {
            selection: self,
            path: Vec::new(),
            containers: Vec::new(),
            candidates: Vec::new(),
            convolutions: Vec::new(),
            reparameterized: None,
            seen: HashSet::new(),
            modules: HashSet::new(),
        };
        model.visit(&mut survey);
        survey.finish()
    }
}

impl Survey<'_> {
    /// Decides for each layer whether it is selected, once the whole model is known.
    fn finish(self) -> Result<Surveyed, Nvfp4Error> {
        let Self {
            selection,
            candidates,
            convolutions,
            reparameterized,
            modules,
            ..
        } = self;
        if let Some(path) = reparameterized {
            return Err(Nvfp4Error::value(
                "model",
                format!("a reparameterization at `{path}`"),
                "a model without any: not decorated, quantized or sharded, and without LoRA adapters",
            ));
        }
        let mut found = Surveyed {
            layers: Vec::new(),
            left_alone: Vec::new(),
            convolutions,
        };
        let (mut any_included, mut any_excluded) = (false, false);
        for candidate in candidates {
            let Candidate {
                layer,
                is_linear,
                is_sharded,
                in_include,
                in_exclude,
            } = candidate;
            let by_name = !layer.is_own && is_head_or_router(&layer.path, &modules);
            let by_default = is_linear && !by_name;
            let included = in_include && !by_default;
            any_included |= included;
            any_excluded |= (is_linear || included) && in_exclude;
            let why = match (in_exclude, by_default || included) {
                (true, _) => LeftAlone::Excluded,
                (false, false) => LeftAlone::HeadOrRouter,
                (false, true) if is_sharded => LeftAlone::Sharded,
                (false, true) => {
                    found.layers.push(layer);
                    continue;
                }
            };
            if is_linear {
                found.left_alone.push((layer, why));
            }
        }
        selection.check(&found, any_included, any_excluded)?;
        Ok(found)
    }
}

impl Selection<'_> {
    /// Returns an error if a group selected nothing, or no layer is left.
    fn check(
        &self,
        found: &Surveyed,
        any_included: bool,
        any_excluded: bool,
    ) -> Result<(), Nvfp4Error> {
        let verb = self.verb;
        if let Some(group) = self.include
            && !any_included
        {
            return Err(Nvfp4Error::value(
                "include",
                format!(
                    "{}, which matches no parameter of rank 2 or 3 called `weight`",
                    patterns(group)
                ),
                "a group with at least one that is not in a Linear, or in a head or router",
            ));
        }
        if let Some(group) = self.exclude
            && !any_excluded
        {
            return Err(Nvfp4Error::value(
                "exclude",
                format!(
                    "{}, which matches no weight of a layer to {verb}",
                    patterns(group)
                ),
                "a group with at least one",
            ));
        }
        if found.layers.is_empty() {
            let paths = found.left_alone.iter().map(|(layer, _)| &*layer.path);
            let paths: Vec<&str> = paths.collect();
            let found = match &paths[..] {
                [] => "no linear layer".into(),
                paths => format!("no linear layer to {verb} besides {}", paths.join(", ")),
            };
            return Err(Nvfp4Error::value(
                "model",
                found,
                match self.exclude {
                    Some(_) => "one that `exclude` leaves, or a head or router in `include`",
                    None => "a model with at least one, or a head or router in `include`",
                },
            ));
        }
        Ok(())
    }
}

/// Returns true if the layer at `path` is, or is part of, an output head or a router. `modules` are
/// the paths of all modules.
fn is_head_or_router(path: &str, modules: &HashSet<String>) -> bool {
    let by_name = |name: &str| {
        HEADS.contains(&name)
            || name.ends_with("_head")
            || name == "router"
            || name.ends_with("_router")
    };
    let gates_experts = || {
        let neighbour = match path.rsplit_once('.') {
            Some((parent, "gate")) => format!("{parent}.{EXPERTS}"),
            None if path == "gate" => EXPERTS.into(),
            _ => return false,
        };
        modules.contains(&neighbour)
    };
    path.split('.').any(by_name) || gates_experts()
}

impl ModuleVisitor for Survey<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == "Reparameterization" && self.reparameterized.is_none() {
            self.reparameterized = Some(self.path.join("."));
        }
        self.path.push(name.into());
        self.containers.push(container_type.into());
        self.modules.insert(self.path.join("."));
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
        self.containers.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some((name, owner)) = self.path.split_last() else {
            return;
        };
        let container = self.containers.last().map_or("", |container| container);
        let is_own = OWN.contains(&container);
        let is_linear = container == "Struct:Linear" || (is_own && self.selection.own);
        let owner = owner.join(".");
        match (name.as_str(), D) {
            ("weight", 2 | 3) => {
                let path = self.path.join(".");
                let is_in = |group: Option<&ParamGroup>| {
                    group.is_some_and(|group| group.matches(&param.id, Some(&path)))
                };
                let (in_include, in_exclude) =
                    (is_in(self.selection.include), is_in(self.selection.exclude));
                if (is_linear || in_include) && self.seen.insert(param.id) {
                    let shape = param.lazy_shape();
                    self.candidates.push(Candidate {
                        layer: Found {
                            path: owner,
                            is_own,
                            weight: param.id,
                            bias: None,
                            dims: [shape[D - 2], shape[D - 1]],
                            experts: (D == 3).then(|| shape[0]),
                        },
                        is_linear,
                        is_sharded: (self.containers.iter())
                            .any(|container| SHARDED.contains(&&**container)),
                        in_include,
                        in_exclude,
                    });
                } else if D == 3 && !is_own {
                    self.convolutions.push(owner);
                }
            }
            ("weight", 4..) => self.convolutions.push(owner),
            ("bias", 1) if is_linear => {
                if let Some(Candidate { layer, .. }) = self.candidates.last_mut()
                    && layer.path == owner
                {
                    layer.bias = Some(param.id);
                }
            }
            _ => {}
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn_core as burn;

    use burn_core::tensor::Device;
    use burn_nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig};
    use burn_nn::{Linear, LinearConfig};

    use super::*;

    #[derive(Module, Debug)]
    struct Network {
        first: Conv2d,
        second: Conv1d,
        hidden: Linear,
        head: Linear,
    }

    #[test]
    fn convolutions_are_listed() {
        let device = Device::flex();
        let network = Network {
            first: Conv2dConfig::new([3, 16], [3, 3]).init(&device),
            second: Conv1dConfig::new(16, 16, 3).init(&device),
            hidden: LinearConfig::new(16, 16).init(&device),
            head: LinearConfig::new(16, 4).init(&device),
        };
        let selection = Selection {
            verb: "decorate",
            own: false,
            include: None,
            exclude: None,
        };
        let found = selection.of(&network).unwrap();
        let layers: Vec<_> = found.layers.iter().map(|layer| &*layer.path).collect();
        assert_eq!(layers, ["hidden"]);
        let left_alone = found.left_alone.iter().map(|(layer, _)| &*layer.path);
        assert_eq!(left_alone.collect::<Vec<_>>(), ["head"]);
        assert_eq!(found.convolutions, ["first", "second"]);
    }

    #[test]
    fn heads_and_routers_are_known_by_their_names() {
        let modules: HashSet<String> = ["moe.experts", "moe.experts.0.up", "ffn.up"]
            .map(String::from)
            .into();
        for path in [
            "head",
            "lm_head",
            "model.lm_head",
            "classification_head.linear",
            "classifier",
            "blocks.3.moe.router",
            "expert_router",
            "moe.gate",
        ] {
            assert!(is_head_or_router(path, &modules), "{path}");
        }
        for path in [
            "",
            "gate",
            "ffn.gate",
            "moe.experts.0.gate",
            "blocks.0.mha.output",
            "heads",
            "header",
            "up",
        ] {
            assert!(!is_head_or_router(path, &modules), "{path}");
        }
    }
}
