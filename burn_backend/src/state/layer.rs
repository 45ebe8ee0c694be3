//! State of one layer, and enumeration of the layers of a model.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use burn_core::backend::DeviceOps;
use burn_core::module::{Content, Module, ModuleVisitor, Param, ParamId};
use burn_core::tensor::{Device, Tensor};
use nvfp4_formats::Nvfp4Error;

use crate::ops::{CachedWeight, LinearContext, LinearSpec, Probe, WeightCache, WeightIdentity};
use crate::parallel::ReduceDtype;
use crate::parameterless::{Parameterless, parameterless_module};
use crate::recipe::{LayerMode, Nvfp4Recipe};
use crate::rng::{RANK_SHIFT, RngState};

/// State of one layer: its [`RngState`], its high-precision flag, its [`LayerMode`], the recipe of a
/// [`RecipeSchedule`](crate::recipe::RecipeSchedule), and the cache of its quantized weight.
///
/// Clones share the state. A clone of a module is the same logical layer: a fork for another
/// device, the module that an optimizer step returns, or `valid()`. No offset is drawn twice and
/// none is lost, regardless of which clone runs the forward.
///
/// # Several devices
///
/// Each rank counts its own forwards and draws at offset `rank << 48 | count`. The signs of the
/// Hadamard transform are the same on all ranks. [`set_rank`](super::set_rank) sets the rank of a
/// model. Without it, the rank is the index of the device that `Module::fork` was called for, or 0
/// for a module that was never forked. The bits of each rank are therefore deterministic,
/// independent of thread timing. Clones, and forks to one device, share one count.
/// [`Nvfp4State`](crate::Nvfp4State) saves the count of the module that it is given. All ranks
/// resume from that count, because they step together.
#[derive(Clone, Debug)]
pub struct LayerState {
    shared: Arc<Shared>,
    rank: u64,
}

#[derive(Debug)]
struct Shared {
    seed: AtomicU64,
    layer: AtomicU64,
    rht_signs: AtomicU16,
    high_precision: AtomicBool,
    mode: Mutex<LayerMode>,
    /// Recipe that replaces the layer's own, if one was set.
    recipe: Mutex<Option<Arc<Nvfp4Recipe>>>,
    /// Rank of this process, or [`NO_RANK`].
    process: AtomicU64,
    weights: WeightCache,
    probe: Mutex<Option<Probe>>,
    offsets: Mutex<Offsets>,
}

/// Value for a process without a rank: the device index is used.
const NO_RANK: u64 = u64::MAX;

/// Number of forwards, by rank.
#[derive(Debug)]
struct Offsets {
    /// Initial count of a rank that has not drawn yet.
    start: u64,
    next: BTreeMap<u64, u64>,
    /// Set while a graph adds the rest of the offset on the device.
    pinned: Option<Pinned>,
}

/// Offsets of a step while a part of the offset is in device memory. A step draws at `base` plus
/// the number of draws of the step, regardless of the step number, so that a captured step has the
/// same arguments as every other.
#[cfg_attr(
    not(any(feature = "cpu", feature = "cuda")),
    allow(dead_code, reason = "only devices with graphs pin offsets")
)]
#[derive(Debug, Clone, Copy)]
struct Pinned {
    base: u64,
    /// Count at the beginning of the step.
    step: u64,
}

impl Offsets {
    fn starting_at(start: u64) -> Self {
        Self {
            start,
            next: BTreeMap::new(),
            pinned: None,
        }
    }

    fn of(&self, rank: u64) -> u64 {
        self.next.get(&rank).copied().unwrap_or(self.start)
    }
}

