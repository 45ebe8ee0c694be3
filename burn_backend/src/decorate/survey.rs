//! Search for the linear layers of a model, for the heads and routers among them, and for
//! convolutions.

use std::collections::HashSet;

use burn_core::module::{ModuleVisitor, Param, ParamGroup, ParamId};
use burn_core::tensor::Tensor;

/// Names of modules whose linear layers compute a model's output; names that end in `_head` count
/// too.
const HEADS: [&str; 5] = ["head", "classifier", "logits", "unembed", "unembedding"];
/// Sibling module that makes a module called `gate` a router; without it `gate` is the gate of a
/// SwiGLU.
const EXPERTS: &str = "experts";

/// Linear layer to decorate.
pub(super) struct Found {
    pub path: String,
    pub weight: ParamId,
    pub bias: Option<ParamId>,
    /// Shape of the weight, or of each matrix in a stack.
    pub dims: [usize; 2],
    /// Number of matrices in a stacked weight.
    pub experts: Option<usize>,
}

/// Visitor that finds the linear layers.
#[derive(Default)]
pub(super) struct Survey<'a> {
    include: Option<&'a ParamGroup>,
    exclude: Option<&'a ParamGroup>,
    path: Vec<String>,
    containers: Vec<String>,
    candidates: Vec<Candidate>,
    reparameterized: Option<String>,
    seen: HashSet<ParamId>,
    /// Paths of all modules.
    modules: HashSet<String>,
}

/// Weight of a linear layer, a stack or a convolution.
struct Candidate {
    layer: Found,
    is_linear: bool,
    in_include: bool,
    in_exclude: bool,
}

/// Result of a survey.
pub(super) struct Surveyed {
    pub layers: Vec<Found>,
    /// Paths of the layers that are not to be decorated.
    pub left_alone: Vec<String>,
    /// `included`: true if `include` adds a layer. `excluded`: true if `exclude` removes one.
    pub included: bool,
    pub excluded: bool,
    /// First parameter that has a reparameterization.
    pub reparameterized: Option<String>,
}

impl<'a> Survey<'a> {
    /// Creates a survey for the groups of a decorator.
    pub fn new(include: Option<&'a ParamGroup>, exclude: Option<&'a ParamGroup>) -> Self {
        Self {
            include,
            exclude,
            ..Self::default()
        }
    }

    /// Decides for each layer whether it is decorated, once the whole model is known.
    pub fn finish(self) -> Surveyed {
        let Self {
            candidates,
            reparameterized,
            modules,
            ..
        } = self;
        let mut found = Surveyed {
            layers: Vec::new(),
            left_alone: Vec::new(),
            included: false,
            excluded: false,
            reparameterized,
        };
        for candidate in candidates {
            let Candidate {
                layer,
                is_linear,
                in_include,
                in_exclude,
            } = candidate;
            let by_default = is_linear && !is_head_or_router(&layer.path, &modules);
            let included = in_include && !by_default;
            found.included |= included;
            found.excluded |= (is_linear || included) && in_exclude;
            if (by_default || included) && !in_exclude {
                found.layers.push(layer);
            } else {
                found.left_alone.push(layer.path);
            }
        }
        found
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
        let is_linear = self
            .containers
            .last()
            .is_some_and(|container| container == "Struct:Linear");
        let owner = owner.join(".");
        match (name.as_str(), D) {
            // The weight of a convolution over one axis has rank 3, as that of a stack.
            ("weight", 2..) => {
                let path = self.path.join(".");
                let is_in = |group: Option<&ParamGroup>| {
                    group.is_some_and(|group| group.matches(&param.id, Some(&path)))
                };
                let in_include = D <= 3 && is_in(self.include);
                let in_exclude = is_in(self.exclude);
                if (is_linear || D > 2 || in_include) && self.seen.insert(param.id) {
                    let shape = param.lazy_shape();
                    self.candidates.push(Candidate {
                        layer: Found {
                            path: owner,
                            weight: param.id,
                            bias: None,
                            dims: [shape[D - 2], shape[D - 1]],
                            experts: (D == 3).then(|| shape[0]),
                        },
                        is_linear,
                        in_include,
                        in_exclude,
                    });
                }
            }
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

    use burn_core::module::Module;
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
    fn convolutions_are_left_alone_and_listed() {
        let device = Device::flex();
        let network = Network {
            first: Conv2dConfig::new([3, 16], [3, 3]).init(&device),
            second: Conv1dConfig::new(16, 16, 3).init(&device),
            hidden: LinearConfig::new(16, 16).init(&device),
            head: LinearConfig::new(16, 4).init(&device),
        };
        let mut survey = Survey::new(None, None);
        network.visit(&mut survey);
        let found = survey.finish();
        let layers: Vec<_> = found.layers.iter().map(|layer| &layer.path).collect();
        assert_eq!(layers, ["hidden"]);
        assert_eq!(found.left_alone, ["first", "second", "head"]);
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
