//! Modified model folders for tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use serde_json::Value;

use super::config::CONFIG_FILE;
use super::{Dtype, TensorFolder, TensorWriter};
use crate::checkpoint::{read_json, write_json};

/// A model folder with modified tensors or configuration.
pub(crate) struct Variant {
    source: PathBuf,
    /// Type, shape and bytes by name.
    pub tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    /// Contents of config.json.
    pub json: Value,
}

impl Variant {
    pub fn of(source: &Path) -> Self {
        let tensors = TensorFolder::open(source).unwrap();
        let all = tensors.iter().map(|tensor| {
            let content = (tensor.dtype, tensor.shape.to_vec(), tensor.bytes().to_vec());
            (tensor.name.to_owned(), content)
        });
        Self {
            source: source.to_owned(),
            tensors: all.collect(),
            json: read_json(&source.join(CONFIG_FILE)).unwrap(),
        }
    }

    /// Adds a BF16 tensor whose elements are all `value`.
    pub fn fill(&mut self, name: &str, shape: &[usize], value: f32) {
        let count = shape.iter().product();
        let bytes = bf16::from_f32(value).to_le_bytes().repeat(count);
        let tensor = (Dtype::BF16, shape.to_vec(), bytes);
        self.tensors.insert(name.to_owned(), tensor);
    }

    /// Sets element `at` of a BF16 tensor.
    pub fn set(&mut self, name: &str, at: usize, value: f32) {
        let (dtype, _, bytes) = self.tensors.get_mut(name).unwrap();
        assert_eq!(*dtype, Dtype::BF16);
        bytes[2 * at..][..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
    }

    /// Multiplies a BF16 tensor.
    pub fn scale(&mut self, name: &str, factor: f32) {
        let (_, _, bytes) = self.tensors.get_mut(name).unwrap();
        for element in bytes.as_chunks_mut::<2>().0 {
            let value = bf16::from_le_bytes(*element).to_f32();
            *element = bf16::from_f32(value * factor).to_le_bytes();
        }
    }

    /// Writes the variant to a fresh folder `target`, with the companion files.
    pub fn write(&self, target: &Path) {
        let _ = fs::remove_dir_all(target);
        fs::create_dir_all(target).unwrap();
        for entry in fs::read_dir(&self.source).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|end| end == "json")
                && !path.ends_with(super::INDEX_FILE)
            {
                fs::copy(&path, target.join(path.file_name().unwrap())).unwrap();
            }
        }
        write_json(&target.join(CONFIG_FILE), &self.json).unwrap();
        let mut writer = TensorWriter::create(target, TensorWriter::SHARD_BYTES).unwrap();
        for (name, (dtype, shape, bytes)) in &self.tensors {
            writer.add(name, *dtype, shape, bytes).unwrap();
        }
        writer.finish().unwrap();
    }
}
