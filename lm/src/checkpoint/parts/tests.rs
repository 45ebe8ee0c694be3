use burn::tensor::DType;

use super::*;

fn tensor(name: &str, dims: &[usize], id: Option<u64>, first: f32) -> Tensor {
    let count: usize = dims.iter().product();
    let values = (0..count).flat_map(|i| (first + i as f32).to_le_bytes());
    let bytes = Bytes::from_bytes_vec(values.collect());
    let shape = Shape::from(dims.to_vec());
    Tensor::new(name.into(), DType::F32, shape, id, bytes)
}

/// Name, shape, parameter ID and bytes.
type Content = (String, Vec<usize>, Option<u64>, Vec<u8>);

/// Returns the tensors of a container, in order.
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

fn level(ranks: usize, parameters: BTreeMap<u64, ShardedParameter>) -> Level {
    Level {
        ranks,
        stride: 1,
        model: true,
        sharded: BTreeSet::from([1]),
        parameters,
    }
}

/// Returns the part of `whole` that `rank` holds.
fn part(whole: Bytes, rank: usize, levels: &[Level]) -> Result<Bytes> {
    let partition = Partition {
        levels: levels.to_vec(),
        rank,
        names: BTreeMap::new(),
    };
    slice(whole, &partition)
}

fn parts(whole: impl Fn() -> Bytes, ranks: usize, levels: &[Level]) -> Vec<Bytes> {
    let own = |rank| part(whole(), rank, levels).unwrap();
    (0..ranks).map(own).collect()
}

fn joined(parts: Vec<Bytes>, levels: &[Level]) -> Result<Bytes> {
    join(parts, &levels.iter().collect::<Vec<_>>())
}

#[test]
fn parts_make_the_whole() {
    for size in [1, 2, 4] {
        let levels = [level(size, BTreeMap::new())];
        let parts = parts(whole, size, &levels);
        let last = content(&parts[size - 1]);
        assert_eq!(last[0].1, [4 / size, 3]);
        let row = 10.0f32 + (3 * (4 - 4 / size)) as f32;
        assert_eq!(last[0].3[..4], row.to_le_bytes());
        assert_eq!(last[1], content(&whole())[1]);
        assert_eq!(last[2].1, [12 / size]);
        let joined = joined(parts, &levels).unwrap();
        assert_eq!(content(&joined), content(&whole()));
        let reader = Reader::from_bytes(joined).unwrap();
        assert_eq!(reader.metadata().get("time").unwrap(), "7");
    }
}

/// Two rows, each with two segments of two columns; a rank has one column of each segment. The
/// moments are flat.
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
    let levels = [level(2, BTreeMap::from([(1, sharded)]))];
    let made = parts(whole, 2, &levels);
    let [own, other] = [0, 1].map(|rank| content(&made[rank]));
    assert_eq!((&own[0].1, &own[1].1), (&vec![2, 2], &vec![4]));
    assert_eq!(values(&own[0]), [0.0, 2.0, 4.0, 6.0]);
    assert_eq!(values(&other[0]), [1.0, 3.0, 5.0, 7.0]);
    assert_eq!(values(&other[1]), [11.0, 13.0, 15.0, 17.0]);
    let joined = joined(made, &levels).unwrap();
    assert_eq!(content(&joined), content(&whole()));
}

