//! Containers of tensors of which each rank has a part, along the first axis.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::{Bytes, Shape};
use burn_nvfp4::parallel::Shards;
use burn_pack::{Reader, Tensor, Writer};

/// This rank's part of a container of whole tensors: of those that belong to parameters in
/// `shards`, part `rank` of their first axis.
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

/// The container of whole tensors of which `parts` are those of all ranks, in their order.
/// `sharded` are the parameters whose tensors are parts; all others are those of the first.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use burn::tensor::DType;
    use burn_nvfp4::parallel::ProcessGroup;

    use super::*;

    fn tensor(name: &str, dims: &[usize], id: Option<u64>, first: f32) -> Tensor {
        let count: usize = dims.iter().product();
        let values = (0..count).flat_map(|i| (first + i as f32).to_le_bytes());
        let bytes = Bytes::from_bytes_vec(values.collect());
        let shape = Shape::from(dims.to_vec());
        Tensor::new(name.into(), DType::F32, shape, id, bytes)
    }

    /// Name, shape, parameter and bytes.
    type Content = (String, Vec<usize>, Option<u64>, Vec<u8>);

    /// What a container has, in its order.
    fn content(container: &Bytes) -> Vec<Content> {
        let container = Bytes::from_bytes_vec(container.to_vec());
        let tensors = Reader::from_bytes(container).unwrap().into_tensors();
        let parts = tensors.unwrap().into_iter().map(|tensor| {
            let (name, _, shape, id, bytes) = tensor.into_parts().unwrap();
            (name, shape.to_vec(), id, bytes.to_vec())
        });
        parts.collect()
    }

    fn whole() -> Bytes {
        let tensors = vec![
            tensor("a.weight", &[4, 3], Some(1), 10.0),
            tensor("b.weight", &[3], Some(2), 50.0),
            tensor("z.first", &[8], Some(1), 70.0),
        ];
        let writer = Writer::new(tensors).with_metadata("time", "7");
        writer.into_bytes().unwrap()
    }

    fn parts(size: usize) -> (Vec<Bytes>, BTreeSet<u64>) {
        let groups = ProcessGroup::loopback(size, Duration::ZERO);
        let ids = BTreeSet::from([1]);
        let parts = groups.into_iter().map(|group| {
            let ids = ids.clone();
            slice(whole(), &Shards { group, ids }).unwrap()
        });
        (parts.collect(), ids)
    }

    #[test]
    fn parts_make_the_whole() {
        for size in [1, 2, 4] {
            let (parts, ids) = parts(size);
            let last = content(&parts[size - 1]);
            assert_eq!(last[0].1, [4 / size, 3]);
            let row = 10.0f32 + (3 * (4 - 4 / size)) as f32;
            assert_eq!(last[0].3[..4], row.to_le_bytes());
            assert_eq!(last[1], content(&whole())[1]);
            assert_eq!(last[2].1, [8 / size]);
            let joined = join(parts, &ids).unwrap();
            assert_eq!(content(&joined), content(&whole()));
            let reader = Reader::from_bytes(joined).unwrap();
            assert_eq!(reader.metadata().get("time").unwrap(), "7");
        }
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let group = ProcessGroup::loopback(3, Duration::ZERO).remove(0);
        let ids = BTreeSet::from([1]);
        let error = slice(whole(), &Shards { group, ids })
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("a.weight") && error.contains("3 ranks"),
            "{error}"
        );

        let (mut parts, ids) = parts(2);
        let other = vec![
            tensor("a.weight", &[2, 3], Some(1), 0.0),
            tensor("c.weight", &[3], Some(2), 0.0),
            tensor("z.first", &[4], Some(1), 0.0),
        ];
        parts[1] = Writer::new(other).into_bytes().unwrap();
        let error = join(parts, &ids).unwrap_err().to_string();
        assert!(
            error.contains("c.weight") && error.contains("b.weight"),
            "{error}"
        );
        let short = vec![tensor("a.weight", &[2, 3], Some(1), 0.0)];
        let short = Writer::new(short).into_bytes().unwrap();
        let error = join(vec![whole(), short], &ids).unwrap_err().to_string();
        assert!(
            error.contains("1 tensors") && error.contains('3'),
            "{error}"
        );
        assert!(join(Vec::new(), &ids).is_err());
    }
}
