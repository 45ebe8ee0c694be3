//! Where layers take their random bits from, and how that is saved with a model.
//!
//! Burn's module records hold tensors by path, and refuse entries that one side lacks. If a layer's
//! counter were such an entry, its checkpoints would no longer be those of `burn_nn::Linear`. So the
//! state of a layer shows nothing to Burn's visitors and mappers, and [`Nvfp4State`] travels beside
//! the record: collect it from the model when saving, apply it to the model after loading.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use burn_core as burn;

use burn_core::backend::DeviceOps;
use burn_core::config::Config;
use burn_core::module::{Content, Module, ModuleVisitor, Param, ParamId};
use burn_core::tensor::{Device, Tensor};
use nvfp4_kernels::Nvfp4Error;
use serde::{Deserialize, Serialize};

use crate::ops::{KeptWeight, LinearContext, LinearSpec, WeightCache, WeightIdentity};
use crate::parameterless::{Parameterless, parameterless_module};
use crate::recipe::{LayerMode, Nvfp4Recipe};
use crate::telemetry::Probe;

/// Role of a stream: the row-wise copy of the output's gradient, for dgrad.
pub(crate) const ROLE_DGRAD: u64 = 0;
/// Role of a stream: the column-wise copy of the output's gradient, for wgrad.
pub(crate) const ROLE_WGRAD: u64 = 1;
/// Role of a stream: the weight in dgrad.
pub(crate) const ROLE_DGRAD_W: u64 = 2;
/// Role of a stream: the input in wgrad.
pub(crate) const ROLE_WGRAD_X: u64 = 3;
/// Role of a stream: the signs of MS-EDEN's transform in dgrad.
pub(crate) const ROLE_DGRAD_SIGNS: u64 = 4;
/// Role of a stream: the signs of MS-EDEN's transform in wgrad.
pub(crate) const ROLE_WGRAD_SIGNS: u64 = 5;
/// Role of a stream: the input in fprop.
pub(crate) const ROLE_FPROP_X: u64 = 6;
/// Role of a stream: the weight in fprop.
pub(crate) const ROLE_FPROP_W: u64 = 7;
/// Bits of a stream id that name the role; the others name the layer.
const ROLE_BITS: u32 = 8;

/// Position of the rank in an offset; the count of forwards is below.
const RANK_SHIFT: u32 = 48;

/// The stream of `role` in layer number `layer`.
pub(crate) fn stream(layer: u64, role: u64) -> u64 {
    layer << ROLE_BITS | role
}

/// Everything that decides the random bits of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRandomness {
    /// Seed of the run.
    pub seed: u64,
    /// Number of the layer, less than 2^56: layers with different numbers never share bits.
    pub layer: u64,
    /// Training forwards so far. Each one draws at its own offset, and its backward uses the same.
    pub offset: u64,
    /// Signs of the Hadamard transform: bit `i` set negates element `i`.
    pub rht_signs: u16,
}

impl LayerRandomness {
    /// Layer numbers end here.
    pub const LAYER_LIMIT: u64 = 1 << (64 - ROLE_BITS);

    /// Counts of forwards end here: the bits above tell the devices of a data-parallel run apart.
    pub const OFFSET_LIMIT: u64 = 1 << RANK_SHIFT;

    fn check(&self) -> Result<(), Nvfp4Error> {
        if self.layer >= Self::LAYER_LIMIT {
            return Err(Nvfp4Error::value(
                "layer",
                self.layer.to_string(),
                format!("less than {} (2^56)", Self::LAYER_LIMIT),
            ));
        }
        if self.offset >= Self::OFFSET_LIMIT {
            return Err(Nvfp4Error::value(
                "offset",
                self.offset.to_string(),
                format!("less than {} (2^48)", Self::OFFSET_LIMIT),
            ));
        }
        Ok(())
    }
}

