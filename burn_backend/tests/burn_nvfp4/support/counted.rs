//! The work that backends report, and the number of quantizations of a weight.

use std::sync::{Mutex, MutexGuard, Once};

use burn_core::module::Module;
use burn_core::tensor::Gradients;
use burn_nvfp4::ops::BackwardSource;
use burn_nvfp4::{LayerMode, Nvfp4Recipe, set_mode};
use burn_optim::{GradientsAccumulator, GradientsParams, SgdConfig};
use tracing::field::{Field, Visit};
use tracing::span;

/// One unit of work that a backend reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Work {
    pub op: String,
    pub usage: String,
    pub rows: u64,
    pub cols: u64,
}

impl Visit for Work {
    fn record_debug(&mut self, _field: &Field, _value: &dyn std::fmt::Debug) {}

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "op" => self.op = value.into(),
            "usage" => self.usage = value.into(),
            _ => {}
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "rows" => self.rows = value,
            "cols" => self.cols = value,
            _ => {}
        }
    }
}

/// Collects the work of the whole process: backends run on separate threads.
struct Collector;

static WORK: Mutex<Vec<Work>> = Mutex::new(Vec::new());

impl tracing::Subscriber for Collector {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "burn_nvfp4::ops"
    }

    fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

    fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut work = Work::default();
        event.record(&mut work);
        WORK.lock().unwrap().push(work);
    }

    fn enter(&self, _span: &span::Id) {}

    fn exit(&self, _span: &span::Id) {}
}

/// Starts to collect, for one test at a time.
pub fn collect() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    static ONCE: Once = Once::new();
    let alone = ALONE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    ONCE.call_once(|| {
        tracing::subscriber::set_global_default(Collector).expect("no other subscriber");
    });
    alone
}

/// Results of a forward and backward of a layer.
pub struct Step {
    pub output: Vec<f32>,
    /// Gradient of the weight.
    pub gradient: Vec<f32>,
    pub grads: Gradients,
}

/// Returns the work since the last call.
pub fn taken() -> Vec<Work> {
    std::mem::take(&mut *WORK.lock().unwrap())
}

/// Returns the number of times that a matrix of this size, or a stack of matrices, was quantized
/// since the last call.
pub fn quantized([rows, cols]: [usize; 2]) -> usize {
    let is_one = |work: &&Work| {
        work.op == "quantize" && [work.rows as usize, work.cols as usize] == [rows, cols]
    };
    taken().iter().filter(is_one).count()
}

/// Forwards of `valid()` quantize a weight once until it changes, no matter how often `valid()` is
/// called; training quantizes it separately. The results equal those without a cache. `weight` is
/// the size of the weight, `layer` creates a layer for a recipe, `forward` returns its output for a
/// batch, and `step` runs a step of training.
pub fn validation_quantizes_once<L: Module>(
    weight: [usize; 2],
    layer: impl Fn(Nvfp4Recipe) -> L,
    forward: impl Fn(&L, u64) -> Vec<f32>,
    step: impl Fn(&L, u64) -> Step,
) {
    let weights = || quantized(weight);
    for preset in ["nvidia", "quartet2", "fwd_nvfp4_bwd_bf16"] {
        let recipe = Nvfp4Recipe::preset(preset).unwrap();
        let mut kept = layer(recipe.clone());
        let mut plain = layer(recipe.with_cache_weights(false));
        plain = plain.load_record(kept.clone().into_record());
        let mut optimizers = [(); 2].map(|()| SgdConfig::new().init());
        let mut before = Vec::new();
        for turn in 0..3 {
            weights();
            for call in 0..2 {
                let (valid, expected) = (kept.valid(), plain.valid());
                for batch in 0..3 {
                    let found = forward(&valid, batch);
                    let is_first = call == 0 && batch == 0;
                    assert_eq!(
                        weights(),
                        usize::from(is_first),
                        "{preset}, {turn}, {batch}"
                    );
                    assert_eq!(
                        found,
                        forward(&expected, batch),
                        "{preset}, {turn}, {batch}"
                    );
                    assert_eq!(weights(), 1, "without the cache");
                    if is_first {
                        assert_ne!(found, before, "{preset}: the optimizer changed the weight");
                        before = found;
                    }
                }
            }
            // Only the layer holds its weight when an optimizer overwrites it.
            let [found, expected] = [&kept, &plain].map(|layer| step(layer, turn));
            assert_eq!(found.output, expected.output, "{preset}, {turn}");
            assert_eq!(found.gradient, expected.gradient, "{preset}, {turn}");
            assert_eq!(weights(), 2, "{preset}: training quantizes its own");
            let [own, other] = &mut optimizers;
            let grads = GradientsParams::from_grads(found.grads, &kept);
            kept = own.step(0.1, kept, grads);
            let grads = GradientsParams::from_grads(expected.grads, &plain);
            plain = other.step(0.1, plain, grads);
        }
        // A validation between a forward and its step: the step creates another weight.
        let grads = step(&kept, 7).grads;
        let valid = kept.valid();
        let old = forward(&valid, 0);
        let grads = GradientsParams::from_grads(grads, &kept);
        kept = SgdConfig::new().init().step(0.1, kept, grads);
        weights();
        assert_ne!(forward(&kept.valid(), 0), old, "{preset}");
        assert_eq!(weights(), 1, "{preset}: the weight has changed");
        assert_eq!(forward(&valid, 0), old, "{preset}: the other has stayed");
        // A loaded weight is another weight, and another mode needs other operands.
        let loaded = valid.load_record(plain.valid().into_record());
        let expected = forward(&plain.valid(), 0);
        assert_eq!(
            forward(&loaded, 0),
            expected,
            "{preset}: a record was loaded"
        );
        weights();
        set_mode(&loaded, LayerMode::HighPrecision);
        assert_ne!(forward(&loaded, 0), expected, "{preset}");
        assert_eq!(weights(), 0, "{preset}: in high precision");
    }
}

