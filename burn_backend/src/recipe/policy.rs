//! Selection of the high-precision layers by their position in the model.

use std::collections::BTreeSet;

use nvfp4_formats::Nvfp4Error;
use serde::{Deserialize, Serialize};

/// Layers that stay in high precision by their position in the model. Embeddings, norms, heads and
/// routers that are Burn's own layers always do: they are not NVFP4 layers, and `Decorator`
/// recognizes heads and routers by their names.
///
/// The first number in a layer's path is the index of its *block*: `blocks.3.attention.qkv` belongs
/// to block 3. Layers without a number belong to no block.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(tag = "keep", rename_all = "snake_case")]
pub enum LayerPolicy {
    /// No layer.
    #[default]
    None,
    /// Layers of the first and last blocks.
    FirstLast {
        /// Number of first blocks.
        first: usize,
        /// Number of last blocks.
        last: usize,
    },
    /// Layers of the last blocks.
    KeepLast {
        /// Fraction of the blocks, rounded up: more than 0, at most 1.
        fraction: f64,
    },
    /// High-precision layers of Nemotron 3: the last 15 % of the blocks, and in every block the
    /// attention projections (layers called `qkv`, `query`, `key`, `value`, or in a module called
    /// `attention`, `mha`, `self_attn` or `cross_attn`). Nemotron 3 also has Mamba output projections in MXFP8,
    /// which have no counterpart here.
    Nemotron3,
}

impl LayerPolicy {
    /// Returns an error if a number is out of range.
    pub(super) fn check(&self) -> Result<(), Nvfp4Error> {
        match self {
            Self::KeepLast { fraction } if !(*fraction > 0.0 && *fraction <= 1.0) => Err(
                Nvfp4Error::value("layers", self.to_string(), "more than 0, at most 1"),
            ),
            _ => Ok(()),
        }
    }

    /// Returns true for each layer in `paths` that stays in high precision.
    ///
    /// # Errors
    /// Returns an error if the policy selects blocks and no path has a number, or if it selects more
    /// first and last blocks than there are.
    pub(crate) fn matches(&self, paths: &[&str]) -> Result<Vec<bool>, Nvfp4Error> {
        let (first, last) = match *self {
            Self::None => return Ok(vec![false; paths.len()]),
            Self::FirstLast { first, last } => (first, Count::Exactly(last)),
            Self::KeepLast { fraction } => (0, Count::Share(fraction)),
            Self::Nemotron3 => (0, Count::Share(0.15)),
        };
        let blocks: BTreeSet<u64> = paths.iter().filter_map(|path| block(path)).collect();
        if blocks.is_empty() {
            return Err(Nvfp4Error::value(
                "layers",
                format!("{self} for the layers {}", paths.join(", ")),
                "a model whose layers are in numbered blocks, such as `blocks.0.linear`",
            ));
        }
        let last = match last {
            Count::Exactly(last) if first + last > blocks.len() => {
                return Err(Nvfp4Error::value(
                    "layers",
                    self.to_string(),
                    format!("together at most {}, the blocks of the model", blocks.len()),
                ));
            }
            Count::Exactly(last) => last,
            // Keeps the rounding error of a multiplication such as 0.15 · 20 from rounding 3 up to
            // 4.
            Count::Share(share) => (share * blocks.len() as f64 - 1e-9).ceil() as usize,
        };
        let kept: BTreeSet<u64> = blocks
            .iter()
            .take(first)
            .chain(blocks.iter().rev().take(last))
            .copied()
            .collect();
        Ok(paths
            .iter()
            .map(|path| {
                block(path).is_some_and(|block| kept.contains(&block))
                    || (*self == Self::Nemotron3 && is_attention(path))
            })
            .collect())
    }
}

impl std::fmt::Display for LayerPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => write!(f, "none"),
            Self::FirstLast { first, last } => write!(f, "first_last of {first} and {last}"),
            Self::KeepLast { fraction } => write!(f, "keep_last of {fraction}"),
            Self::Nemotron3 => write!(f, "nemotron3"),
        }
    }
}

enum Count {
    Exactly(usize),
    Share(f64),
}

/// Returns the first number in a path.
fn block(path: &str) -> Option<u64> {
    path.split('.').find_map(|part| part.parse().ok())
}

fn is_attention(path: &str) -> bool {
    let mut parts: Vec<&str> = path.split('.').collect();
    let name = parts.pop().unwrap_or_default();
    ["qkv", "query", "key", "value"].contains(&name)
        || parts
            .iter()
            .any(|part| ["attention", "mha", "self_attn", "cross_attn"].contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(policy: LayerPolicy, paths: &[&str]) -> Vec<usize> {
        let matches = policy.matches(paths).unwrap();
        (0..paths.len()).filter(|&i| matches[i]).collect()
    }

    #[test]
    fn more_blocks_than_there_are_is_an_error() {
        let paths = ["blocks.0.linear", "blocks.1.linear"];
        let all = LayerPolicy::FirstLast { first: 1, last: 1 };
        assert_eq!(kept(all, &paths), [0, 1]);
        let more = LayerPolicy::FirstLast { first: 1, last: 2 };
        let error = more.matches(&paths).unwrap_err().to_string();
        assert!(error.contains("first_last of 1 and 2"), "{error}");
        assert!(error.contains("at most 2"), "{error}");
    }

    #[test]
    fn blocks_are_counted_by_the_first_number() {
        let paths = [
            "stem",
            "blocks.10.mlp.0",
            "blocks.2.mlp.0",
            "blocks.2.mlp.1",
            "blocks.3.mlp.0",
            "blocks.4.mlp.0",
        ];
        let first_last = LayerPolicy::FirstLast { first: 1, last: 1 };
        assert_eq!(kept(first_last, &paths), [1, 2, 3]);
        assert_eq!(
            kept(LayerPolicy::KeepLast { fraction: 0.25 }, &paths),
            [1],
            "one of four"
        );
        assert_eq!(
            kept(LayerPolicy::KeepLast { fraction: 0.3 }, &paths),
            [1, 5],
            "rounded up"
        );
        assert_eq!(kept(LayerPolicy::None, &paths), [0usize; 0]);
    }

    #[test]
    fn nemotron_keeps_attention_and_the_last_blocks() {
        let mut paths: Vec<String> = Vec::new();
        for block in 0..20 {
            paths.push(format!("blocks.{block}.attention.out"));
            paths.push(format!("blocks.{block}.feed_forward.down"));
        }
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        let kept = kept(LayerPolicy::Nemotron3, &paths);
        let feed_forward: Vec<usize> = kept.iter().copied().filter(|i| i % 2 == 1).collect();
        assert_eq!(feed_forward, [35, 37, 39], "15 % of 20 is 3");
        assert_eq!(kept.len(), 20 + 3);
    }

    #[test]
    fn a_model_without_blocks_is_refused() {
        let error = LayerPolicy::Nemotron3.matches(&["up", "down"]).unwrap_err();
        assert!(error.to_string().contains("up, down"), "{error}");
        assert!(LayerPolicy::KeepLast { fraction: 0.0 }.check().is_err());
        assert!(
            LayerPolicy::KeepLast { fraction: f64::NAN }
                .check()
                .is_err()
        );
    }
}
