use std::fs;

use safetensors::SafeTensors;

use super::*;
use crate::hf::TensorWriter;
use nvfp4_test_support::{Scratch, golden};

/// Returns a file with `header`, followed by `data` zeros.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

fn error_of(bytes: &[u8]) -> String {
    format!("{:#}", Header::parse(bytes).unwrap_err())
}

fn open_error(folder: &Path) -> String {
    format!("{:#}", TensorFolder::open(folder).unwrap_err())
}

#[test]
fn lying_headers_are_errors() {
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let good = file(&entry("F32", "[2,3]", "[0,24]"), 24);
    let header = Header::parse(&good).unwrap();
    assert_eq!(header.tensors["w"].shape, [2, 3]);
    assert_eq!(header.tensors["w"].end, good.len());
    let huge = u64::MAX.to_string();
    for (bytes, expected) in [
        (vec![1, 2, 3], "the file has 3 bytes"),
        (huge_length(u64::MAX), "said to have 18446744073709551615"),
        (huge_length(1 << 40), "said to have 1099511627776 bytes"),
        (file("{\"w\":", 0), "not the expected JSON"),
        (file("[]", 0), "not the expected JSON"),
        (file(&entry("F32", "[2,3]", "[0,24]"), 23), "has 23 bytes"),
        (
            file(&entry("F32", "[2,3]", "[0,24]"), 25),
            "the data has 25",
        ),
        (
            file(&entry("F32", "[2,3]", "[0,20]"), 20),
            "takes 24 bytes, but it is said to have 20",
        ),
        (
            file(&entry("F32", &format!("[{huge},{huge}]"), "[0,24]"), 24),
            "tensor `w`",
        ),
        (
            file(&entry("F32", &format!("[{huge}]"), "[0,24]"), 24),
            "takes no whole number of bytes",
        ),
        (file(&entry("F4", "[3]", "[0,1]"), 1), "no whole number"),
        (file(&entry("F32", "[1]", "[8,4]"), 8), "8 to 4"),
        (
            file(&entry("F32", "[1]", "[4,8]"), 8),
            "starts at byte 4 of the data, but the one before it ends at 0",
        ),
        (file(&entry("F99", "[1]", "[0,4]"), 4), "F99"),
        (file(&entry("F32", "[-1]", "[0,4]"), 4), "JSON"),
        (file(&entry("F32", &"[1]".repeat(9), "[0,4]"), 4), "JSON"),
        (
            file(
                &entry("F32", &format!("[{}1]", "1,".repeat(16)), "[0,4]"),
                4,
            ),
            "17 axes",
        ),
        (
            file(
                r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
                    "a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#,
                2,
            ),
            "tensor `a` comes twice",
        ),
        (
            file(
                r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},
                    "b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#,
                3,
            ),
            "tensor `b` starts at byte 1 of the data, but the one before it ends at 2",
        ),
    ] {
        let found = error_of(&bytes);
        assert!(found.contains(expected), "{found}\nnot: {expected}");
    }
}

fn huge_length(length: u64) -> Vec<u8> {
    let mut file = length.to_le_bytes().to_vec();
    file.extend(b"{}");
    file
}