impl LayerState {
    /// Creates a state that starts at `rng_state`, in NVFP4.
    ///
    /// # Errors
    /// Returns an error if the layer number is 2^56 or more, or the offset is 2^48 or more.
    pub fn new(rng_state: RngState) -> Result<Self, Nvfp4Error> {
        rng_state.check()?;
        let RngState {
            seed,
            layer,
            offset,
            rht_signs,
        } = rng_state;
        Ok(Self {
            shared: Arc::new(Shared {
                seed: seed.into(),
                layer: layer.into(),
                rht_signs: rht_signs.into(),
                high_precision: false.into(),
                mode: Mutex::default(),
                recipe: Mutex::default(),
                process: NO_RANK.into(),
                weights: WeightCache::default(),
                probe: Mutex::default(),
                offsets: Mutex::new(Offsets::starting_at(offset)),
            }),
            rank: 0,
        })
    }

    /// Creates the state of a new layer with `recipe`. Its id is `layer`, or the next one of the
    /// process.
    ///
    /// # Errors
    /// Returns an error if the layer number is 2^56 or more.
    pub(crate) fn for_recipe(recipe: &Nvfp4Recipe, layer: Option<u64>) -> Result<Self, Nvfp4Error> {
        Self::new(RngState {
            seed: recipe.seed,
            layer: layer.unwrap_or_else(Self::next_layer),
            offset: 0,
            rht_signs: recipe.rht_signs,
        })
    }

    /// Returns the next id that no layer of this process has.
    fn next_layer() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the RNG state of the next training forward.
    pub fn rng_state(&self) -> RngState {
        let shared = &self.shared;
        RngState {
            seed: shared.seed.load(Ordering::Relaxed),
            layer: shared.layer.load(Ordering::Relaxed),
            offset: self.offsets().of(self.rank()),
            rht_signs: shared.rht_signs.load(Ordering::Relaxed),
        }
    }

    /// Returns the RNG state of the rank with the most forwards. (Ranks step together.)
    #[cfg(any(feature = "train", test))]
    pub(super) fn furthest(&self) -> RngState {
        let offset = {
            let offsets = self.offsets();
            let counts = offsets.next.values().copied();
            counts.max().unwrap_or(offsets.start)
        };
        RngState {
            offset,
            ..self.rng_state()
        }
    }

    /// Sets the next RNG state of this layer, all its clones and forks.
    ///
    /// # Errors
    /// Returns an error if the layer number is 2^56 or more, or the offset is 2^48 or more; the
    /// state is then unchanged.
    pub fn set_rng_state(&self, rng_state: RngState) -> Result<(), Nvfp4Error> {
        rng_state.check()?;
        let RngState {
            seed,
            layer,
            offset,
            rht_signs,
        } = rng_state;
        self.shared.seed.store(seed, Ordering::Relaxed);
        self.shared.layer.store(layer, Ordering::Relaxed);
        self.shared.rht_signs.store(rht_signs, Ordering::Relaxed);
        *self.offsets() = Offsets::starting_at(offset);
        Ok(())
    }

    /// Takes the current offset of the rank and advances it by one. The returned offset includes
    /// the rank. It includes the part in device memory, if any, unless that part is used
    /// `in_memory`.
    pub(crate) fn advance(&self, in_memory: bool) -> RngState {
        let count = {
            let mut offsets = self.offsets();
            let count = offsets.of(self.rank());
            offsets.next.insert(self.rank(), count + 1);
            match offsets.pinned {
                Some(Pinned { base, step }) if in_memory => base + (count - step),
                _ => count,
            }
        };
        RngState {
            offset: self.rank() << RANK_SHIFT | count,
            ..self.rng_state()
        }
    }

    /// Returns the rank that the layer draws for.
    fn rank(&self) -> u64 {
        match self.shared.process.load(Ordering::Relaxed) {
            NO_RANK => self.rank,
            rank => rank,
        }
    }

    /// Sets the rank of this process; it continues the count of the previous rank.
    pub(super) fn set_rank(&self, rank: u64) {
        let count = self.offsets().of(self.rank());
        self.shared.process.store(rank, Ordering::Relaxed);
        *self.offsets() = Offsets::starting_at(count);
    }

