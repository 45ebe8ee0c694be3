//! Splits and joins containers of tensors that are sharded over ranks.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bytes, Shape, Tensor as BurnTensor};
use burn_nvfp4::Nvfp4State;
use burn_nvfp4::nn::tensor_parallel::ShardedParameter;
use burn_pack::{Reader, Tensor, Writer};
use serde::{Deserialize, Serialize};

/// Suffix of the path of a layer's weight.
const WEIGHT: &str = ".weight";

/// The part of a checkpoint's tensors that a rank holds.
#[derive(Debug, Clone)]
pub(crate) struct Partition {
    /// Levels of the split, outermost first; at most two of them split the same parameter.
    pub levels: Vec<Level>,
    /// Index of this rank.
    pub rank: usize,
    /// Parameter names in the single-rank model, by ID, if they may differ.
    pub names: BTreeMap<u64, String>,
}

impl Partition {
    /// Renames the parameters in `container` to their names in the single-rank model.
    ///
    /// # Errors
    /// Returns an error if `container` is not such a container.
    pub fn renamed(&self, container: Bytes) -> Result<Bytes> {
        if self.names.is_empty() {
            return Ok(container);
        }
        let reader = Reader::from_bytes(container)?;
        let metadata = reader.metadata().clone();
        let tensors = reader.into_tensors()?.into_iter().map(|tensor| {
            let (name, dtype, shape, id, bytes) = tensor.into_parts()?;
            let own = id.and_then(|id| self.names.get(&id)).cloned();
            Ok(Tensor::new(own.unwrap_or(name), dtype, shape, id, bytes))
        });
        pack(tensors.collect::<Result<_>>()?, metadata)
    }

    /// Maps the path of each layer of `model` to its path in the single-rank model, if different.
    pub fn layer_paths<M: Module>(&self, model: &M) -> BTreeMap<String, String> {
        // A layer is identified by its weight.
        let own = parameter_names(model);
        let layers = own.iter().filter_map(|(id, own)| {
            let whole = self.names.get(id)?;
            Some((
                own.strip_suffix(WEIGHT)?.into(),
                whole.strip_suffix(WEIGHT)?.into(),
            ))
        });
        layers.collect()
    }

    /// Renames the layers of `model` in `state` to their paths in the single-rank model.
    pub fn renamed_state<M: Module>(&self, state: Nvfp4State, model: &M) -> Nvfp4State {
        if self.names.is_empty() {
            return state;
        }
        let paths = self.layer_paths(model);
        let renamed = |path: String| paths.get(&path).cloned().unwrap_or(path);
        let (layers, modes) = (state.layers.into_iter(), state.modes.into_iter());
        Nvfp4State {
            layers: layers.map(|(path, rng)| (renamed(path), rng)).collect(),
            modes: modes.map(|(path, mode)| (renamed(path), mode)).collect(),
        }
    }
}

/// Returns the path of each parameter of `model`, by ID.
pub(crate) fn parameter_names<M: Module>(model: &M) -> BTreeMap<u64, String> {
    let mut names = Names::default();
    model.visit(&mut names);
    names.found
}

#[derive(Default)]
struct Names {
    path: Vec<String>,
    found: BTreeMap<u64, String>,
}

impl ModuleVisitor for Names {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<BurnTensor<D>>) {
        self.found.insert(param.id.val(), self.path.join("."));
    }
}

/// Describes how some tensors are split over ranks. Ranks may split their shards again. Rank `r`
/// has shard `r / stride % ranks`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Level {
    /// Number of shards.
    pub ranks: usize,
    /// Number of adjacent ranks that have the same shard.
    pub stride: usize,
    /// True if the model is split as well, and not only the optimizer state.
    pub model: bool,
    /// IDs of the split parameters.
    pub sharded: BTreeSet<u64>,
    /// Split of parameters that are not split along the first axis as one segment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parameters: BTreeMap<u64, ShardedParameter>,
}

/// Returns the number of ranks, counted from the first, that together hold all shards of `levels`.
/// Returns none if `levels` are invalid.
pub(crate) fn ranks_of<'a>(levels: impl IntoIterator<Item = &'a Level>) -> Option<usize> {
    levels.into_iter().try_fold(1, |most: usize, level| {
        let ranks = level.ranks.checked_mul(level.stride)?;
        (ranks > 0).then_some(most.max(ranks))
    })
}

/// Split of one tensor.
struct Cut {
    /// Shape of the whole tensor.
    shape: Vec<usize>,
    /// Shape of a shard.
    part: Vec<usize>,
    /// Number of rows of the tensor.
    rows: usize,
    /// Lengths, in elements, of the consecutive runs of each row. Every run is split evenly over
    /// the ranks.
    runs: Vec<usize>,
}

