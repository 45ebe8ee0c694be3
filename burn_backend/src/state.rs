//! Where layers take their random bits from, and how that is saved with a model.
//!
//! Burn's module records hold tensors by path, and refuse entries that one side lacks. If a layer's
//! counter were such an entry, its checkpoints would no longer be those of `burn_nn::Linear`. So the
//! state of a layer shows nothing to Burn's visitors and mappers, and [`Nvfp4State`] travels beside
//! the record: collect it from the model when saving, apply it to the model after loading.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    Param, ParamId,
};
use burn_core::tensor::{Device, Tensor};
use nvfp4_kernels::Nvfp4Error;
use serde::{Deserialize, Serialize};

/// Role of a stream: the row-wise copy of the output's gradient, for dgrad.
pub(crate) const ROLE_DGRAD: u64 = 0;
/// Role of a stream: the column-wise copy of the output's gradient, for wgrad.
pub(crate) const ROLE_WGRAD: u64 = 1;
/// Bits of a stream id that name the role; the others name the layer.
const ROLE_BITS: u32 = 8;

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

    fn check(&self) -> Result<(), Nvfp4Error> {
        if self.layer < Self::LAYER_LIMIT {
            Ok(())
        } else {
            Err(Nvfp4Error::value(
                "layer",
                self.layer.to_string(),
                format!("less than {} (2^56)", Self::LAYER_LIMIT),
            ))
        }
    }
}

/// The state of one layer: its [`LayerRandomness`], and whether it stays in high precision.
///
/// Clones share it. A clone of a module is the same logical layer (a fork for another device, the
/// module that an optimizer step returns, `valid()`), and whichever of them runs forward, no offset
/// is drawn twice and none is lost. What threads draw concurrently is distinct, but which draws
/// first is not determined.
#[derive(Clone, Debug)]
pub struct LayerState {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    seed: AtomicU64,
    layer: AtomicU64,
    offset: AtomicU64,
    rht_signs: AtomicU16,
    high_precision: AtomicBool,
}

impl LayerState {
    /// A state that starts at `randomness`, in NVFP4.
    ///
    /// # Errors
    /// When the layer number is 2^56 or more.
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
                offset: offset.into(),
                rht_signs: rht_signs.into(),
                high_precision: false.into(),
            }),
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
            offset: shared.offset.load(Ordering::Relaxed),
            rht_signs: shared.rht_signs.load(Ordering::Relaxed),
        }
    }

    /// Draw from `randomness` next, in this layer and all its clones.
    ///
    /// # Errors
    /// When the layer number is 2^56 or more; the state is unchanged then.
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
        self.shared.offset.store(offset, Ordering::Relaxed);
        self.shared.rht_signs.store(rht_signs, Ordering::Relaxed);
        Ok(())
    }

    /// Take the current offset, and leave the next one for whoever comes after.
    pub(crate) fn advance(&self) -> LayerRandomness {
        let offset = self.shared.offset.fetch_add(1, Ordering::Relaxed);
        LayerRandomness {
            offset,
            ..self.randomness()
        }
    }

    /// Whether the layer computes in the type of its input in place of NVFP4.
    pub fn is_high_precision(&self) -> bool {
        self.shared.high_precision.load(Ordering::Relaxed)
    }

    pub(crate) fn set_high_precision(&self, high_precision: bool) {
        self.shared
            .high_precision
            .store(high_precision, Ordering::Relaxed);
    }
}

/// A module without parameters: Burn's traversals see nothing of it; [`Nvfp4State`] does.
impl Module for LayerState {
    fn visit<V: ModuleVisitor>(&self, _visitor: &mut V) {
        TRAVERSAL.with_borrow_mut(|traversal| {
            if let Some(traversal) = traversal {
                traversal.found(self);
            }
        });
    }

    fn map<M: ModuleMapper>(self, _mapper: &mut M) -> Self {
        self
    }

    fn to_device(self, _device: &Device) -> Self {
        self
    }

    fn fork(self, _device: &Device) -> Self {
        self
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn materialize(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn train(self) -> Self {
        self
    }
}

impl ModuleDisplayDefault for LayerState {
    fn content(&self, content: Content) -> Option<Content> {
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

impl ModuleDisplay for LayerState {}

thread_local! {
    /// The traversal of [`layers`] on this thread, while one is under way. A module's `visit` is
    /// generic over its visitor, so the state of a layer cannot hand itself to ours directly; it
    /// leaves itself here.
    static TRAVERSAL: RefCell<Option<Traversal>> = const { RefCell::new(None) };
}

/// One layer of a model, found by [`layers`].
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
}

impl Nvfp4State {
    /// The state of every NVFP4 layer of `model`.
    pub fn collect<M: Module>(model: &M) -> Self {
        let layers = layers(model)
            .into_iter()
            .map(|layer| (layer.path, layer.state.randomness()))
            .collect();
        Self { layers }
    }

    /// Put every layer of `model`, and all clones of them, into this state.
    ///
    /// # Errors
    /// When a layer of the model is missing here, or one named here is missing in the model;
    /// nothing has been changed then.
    pub fn apply<M: Module>(&self, model: &M) -> Result<(), Nvfp4Error> {
        let found = layers(model);
        let missing: Vec<&str> = found
            .iter()
            .map(|layer| layer.path.as_str())
            .filter(|path| !self.layers.contains_key(*path))
            .collect();
        let unused: Vec<&str> = self
            .layers
            .keys()
            .map(String::as_str)
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
        found
            .iter()
            .try_for_each(|layer| layer.state.set_randomness(self.layers[&layer.path]))
    }
}