    fn offsets(&self) -> MutexGuard<'_, Offsets> {
        self.shared
            .offsets
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns true if the layer computes in the dtype of its input instead of NVFP4.
    pub fn is_high_precision(&self) -> bool {
        self.shared.high_precision.load(Ordering::Relaxed)
    }

    pub(crate) fn set_high_precision(&self, high_precision: bool) {
        let shared = &self.shared;
        if shared
            .high_precision
            .swap(high_precision, Ordering::Relaxed)
            != high_precision
        {
            shared.weights.clear();
        }
    }

    /// Returns the mode in effect.
    pub fn mode(&self) -> LayerMode {
        match self.is_high_precision() {
            true => LayerMode::HighPrecision,
            false => self.requested_mode(),
        }
    }

    /// Returns the mode that was set last, even if the layer stays in high precision.
    pub(super) fn requested_mode(&self) -> LayerMode {
        *self.shared.mode.lock().expect("no panic while it is held")
    }

    pub(crate) fn set_mode(&self, mode: LayerMode) {
        let mut current = self.shared.mode.lock().expect("no panic while it is held");
        if *current != mode {
            *current = mode;
            self.shared.weights.clear();
        }
    }

    /// Returns the recipe that replaces the layer's own, if one was set.
    pub(crate) fn recipe(&self) -> Option<Arc<Nvfp4Recipe>> {
        let recipe = self.shared.recipe.lock();
        recipe.expect("no panic while it is held").clone()
    }

    /// Makes the layer follow `recipe` instead of its own. Seed and offset of the layer stay.
    pub(super) fn set_recipe(&self, recipe: Arc<Nvfp4Recipe>) {
        let shared = &self.shared;
        shared.rht_signs.store(recipe.rht_signs, Ordering::Relaxed);
        *shared.recipe.lock().expect("no panic while it is held") = Some(recipe);
        shared.weights.clear();
    }

    /// Resolves the operands of the layer's next forward with the weight `weight` by `recipe`, and
    /// its context. If it `draws` (a training forward), it takes the current offset.
    ///
    /// # Errors
    /// Returns an error if a step of a graph would draw bits that a replay repeats.
    pub(crate) fn for_forward(
        &self,
        recipe: &Nvfp4Recipe,
        weight: Option<WeightIdentity>,
        draws: bool,
    ) -> Result<(LinearSpec, LinearContext), Nvfp4Error> {
        let replaced = self.recipe();
        let recipe = replaced.as_deref().unwrap_or(recipe);
        let mode = self.mode();
        let probe = self.probe();
        // A step that telemetry samples is never captured; the code that examines its operands
        // needs the signs of their transform.
        let in_memory = draws && probe.is_none() && self.offsets().pinned.is_some();
        let rng_state = if draws && mode != LayerMode::HighPrecision {
            self.advance(in_memory)
        } else {
            self.rng_state()
        };
        let context = LinearContext {
            weight: weight
                .filter(|_| recipe.cache_weights)
                .map(|identity| CachedWeight {
                    cache: self.shared.weights.clone(),
                    identity,
                }),
            probe,
            reads: None,
            sharding: None,
            gathered: None,
            reduce_dtype: ReduceDtype::default(),
        };
        let spec = mode.of(recipe.spec(&rng_state));
        #[cfg(any(feature = "cpu", feature = "cuda"))]
        let spec = match in_memory {
            true => {
                let spec = spec.with_offset_in_memory();
                spec.check()?;
                spec
            }
            false => spec,
        };
        Ok((spec, context))
    }

    /// Resolves the operands of the next forward by `recipe`, without taking an offset.
    pub(crate) fn next_spec(&self, recipe: &Nvfp4Recipe) -> LinearSpec {
        let replaced = self.recipe();
        let recipe = replaced.as_deref().unwrap_or(recipe);
        self.mode().of(recipe.spec(&self.rng_state()))
    }