impl Level {
    /// Returns the shard index of `rank`.
    fn part(&self, rank: usize) -> usize {
        rank / self.stride % self.ranks
    }

    /// Returns true if the parameter `id` is split.
    fn cuts(&self, id: Option<u64>) -> bool {
        id.is_some_and(|id| self.sharded.contains(&id))
    }

    /// Returns the split of the tensor `name` of parameter `id`, if it is split. `dims` is the
    /// shape of a shard if `is_part`, else of the whole tensor. A tensor may be flat.
    fn of(
        &self,
        name: &str,
        id: Option<u64>,
        dims: &[usize],
        is_part: bool,
    ) -> Result<Option<Cut>> {
        let Some(id) = id.filter(|id| self.cuts(Some(*id))) else {
            return Ok(None);
        };
        let ranks = self.ranks;
        let times = if is_part { ranks } else { 1 };
        let of_dims = |axis: usize| {
            let mut shape = dims.to_vec();
            if let Some(len) = shape.get_mut(axis) {
                *len *= times;
            }
            shape
        };
        let first = |shape: &[usize]| ShardedParameter {
            shape: shape.to_vec(),
            axis: 0,
            segments: shape[..1.min(shape.len())].to_vec(),
        };
        let found = self.parameters.get(&id).cloned();
        let found = found.unwrap_or_else(|| first(&of_dims(0)));
        let ShardedParameter {
            shape,
            axis,
            segments,
        } = found;
        let elements = product(&shape).unwrap_or_default();
        // Flat tensors hold the elements of the parameter in order.
        let (whole, cut_axis) = match dims.len() == 1 && shape.len() != 1 {
            true => (vec![elements], 0),
            false => (shape.clone(), axis),
        };
        ensure!(
            whole == of_dims(cut_axis),
            "{name} is of shape {dims:?}, but the parameter is of shape {shape:?} on one rank"
        );
        let sum = segments
            .iter()
            .try_fold(0usize, |sum, len| sum.checked_add(*len));
        ensure!(
            sum.is_some() && sum.as_ref() == shape.get(axis),
            "{name} has segments {segments:?} of axis {axis}, but the parameter is of shape \
             {shape:?} on one rank"
        );
        ensure!(
            segments.iter().all(|len| len.is_multiple_of(ranks)),
            "{name} is of shape {dims:?}, which {ranks} ranks do not share equally"
        );
        let inner: usize = shape[axis + 1..].iter().product();
        let mut part = whole.clone();
        part[cut_axis] /= ranks;
        Ok(Some(Cut {
            shape: whole,
            part,
            rows: shape[..axis].iter().product(),
            runs: segments.iter().map(|len| len * inner).collect(),
        }))
    }
}

/// Returns none on overflow.
fn product(dims: &[usize]) -> Option<usize> {
    dims.iter()
        .try_fold(1usize, |product, len| product.checked_mul(*len))
}

impl Cut {
    /// Returns the bytes per element of a tensor of `bytes`.
    fn element(&self, bytes: usize, shape: &[usize]) -> usize {
        bytes / shape.iter().product::<usize>().max(1)
    }

    /// Extracts the shard of `rank` of `ranks`.
    fn slice(&self, whole: &[u8], rank: usize, ranks: usize) -> Vec<u8> {
        let element = self.element(whole.len(), &self.shape);
        let mut own = Vec::with_capacity(whole.len() / ranks);
        let mut at = 0;
        for _ in 0..self.rows {
            for run in &self.runs {
                let part = run / ranks * element;
                own.extend_from_slice(&whole[at + rank * part..][..part]);
                at += run * element;
            }
        }
        own
    }