/// The state of one layer: its [`LayerRandomness`], whether it stays in high precision, its
/// [`LayerMode`], and what it keeps of its packed weight.
///
/// Clones share it. A clone of a module is the same logical layer (a fork for another device, the
/// module that an optimizer step returns, `valid()`), and whichever of them runs forward, no offset
/// is drawn twice and none is lost.
///
/// # Several devices
///
/// `Module::fork` to a device, as data-parallel training does for each of its workers, gives a clone
/// that counts its forwards apart and draws other bits than the forks for other devices: those at
/// offset `rank << 48 | count`, `rank` being the index of the device. So what every worker draws is
/// determined, however their threads run. The signs of the Hadamard transform are the same on all.
/// Forks to one device, and clones, share one count; a module that was never forked has rank 0.
/// [`Nvfp4State`] saves the count of the module it is given; applied to a module, it is where all
/// ranks go on, since data-parallel workers take their steps together.
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
    weights: WeightCache,
    probe: Mutex<Option<Probe>>,
    offsets: Mutex<Offsets>,
}

/// The counts of forwards, by rank.
#[derive(Debug)]
struct Offsets {
    /// Where ranks begin that have not drawn yet.
    start: u64,
    next: BTreeMap<u64, u64>,
}

impl Offsets {
    fn starting_at(start: u64) -> Self {
        Self {
            start,
            next: BTreeMap::new(),
        }
    }

    fn of(&self, rank: u64) -> u64 {
        self.next.get(&rank).copied().unwrap_or(self.start)
    }
}

impl LayerState {
    /// A state that starts at `randomness`, in NVFP4.
    ///
    /// # Errors
    /// When the layer number is 2^56 or more, or the offset 2^48 or more.
    pub fn new(randomness: LayerRandomness) -> Result<Self, Nvfp4Error> {
        randomness.check()?;
        let LayerRandomness {
            seed,
            layer,
            offset,
            rht_signs,
        } = randomness;
        Ok(Self {
            shared: Arc::new(Shared {
                seed: seed.into(),
                layer: layer.into(),
                rht_signs: rht_signs.into(),
                high_precision: false.into(),
                mode: Mutex::default(),
                weights: WeightCache::default(),
                probe: Mutex::default(),
                offsets: Mutex::new(Offsets::starting_at(offset)),
            }),
            rank: 0,
        })
    }

    /// The state of a new layer with `recipe`: number `layer`, or the next one of the process.
    ///
    /// # Errors
    /// When the layer number is 2^56 or more.
    pub(crate) fn for_recipe(recipe: &Nvfp4Recipe, layer: Option<u64>) -> Result<Self, Nvfp4Error> {
        Self::new(LayerRandomness {
            seed: recipe.seed,
            layer: layer.unwrap_or_else(Self::next_layer),
            offset: 0,
            rht_signs: recipe.rht_signs,
        })
    }

    /// The next number that no layer of this process was built with.
    pub(crate) fn next_layer() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Where the next training forward draws from.
    pub fn randomness(&self) -> LayerRandomness {
        let shared = &self.shared;
        LayerRandomness {
            seed: shared.seed.load(Ordering::Relaxed),
            layer: shared.layer.load(Ordering::Relaxed),
            offset: self.offsets().of(self.rank),
            rht_signs: shared.rht_signs.load(Ordering::Relaxed),
        }
    }

    /// Where the rank that has drawn most draws from next. (Ranks take their steps together.)
    #[cfg(any(feature = "train", test))]
    fn furthest(&self) -> LayerRandomness {
        let offset = {
            let offsets = self.offsets();
            let counts = offsets.next.values().copied();
            counts.max().unwrap_or(offsets.start)
        };
        LayerRandomness {
            offset,
            ..self.randomness()
        }
    }