    /// Returns the sink for samples of the layer's operands, while telemetry is on.
    pub(crate) fn probe(&self) -> Option<Probe> {
        let probe = self.shared.probe.lock().expect("no panic while it is held");
        probe.clone()
    }

    pub(crate) fn set_probe(&self, probe: Option<Probe>) {
        *self.shared.probe.lock().expect("no panic while it is held") = probe;
    }
}

/// Methods for a part of the offset in device memory.
#[cfg_attr(
    not(any(feature = "cpu", feature = "cuda")),
    allow(dead_code, reason = "only devices with graphs pin offsets")
)]
impl LayerState {
    /// Makes the offsets of later steps those of the next step plus the part in device memory,
    /// until [`unpin`](Self::unpin).
    pub(crate) fn pin(&self) {
        let mut offsets = self.offsets();
        let count = offsets.of(self.rank());
        offsets.pinned = Some(Pinned {
            base: count,
            step: count,
        });
    }

    /// Begins a step.
    pub(crate) fn begin_step(&self) {
        let mut offsets = self.offsets();
        let count = offsets.of(self.rank());
        if let Some(pinned) = &mut offsets.pinned {
            pinned.step = count;
        }
    }

    /// Number of forwards of the step that began last.
    pub(crate) fn drawn(&self) -> u64 {
        let offsets = self.offsets();
        let count = offsets.of(self.rank());
        offsets.pinned.map_or(0, |pinned| count - pinned.step)
    }

    /// Registers a replay that drew `forwards` times and changed the weight without the cache's
    /// knowledge. A layer in high precision draws nothing.
    pub(crate) fn replayed(&self, forwards: u64) {
        if self.mode() != LayerMode::HighPrecision {
            let mut offsets = self.offsets();
            let count = offsets.of(self.rank());
            offsets.next.insert(self.rank(), count + forwards);
        }
        self.shared.weights.clear();
    }

    /// Makes offsets plain counts again.
    pub(crate) fn unpin(&self) {
        self.offsets().pinned = None;
    }
}

/// Hides the state from Burn's traversals; [`Nvfp4State`](crate::Nvfp4State) accesses it.
impl Parameterless for LayerState {
    fn pass<V: ModuleVisitor>(&self, _visitor: &mut V) {
        TRAVERSAL.with_borrow_mut(|traversal| {
            if let Some(traversal) = traversal {
                traversal.found(self);
            }
        });
    }

    fn forked(self, device: &Device) -> Self {
        Self {
            rank: device.as_dispatch().id().index_id.into(),
            ..self
        }
    }

    fn show(&self, content: Content) -> Option<Content> {
        let RngState {
            seed,
            layer,
            offset,
            rht_signs,
        } = self.rng_state();
        let text = format!(
            "LayerState {{seed: {seed}, layer: {layer}, offset: {offset}, \
             rht_signs: {rht_signs:#06x}, high_precision: {}}}",
            self.is_high_precision()
        );
        content.add_formatted(&text).optional()
    }
}

parameterless_module!(LayerState);

thread_local! {
    /// Traversal of [`layers`] on this thread. A module's `visit` is generic over its visitor, so a
    /// layer's state cannot call this crate's visitor directly; it registers itself here.
    static TRAVERSAL: RefCell<Option<Traversal>> = const { RefCell::new(None) };
}

/// Layer of a model, found by [`layers`].
#[derive(Debug)]
pub(crate) struct FoundLayer {
    /// Path of the layer in the model, `""` for the model itself.
    pub path: String,
    /// Id of the weight.
    pub id: ParamId,
    /// State of the layer.
    pub state: LayerState,
}

impl FoundLayer {
    /// Path of the weight, as in the model's record.
    pub fn weight_path(&self) -> String {
        if self.path.is_empty() {
            "weight".into()
        } else {
            format!("{}.weight", self.path)
        }
    }
}

#[derive(Default)]
struct Traversal {
    path: Vec<String>,
    /// Last parameter called `weight`, with the path of its owner: a layer's weight is visited
    /// before its state.
    weight: Option<(Vec<String>, ParamId)>,
    layers: Vec<FoundLayer>,
}

