//! Stored format of each linear layer, which both dialects describe in groups with targets.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::{Result, bail};

use super::exclude::{Exclusion, LINEAR};
use super::{Dialect, Scheme};

/// Stored format of a quantized linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LayerFormat {
    /// NVFP4.
    Nvfp4(Scheme),
    /// FP8 (E4M3).
    Fp8(Fp8Format),
}

/// Format of a linear layer in FP8: E4M3 elements, which scales multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fp8Format {
    /// Scales of the weight.
    pub scales: Fp8Scales,
    /// Quantization of the inputs.
    pub inputs: Fp8Inputs,
}

/// Scales of a weight in FP8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fp8Scales {
    /// One scale.
    Tensor,
    /// A scale per row.
    Channel,
    /// A scale per block of rows and columns.
    Block([usize; 2]),
}

/// Quantization of the inputs of a layer in FP8, to E4M3.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fp8Inputs {
    /// Not quantized.
    HighPrecision,
    /// One scale, from the file.
    Static,
    /// A scale per token, at run time.
    PerToken,
    /// A scale per token and this number of features, at run time.
    Groups(usize),
}

impl Fp8Format {
    /// Returns ModelOpt's name of the scales of the weight.
    pub const fn modelopt_algo(self) -> &'static str {
        match self.scales {
            Fp8Scales::Tensor => "FP8",
            Fp8Scales::Channel => "FP8_PER_CHANNEL_PER_TOKEN",
            // ModelOpt's writer has no upper-case name for it.
            Fp8Scales::Block(_) => "fp8_pb_wo",
        }
    }

    /// Returns the format of ModelOpt's algorithm `name`, if it is one in FP8.
    pub fn of_modelopt(name: &str) -> Option<Self> {
        let (scales, inputs) = match name {
            "FP8" => (Fp8Scales::Tensor, Fp8Inputs::Static),
            "FP8_PER_CHANNEL_PER_TOKEN" => (Fp8Scales::Channel, Fp8Inputs::PerToken),
            "fp8_pb_wo" | "FP8_PB_WO" => (Fp8Scales::Block([128; 2]), Fp8Inputs::HighPrecision),
            _ => return None,
        };
        Some(Self { scales, inputs })
    }

    /// Returns the rows and columns that share a scale in a weight of `shape`.
    pub const fn block(self, shape: [usize; 2]) -> [usize; 2] {
        match self.scales {
            Fp8Scales::Tensor => shape,
            Fp8Scales::Channel => [1, shape[1]],
            Fp8Scales::Block(block) => block,
        }
    }

    /// Returns the shapes that the scales of a weight `[n, k]` have in `dialect`: the shape that is
    /// written, then others that are read.
    pub fn scale_shapes(self, dialect: Dialect, [n, k]: [usize; 2]) -> Vec<Vec<usize>> {
        let mut shapes = match self.scales {
            Fp8Scales::Tensor => vec![vec![], vec![1]],
            Fp8Scales::Channel => vec![vec![n], vec![n, 1]],
            Fp8Scales::Block([rows, columns]) => {
                let [rows, columns] = [n.div_ceil(rows), k.div_ceil(columns)];
                vec![vec![rows, 1, columns, 1], vec![rows, columns]]
            }
        };
        if dialect == Dialect::CompressedTensors {
            shapes.reverse();
        }
        shapes
    }

    /// Returns true if the inputs of the layer are quantized.
    pub fn quantizes_inputs(self) -> bool {
        self.inputs != Fp8Inputs::HighPrecision
    }
}

impl LayerFormat {
    /// Returns true if `dialect` can describe the format.
    pub fn is_in(self, dialect: Dialect) -> bool {
        match (dialect, self) {
            (Dialect::ModelOpt, Self::Fp8(fp8)) => {
                Fp8Format::of_modelopt(fp8.modelopt_algo()) == Some(fp8)
            }
            _ => true,
        }
    }
}

impl fmt::Display for LayerFormat {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Nvfp4(scheme) => write!(f, "nvfp4 {}", scheme.name()),
            Self::Fp8(fp8) => fp8.fmt(f),
        }
    }
}