/// The micro-batches of gradient accumulation quantize a weight once; a changed weight, another
/// mode or a recipe without caching quantizes it again. The results are the same either way.
/// `weight` is the size of the weight, `layer` creates a layer with number 5 for a recipe, and
/// `step` runs a step of one on a batch.
pub fn is_quantized_once_until_it_changes<L: Module>(
    weight: [usize; 2],
    layer: impl Fn(Nvfp4Recipe) -> L,
    step: impl Fn(&L, u64) -> Step,
) {
    let weights = || quantized(weight);
    let both = |recipe: Nvfp4Recipe| {
        let cached = layer(recipe.clone());
        let plain = layer(recipe.with_cache_weights(false));
        let plain = plain.load_record(cached.clone().into_record());
        (cached, plain)
    };
    let (cached, plain) = both(Nvfp4Recipe::new());
    weights();
    for batch in 0..3 {
        let found = step(&cached, batch);
        assert_eq!(weights(), usize::from(batch == 0), "batch {batch}");
        let expected = step(&plain, batch);
        assert_eq!(weights(), 1, "without the cache");
        assert_eq!(found.output, expected.output);
        assert_eq!(found.gradient, expected.gradient);
    }
    // A clone is the same layer with the same weight.
    step(&cached.clone(), 3);
    assert_eq!(weights(), 0);
    let grads = step(&cached, 4).grads;
    weights();
    let grads = GradientsParams::from_grads(grads, &cached);
    let before = cached.clone();
    let cached = SgdConfig::new().init().step(0.1, cached, grads);
    let changed = step(&cached, 4);
    assert_eq!(weights(), 1, "the optimizer changed the weight");
    let old = step(&before, 4);
    assert_eq!(
        weights(),
        1,
        "its predecessor was dropped, and is another weight"
    );
    assert_ne!(changed.output, old.output);
    let loaded = cached.clone().load_record(plain.clone().into_record());
    assert_eq!(step(&loaded, 4).output, old.output, "what was loaded");
    assert_eq!(weights(), 1, "a record was loaded");
    // Two models with the same ids, which share the cache, alternately.
    for _ in 0..2 {
        assert_eq!(step(&cached, 4).output, changed.output);
        assert_eq!(step(&loaded, 4).output, old.output);
    }
    assert_eq!(weights(), 4);
    let fork = loaded.fork(&cached.devices()[0]);
    assert_eq!(step(&fork, 4).output, old.output, "a fork");
    assert_eq!(step(&cached, 4).output, changed.output);
    weights();
    // Another mode needs other operands, or none.
    step(&cached, 5);
    weights();
    set_mode(&cached, LayerMode::HighPrecision);
    step(&cached, 5);
    assert_eq!(weights(), 0);
    set_mode(&cached, LayerMode::Recipe);
    step(&cached, 5);
    assert_eq!(weights(), 1);

    // Steps of two micro-batches. Only the layer holds its weight, so an optimizer may overwrite
    // it.
    let (mut cached, mut plain) = both(Nvfp4Recipe::new());
    let mut optimizers = [(); 2].map(|()| SgdConfig::new().init());
    for turn in 0..3 {
        let mut accumulators = [(); 2].map(|()| GradientsAccumulator::new());
        weights();
        for batch in 0..2 {
            let [found, expected] = [&cached, &plain].map(|layer| step(layer, 2 * turn + batch));
            assert_eq!(found.output, expected.output, "step {turn}");
            assert_eq!(found.gradient, expected.gradient, "step {turn}");
            let layers = [&cached, &plain].into_iter().zip([found, expected]);
            for ((layer, step), all) in layers.zip(&mut accumulators) {
                all.accumulate(layer, GradientsParams::from_grads(step.grads, layer));
            }
        }
        assert_eq!(weights(), 1 + 2, "step {turn}: kept, and not");
        let [own, other] = &mut optimizers;
        let [own_grads, other_grads] = accumulators.map(|mut all| all.grads());
        cached = own.step(0.1, cached, own_grads);
        plain = other.step(0.1, plain, other_grads);
    }

    // Operands with random draws for the backward are quantized again, and others are cached: the
    // results reveal neither.
    for preset in ["quartet2", "per_token", "fwd_nvfp4_bwd_mxfp8"] {
        let (cached, plain) = both(Nvfp4Recipe::preset(preset).unwrap());
        weights();
        for batch in 0..2 {
            let found = step(&cached, batch);
            assert_eq!(
                weights(),
                usize::from(batch == 0),
                "{preset}, batch {batch}"
            );
            let expected = step(&plain, batch);
            assert_eq!(weights(), 1, "{preset}, without the cache");
            assert_eq!(found.output, expected.output, "{preset}");
            assert_eq!(found.gradient, expected.gradient, "{preset}");
        }
    }

    // By MS-EDEN of the weight itself, as in no preset: the cached operand is not used for it.
    let mut recipe = Nvfp4Recipe::quartet2();
    recipe.source = BackwardSource::Original;
    let (cached, plain) = both(recipe);
    weights();
    for batch in 0..2 {
        let found = step(&cached, batch);
        assert_eq!(weights(), usize::from(batch == 0), "originals, {batch}");
        let expected = step(&plain, batch);
        assert_eq!(weights(), 1, "originals, without the cache");
        assert_eq!(found.output, expected.output, "originals");
        assert_eq!(found.gradient, expected.gradient, "originals");
    }
}
