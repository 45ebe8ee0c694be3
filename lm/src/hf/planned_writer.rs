//! Writes the tensors of a planned model, each once, and resumes where an interrupted run stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use safetensors::Dtype;

use super::INDEX_FILE;
use super::header::Entry;
use super::plan::{FilePlan, ModelPlan};
use super::writer::TensorSink;
use crate::checkpoint::sync_folder;

/// Writes the tensors of a [`ModelPlan`] in any order. Every tensor is written once, to its place
/// in the file.
///
/// The unfinished files stay in their own folder, also if this value is dropped or the process is
/// killed, until [`finish`](Self::finish) moves them. The caller records which tensors are written,
/// after [`sync`](Self::sync), and passes them to [`keep`](Self::keep) to resume.
pub struct PlannedWriter {
    plan: ModelPlan,
    /// Folder of the unfinished files.
    folder: PathBuf,
    files: Vec<File>,
    /// Index of the file and location of each tensor.
    places: BTreeMap<String, (usize, Entry)>,
    /// Tensors that are not written yet.
    missing: BTreeSet<String>,
    /// Files that were written since the last [`sync`](Self::sync).
    unsynced: BTreeSet<usize>,
}

impl PlannedWriter {
    /// Creates the files of `plan` in `folder`; replaces unfinished files of the same names.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub fn create(plan: ModelPlan, folder: &Path) -> Result<Self> {
        let create = |path: &Path, file: &FilePlan| {
            let mut created = File::create(path)?;
            created.write_all(&file.header)?;
            created.set_len(file.bytes)?;
            created.sync_all()?;
            Ok(created)
        };
        let writer = Self::with_files(plan, folder, create)?;
        sync_folder(folder).with_context(|| folder.display().to_string())?;
        Ok(writer)
    }

    /// Opens the unfinished files of `plan` in `folder`. Files that an interrupted
    /// [`finish`](Self::finish) moved to the folder `moved_to` are moved back.
    ///
    /// # Errors
    /// Returns an error if a file is missing or does not belong to `plan`.
    pub fn resume(plan: ModelPlan, folder: &Path, moved_to: &Path) -> Result<Self> {
        let index = moved_to.join(INDEX_FILE);
        if index.exists() {
            fs::remove_file(&index).with_context(|| index.display().to_string())?;
        }
        let open = |path: &Path, file: &FilePlan| {
            let moved = moved_to.join(path.file_name().unwrap_or_default());
            if !path.exists() && moved.exists() {
                fs::rename(&moved, path)?;
            }
            let mut opened = File::options().read(true).write(true).open(path)?;
            let mut header = vec![0; file.header.len()];
            ensure!(
                opened.metadata()?.len() == file.bytes
                    && opened.read_exact(&mut header).is_ok()
                    && header == file.header,
                "the file was changed since the run that is resumed: remove the folder, and start \
                 anew"
            );
            Ok(opened)
        };
        Self::with_files(plan, folder, open)
    }

    fn with_files(
        plan: ModelPlan,
        folder: &Path,
        mut open: impl FnMut(&Path, &FilePlan) -> Result<File>,
    ) -> Result<Self> {
        let mut files = Vec::new();
        let mut places = BTreeMap::new();
        for (index, file) in plan.files.iter().enumerate() {
            let path = folder.join(plan.file_name(index));
            files.push(open(&path, file).with_context(|| path.display().to_string())?);
            let tensors = file.tensors.iter().cloned();
            places.extend(tensors.map(|(name, entry)| (name, (index, entry))));
        }
        Ok(Self {
            folder: folder.to_owned(),
            files,
            missing: places.keys().cloned().collect(),
            places,
            unsynced: BTreeSet::new(),
            plan,
        })
    }

    /// Marks the tensor `name` as written by the run that is resumed.
    pub fn keep(&mut self, name: &str) {
        self.missing.remove(name);
    }

    /// Flushes all written tensors to disk.
    ///
    /// # Errors
    /// Returns an error if that fails.
    pub fn sync(&mut self) -> Result<()> {
        for index in std::mem::take(&mut self.unsynced) {
            let synced = self.files[index].sync_data();
            synced.with_context(|| self.path(index).display().to_string())?;
        }
        Ok(())
    }

    /// Moves the files to `folder`, and writes the index if there are several.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing or a file cannot be moved.
    pub fn finish(mut self, folder: &Path) -> Result<()> {
        if let Some(name) = self.missing.first() {
            bail!(
                "tensor `{name}` and {} others were not written",
                self.missing.len() - 1
            );
        }
        self.sync()?;
        // The index comes last: shards without an index are not a model.
        for index in 0..self.files.len() {
            let target = folder.join(self.plan.file_name(index));
            let moved = fs::rename(self.path(index), &target);
            moved.with_context(|| target.display().to_string())?;
        }
        self.plan.write_index(folder)
    }

    fn path(&self, index: usize) -> PathBuf {
        self.folder.join(self.plan.file_name(index))
    }
}

