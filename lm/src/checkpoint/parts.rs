//! Containers of tensors of which each rank has a part, along the first axis.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::{Bytes, Shape};
use burn_nvfp4::parallel::Shards;
use burn_pack::{Reader, Tensor, Writer};

/// This rank's part of a container of whole tensors: of those that belong to parameters in `shards`,
/// part `rank` of their first axis.
///
/// # Errors
/// When it is no such container, or an axis has no equal parts.
pub(crate) fn slice(whole: Bytes, shards: &Shards) -> Result<Bytes> {
    let (rank, size) = (shards.group.rank(), shards.group.size());
    let reader = Reader::from_bytes(whole)?;
    let metadata = reader.metadata().clone();
    let tensors = reader.into_tensors()?.into_iter().map(|tensor| {
        let (name, dtype, shape, id, bytes) = tensor.into_parts()?;
        if !id.is_some_and(|id| shards.ids.contains(&id)) {
            return Ok(Tensor::new(name, dtype, shape, id, bytes));
        }
        let mut dims = shape.to_vec();
        ensure!(
            dims.first().is_some_and(|rows| rows.is_multiple_of(size)),
            "{name} is of shape {dims:?}, which {size} ranks do not share equally"
        );
        dims[0] /= size;
        let part = bytes.len() / size;
        let own = bytes[rank * part..(rank + 1) * part].to_vec();
        let own = Bytes::from_bytes_vec(own);
        Ok(Tensor::new(name, dtype, Shape::from(dims), id, own))
    });
    pack(tensors.collect::<Result<_>>()?, metadata)
}

/// The container of whole tensors of which `parts` are those of all ranks, in their order. `sharded`
/// are the parameters whose tensors are parts; all others are those of the first.
///
/// # Errors
/// When the containers do not fit each other.
pub(crate) fn join(parts: Vec<Bytes>, sharded: &BTreeSet<u64>) -> Result<Bytes> {
    let mut parts = parts.into_iter();
    let first = parts.next().context("a checkpoint has a part")?;
    let reader = Reader::from_bytes(first)?;
    let metadata = reader.metadata().clone();
    let mut whole = Vec::new();
    for tensor in reader.into_tensors()? {
        let (name, dtype, shape, id, bytes) = tensor.into_parts()?;
        whole.push((name, dtype, shape.to_vec(), id, bytes.to_vec()));
    }
    for part in parts {
        let tensors = Reader::from_bytes(part)?.into_tensors()?;
        ensure!(
            tensors.len() == whole.len(),
            "a part has {} tensors, but the first one has {}",
            tensors.len(),
            whole.len()
        );
        for (tensor, whole) in tensors.into_iter().zip(&mut whole) {
            let (name, dtype, shape, id, bytes) = tensor.into_parts()?;
            let alike = (&name, dtype, id) == (&whole.0, whole.1, whole.3);
            if !alike || shape.num_dims() != whole.2.len() {
                bail!(
                    "a part has tensor {name} where the first one has {}",
                    whole.0
                );
            }
            if id.is_some_and(|id| sharded.contains(&id)) {
                ensure!(
                    shape.to_vec()[1..] == whole.2[1..],
                    "{name} is of shape {shape} in one part and of {:?} in others",
                    whole.2
                );
                whole.2[0] += shape.to_vec()[0];
                whole.4.extend_from_slice(&bytes);
            }
        }
    }
    let tensors = whole.into_iter().map(|(name, dtype, dims, id, bytes)| {
        let bytes = Bytes::from_bytes_vec(bytes);
        Tensor::new(name, dtype, Shape::from(dims), id, bytes)
    });
    pack(tensors.collect(), metadata)
}

fn pack(
    tensors: Vec<Tensor>,
    metadata: std::collections::BTreeMap<String, String>,
) -> Result<Bytes> {
    let mut writer = Writer::new(tensors);
    for (key, value) in metadata {
        writer = writer.with_metadata(&key, &value);
    }
    writer.into_bytes().context("packing a checkpoint")
}
