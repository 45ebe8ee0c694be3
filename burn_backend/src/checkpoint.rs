//! Checkpoints of burn-train that include the RNG state of NVFP4 layers (feature `train`).
//!
//! burn-train saves the records of the model, the optimizer and the scheduler. They do not include
//! an [`Nvfp4State`]: a run resumed from them (`SupervisedTraining::checkpoint`) draws from its
//! first offsets again and loses the modes of its layers. [`Nvfp4Checkpoints::register`] replaces
//! `with_default_checkpointers` and saves the state in a file next to the records:
//!
//! ```no_run
//! # use burn_core::module::Module;
//! # use burn_train::{LearnerModel, SupervisedTraining, checkpoint::KeepLastNCheckpoints};
//! # fn with<M: LearnerModel + Module>(training: SupervisedTraining<M>, model: M) {
//! use burn_nvfp4::checkpoint::Nvfp4Checkpoints;
//!
//! // Before the model moves into the Learner.
//! let checkpoints = Nvfp4Checkpoints::new(&model, "artifacts/checkpoint");
//! let training = checkpoints.register(training, KeepLastNCheckpoints::new(2));
//! // To resume: training.checkpoint(epoch), as always.
//! # }
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::store::ModuleRecord;
use burn_train::checkpoint::{
    Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy, FileCheckpointer,
};
use burn_train::metric::store::EventStoreClient;
use burn_train::{LearnerModel, SupervisedTraining};

use crate::state::{self, FoundLayer, Nvfp4State};

/// Saves the [`Nvfp4State`] of a model with burn-train's checkpoints, and restores it.
///
/// burn-train writes records on other threads while training continues and layers advance their
/// offsets. Therefore the state is collected earlier, when burn-train asks the
/// [`strategy`](Self::strategy) whether to save. Both components are public for checkpoints that
/// are not files: pass burn-train both the strategy and the checkpointer that
/// [`model`](Self::model) wraps.
#[derive(Debug, Clone)]
pub struct Nvfp4Checkpoints {
    directory: PathBuf,
    layers: Arc<Vec<FoundLayer>>,
    /// States of epochs whose checkpoints are about to be saved.
    collected: Arc<Mutex<BTreeMap<usize, Nvfp4State>>>,
}

impl Nvfp4Checkpoints {
    /// Creates checkpoints of `model` and all its clones and forks, with a file `nvfp4-EPOCH.json`
    /// per checkpoint in `directory`, which is created when needed.
    pub fn new<M: Module>(model: &M, directory: impl AsRef<Path>) -> Self {
        Self {
            directory: directory.as_ref().into(),
            layers: Arc::new(state::layers(model)),
            collected: Arc::default(),
        }
    }

    /// Saves checkpoints of the model, the optimizer and the scheduler to files in the directory,
    /// with burn-train's file names, at the epochs that `strategy` selects.
    ///
    /// Replaces the checkpointers and the strategy of `training`.
    pub fn register<M: LearnerModel>(
        &self,
        training: SupervisedTraining<M>,
        strategy: impl CheckpointingStrategy + 'static,
    ) -> SupervisedTraining<M> {
        let file = |name| FileCheckpointer::new(&self.directory, name);
        training
            .with_custom_checkpointers(self.model(file("model")), file("optim"), file("scheduler"))
            .with_checkpointing_strategy(self.strategy(strategy))
    }

    /// Returns a checkpointer that saves and restores the state together with the model's record,
    /// which `inner` handles.
    ///
    /// Saving fails without the [`strategy`](Self::strategy). Restoring fails if the file of the
    /// state is missing or belongs to another model.
    pub fn model<C: Checkpointer<ModuleRecord>>(&self, inner: C) -> StateCheckpointer<C> {
        StateCheckpointer {
            inner,
            checkpoints: self.clone(),
        }
    }

    /// Wraps `inner`: a checkpoint contains the state at the moment when `inner` requests it.
    pub fn strategy<S: CheckpointingStrategy>(&self, inner: S) -> StateStrategy<S> {
        StateStrategy {
            inner,
            checkpoints: self.clone(),
        }
    }

    fn path(&self, epoch: usize) -> PathBuf {
        self.directory.join(format!("nvfp4-{epoch}.json"))
    }

    fn collected(&self) -> MutexGuard<'_, BTreeMap<usize, Nvfp4State>> {
        self.collected
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn save(&self, epoch: usize) -> Result<(), CheckpointerError> {
        let state = self.collected().remove(&epoch).ok_or_else(|| {
            CheckpointerError::Unknown(format!(
                "epoch {epoch} has no NVFP4 state: with_checkpointing_strategy() needs \
                 Nvfp4Checkpoints::strategy()"
            ))
        })?;
        fs::create_dir_all(&self.directory)
            .and_then(|()| state.save(self.path(epoch)))
            .map_err(CheckpointerError::IOError)
    }

    fn restore(&self, epoch: usize) -> Result<(), CheckpointerError> {
        let path = self.path(epoch);
        let failed = |error: &dyn std::fmt::Display| {
            CheckpointerError::Unknown(format!("NVFP4 state {}: {error}", path.display()))
        };
        let state = Nvfp4State::load(&path).map_err(|error| failed(&error))?;
        state.apply_to(&self.layers).map_err(|error| failed(&error))
    }
}

/// Checkpointer created by [`Nvfp4Checkpoints::model`].
#[derive(Debug)]
pub struct StateCheckpointer<C> {
    inner: C,
    checkpoints: Nvfp4Checkpoints,
}

impl<C: Checkpointer<ModuleRecord>> Checkpointer<ModuleRecord> for StateCheckpointer<C> {
    fn save(&self, epoch: usize, record: ModuleRecord) -> Result<(), CheckpointerError> {
        // The state is saved first, so that no record exists without a state.
        self.checkpoints.save(epoch)?;
        self.inner.save(epoch, record)
    }

    fn delete(&self, epoch: usize) -> Result<(), CheckpointerError> {
        self.inner.delete(epoch)?;
        let path = self.checkpoints.path(epoch);
        if path.exists() {
            fs::remove_file(path).map_err(CheckpointerError::IOError)?;
        }
        Ok(())
    }

    fn restore(&self, epoch: usize) -> Result<ModuleRecord, CheckpointerError> {
        let record = self.inner.restore(epoch)?;
        self.checkpoints.restore(epoch)?;
        Ok(record)
    }
}

/// Strategy created by [`Nvfp4Checkpoints::strategy`].
#[derive(Debug)]
pub struct StateStrategy<S> {
    inner: S,
    checkpoints: Nvfp4Checkpoints,
}

impl<S: CheckpointingStrategy> CheckpointingStrategy for StateStrategy<S> {
    fn checkpointing(
        &mut self,
        epoch: usize,
        collector: &EventStoreClient,
    ) -> Vec<CheckpointingAction> {
        let actions = self.inner.checkpointing(epoch, collector);
        if actions.contains(&CheckpointingAction::Save) {
            let state = Nvfp4State::of(&self.checkpoints.layers);
            self.checkpoints.collected().insert(epoch, state);
        }
        actions
    }
}