impl Traversal {
    fn found(&mut self, state: &LayerState) {
        let owner = &self.path[..self.path.len().saturating_sub(1)];
        match &self.weight {
            // The state is a sibling of the weight in an NVFP4 layer, and a child of it in a
            // decorated layer.
            Some((weight_owner, id))
                if weight_owner == owner || is_weight_of(owner, weight_owner) =>
            {
                self.layers.push(FoundLayer {
                    path: weight_owner.join("."),
                    id: *id,
                    state: state.clone(),
                })
            }
            // A state that is not part of a layer has no weight and is ignored.
            _ => {}
        }
    }
}

/// Returns true if `path` is the path of the weight in the module at `owner`.
fn is_weight_of(path: &[String], owner: &[String]) -> bool {
    path.split_last()
        .is_some_and(|(last, parent)| last == "weight" && parent == owner)
}

/// Visitor of [`layers`]: tracks the path.
struct PathVisitor;

impl PathVisitor {
    fn with(update: impl FnOnce(&mut Traversal)) {
        TRAVERSAL.with_borrow_mut(|traversal| traversal.as_mut().map(update));
    }
}

impl ModuleVisitor for PathVisitor {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        Self::with(|traversal| traversal.path.push(name.into()));
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        Self::with(|traversal| {
            traversal.path.pop();
        });
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        Self::with(|traversal| {
            if let Some(("weight", owner)) = traversal
                .path
                .split_last()
                .map(|(last, owner)| (last.as_str(), owner))
            {
                traversal.weight = Some((owner.to_vec(), param.id));
            }
        });
    }
}

/// Returns every NVFP4 layer of `model`, in the order of its fields.
pub(crate) fn layers<M: Module>(model: &M) -> Vec<FoundLayer> {
    /// Ends the traversal also if a visitor panics.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            TRAVERSAL.set(None);
        }
    }
    TRAVERSAL.set(Some(Traversal::default()));
    let _end = End;
    model.visit(&mut PathVisitor);
    TRAVERSAL
        .take()
        .map(|traversal| traversal.layers)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> LayerState {
        LayerState::new(RngState {
            seed: 1,
            layer: 2,
            offset: 5,
            rht_signs: 3,
        })
        .unwrap()
    }

    /// Forks the state for the device with this index.
    fn fork(state: &LayerState, rank: u64) -> LayerState {
        LayerState {
            rank,
            ..state.clone()
        }
    }

    #[test]
    fn ranks_draw_from_disjoint_offsets() {
        let main = state();
        let (zero, one) = (fork(&main, 0), fork(&main, 1));
        let drawn = [&one, &zero, &one, &main, &one].map(|state| state.advance(false));
        let offsets = drawn.map(|rng_state| rng_state.offset);
        assert_eq!(offsets, [1 << 48 | 5, 5, 1 << 48 | 6, 6, 1 << 48 | 7]);
        assert!(drawn.iter().all(|one| one.rht_signs == 3 && one.layer == 2));
        assert_eq!(main.rng_state().offset, 7);
        assert_eq!(one.rng_state().offset, 8, "a count, without the rank");
        assert_eq!(main.furthest().offset, 8, "that of the other rank");

        let saved = main.rng_state();
        main.set_rng_state(saved).unwrap();
        assert_eq!(zero.advance(false).offset, 7);
        assert_eq!(
            one.advance(false).offset,
            1 << 48 | 7,
            "all ranks go on together"
        );
    }

    #[test]
    fn counts_end_before_the_rank() {
        let too_far = RngState {
            offset: RngState::OFFSET_LIMIT,
            ..state().rng_state()
        };
        let error = state().set_rng_state(too_far).unwrap_err().to_string();
        assert!(
            error.contains("`offset`") && error.contains("2^48"),
            "{error}"
        );
    }
}