/// Neither truncation nor a flipped bit may panic; a header that changed but is still consistent
/// may parse.
#[test]
fn damaged_files_never_panic() {
    let folder = Scratch::new("damaged");
    let mut writer = TensorWriter::create(&folder, 1 << 20).unwrap();
    writer
        .add("a.weight", Dtype::BF16, &[2, 3], &[7; 12])
        .unwrap();
    writer
        .add("b.scale", Dtype::F8_E4M3, &[5], &[1; 5])
        .unwrap();
    writer.finish().unwrap();
    let whole = fs::read(folder.join(WHOLE_FILE)).unwrap();
    assert!(Header::parse(&whole).is_ok());
    for length in 0..whole.len() {
        assert!(Header::parse(&whole[..length]).is_err(), "{length} bytes");
    }
    let mut damaged = whole.clone();
    for bit in 0..whole.len() * 8 {
        damaged[bit / 8] ^= 1 << (bit % 8);
        let _ = Header::parse(&damaged);
        damaged[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn an_index_that_disagrees_is_an_error() {
    let folder = Scratch::new("index");
    assert!(open_error(&folder).contains("neither model.safetensors nor"));
    let mut writer = TensorWriter::create(&folder, 4).unwrap();
    for name in ["a", "b"] {
        writer.add(name, Dtype::U8, &[4], &[1, 2, 3, 4]).unwrap();
    }
    writer.finish().unwrap();
    let opened = TensorFolder::open(&folder).unwrap();
    assert_eq!(opened.names().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(opened.files().len(), 2);
    let (one, two) = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    );
    let check = |map: &str, expected: &str| {
        let text = format!(r#"{{"weight_map":{{{map}}}}}"#);
        fs::write(folder.join(INDEX_FILE), text).unwrap();
        let found = open_error(&folder);
        assert!(found.contains(INDEX_FILE), "{found}");
        assert!(found.contains(expected), "{found}\nnot: {expected}");
    };
    check("", "`weight_map` is empty");
    check(
        &format!(r#""a":"{one}","b":"gone.safetensors""#),
        "gone.safetensors",
    );
    check(
        &format!(r#""a":"{one}","b":"{one}""#),
        &format!("tensors that are not where it says: `b` in {one}"),
    );
    check(
        &format!(r#""a":"{one}","c":"{two}""#),
        &format!("not where it says: `c` in {two}"),
    );
    // A tensor that the index omits.
    fs::copy(folder.join(two), folder.join("more.safetensors")).unwrap();
    let mut writer = TensorWriter::create(&scratch_in(&folder), 64).unwrap();
    for name in ["b", "stray"] {
        writer.add(name, Dtype::U8, &[1], &[9]).unwrap();
    }
    writer.finish().unwrap();
    fs::rename(
        folder.join("inner").join(WHOLE_FILE),
        folder.join("more.safetensors"),
    )
    .unwrap();
    check(
        &format!(r#""a":"{one}","b":"more.safetensors""#),
        "does not name: `stray` in more.safetensors",
    );
    for name in [
        "../x",
        "/etc/passwd",
        "..",
        ".",
        "",
        "sub/x",
        "C:x",
        "a\\\\b",
    ] {
        check(&format!(r#""a":"{name}""#), "must be the name of a file");
    }
}

fn scratch_in(folder: &Path) -> PathBuf {
    let inner = folder.join("inner");
    fs::create_dir(&inner).unwrap();
    inner
}

#[test]
fn a_tensor_of_several_shards_is_the_one_that_the_index_names() {
    let folder = Scratch::new("several");
    for (name, value) in [("x", 1), ("y", 2)] {
        let mut writer = TensorWriter::create(&folder, 64).unwrap();
        writer.add("w", Dtype::U8, &[1], &[value]).unwrap();
        writer.add(name, Dtype::U8, &[1], &[0]).unwrap();
        writer.finish().unwrap();
        let shard = folder.join(format!("{name}.safetensors"));
        fs::rename(folder.join(WHOLE_FILE), shard).unwrap();
    }
    let map = r#"{"weight_map":{"w":"y.safetensors","x":"x.safetensors","y":"y.safetensors"}}"#;
    fs::write(folder.join(INDEX_FILE), map).unwrap();
    let opened = TensorFolder::open(&folder).unwrap();
    assert_eq!(opened.get("w").unwrap().bytes()[..], [2]);
    assert_eq!(opened.len(), 3);
    let error = opened.get("z").unwrap_err().to_string();
    assert!(error.contains("no tensor `z`"), "{error}");
}

/// Writes `model.safetensors` with one tensor of this value.
fn write_one(folder: &Path, name: &str, value: u8) {
    let mut writer = TensorWriter::create(folder, 64).unwrap();
    writer.add(name, Dtype::U8, &[1], &[value]).unwrap();
    writer.finish().unwrap();
}

/// Readers disagree on which of two complete sets of weights to use.
#[test]
fn a_whole_file_beside_an_index_must_be_the_same_model() {
    let folder = Scratch::new("whole-and-index");
    write_one(&folder, "w", 1);
    let shard = "model-00001-of-00001.safetensors";
    fs::copy(folder.join(WHOLE_FILE), folder.join(shard)).unwrap();
    // A shard that no index names.
    let error = open_error(&folder);
    assert!(error.contains(shard), "{error}");
    let map = format!(r#"{{"weight_map":{{"w":"{shard}"}}}}"#);
    fs::write(folder.join(INDEX_FILE), &map).unwrap();
    assert_eq!(TensorFolder::open(&folder).unwrap().len(), 1);
    for (name, value) in [("w", 2), ("v", 1)] {
        fs::remove_file(folder.join(WHOLE_FILE)).unwrap();
        fs::rename(folder.join(INDEX_FILE), folder.join("index")).unwrap();
        write_one(&folder, name, value);
        fs::rename(folder.join("index"), folder.join(INDEX_FILE)).unwrap();
        let error = open_error(&folder);
        for part in [WHOLE_FILE, INDEX_FILE, &format!("`{name}`")] {
            assert!(error.contains(part), "{error}\nnot: {part}");
        }
    }
    // The shards of the index are missing.
    fs::remove_file(folder.join(shard)).unwrap();
    let error = open_error(&folder);
    assert!(
        error.contains(WHOLE_FILE) && error.contains(INDEX_FILE),
        "{error}"
    );
    // The index of an unsharded model.
    let map = format!(r#"{{"weight_map":{{"v":"{WHOLE_FILE}"}}}}"#);
    fs::write(folder.join(INDEX_FILE), &map).unwrap();
    TensorFolder::open(&folder).unwrap();
}

#[test]
fn adapters_beside_a_model_are_refused() {
    let folder = Scratch::new("adapters-beside");
    write_one(&folder, "w", 1);
    fs::write(folder.join(ADAPTER_FILE), "{}").unwrap();
    fs::write(folder.join("config.json"), "{}").unwrap();
    let error = open_error(&folder);
    assert!(error.contains("adapter_config.json"), "{error}");
}

/// Companion files are copied without the permissions of a read-only source.
#[cfg(unix)]
#[test]
fn copied_files_have_the_permissions_of_others() {
    use std::os::unix::fs::PermissionsExt;

    let folder = Scratch::new("permissions-copy");
    let mode = |name: &str| {
        fs::metadata(folder.join(name))
            .unwrap()
            .permissions()
            .mode()
    };
    fs::write(folder.join("other"), "a").unwrap();
    fs::write(folder.join("own"), "b").unwrap();
    fs::set_permissions(folder.join("own"), fs::Permissions::from_mode(0o400)).unwrap();
    crate::hf::copy_file(&folder.join("own"), &folder.join("copy")).unwrap();
    assert_eq!(mode("copy"), mode("other"));
    assert_eq!(fs::read(folder.join("copy")).unwrap(), b"b");
}

/// 0666 minus the umask, as for any other file.
#[cfg(unix)]
#[test]
fn written_files_have_the_permissions_of_others() {
    use std::os::unix::fs::PermissionsExt;

    let folder = Scratch::new("permissions");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    fs::write(folder.join("other"), "").unwrap();
    let mut writer = TensorWriter::create(&folder, 1).unwrap();
    for name in ["a", "b"] {
        writer.add(name, Dtype::U8, &[1], &[1]).unwrap();
    }
    writer.finish().unwrap();
    for shard in ["model-00001-of-00002.safetensors", INDEX_FILE] {
        assert_eq!(
            mode(&folder.join(shard)),
            mode(&folder.join("other")),
            "{shard}"
        );
    }
}

#[test]
fn values_that_are_not_finite_are_named() {
    let folder = Scratch::new("finite");
    let mut writer = TensorWriter::create(&folder, 1 << 20).unwrap();
    let bf16s = |values: [f32; 6]| values.map(|v| bf16::from_f32(v).to_le_bytes()).concat();
    let good = [1.0, -0.0, f32::MIN_POSITIVE, 3e38, -2.0, 0.5];
    let mut bad = good;
    bad[4] = f32::NEG_INFINITY;
    writer
        .add("good", Dtype::BF16, &[2, 3], &bf16s(good))
        .unwrap();
    writer
        .add("bad", Dtype::BF16, &[2, 3], &bf16s(bad))
        .unwrap();
    let nan = [1f32.to_le_bytes(), f32::NAN.to_le_bytes()].concat();
    writer.add("norm", Dtype::F32, &[2], &nan).unwrap();
    writer
        .add("scales", Dtype::F8_E4M3, &[1, 1, 2], &[1, 0xff])
        .unwrap();
    writer.add("codes", Dtype::U8, &[1], &[0x7f]).unwrap();
    writer.finish().unwrap();
    let opened = TensorFolder::open(&folder).unwrap();
    let check = |name: &str| opened.get(name).unwrap().check_finite();
    check("good").unwrap();
    check("codes").unwrap();
    for (name, expected) in [
        ("bad", "`bad`: the value of row 1, column 1 is -inf"),
        ("norm", "`norm`: the value at 1 is NaN"),
        ("scales", "`scales`: the value at [0, 0, 1] is NaN"),
    ] {
        let error = check(name).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn values_of_each_float_type() {
    let folder = Scratch::new("values");
    let values = [0.5f32, -3.0, 448.0];
    let mut writer = TensorWriter::create(&folder, 1 << 20).unwrap();
    let all = |bytes: &dyn Fn(f32) -> Vec<u8>| values.iter().flat_map(|v| bytes(*v)).collect();
    let cases: [(&str, Dtype, Vec<u8>); 4] = [
        (
            "f64",
            Dtype::F64,
            all(&|v| f64::from(v).to_le_bytes().into()),
        ),
        ("f32", Dtype::F32, all(&|v| v.to_le_bytes().into())),
        (
            "f16",
            Dtype::F16,
            all(&|v| f16::from_f32(v).to_le_bytes().into()),
        ),
        (
            "bf16",
            Dtype::BF16,
            all(&|v| bf16::from_f32(v).to_le_bytes().into()),
        ),
    ];
    for (name, dtype, bytes) in &cases {
        writer.add(name, *dtype, &[3], bytes).unwrap();
    }
    writer
        .add("e4m3", Dtype::F8_E4M3, &[3], &[0x30, 0xc4, 0x7e])
        .unwrap();
    writer.add("codes", Dtype::U8, &[1], &[1]).unwrap();
    let error = writer.add("codes", Dtype::U8, &[1], &[1]).unwrap_err();
    assert!(error.to_string().contains("`codes`"), "{error}");
    let error = writer.add("short", Dtype::F32, &[2], &[1]).unwrap_err();
    assert!(
        error.to_string().contains("1 bytes are no F32[2]"),
        "{error}"
    );
    writer.finish().unwrap();
    let opened = TensorFolder::open(&folder).unwrap();
    for name in ["f64", "f32", "f16", "bf16", "e4m3"] {
        assert_eq!(
            opened.get(name).unwrap().to_f32().unwrap(),
            values,
            "{name}"
        );
    }
    let error = opened
        .get("codes")
        .unwrap()
        .to_f32()
        .unwrap_err()
        .to_string();
    assert!(error.contains("`codes`") && error.contains("U8"), "{error}");
    assert_eq!(opened.metadata("format"), Some("pt"));
}

#[test]
fn what_is_not_finished_leaves_nothing() {
    let folder = Scratch::new("unfinished");
    let mut writer = TensorWriter::create(&folder, 1).unwrap();
    for name in ["a", "b", "c"] {
        writer.add(name, Dtype::U8, &[1], &[1]).unwrap();
    }
    assert_ne!(fs::read_dir(&*folder).unwrap().count(), 0);
    drop(writer);
    assert_eq!(fs::read_dir(&*folder).unwrap().count(), 0);
    let error = TensorWriter::create(&folder, 1).unwrap().finish();
    assert!(error.is_err());
    fs::write(folder.join(WHOLE_FILE), "").unwrap();
    let Err(error) = TensorWriter::create(&folder, 1) else {
        panic!("it would overwrite a model");
    };
    assert!(error.to_string().contains("exists already"), "{error}");
}

/// Writes a golden folder again, byte for byte as the `safetensors` library reads and writes it.
fn round_trip(source: &Path, target: &Path, shard_bytes: u64) {
    let opened = TensorFolder::open(source).unwrap();
    let mut writer = TensorWriter::create(target, shard_bytes).unwrap();
    for tensor in opened.iter() {
        writer
            .add(tensor.name, tensor.dtype, tensor.shape, &tensor.bytes())
            .unwrap();
    }
    writer.finish().unwrap();
    let again = TensorFolder::open(target).unwrap();
    assert_eq!(opened.len(), again.len());
    for (a, b) in opened.iter().zip(again.iter()) {
        assert_eq!((a.name, a.dtype, a.shape), (b.name, b.dtype, b.shape));
        assert_eq!(a.bytes(), b.bytes(), "{}", a.name);
    }
}

#[test]
fn golden_files_come_back_byte_for_byte() {
    let source = golden("llama3-tiny-modelopt-nvfp4");
    let folder = Scratch::new("golden-whole");
    round_trip(&source, &folder, TensorWriter::SHARD_BYTES);
    let bytes = fs::read(source.join(WHOLE_FILE)).unwrap();
    assert_eq!(fs::read(folder.join(WHOLE_FILE)).unwrap(), bytes);
    let library = SafeTensors::deserialize(&bytes).unwrap();
    let opened = TensorFolder::open(&source).unwrap();
    assert_eq!(library.len(), opened.len());
    for tensor in opened.iter() {
        let expected = library.tensor(tensor.name).unwrap();
        assert_eq!(
            (expected.dtype(), expected.shape()),
            (tensor.dtype, tensor.shape)
        );
        assert_eq!(expected.data(), &*tensor.bytes(), "{}", tensor.name);
    }
}

#[test]
fn golden_shards_come_back() {
    let source = golden("mixtral-tiny");
    assert_eq!(TensorFolder::open(&source).unwrap().files().len(), 3);
    let folder = Scratch::new("golden-shards");
    round_trip(&source, &folder, 60_000);
    assert!(TensorFolder::open(&folder).unwrap().files().len() > 3);
}