/// Columns are split over two ranks, and the rows of these columns over two ranks each; adjacent
/// ranks have different columns. The rows of another parameter are split over all four ranks.
/// Moments are flat.
#[test]
fn parts_are_cut_again() {
    let whole = || {
        let tensors = vec![
            tensor("a.weight", &[4, 4], Some(1), 0.0),
            tensor("b.weight", &[4], Some(2), 50.0),
            tensor("c.weight", &[3], Some(3), 60.0),
            tensor("z.first", &[16], Some(1), 100.0),
        ];
        Writer::new(tensors).into_bytes().unwrap()
    };
    let columns = ShardedParameter {
        shape: vec![4, 4],
        axis: 1,
        segments: vec![4],
    };
    let again = Level {
        stride: 2,
        model: false,
        ..level(2, BTreeMap::new())
    };
    let rows = Level {
        sharded: BTreeSet::from([2]),
        ..level(4, BTreeMap::new())
    };
    let levels = [level(2, BTreeMap::from([(1, columns)])), again, rows];
    assert_eq!(ranks_of(&levels), Some(4));
    let made = parts(whole, 4, &levels);
    // Rank 3 has the second half of the columns, and the second half of their rows.
    let last = content(&made[3]);
    assert_eq!((&last[0].1, &last[3].1), (&vec![2, 2], &vec![4]));
    assert_eq!(values(&last[0]), [10.0, 11.0, 14.0, 15.0]);
    assert_eq!(values(&last[1]), [53.0]);
    assert_eq!(values(&last[2]), [60.0, 61.0, 62.0]);
    assert_eq!(values(&last[3]), [110.0, 111.0, 114.0, 115.0]);
    // Rank 1 also has the second half of the columns.
    assert_eq!(values(&content(&made[1])[0]), [2.0, 3.0, 6.0, 7.0]);
    let back = joined(made, &levels).unwrap();
    assert_eq!(content(&back), content(&whole()));
    // Without the level that splits only the optimizer state, the first two ranks have everything.
    let of_model = [levels[0].clone()];
    assert_eq!(ranks_of(&of_model), Some(2));
    let back = joined(parts(whole, 2, &of_model), &of_model).unwrap();
    assert_eq!(content(&back), content(&whole()));
}

#[test]
fn what_does_not_fit_is_named() {
    let refused = |ranks: usize, parameters: BTreeMap<u64, ShardedParameter>| {
        let error = part(whole(), 0, &[level(ranks, parameters)]).unwrap_err();
        error.to_string()
    };
    let error = refused(3, BTreeMap::new());
    assert!(
        error.contains("a.weight") && error.contains("3 ranks"),
        "{error}"
    );
    let other = ShardedParameter {
        shape: vec![4, 6],
        axis: 1,
        segments: vec![6],
    };
    let error = refused(2, BTreeMap::from([(1, other)]));
    assert!(
        error.contains("a.weight") && error.contains("[4, 6]"),
        "{error}"
    );

    let longer = ShardedParameter {
        shape: vec![4, 3],
        axis: 0,
        segments: vec![4, 2],
    };
    let error = refused(2, BTreeMap::from([(1, longer)]));
    assert!(error.contains("segments [4, 2] of axis 0"), "{error}");

    let levels = [level(2, BTreeMap::new())];
    let mut parts = parts(whole, 2, &levels);
    let other = vec![
        tensor("a.weight", &[2, 3], Some(1), 0.0),
        tensor("c.weight", &[3], Some(2), 0.0),
        tensor("z.first", &[6], Some(1), 0.0),
    ];
    parts[1] = Writer::new(other).into_bytes().unwrap();
    let error = joined(parts, &levels).unwrap_err().to_string();
    assert!(
        error.contains("c.weight") && error.contains("b.weight"),
        "{error}"
    );
    let short = vec![tensor("a.weight", &[2, 3], Some(1), 0.0)];
    let short = Writer::new(short).into_bytes().unwrap();
    let error = joined(vec![whole(), short], &levels)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("1 tensors") && error.contains('3'),
        "{error}"
    );
    assert!(joined(Vec::new(), &levels).is_err());
    // The levels need more ranks than there are files.
    let twice = [level(2, BTreeMap::new()), level(2, BTreeMap::new())];
    let two = vec![whole(), whole()];
    let error = joined(two, &twice).unwrap_err().to_string();
    assert!(error.contains("more ranks than there are"), "{error}");
    let none = Level {
        stride: 0,
        ..level(2, BTreeMap::new())
    };
    assert_eq!(ranks_of([&none]), None);
    assert!(joined(vec![whole()], &[none]).is_err());
}
