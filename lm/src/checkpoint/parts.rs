//! Containers of tensors of which each rank has a part.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail, ensure};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bytes, Shape, Tensor as BurnTensor};
use burn_nvfp4::Nvfp4State;
use burn_nvfp4::nn::tensor_parallel::ShardedParameter;
use burn_nvfp4::parallel::Shards;
use burn_pack::{Reader, Tensor, Writer};

use crate::model::ModelPartition;

/// The end of the path of a layer's weight.
const WEIGHT: &str = ".weight";

/// What of a checkpoint is a part, and which of the ranks writes it.
#[derive(Debug, Clone)]
pub(crate) struct Partition {
    /// The parameters, and the ranks with the other parts.
    pub of: ModelPartition,
    /// Whether ranks have parts of the model, too, and not only of the optimizer's state.
    pub model: bool,
    /// Names of the parameters in the model of one rank, by id, where they may differ.
    pub names: BTreeMap<u64, String>,
}

impl Partition {
    /// Of parameters that are parts along their first axis; no other rank has the same parts.
    pub fn of_shards(shards: Shards, model: bool) -> Self {
        let of = ModelPartition {
            shards,
            parameters: BTreeMap::new(),
            replica: 0,
        };
        Self {
            of,
            model,
            names: BTreeMap::new(),
        }
    }

    /// How the parameters are cut.
    pub fn cuts(&self) -> Cuts {
        Cuts {
            ranks: self.of.shards.group.size(),
            sharded: self.of.shards.ids.clone(),
            parameters: self.of.parameters.clone(),
        }
    }

    /// `container`, of parameters, with the names that they have in the model of one rank.
    ///
    /// # Errors
    /// When it is no such container.
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

    /// `state`, of the layers of `model`, with the paths that they have in the model of one rank.
    pub fn renamed_state<M: Module>(&self, state: Nvfp4State, model: &M) -> Nvfp4State {
        if self.names.is_empty() {
            return state;
        }
        // A layer is known by its weight.
        let own = parameter_names(model);
        let layers = own.iter().filter_map(|(id, own)| {
            let whole = self.names.get(id)?;
            Some((own.strip_suffix(WEIGHT)?, whole.strip_suffix(WEIGHT)?))
        });
        let paths: BTreeMap<&str, &str> = layers.collect();
        let renamed = |path: String| match paths.get(&path[..]) {
            Some(whole) => (*whole).into(),
            None => path,
        };
        let (layers, modes) = (state.layers.into_iter(), state.modes.into_iter());
        Nvfp4State {
            layers: layers.map(|(path, rng)| (renamed(path), rng)).collect(),
            modes: modes.map(|(path, mode)| (renamed(path), mode)).collect(),
        }
    }
}

/// The path of each parameter of `model`, by its id.
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

/// How tensors are cut into the parts of ranks.
#[derive(Debug, Clone)]
pub(crate) struct Cuts {
    /// Number of ranks.
    pub ranks: usize,
    /// Parameters whose tensors are parts.
    pub sharded: BTreeSet<u64>,
    /// The parts of those that are not cut along the first axis of each of their tensors.
    pub parameters: BTreeMap<u64, ShardedParameter>,
}

/// A tensor that is cut.
struct Cut {
    /// Of the whole.
    shape: Vec<usize>,
    /// Of a part.
    part: Vec<usize>,
    /// The tensor is so many rows.
    rows: usize,
    /// Each row has these runs of elements, one behind another, of each of which each rank has an
    /// equal part.
    runs: Vec<usize>,
}

impl Cuts {
    /// The cut of the tensor `name` of the parameter `id`, if that is cut; its shape is that of a part
    /// where `is_part`, else of the whole. A tensor may be flat.
    fn of(
        &self,
        name: &str,
        id: Option<u64>,
        dims: &[usize],
        is_part: bool,
    ) -> Result<Option<Cut>> {
        let Some(id) = id.filter(|id| self.sharded.contains(id)) else {
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
        // Flat tensors have the elements of the parameter in its order.
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

/// None where it has no number.
fn product(dims: &[usize]) -> Option<usize> {
    dims.iter()
        .try_fold(1usize, |product, len| product.checked_mul(*len))
}

impl Cut {
    /// Bytes of an element, of a tensor of `bytes`.
    fn element(&self, bytes: usize, shape: &[usize]) -> usize {
        bytes / shape.iter().product::<usize>().max(1)
    }

    /// The part of `rank` of `ranks`.
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

    /// The whole of the parts of all ranks.
    fn join(&self, parts: &[Bytes]) -> Vec<u8> {
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

/// This rank's part of a container of whole tensors, of those that are cut.
///
/// # Errors
/// When it is no such container, or a tensor has no equal parts.
pub(crate) fn slice(whole: Bytes, partition: &Partition) -> Result<Bytes> {
    let (group, cuts) = (&partition.of.shards.group, partition.cuts());
    let reader = Reader::from_bytes(whole)?;
    let metadata = reader.metadata().clone();
    let tensors = reader.into_tensors()?.into_iter().map(|tensor| {
        let (name, dtype, shape, id, bytes) = tensor.into_parts()?;
        Ok(match cuts.of(&name, id, &shape.to_vec(), false)? {
            None => Tensor::new(name, dtype, shape, id, bytes),
            Some(cut) => {
                let own = cut.slice(&bytes, group.rank(), group.size());
                let own = Bytes::from_bytes_vec(own);
                Tensor::new(name, dtype, Shape::from(cut.part), id, own)
            }
        })
    });
    pack(tensors.collect::<Result<_>>()?, metadata)
}

/// The container of whole tensors of which `parts` are those of all ranks, in their order. Tensors
/// that are not cut are those of the first.
///
/// # Errors
/// When the containers do not fit each other.
pub(crate) fn join(parts: Vec<Bytes>, cuts: &Cuts) -> Result<Bytes> {
    ensure!(
        parts.len() == cuts.ranks && !parts.is_empty(),
        "a checkpoint of {} ranks has {} parts",
        cuts.ranks,
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
    let mut others = tensors.split_off(1);
    let first = tensors.remove(0);
    for part in &others {
        ensure!(
            part.len() == first.len(),
            "a part has {} tensors, but the first one has {}",
            part.len(),
            first.len()
        );
    }
    // One after another, so that no tensor is held twice.
    others.iter_mut().for_each(|part| part.reverse());
    let mut whole = Vec::with_capacity(first.len());
    for (name, dtype, shape, id, bytes) in first {
        let mut all = vec![bytes];
        for part in &mut others {
            let (other, type_of_other, dims, id_of_other, bytes) =
                part.pop().context("as many as the first one has")?;
            if (&other, type_of_other, id_of_other) != (&name, dtype, id) {
                bail!("a part has tensor {other} where the first one has {name}");
            }
            ensure!(
                dims == shape || !id.is_some_and(|id| cuts.sharded.contains(&id)),
                "{name} is of shape {dims} in one part and of {shape} in another"
            );
            all.push(bytes);
        }
        whole.push(match cuts.of(&name, id, &shape.to_vec(), true)? {
            None => Tensor::new(name, dtype, shape, id, all.swap_remove(0)),
            Some(cut) => {
                let bytes = Bytes::from_bytes_vec(cut.join(&all));
                Tensor::new(name, dtype, Shape::from(cut.shape), id, bytes)
            }
        });
    }
    pack(whole, metadata)
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
