//! What is computed, and what is kept: nothing that no gradient asks for.

use std::sync::{Mutex, MutexGuard, Once};

use burn_core::module::Module;
use burn_core::tensor::{DType, Gradients, Int, Tensor, TensorData};
use burn_nvfp4::functions::linear;
use burn_nvfp4::ops::LinearSpec;
use burn_nvfp4::{
    ExpertOffsets, LayerMode, Nvfp4GroupedLinearConfig, Nvfp4LinearConfig, Nvfp4Recipe, set_mode,
};
use burn_optim::{GradientsParams, SgdConfig};
use tracing::field::{Field, Visit};
use tracing::span;

use crate::common::{Matrix, device, flex_only, one_by_16, skip_where_small_only, spec, values};

/// One unit of work that a backend reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Work {
    op: String,
    copy: String,
    rows: u64,
    cols: u64,
}

impl Visit for Work {
    fn record_debug(&mut self, _field: &Field, _value: &dyn std::fmt::Debug) {}

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "op" => self.op = value.into(),
            "copy" => self.copy = value.into(),
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

/// Collects the work of the whole process: backends run on threads of their own.
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

/// Start to collect, for one test at a time.
fn collect() -> MutexGuard<'static, ()> {
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

/// Sizes that no other test uses, by which this test tells its own work from that of others.
const ROWS: usize = 21;
const D_IN: usize = 112;
const D_OUT: usize = 208;

/// The work of one forward and backward with the given tracking, as `op copy` of its operands.
fn work(x_grad: bool, w_grad: bool, bias_grad: bool, spec: LinearSpec) -> Vec<String> {
    let device = device().autodiff();
    let x = Matrix::gaussian(ROWS, D_IN, DType::F32, 1)
        .tensor(&device)
        .set_require_grad(x_grad);
    let w = Matrix::gaussian(D_IN, D_OUT, DType::F32, 2)
        .tensor(&device)
        .set_require_grad(w_grad);
    let bias = Tensor::<1>::zeros([D_OUT], &device).set_require_grad(bias_grad);
    WORK.lock().unwrap().clear();
    let y = linear(x.clone(), w.clone(), Some(bias.clone()), spec);
    if y.is_tracked() {
        let output = y.clone().inner();
        let grads = y.sum().backward();
        assert_eq!(x.grad(&grads).is_some(), x_grad);
        assert_eq!(w.grad(&grads).is_some(), w_grad);
        assert_eq!(bias.grad(&grads).is_some(), bias_grad);
        // Deferred work runs when it is read.
        output.into_data();
        x.grad(&grads).map(|grad| grad.into_data());
        w.grad(&grads).map(|grad| grad.into_data());
    } else {
        y.into_data();
    }
    let name = |rows: u64, cols: u64| match (rows as usize, cols as usize) {
        (ROWS, D_IN) => Some("x"),
        (D_IN, D_OUT) => Some("w"),
        (ROWS, D_OUT) => Some("y"),
        _ => None,
    };
    let mut found: Vec<String> = WORK
        .lock()
        .unwrap()
        .iter()
        .filter_map(|work| {
            name(work.rows, work.cols).map(|name| format!("{} {name} {}", work.op, work.copy))
        })
        .map(|text| text.trim().to_string())
        .collect();
    found.sort();
    found
}

#[test]
fn a_gradient_that_nobody_asks_for_costs_nothing() {
    skip_where_small_only!();
    let _alone = collect();
    let tiles = spec(0, 0);
    let blocks = one_by_16(tiles);

    let all = [
        "matmul w",
        "matmul x",
        "matmul y",
        "quantize w pair",
        "quantize x pair",
        "quantize y pair",
    ];
    assert_eq!(work(true, true, true, tiles), all, "everything is wanted");
    assert_eq!(
        work(true, true, false, blocks),
        all,
        "everything is wanted, without tiles"
    );

    // A frozen weight: no column-wise copy of x or dy, no wgrad.
    let frozen = [
        "matmul x",
        "matmul y",
        "quantize w pair",
        "quantize x row",
        "quantize y row",
    ];
    assert_eq!(work(true, false, false, tiles), frozen);
    assert_eq!(work(true, false, true, blocks), frozen);

    // A constant input: no row-wise copy of dy, no dgrad; and without tiles none of w either.
    let constant = [
        "matmul w",
        "matmul y",
        "quantize w pair",
        "quantize x pair",
        "quantize y col",
    ];
    assert_eq!(work(false, true, true, tiles), constant);
    let constant = [
        "matmul w",
        "matmul y",
        "quantize w col",
        "quantize x pair",
        "quantize y col",
    ];
    assert_eq!(work(false, true, false, blocks), constant);

    // Only the bias: its gradient is a sum.
    let forward = ["matmul y", "quantize w col", "quantize x row"];
    assert_eq!(work(false, false, true, blocks), forward);
    assert_eq!(work(false, false, false, blocks), forward);
}

/// What a forward and backward of a layer gave.
struct Step {
    output: Vec<f32>,
    /// The gradient of the weight.
    gradient: Vec<f32>,
    grads: Gradients,
}

/// How often a matrix, or a stack of them one below the other, of this size was quantized since the last
/// call.
fn quantized([rows, cols]: [usize; 2]) -> usize {
    let is_one = |work: &&Work| {
        work.op == "quantize" && [work.rows as usize, work.cols as usize] == [rows, cols]
    };
    let mut all = WORK.lock().unwrap();
    let count = all.iter().filter(is_one).count();
    all.clear();
    count
}

/// The micro-batches of gradient accumulation quantize a weight once; a changed weight, another mode or
/// a recipe that says so, again. The results are the same either way. `weight` is the size of the weight,
/// `layer` a layer number 5 for a recipe, `step` a step of one on a batch.
fn is_quantized_once_until_it_changes<L: Module>(
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
    // Without autodiff there is no tensor to know the weight by.
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
    // Another mode needs other operands, or none.
    step(&cached, 5);
    weights();
    set_mode(&cached, LayerMode::HighPrecision);
    step(&cached, 5);
    assert_eq!(weights(), 0);
    set_mode(&cached, LayerMode::Recipe);
    step(&cached, 5);
    assert_eq!(weights(), 1);

    // What is drawn for the backward is drawn afresh, and what is not is kept: results show neither.
    for preset in ["quartet2", "per_token", "fwd_nvfp4_bwd_mxfp8"] {
        let (cached, plain) = both(Nvfp4Recipe::preset(preset).unwrap());
        for batch in 0..2 {
            let [found, expected] = [&cached, &plain].map(|layer| step(layer, batch));
            assert_eq!(found.output, expected.output, "{preset}");
            assert_eq!(found.gradient, expected.gradient, "{preset}");
        }
    }
}

#[test]
fn a_weight_is_quantized_once_until_it_changes() {
    let _alone = collect();
    const WIDTHS: [usize; 2] = [80, 176];
    let device = device().autodiff();
    is_quantized_once_until_it_changes(
        WIDTHS,
        |recipe| {
            let config = Nvfp4LinearConfig::new(WIDTHS[0], WIDTHS[1]).with_recipe(recipe);
            config.with_layer(Some(5)).init(&device)
        },
        |layer, batch| {
            let x = Matrix::gaussian(24, WIDTHS[0], DType::F32, batch).tensor(&device);
            let y = layer.forward(x.require_grad());
            let output = values(y.clone().inner());
            let grads = y.square().sum().backward();
            Step {
                output,
                gradient: values(layer.weight.grad(&grads).unwrap()),
                grads,
            }
        },
    );
}

/// All experts' weights together; one of the experts has no tokens.
#[test]
fn experts_are_quantized_once_until_they_change() {
    let _alone = collect();
    const SIZES: [usize; 3] = [3, 48, 112];
    let [experts, d_in, d_out] = SIZES;
    let device = device().autodiff();
    let counts = Tensor::<1, Int>::from_data(TensorData::from([9i64, 0, 14]), &device);
    let groups = ExpertOffsets::from_counts(counts, 24);
    is_quantized_once_until_it_changes(
        [experts * d_in, d_out],
        |recipe| {
            let config = Nvfp4GroupedLinearConfig::new(experts, d_in, d_out).with_recipe(recipe);
            config.with_layer(Some(5)).init(&device)
        },
        |layer, batch| {
            let x = Matrix::gaussian(24, d_in, DType::F32, batch).tensor(&device);
            let y = layer.forward(x.require_grad(), &groups);
            let output = values(y.clone().inner());
            let grads = y.square().sum().backward();
            Step {
                output,
                gradient: values(layer.weight.grad(&grads).unwrap()),
                grads,
            }
        },
    );
}

/// A kept weight belongs to the type of the activations too: operands in high precision have it.
#[test]
fn a_kept_weight_has_the_type_of_the_activations() {
    use burn_core::module::Module;
    use burn_nvfp4::{Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe};

    flex_only!();
    let device = device().autodiff();
    let recipe = Nvfp4Recipe::preset("fwd_nvfp4_bwd_bf16").unwrap();
    let layer = Nvfp4LinearConfig::new(32, 48)
        .with_recipe(recipe)
        .init(&device);
    let gradient_of = |layer: &Nvfp4Linear, dtype| {
        let x = Matrix::gaussian(24, 32, DType::F32, 9);
        let x = Matrix::new(x.values, 24, 32, dtype)
            .tensor(&device)
            .require_grad();
        let grads = layer.forward(x.clone()).square().sum().backward();
        crate::common::values(x.grad(&grads).unwrap())
    };
    let gradient = |dtype| gradient_of(&layer, dtype);
    let first = gradient(DType::BF16);
    let other = gradient(DType::F32);
    assert_eq!(gradient(DType::BF16), first);
    // Without a cache there is nothing to mistake.
    let uncached = Nvfp4Recipe::preset("fwd_nvfp4_bwd_bf16").unwrap();
    let uncached = uncached.with_cache_weights(false);
    let fresh = Nvfp4LinearConfig::new(32, 48).with_recipe(uncached);
    let fresh = fresh.init(&device).load_record(layer.clone().into_record());
    assert_eq!(gradient_of(&fresh, DType::F32), other);
    assert_eq!(gradient_of(&fresh, DType::BF16), first);
}

/// After the forward nothing holds the buffers of `x` and `w` but this test: what waits for the
/// backward is packed.
#[cfg(feature = "flex")]
#[test]
fn only_packed_operands_wait_for_the_backward() {
    use std::sync::Arc;

    use burn_flex::{Flex, FlexTensor};

    flex_only!();
    let device = burn_core::tensor::Device::flex();
    let leaf = |rows, cols| {
        let tensor = Matrix::gaussian(rows, cols, DType::F32, 3).tensor(&device);
        let primitive: FlexTensor = tensor.try_into_primitive::<Flex>().unwrap();
        let buffer = primitive.data_arc();
        (
            Tensor::<2>::from_primitive::<Flex>(primitive)
                .autodiff()
                .require_grad(),
            buffer,
        )
    };
    type Product = fn(Tensor<2>, Tensor<2>) -> Tensor<2>;
    let held = |product: Product| {
        let ((x, x_buffer), (w, w_buffer)) = (leaf(32, 64), leaf(64, 48));
        let y = product(x, w);
        assert!(y.is_tracked());
        let counts = [Arc::strong_count(&x_buffer), Arc::strong_count(&w_buffer)];
        drop(y);
        counts.map(|count| count - 1)
    };
    assert_eq!(held(|x, w| linear(x, w, None, spec(0, 0))), [0, 0]);
    assert_eq!(
        held(|x, w| x.matmul(w)),
        [1, 1],
        "what a plain product keeps"
    );
}