    /// Draw from `randomness` next, in this layer, all its clones and forks.
    ///
    /// # Errors
    /// When the layer number is 2^56 or more, or the offset 2^48 or more; the state is unchanged then.
    pub fn set_randomness(&self, randomness: LayerRandomness) -> Result<(), Nvfp4Error> {
        randomness.check()?;
        let LayerRandomness {
            seed,
            layer,
            offset,
            rht_signs,
        } = randomness;
        self.shared.seed.store(seed, Ordering::Relaxed);
        self.shared.layer.store(layer, Ordering::Relaxed);
        self.shared.rht_signs.store(rht_signs, Ordering::Relaxed);
        *self.offsets() = Offsets::starting_at(offset);
        Ok(())
    }

    /// Take the current offset of the rank, and leave the next one for whoever comes after. The
    /// rank is in the result's offset.
    pub(crate) fn advance(&self) -> LayerRandomness {
        let count = {
            let mut offsets = self.offsets();
            let count = offsets.of(self.rank);
            offsets.next.insert(self.rank, count + 1);
            count
        };
        LayerRandomness {
            offset: self.rank << RANK_SHIFT | count,
            ..self.randomness()
        }
    }

    fn offsets(&self) -> MutexGuard<'_, Offsets> {
        self.shared
            .offsets
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whether the layer computes in the type of its input in place of NVFP4.
    pub fn is_high_precision(&self) -> bool {
        self.shared.high_precision.load(Ordering::Relaxed)
    }

    pub(crate) fn set_high_precision(&self, high_precision: bool) {
        self.shared
            .high_precision
            .store(high_precision, Ordering::Relaxed);
        self.shared.weights.clear();
    }

    /// What the layer does with its recipe.
    pub fn mode(&self) -> LayerMode {
        match self.is_high_precision() {
            true => LayerMode::HighPrecision,
            false => self.asked_mode(),
        }
    }

    /// What was last asked of the layer, whether or not it stays in high precision.
    fn asked_mode(&self) -> LayerMode {
        *self.shared.mode.lock().expect("no panic while it is held")
    }

    pub(crate) fn set_mode(&self, mode: LayerMode) {
        let mut current = self.shared.mode.lock().expect("no panic while it is held");
        if *current != mode {
            *current = mode;
            self.shared.weights.clear();
        }
    }

    /// What the layer's next forward with the weight `weight` computes by `recipe`, and what it brings
    /// along. If it `draws`, being a training forward, it takes the current offset.
    pub(crate) fn for_forward(
        &self,
        recipe: &Nvfp4Recipe,
        weight: Option<WeightIdentity>,
        draws: bool,
    ) -> (LinearSpec, LinearContext) {
        let mode = self.mode();
        let randomness = if draws && mode != LayerMode::HighPrecision {
            self.advance()
        } else {
            self.randomness()
        };
        let context = LinearContext {
            weight: weight
                .filter(|_| recipe.cache_weights)
                .map(|identity| KeptWeight {
                    cache: self.shared.weights.clone(),
                    identity,
                }),
            probe: self.probe(),
            form: None,
        };
        (mode.of(recipe.spec(&randomness)), context)
    }

    /// Where the layer leaves what it sees of its operands, while someone looks.
    pub(crate) fn probe(&self) -> Option<Probe> {
        let probe = self.shared.probe.lock().expect("no panic while it is held");
        probe.clone()
    }

    pub(crate) fn set_probe(&self, probe: Option<Probe>) {
        *self.shared.probe.lock().expect("no panic while it is held") = probe;
    }
}

/// Burn's traversals see nothing of it; [`Nvfp4State`] does.
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
        let LayerRandomness {
            seed,
            layer,
            offset,
            rht_signs,
        } = self.randomness();
        let text = format!(
            "LayerState {{seed: {seed}, layer: {layer}, offset: {offset}, rht_signs: {rht_signs:#06x}, \
             high_precision: {}}}",
            self.is_high_precision()
        );
        content.add_formatted(&text).optional()
    }
}

parameterless_module!(LayerState);

