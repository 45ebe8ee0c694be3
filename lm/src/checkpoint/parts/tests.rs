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

fn values(content: &Content) -> Vec<f32> {
    let values = content.3.chunks_exact(4);
    values
        .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
        .collect()
}

fn whole() -> Bytes {
    let tensors = vec![
        tensor("a.weight", &[4, 3], Some(1), 10.0),
        tensor("b.weight", &[3], Some(2), 50.0),
        tensor("z.first", &[12], Some(1), 70.0),
    ];
    let writer = Writer::new(tensors).with_metadata("time", "7");
    writer.into_bytes().unwrap()
}

fn partition(group: ProcessGroup, parameters: BTreeMap<u64, ShardedParameter>) -> Partition {
    let ids = BTreeSet::from([1]);
    let mut partition = Partition::of_shards(Shards { group, ids }, true);
    partition.of.parameters = parameters;
    partition
}

fn parts(size: usize, parameters: &BTreeMap<u64, ShardedParameter>) -> (Vec<Bytes>, Cuts) {
    let groups = ProcessGroup::loopback(size, Duration::ZERO).into_iter();
    let partitions: Vec<_> = groups
        .map(|group| partition(group, parameters.clone()))
        .collect();
    let cuts = partitions[0].cuts();
    let parts = partitions
        .iter()
        .map(|partition| slice(whole(), partition).unwrap());
    (parts.collect(), cuts)
}

#[test]
fn parts_make_the_whole() {
    for size in [1, 2, 4] {
        let (parts, cuts) = parts(size, &BTreeMap::new());
        let last = content(&parts[size - 1]);
        assert_eq!(last[0].1, [4 / size, 3]);
        let row = 10.0f32 + (3 * (4 - 4 / size)) as f32;
        assert_eq!(last[0].3[..4], row.to_le_bytes());
        assert_eq!(last[1], content(&whole())[1]);
        assert_eq!(last[2].1, [12 / size]);
        let joined = join(parts, &cuts).unwrap();
        assert_eq!(content(&joined), content(&whole()));
        let reader = Reader::from_bytes(joined).unwrap();
        assert_eq!(reader.metadata().get("time").unwrap(), "7");
    }
}

/// Two segments of two columns on each of two rows, of each of which a rank has one column; and the
/// moments, which are flat.
#[test]
fn columns_are_cut_by_segments() {
    let tensors = || {
        vec![
            tensor("a.weight", &[2, 4], Some(1), 0.0),
            tensor("z.first", &[8], Some(1), 10.0),
        ]
    };
    let whole = || Writer::new(tensors()).into_bytes().unwrap();
    let sharded = ShardedParameter {
        shape: vec![2, 4],
        axis: 1,
        segments: vec![2, 2],
    };
    let parameters = BTreeMap::from([(1, sharded)]);
    let groups = ProcessGroup::loopback(2, Duration::ZERO).into_iter();
    let partitions: Vec<_> = groups
        .map(|group| partition(group, parameters.clone()))
        .collect();
    let made: Vec<Bytes> = partitions
        .iter()
        .map(|partition| slice(whole(), partition).unwrap())
        .collect();
    let [own, other] = [0, 1].map(|rank| content(&made[rank]));
    assert_eq!((&own[0].1, &own[1].1), (&vec![2, 2], &vec![4]));
    assert_eq!(values(&own[0]), [0.0, 2.0, 4.0, 6.0]);
    assert_eq!(values(&other[0]), [1.0, 3.0, 5.0, 7.0]);
    assert_eq!(values(&other[1]), [11.0, 13.0, 15.0, 17.0]);
    let joined = join(made, &partitions[0].cuts()).unwrap();
    assert_eq!(content(&joined), content(&whole()));
}

#[test]
fn what_does_not_fit_is_named() {
    let group = ProcessGroup::loopback(3, Duration::ZERO).remove(0);
    let error = slice(whole(), &partition(group, BTreeMap::new()))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("a.weight") && error.contains("3 ranks"),
        "{error}"
    );
    let other = ShardedParameter {
        shape: vec![4, 6],
        axis: 1,
        segments: vec![6],
    };
    let group = ProcessGroup::loopback(2, Duration::ZERO).remove(0);
    let error = slice(whole(), &partition(group, BTreeMap::from([(1, other)])))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("a.weight") && error.contains("[4, 6]"),
        "{error}"
    );

    let longer = ShardedParameter {
        shape: vec![4, 3],
        axis: 0,
        segments: vec![4, 2],
    };
    let group = ProcessGroup::loopback(2, Duration::ZERO).remove(0);
    let error = slice(whole(), &partition(group, BTreeMap::from([(1, longer)])))
        .unwrap_err()
        .to_string();
    assert!(error.contains("segments [4, 2] of axis 0"), "{error}");

    let (mut parts, cuts) = parts(2, &BTreeMap::new());
    let other = vec![
        tensor("a.weight", &[2, 3], Some(1), 0.0),
        tensor("c.weight", &[3], Some(2), 0.0),
        tensor("z.first", &[6], Some(1), 0.0),
    ];
    parts[1] = Writer::new(other).into_bytes().unwrap();
    let error = join(parts, &cuts).unwrap_err().to_string();
    assert!(
        error.contains("c.weight") && error.contains("b.weight"),
        "{error}"
    );
    let short = vec![tensor("a.weight", &[2, 3], Some(1), 0.0)];
    let short = Writer::new(short).into_bytes().unwrap();
    let error = join(vec![whole(), short], &cuts).unwrap_err().to_string();
    assert!(
        error.contains("1 tensors") && error.contains('3'),
        "{error}"
    );
    assert!(join(Vec::new(), &cuts).is_err());
}