impl fmt::Display for Fp8Format {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.scales {
            Fp8Scales::Tensor => write!(f, "fp8 per tensor"),
            Fp8Scales::Channel => write!(f, "fp8 per channel"),
            Fp8Scales::Block([rows, columns]) => write!(f, "fp8 per block of {rows} x {columns}"),
        }?;
        match self.inputs {
            Fp8Inputs::HighPrecision => Ok(()),
            Fp8Inputs::Static => write!(f, ", inputs static"),
            Fp8Inputs::PerToken => write!(f, ", inputs per token"),
            Fp8Inputs::Groups(size) => write!(f, ", inputs in groups of {size}"),
        }
    }
}

/// Layers of one format in a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Format of the layers.
    pub format: LayerFormat,
    /// Modules that have this format unless excluded, as written: the class `Linear`, names, and
    /// patterns of the dialect.
    pub targets: Vec<String>,
}

impl Group {
    /// Returns the group of all linear layers.
    pub fn linear(format: LayerFormat) -> Self {
        let targets = vec![LINEAR.into()];
        Self { format, targets }
    }
}

/// Targets of all groups of a configuration, with the matching rules of its dialect.
#[derive(Debug, Clone)]
pub struct Targets {
    /// Format of all linear layers that no name or pattern matches.
    linear: Option<LayerFormat>,
    names: BTreeMap<String, LayerFormat>,
    patterns: Vec<(Exclusion, LayerFormat)>,
    /// True if a name stands for all layers inside of a module.
    has_parents: bool,
}

impl Targets {
    /// Parses the targets of `groups`. compressed-tensors: exact names, or `re:` and a regular
    /// expression that is matched from the start. ModelOpt: names of layers, or of modules that
    /// contain them.
    ///
    /// # Errors
    /// Returns an error for an invalid regular expression, and if a target is in two groups.
    pub fn new(dialect: Dialect, groups: &[Group]) -> Result<Self> {
        let mut targets = Self {
            linear: None,
            names: BTreeMap::new(),
            patterns: Vec::new(),
            has_parents: dialect == Dialect::ModelOpt,
        };
        for group in groups {
            for text in &group.targets {
                let is_pattern = dialect == Dialect::CompressedTensors && text.starts_with("re:");
                let other = if text == LINEAR {
                    targets.linear.replace(group.format)
                } else if is_pattern {
                    let pattern = Exclusion::new(dialect, text)?;
                    targets.patterns.push((pattern, group.format));
                    None
                } else {
                    targets.names.insert(text.clone(), group.format)
                };
                if let Some(other) = other.filter(|other| *other != group.format) {
                    bail!("{text} is in two groups: {other}, and {}", group.format);
                }
            }
        }
        Ok(targets)
    }

    /// Returns the format of the linear layer `module`; `None` if no target matches it. A name or
    /// pattern has precedence over the class `Linear`.
    ///
    /// # Errors
    /// Returns an error if names or patterns of groups with different formats match.
    pub fn format(&self, module: &str) -> Result<Option<LayerFormat>> {
        let mut matching = self.matching(module);
        let Some((first, format)) = matching.next() else {
            return Ok(self.linear);
        };
        if let Some((second, other)) = matching.find(|(_, other)| *other != format) {
            bail!(
                "is in two groups: the target {first:?} makes it {format}, and {second:?} makes it \
                 {other}"
            );
        }
        Ok(Some(format))
    }

    /// Returns the names and patterns that match `module`, with their formats.
    fn matching<'a>(
        &'a self,
        module: &'a str,
    ) -> impl Iterator<Item = (&'a str, LayerFormat)> + 'a {
        let parents = module.match_indices('.').map(|(at, _)| &module[..at]);
        let parents = parents.filter(move |_| self.has_parents);
        let names = parents.chain([module]).filter_map(move |name| {
            let (name, format) = self.names.get_key_value(name)?;
            Some((name.as_str(), *format))
        });
        let patterns = self
            .patterns
            .iter()
            .filter(move |(it, _)| it.matches(module));
        names.chain(patterns.map(|(it, format)| (it.text(), *format)))
    }

    /// Returns the names and patterns that match none of `modules`.
    pub fn unmatched<'a>(&'a self, modules: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
        let names = self.names.keys().map(String::as_str);
        let patterns = self.patterns.iter().map(|(it, _)| it.text());
        let mut all: BTreeSet<&str> = names.chain(patterns).collect();
        for module in modules {
            for (target, _) in self.matching(module) {
                all.remove(target);
            }
        }
        all.into_iter().collect()
    }
}
