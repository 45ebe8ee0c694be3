//! Split files.

use super::*;

/// Returns the files of [`model`] split in two, as `llama-gguf-split` writes them: all metadata of
/// the model in the first one.
fn split(numbers: [u32; 2], counts: [u32; 2], tensors: u32) -> [Made; 2] {
    let whole = model();
    let mut parts = [whole.clone(), whole];
    parts[0].infos.truncate(4);
    parts[1].infos.drain(..4);
    parts[1].keys.clear();
    for (part, (number, count)) in parts.iter_mut().zip(numbers.into_iter().zip(counts)) {
        part.key("split.no", 2, &(number as u16).to_le_bytes());
        part.key("split.count", 2, &(count as u16).to_le_bytes());
        part.key("split.tensors.count", 5, &tensors.to_le_bytes());
    }
    parts
}

#[test]
fn a_split_file_is_read_by_any_part() {
    let folder = Scratch::new("gguf-split");
    let names = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"];
    let write = |parts: &[Made; 2]| {
        for (name, part) in names.iter().zip(parts) {
            fs::write(folder.join(name), part.bytes()).unwrap();
        }
    };
    let error = |name: &str| {
        let error = import(&folder.join(name), &folder.join("out"), Dtype::F32).unwrap_err();
        format!("{error:#}")
    };
    write(&split([0, 1], [2, 2], 11));
    for (index, name) in names.iter().enumerate() {
        let target = folder.join(format!("out-{index}"));
        import(&folder.join(name), &target, Dtype::F32).unwrap();
        let tensors = TensorFolder::open(&target).unwrap();
        assert_eq!(tensors.len(), 11);
        let down = tensors.get("model.layers.0.mlp.down_proj.weight").unwrap();
        assert_eq!(down.to_f32().unwrap(), values(10, HIDDEN * D_MODEL));
    }
    fs::rename(folder.join(names[1]), folder.join("b.gguf")).unwrap();
    let missing = error(names[0]);
    assert!(missing.contains(names[1]), "{missing}");
    let renamed = error("b.gguf");
    assert!(
        renamed.contains("must end with -00001-of-00002.gguf"),
        "{renamed}"
    );
    for (parts, expected) in [
        (split([0, 0], [2, 2], 11), "`split.no` is 0, but must be 1"),
        (
            split([0, 1], [2, 3], 11),
            "`split.count` is 3, but must be 2",
        ),
        (split([0, 1], [2, 2], 12), "`split.tensors.count` is 12"),
    ] {
        write(&parts);
        let error = error(names[0]);
        assert!(error.contains(expected), "{error}");
    }
    let mut parts = split([0, 1], [2, 2], 12);
    let twice = parts[0].infos[0].clone();
    parts[1].infos.push(twice);
    write(&parts);
    let error = error(names[0]);
    assert!(error.contains("in an earlier part as well"), "{error}");
}