thread_local! {
    /// The traversal of [`layers`] on this thread, while one is under way. A module's `visit` is
    /// generic over its visitor, so the state of a layer cannot hand itself to ours directly; it
    /// leaves itself here.
    static TRAVERSAL: RefCell<Option<Traversal>> = const { RefCell::new(None) };
}

/// One layer of a model, found by [`layers`].
#[derive(Debug)]
pub(crate) struct FoundLayer {
    /// Path of the layer in the model, `""` for the model itself.
    pub path: String,
    /// Id of its weight.
    pub id: ParamId,
    /// Its state.
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
    /// The last parameter called `weight`, with the path of its owner: a layer's weight is visited
    /// before its state.
    weight: Option<(Vec<String>, ParamId)>,
    layers: Vec<FoundLayer>,
}

impl Traversal {
    fn found(&mut self, state: &LayerState) {
        let owner = &self.path[..self.path.len().saturating_sub(1)];
        match &self.weight {
            // A layer's state stands beside its weight, that of a decorated one below it.
            Some((weight_owner, id))
                if weight_owner == owner || is_weight_of(owner, weight_owner) =>
            {
                self.layers.push(FoundLayer {
                    path: weight_owner.join("."),
                    id: *id,
                    state: state.clone(),
                })
            }
            // A state that is not part of a layer has no weight, and no say.
            _ => {}
        }
    }
}

/// Whether `path` is that of the weight in the module at `owner`.
fn is_weight_of(path: &[String], owner: &[String]) -> bool {
    path.split_last()
        .is_some_and(|(last, parent)| last == "weight" && parent == owner)
}

/// The visitor of [`layers`]: keeps the path.
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