    /// Joins the shards of all ranks.
    fn join(&self, parts: &[Cow<'_, [u8]>]) -> Vec<u8> {
        let ranks = parts.len();
        let element = self.element(parts[0].len(), &self.part);
        let mut whole = Vec::with_capacity(parts[0].len() * ranks);
        let mut at = 0;
        for _ in 0..self.rows {
            for run in &self.runs {
                let part = run / ranks * element;
                for bytes in parts {
                    whole.extend_from_slice(&bytes[at..][..part]);
                }
                at += part;
            }
        }
        whole
    }
}

/// Extracts this rank's shards from a container of whole tensors. Tensors that are not split stay
/// whole.
///
/// # Errors
/// Returns an error if `whole` is not such a container, or a tensor cannot be split evenly.
pub(crate) fn slice(whole: Bytes, partition: &Partition) -> Result<Bytes> {
    let reader = Reader::from_bytes(whole)?;
    let metadata = reader.metadata().clone();
    let tensors = reader.into_tensors()?.into_iter().map(|tensor| {
        let (name, dtype, mut shape, id, mut bytes) = tensor.into_parts()?;
        for level in &partition.levels {
            if let Some(cut) = level.of(&name, id, &shape.to_vec(), false)? {
                let own = cut.slice(&bytes, level.part(partition.rank), level.ranks);
                bytes = Bytes::from_bytes_vec(own);
                shape = Shape::from(cut.part);
            }
        }
        Ok(Tensor::new(name, dtype, shape, id, bytes))
    });
    pack(tensors.collect::<Result<_>>()?, metadata)
}

/// Joins `parts`, the containers of the ranks of `levels` in order, into a container of whole
/// tensors. Tensors that are not split are taken from the first rank.
///
/// # Errors
/// Returns an error if the containers do not match each other.
pub(crate) fn join(parts: Vec<Bytes>, levels: &[&Level]) -> Result<Bytes> {
    let ranks = ranks_of(levels.iter().copied());
    let ranks = ranks.context("the levels of layout.json are none that ranks could have")?;
    ensure!(
        parts.len() == ranks,
        "a checkpoint of {ranks} ranks has {} parts",
        parts.len()
    );
    let mut metadata = BTreeMap::new();
    let mut tensors = Vec::with_capacity(parts.len());
    for (rank, part) in parts.into_iter().enumerate() {
        let reader = Reader::from_bytes(part)?;
        if rank == 0 {
            metadata = reader.metadata().clone();
        }
        let own = reader.into_tensors()?.into_iter().map(Tensor::into_parts);
        tensors.push(own.collect::<Result<Vec<_>, _>>()?);
    }
    let count = tensors[0].len();
    for part in &mut tensors {
        ensure!(
            part.len() == count,
            "a part has {} tensors, but the first one has {count}",
            part.len()
        );
        part.reverse();
    }
    // Tensors are joined one at a time, so that none is held twice.
    let mut whole = Vec::with_capacity(count);
    for _ in 0..count {
        let own = tensors.iter_mut().map(|part| part.pop());
        let own = own.collect::<Option<Vec<_>>>();
        let own = own.context("as many as the first one has")?;
        let (name, dtype, _, id, _) = &own[0];
        for (other, type_of_other, _, id_of_other, _) in &own {
            if (other, type_of_other, id_of_other) != (name, dtype, id) {
                bail!("a part has tensor {other} where the first one has {name}");
            }
        }
        let parts = own.iter().map(|(_, _, shape, _, bytes)| Part {
            dims: shape.to_vec(),
            bytes: Cow::Borrowed(&bytes[..]),
        });
        let parts: Vec<Part<'_>> = parts.collect();
        let cuts = levels.iter().copied();
        let cuts: Vec<&Level> = cuts.filter(|level| level.cuts(*id)).collect();
        let Part { dims, bytes } = joined((name, *id), &parts, &cuts, 0)?;
        let bytes = Bytes::from_bytes_vec(bytes.into_owned());
        whole.push(Tensor::new(
            name.clone(),
            *dtype,
            Shape::from(dims),
            *id,
            bytes,
        ));
    }
    pack(whole, metadata)
}

/// A shard of a tensor, or the whole tensor.
#[derive(Clone)]
struct Part<'a> {
    dims: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

/// Joins the tensor `name` of parameter `id` from the shards in `parts` that `levels` (outermost
/// first) assign to ranks from `rank` on.
fn joined<'a>(
    (name, id): (&str, Option<u64>),
    parts: &[Part<'a>],
    levels: &[&Level],
    rank: usize,
) -> Result<Part<'a>> {
    let Some((level, inner)) = levels.split_first() else {
        let part = parts.get(rank).cloned();
        return part.with_context(|| format!("{name} is of more ranks than there are"));
    };
    let own = |part: usize| joined((name, id), parts, inner, rank + part * level.stride);
    let own = (0..level.ranks).map(own).collect::<Result<Vec<_>>>()?;
    let dims = own[0].dims.clone();
    for part in &own {
        ensure!(
            part.dims == dims,
            "{name} is of shape {dims:?} in one part and of {:?} in another",
            part.dims
        );
    }
    let cut = level.of(name, id, &dims, true)?;
    let cut = cut.context("only levels that cut the parameter are given")?;
    let bytes: Vec<_> = own.into_iter().map(|part| part.bytes).collect();
    Ok(Part {
        bytes: Cow::Owned(cut.join(&bytes)),
        dims: cut.shape,
    })
}

fn pack(tensors: Vec<Tensor>, metadata: BTreeMap<String, String>) -> Result<Bytes> {
    let mut writer = Writer::new(tensors);
    for (key, value) in metadata {
        writer = writer.with_metadata(&key, &value);
    }
    writer.into_bytes().context("packing a checkpoint")
}

#[cfg(test)]
mod tests;