impl TensorSink for PlannedWriter {
    /// Writes a tensor to its place.
    ///
    /// # Errors
    /// Returns an error if the tensor is not as planned, is written already, or writing fails.
    fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Result<()> {
        let place = self.places.get(name);
        let (index, entry) = place.with_context(|| format!("tensor `{name}` is not planned"))?;
        ensure!(
            (dtype, shape, bytes.len())
                == (entry.dtype, entry.shape.as_slice(), entry.end - entry.start),
            "tensor `{name}`: {} bytes of {dtype:?}{shape:?} are written, but {:?}{:?} was planned",
            bytes.len(),
            entry.dtype,
            entry.shape
        );
        ensure!(
            self.missing.remove(name),
            "tensor `{name}` is written already"
        );
        let mut file = &self.files[*index];
        let written = file
            .seek(SeekFrom::Start(entry.start as u64))
            .and_then(|_| file.write_all(bytes));
        written.with_context(|| self.path(*index).display().to_string())?;
        self.unsynced.insert(*index);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hf::{TensorFolder, TensorSpec, TensorWriter};
    use nvfp4_test_support::{Scratch, golden};

    /// Limit that divides the golden model into several files.
    const SHARD_BYTES: u64 = 60_000;

    fn plan(tensors: &TensorFolder) -> ModelPlan {
        ModelPlan::new(
            tensors.iter().map(|tensor| tensor.spec()).collect(),
            SHARD_BYTES,
        )
        .unwrap()
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// Writes the model with [`TensorWriter`].
    fn expected(tensors: &TensorFolder, folder: &Path) {
        fs::create_dir(folder).unwrap();
        let mut writer = TensorWriter::create(folder, SHARD_BYTES).unwrap();
        for tensor in tensors.iter() {
            let added = writer.add(tensor.name, tensor.dtype, tensor.shape, &tensor.bytes());
            added.unwrap();
        }
        writer.finish().unwrap();
    }

    fn assert_equal(found: &Path, expected: &Path) {
        assert_eq!(names(found), names(expected));
        for name in names(expected) {
            let [found, expected] = [found, expected].map(|of| fs::read(of.join(&name)).unwrap());
            assert!(found == expected, "{name}");
        }
    }

    #[test]
    fn a_run_that_is_interrupted_anywhere_writes_the_files_of_the_other_writer() {
        let tensors = TensorFolder::open(&golden("mixtral-tiny")).unwrap();
        let scratch = Scratch::new("planned");
        let [by_other, folder, out] = ["other", "unfinished", "out"].map(|name| scratch.join(name));
        expected(&tensors, &by_other);
        assert!(names(&by_other).len() > 3);
        for folder in [&folder, &out] {
            fs::create_dir(folder).unwrap();
        }

        let mut all: Vec<_> = tensors.iter().collect();
        // In another order than that of the files.
        all.reverse();
        let add = |writer: &mut PlannedWriter, at: usize| {
            let tensor = all[at];
            writer.add(tensor.name, tensor.dtype, tensor.shape, &tensor.bytes())
        };
        let half = all.len() / 2;
        let mut writer = PlannedWriter::create(plan(&tensors), &folder).unwrap();
        (0..half).for_each(|at| add(&mut writer, at).unwrap());
        writer.sync().unwrap();
        drop(writer);
        assert_eq!(names(&out), Vec::<String>::new());

        // A tensor whose bytes are any, because it was not recorded.
        let again = half - 1;
        let resume = || {
            let mut writer = PlannedWriter::resume(plan(&tensors), &folder, &out).unwrap();
            (0..again).for_each(|at| writer.keep(all[at].name));
            writer
        };
        let mut writer = resume();
        (again..all.len()).for_each(|at| add(&mut writer, at).unwrap());
        writer.finish(&out).unwrap();
        assert_equal(&out, &by_other);
        assert_eq!(names(&folder), Vec::<String>::new());

        // Stopped after the files, or some of them, were moved.
        let unmoved = &names(&out)[1];
        fs::rename(out.join(unmoved), folder.join(unmoved)).unwrap();
        let mut writer = resume();
        assert_eq!(names(&out), Vec::<String>::new());
        (again..all.len()).for_each(|at| writer.keep(all[at].name));
        writer.finish(&out).unwrap();
        assert_equal(&out, &by_other);
    }

    #[test]
    fn every_tensor_is_written_once_and_as_planned() {
        let scratch = Scratch::new("planned-errors");
        let [folder, out] = ["unfinished", "out"].map(|name| scratch.join(name));
        for folder in [&folder, &out] {
            fs::create_dir(folder).unwrap();
        }
        let specs = || ["a", "b"].map(|name| TensorSpec::new(name, Dtype::F32, &[2]));
        let plan = || ModelPlan::new(specs().to_vec(), 8).unwrap();
        let mut writer = PlannedWriter::create(plan(), &folder).unwrap();
        let mut refused = |name: &str, dtype, shape: &[usize], says: &str| {
            let error = writer
                .add(name, dtype, shape, &[0; 8])
                .unwrap_err()
                .to_string();
            assert!(error.contains(name) && error.contains(says), "{error}");
        };
        refused("c", Dtype::F32, &[2], "is not planned");
        refused("a", Dtype::F64, &[1], "F32[2] was planned");
        refused("a", Dtype::F32, &[2, 1], "F32[2] was planned");
        writer.add("a", Dtype::F32, &[2], &[0; 8]).unwrap();
        let error = writer.add("a", Dtype::F32, &[2], &[0; 8]).unwrap_err();
        assert!(error.to_string().contains("is written already"), "{error}");
        let error = writer.finish(&out).unwrap_err().to_string();
        assert!(error.contains("tensor `b` and 0 others"), "{error}");

        let resume = || {
            format!(
                "{:#}",
                PlannedWriter::resume(plan(), &folder, &out).err().unwrap()
            )
        };
        let path = folder.join("model-00002-of-00002.safetensors");
        fs::write(&path, "other").unwrap();
        let error = resume();
        assert!(
            error.contains("00002-of-00002") && error.contains("start anew"),
            "{error}"
        );
        fs::remove_file(&path).unwrap();
        assert!(resume().contains("00002-of-00002"));

        for (specs, says) in [
            (vec![], "at least one tensor"),
            ([specs(), specs()].concat(), "`a`"),
            (
                vec![TensorSpec::new("__metadata__", Dtype::U8, &[1])],
                "__metadata__",
            ),
            (
                vec![TensorSpec::new("odd", Dtype::F4, &[3])],
                "no whole number",
            ),
        ] {
            let error = ModelPlan::new(specs, 8).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