/// Every NVFP4 layer of `model`, in the order of its fields.
pub(crate) fn layers<M: Module>(model: &M) -> Vec<FoundLayer> {
    /// Ends the traversal also when a visitor panics.
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

/// Number the NVFP4 layers of `model` 0, 1, 2, … in the order of its fields.
///
/// A layer that was built without a number got the next one of the process, which depends on what
/// else the process has built. After this call the numbers depend on the model alone.
pub fn number_layers<M: Module>(model: &M) {
    for (number, layer) in (0..).zip(layers(model)) {
        let randomness = LayerRandomness {
            layer: number,
            ..layer.state.randomness()
        };
        layer
            .state
            .set_randomness(randomness)
            .expect("a model has less than 2^56 layers");
    }
}

/// What the NVFP4 layers of a model draw their random bits from, by the path of the layer.
///
/// Save it beside the model's record and apply it to the loaded model: the resumed run then draws
/// exactly the bits that the uninterrupted one would have. It is a Burn [`Config`], so it has a JSON
/// file of its own; serde puts it into any other.
///
/// ```no_run
/// use burn_core::config::Config;
/// # use burn_core::{module::Module, tensor::Device};
/// # use burn_nvfp4::{Nvfp4Linear, Nvfp4State};
/// # fn save_and_load(model: Nvfp4Linear, fresh: Nvfp4Linear) -> Result<(), Box<dyn std::error::Error>> {
/// Nvfp4State::collect(&model).save("model.nvfp4.json")?;
/// model.save_file("model.bpk")?;
/// // In another process:
/// let model = fresh.load_file("model.bpk");
/// Nvfp4State::load("model.nvfp4.json")?.apply(&model)?;
/// # Ok(())
/// # }
/// ```
#[derive(Config, Debug, Default, PartialEq, Eq)]
pub struct Nvfp4State {
    /// The layers' states, by path (`""` for a model that is itself a layer).
    pub layers: BTreeMap<String, LayerRandomness>,
    /// The modes of the layers that do not follow their recipe, by path.
    #[config(default = "BTreeMap::new()")]
    pub modes: BTreeMap<String, LayerMode>,
}

impl Nvfp4State {
    /// The state of every NVFP4 layer of `model`.
    pub fn collect<M: Module>(model: &M) -> Self {
        Self::of_ranks(&layers(model), LayerState::randomness)
    }

    /// The state of `layers`, on the rank that has come furthest: forks count for themselves, and who
    /// holds the layers need not be the one that trains.
    #[cfg(feature = "train")]
    pub(crate) fn of(layers: &[FoundLayer]) -> Self {
        Self::of_ranks(layers, LayerState::furthest)
    }

    fn of_ranks(found: &[FoundLayer], randomness: impl Fn(&LayerState) -> LayerRandomness) -> Self {
        let modes = found
            .iter()
            .map(|layer| (layer.path.clone(), layer.state.asked_mode()))
            .filter(|(_, mode)| *mode != LayerMode::Recipe)
            .collect();
        let layers = found
            .iter()
            .map(|layer| (layer.path.clone(), randomness(&layer.state)))
            .collect();
        Self { layers, modes }
    }

    /// Put every layer of `model`, and all clones of them, into this state.
    ///
    /// # Errors
    /// When a layer of the model is missing here, or one named here is missing in the model;
    /// nothing has been changed then.
    pub fn apply<M: Module>(&self, model: &M) -> Result<(), Nvfp4Error> {
        self.apply_to(&layers(model))
    }

    /// Put `found`, the layers of a model, into this state.
    pub(crate) fn apply_to(&self, found: &[FoundLayer]) -> Result<(), Nvfp4Error> {
        let missing: Vec<&str> = found
            .iter()
            .map(|layer| layer.path.as_str())
            .filter(|path| !self.layers.contains_key(*path))
            .collect();
        let unused: Vec<&str> = self
            .layers
            .keys()
            .map(String::as_str)
            .chain(self.modes.keys().map(String::as_str))
            .filter(|path| !found.iter().any(|layer| layer.path == *path))
            .collect();
        if !missing.is_empty() || !unused.is_empty() {
            return Err(Nvfp4Error::value(
                "state",
                format!("layers missing: {missing:?}, layers that the model lacks: {unused:?}"),
                "exactly the NVFP4 layers of the model",
            ));
        }
        self.layers.values().try_for_each(LayerRandomness::check)?;
        for layer in found {
            layer.state.set_randomness(self.layers[&layer.path])?;
            let mode = self.modes.get(&layer.path).copied();
            layer.state.set_mode(mode.unwrap_or_default());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> LayerState {
        LayerState::new(LayerRandomness {
            seed: 1,
            layer: 2,
            offset: 5,
            rht_signs: 3,
        })
        .unwrap()
    }

    /// A fork for the device with this index.
    fn fork(state: &LayerState, rank: u64) -> LayerState {
        LayerState {
            rank,
            ..state.clone()
        }
    }

    #[test]
    fn ranks_count_apart_and_never_meet() {
        let main = state();
        let (zero, one) = (fork(&main, 0), fork(&main, 1));
        let drawn = [&one, &zero, &one, &main, &one].map(|state| state.advance());
        let offsets = drawn.map(|randomness| randomness.offset);
        assert_eq!(offsets, [1 << 48 | 5, 5, 1 << 48 | 6, 6, 1 << 48 | 7]);
        assert!(drawn.iter().all(|one| one.rht_signs == 3 && one.layer == 2));
        assert_eq!(main.randomness().offset, 7);
        assert_eq!(one.randomness().offset, 8, "a count, without the rank");
        assert_eq!(main.furthest().offset, 8, "that of the other rank");

        let saved = main.randomness();
        main.set_randomness(saved).unwrap();
        assert_eq!(zero.advance().offset, 7);
        assert_eq!(
            one.advance().offset,
            1 << 48 | 7,
            "all ranks go on together"
        );
    }

    #[test]
    fn counts_end_before_the_rank() {
        let too_far = LayerRandomness {
            offset: LayerRandomness::OFFSET_LIMIT,
            ..state().randomness()
        };
        let error = state().set_randomness(too_far).unwrap_err().to_string();
        assert!(
            error.contains("`offset`") && error.contains("2^48"),
            "{error}"
        );
    }
}
