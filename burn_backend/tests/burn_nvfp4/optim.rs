//! The optimizers on a module with parameters of several dtypes.

use burn_core as burn;

use burn_core::module::{Module, Param, ParamGroup, ParamId};
use burn_core::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_nvfp4::optim::{AdamW, AdamWConfig, MomentType, clip_grad_norm};
use burn_optim::{GradientsParams, ModuleOptimizer};

use crate::support::{activation, device, gaussian};

/// Its parameters have fixed ids, the same in every model.
#[derive(Module, Debug)]
struct Net {
    matrix: Param<Tensor<2>>,
    narrow: Param<Tensor<2>>,
    gain: Param<Tensor<1>>,
    experts: Param<Tensor<3>>,
    unused: Param<Tensor<2>>,
    counts: Param<Tensor<1, Int>>,
}

/// Ids of the parameters with a gradient, and their shapes.
const SHAPES: [(u64, &[usize]); 4] = [(1, &[6, 10]), (2, &[4, 5]), (3, &[7]), (4, &[2, 3, 4])];

fn tensor<const D: usize>(shape: &[usize], seed: u64, dtype: DType, device: &Device) -> Tensor<D> {
    let data = TensorData::new(gaussian(shape.iter().product(), seed), shape.to_vec());
    Tensor::from_data(data, (device, dtype))
}

impl Net {
    fn new(device: &Device) -> Self {
        fn float<const D: usize>(
            id: u64,
            shape: &[usize],
            dtype: DType,
            device: &Device,
        ) -> Param<Tensor<D>> {
            let value = tensor(shape, id, dtype, device).require_grad();
            Param::initialized(ParamId::from(id), value)
        }
        let counts = Tensor::from_data(TensorData::from([1i32, 2, 3]), device);
        Self {
            matrix: float(1, SHAPES[0].1, DType::F32, device),
            narrow: float(2, SHAPES[1].1, activation(), device),
            gain: float(3, SHAPES[2].1, DType::F32, device),
            experts: float(4, SHAPES[3].1, DType::F32, device),
            unused: float(5, &[3, 3], DType::F32, device),
            counts: Param::initialized(ParamId::from(6), counts),
        }
    }

    /// Returns all floats, parameter by parameter.
    fn values(&self) -> Vec<f32> {
        fn of<const D: usize>(param: &Param<Tensor<D>>) -> Vec<f32> {
            param.val().into_data().iter::<f32>().collect()
        }
        [
            of(&self.matrix),
            of(&self.narrow),
            of(&self.gain),
            of(&self.experts),
            of(&self.unused),
        ]
        .concat()
    }
}

/// Returns the gradients of step `step`.
fn gradients(step: u64, device: &Device) -> GradientsParams {
    let device = device.clone().inner();
    let mut gradients = GradientsParams::new();
    let [(_, matrix), (_, narrow), (_, gain), (_, experts)] = SHAPES;
    let seed = |id: u64| 1000 * step + id;
    let f32 = DType::F32;
    gradients.register(1.into(), tensor::<2>(matrix, seed(1), f32, &device));
    gradients.register(
        2.into(),
        tensor::<2>(narrow, seed(2), activation(), &device),
    );
    gradients.register(3.into(), tensor::<1>(gain, seed(3), f32, &device));
    gradients.register(4.into(), tensor::<3>(experts, seed(4), f32, &device));
    gradients
}

fn config(moments: MomentType) -> AdamWConfig {
    AdamWConfig {
        weight_decay: 0.5,
        groups: vec![(ParamGroup::from_path("experts"), 0.25)],
        grad_clip: None,
        moments,
        seed: 9,
        ..AdamWConfig::default()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

const LR: f64 = 0.02;

/// Takes steps `from` to `to` by Burn's optimizer.
fn by_burn(optimizer: &mut ModuleOptimizer, mut net: Net, from: u64, to: u64) -> Net {
    let device = net.matrix.val().device();
    for step in from..to {
        net = optimizer.step(LR, net, gradients(step, &device));
    }
    net
}

fn by_ours(optimizer: &mut AdamW, mut net: Net, from: u64, to: u64) -> Net {
    let device = net.matrix.val().device();
    for step in from..to {
        net = optimizer.step(LR, net, gradients(step, &device));
    }
    net
}

/// In the form for Burn's learner: the bits of the optimizer of the whole module, and, after a
/// record in between, those of an uninterrupted run.
#[test]
fn burns_module_optimizer_has_the_same_bits_and_resumes_to_them() {
    let device = device().autodiff();
    for moments in [MomentType::F32, MomentType::Bf16] {
        let config = config(moments);
        let ours = by_ours(&mut config.clone().init(), Net::new(&device), 0, 10);
        let start = Net::new(&device);
        let mut optimizer = config.module_optimizer(&start);
        let half = by_burn(&mut optimizer, start, 0, 5);
        let bytes = optimizer.into_bytes().unwrap().to_vec();
        let record = half.clone().into_record();
        let through = by_burn(&mut optimizer, half, 5, 10);
        assert_eq!(bits(&through.values()), bits(&ours.values()), "{moments:?}");

        let loaded = Net::new(&device).load_record(record);
        let optimizer = config.module_optimizer(&loaded);
        let given = burn_core::tensor::Bytes::from_bytes_vec(bytes);
        let mut optimizer = optimizer.from_bytes(given).unwrap();
        let resumed = by_burn(&mut optimizer, loaded, 5, 10);
        assert_eq!(
            bits(&resumed.values()),
            bits(&through.values()),
            "{moments:?}"
        );
        assert!(resumed.matrix.val().is_require_grad());
    }
}

/// Training resumes from the saved state of the whole module's optimizer with the same bits.
#[test]
fn adamw_resumes_from_its_state() {
    let device = device().autodiff();
    let config = config(MomentType::Bf16);
    let mut first = config.clone().init();
    let half = by_ours(&mut first, Net::new(&device), 0, 2);
    let mut second = config.init();
    second
        .restore(first.time(), first.moments().clone())
        .unwrap();
    let copy = half.clone();
    let through = by_ours(&mut first, half, 2, 4);
    let resumed = by_ours(&mut second, copy, 2, 4);
    assert_eq!(bits(&resumed.values()), bits(&through.values()));
}

/// A step whose numbers were written before it, as in a graph, has the same bits.
#[test]
fn begun_steps_have_the_same_bits() {
    let device = device().autodiff();
    let start = Net::new(&device);
    let ours = by_ours(&mut config(MomentType::F32).init(), start, 0, 4);
    let mut optimizer = config(MomentType::F32).init();
    let mut net = Net::new(&device);
    for step in 0..4 {
        optimizer.begin_step(LR, &device).unwrap();
        let gradients = gradients(step, &device);
        net = optimizer.try_step_begun(net, gradients).unwrap();
        assert_eq!(optimizer.time(), step + 1);
    }
    assert_eq!(bits(&net.values()), bits(&ours.values()));

    let error = optimizer.begin_step(-1.0, &device).unwrap_err();
    assert!(error.to_string().contains("lr"), "{error}");
    let error = optimizer.try_step_begun(net, gradients(4, &device));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("begin_step"), "{error}");
    assert_eq!(optimizer.time(), 4);
}

/// f32 parameters after 10 steps, against burn-optim's own AdamW; the two round differently.
#[test]
fn burn_optims_adamw_is_near() {
    let device = device().autodiff();
    let config = AdamWConfig {
        groups: vec![(ParamGroup::all(), 0.5)],
        ..config(MomentType::F32)
    };
    let ours = by_ours(&mut config.init(), Net::new(&device), 0, 10);
    let mut theirs = burn_optim::AdamWConfig::new()
        .with_beta_1(0.9)
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(0.5)
        .init();
    let theirs = by_burn(&mut theirs, Net::new(&device), 0, 10);
    let f32s = |net: &Net| [net.matrix.val().into_data(), net.experts.val().into_data()];
    for (ours, theirs) in f32s(&ours).iter().zip(f32s(&theirs)) {
        for (ours, theirs) in ours.iter::<f32>().zip(theirs.iter::<f32>()) {
            let error = (ours - theirs).abs();
            assert!(error < 1e-5, "{ours} and burn-optim's {theirs}");
        }
    }
}

/// With zero gradients only the weight decay acts: that of the group and of matrices, none for
/// vectors. Parameters without a gradient are unchanged, whatever their decay.
#[test]
fn decays_are_those_of_groups_and_the_rest_stays() {
    let device = device().autodiff();
    let start = Net::new(&device);
    let before = start.values();
    let mut zeros = GradientsParams::new();
    let plain = device.clone().inner();
    zeros.register(1.into(), Tensor::<2>::zeros([6, 10], &plain));
    zeros.register(3.into(), Tensor::<1>::zeros([7], &plain));
    zeros.register(4.into(), Tensor::<3>::zeros([2, 3, 4], &plain));
    let net = config(MomentType::F32).init().step(0.5, start, zeros);
    let after = net.values();
    // Lengths of all parameters, and the remaining factor after a step of lr 0.5.
    let parts = [(60, 0.75), (20, 1.0), (7, 1.0), (24, 0.875), (9, 1.0f32)];
    let mut at = 0;
    for (len, left) in parts {
        for i in at..at + len {
            assert_eq!(after[i], before[i] * left, "element {i}");
        }
        at += len;
    }
    assert_eq!(at, after.len());
    let counts: Vec<i32> = net.counts.val().into_data().iter::<i32>().collect();
    assert_eq!(counts, [1, 2, 3]);
}

/// The norm is that of all gradients in f64, up to rounding, and the clipped gradients are those
/// that AdamW uses when it clips itself.
#[test]
fn clipped_gradients_are_those_of_the_global_norm() {
    let device = device().autodiff();
    let net = Net::new(&device);
    let squares = |gradients: &GradientsParams| -> f64 {
        let data = [
            gradients.get::<2>(1.into()).unwrap().into_data(),
            gradients.get::<2>(2.into()).unwrap().into_data(),
            gradients.get::<1>(3.into()).unwrap().into_data(),
            gradients.get::<3>(4.into()).unwrap().into_data(),
        ];
        let values = data.iter().flat_map(|data| data.iter::<f32>());
        values.map(|value| f64::from(value).powi(2)).sum()
    };
    let expected = squares(&gradients(7, &device)).sqrt();
    let (clipped, norm) = clip_grad_norm(&net, gradients(7, &device), 0.5).unwrap();
    let norm: f32 = norm.unwrap().into_scalar();
    assert!((f64::from(norm) / expected - 1.0).abs() < 1e-6, "{norm}");
    assert!(expected > 1.0);
    assert!((squares(&clipped).sqrt() - 0.5).abs() < 1e-3);
    let (loose, _) = clip_grad_norm(&net, gradients(7, &device), 100.0).unwrap();
    assert_eq!(squares(&loose), squares(&gradients(7, &device)));
    let (none, norm) = clip_grad_norm(&net, GradientsParams::new(), 1.0).unwrap();
    assert!(none.is_empty() && norm.is_none());

    let plain = config(MomentType::F32);
    let clipping = AdamWConfig {
        grad_clip: Some(0.5),
        ..plain.clone()
    };
    let by_hand = plain.init().step(LR, Net::new(&device), clipped);
    let by_itself = clipping.init().step(LR, net, gradients(7, &device));
    // Only the f32 parameters: a bf16 gradient is rounded once more when it is written.
    let matrix = |net: &Net| bits(&net.values()[..60]);
    assert_eq!(matrix(&by_hand), matrix(&by_itself));
}

/// The amax values of a step are those of the new parameters, bit for bit.
#[test]
fn amax_is_that_of_the_new_parameters() {
    let device = device().autodiff();
    let config = AdamWConfig {
        amax: true,
        ..config(MomentType::F32)
    };
    let mut optimizer = config.init();
    assert!(optimizer.amax().is_empty());
    let net = by_ours(&mut optimizer, Net::new(&device), 0, 2);
    let values = net.values();
    let mut at = 0;
    for (id, shape) in SHAPES {
        let len: usize = shape.iter().product();
        let expected = values[at..at + len]
            .iter()
            .fold(0.0f32, |a, b| a.max(b.abs()));
        let found: f32 = optimizer.amax()[&id].clone().into_scalar();
        assert_eq!(found.to_bits(), expected.to_bits(), "parameter {id}");
        at += len;
    }
    assert_eq!(optimizer.amax().len(), SHAPES.len());
}

/// A parameter keeps its autodiff state.
#[test]
fn the_checkpointing_strategy_stays() {
    let device = device().autodiff().gradient_checkpointing();
    let start = Net::new(&device);
    let strategy = start.matrix.val().gradient_checkpointing_strategy();
    assert!(strategy.is_some());
    let net = by_ours(&mut config(MomentType::F32).init(), start, 0, 1);
    let after = net.matrix.val();
    assert_eq!(after.gradient_checkpointing_strategy(), strategy);
    assert!(after.is_require_grad());
}

/// Settings out of range are refused by name, without any change.
#[test]
fn what_no_step_can_be_taken_with_is_refused() {
    let base = || config(MomentType::F32);
    let refused = |config: AdamWConfig| config.try_init().unwrap_err().to_string();
    let cases = [
        (
            "beta_1",
            AdamWConfig {
                beta_1: 1.0,
                ..base()
            },
        ),
        (
            "beta_2",
            AdamWConfig {
                beta_2: -0.1,
                ..base()
            },
        ),
        (
            "beta_2",
            AdamWConfig {
                beta_2: f64::NAN,
                ..base()
            },
        ),
        (
            "epsilon",
            AdamWConfig {
                epsilon: 0.0,
                ..base()
            },
        ),
        (
            "weight_decay",
            AdamWConfig {
                weight_decay: -1.0,
                ..base()
            },
        ),
        (
            "groups",
            AdamWConfig {
                groups: vec![(ParamGroup::all(), f64::INFINITY)],
                ..base()
            },
        ),
        (
            "grad_clip",
            AdamWConfig {
                grad_clip: Some(0.0),
                ..base()
            },
        ),
    ];
    for (name, config) in cases {
        let message = refused(config);
        assert!(message.contains(&format!("`{name}`")), "{message}");
    }
    let device = device().autodiff();
    let net = Net::new(&device);
    let module = |config: AdamWConfig| config.try_module_optimizer(&net).err().unwrap().to_string();
    let clips = AdamWConfig {
        grad_clip: Some(1.0),
        ..base()
    };
    assert!(module(clips).contains("clip_grad_norm"));
    assert!(
        module(AdamWConfig {
            amax: true,
            ..base()
        })
        .contains("`amax`")
    );

    let mut optimizer = base().init();
    let mut step = |lr, gradients| {
        let net = Net::new(&device);
        optimizer
            .try_step(lr, net, gradients)
            .unwrap_err()
            .to_string()
    };
    for lr in [-1.0, f64::NAN] {
        assert!(step(lr, gradients(0, &device)).contains("`lr`"));
    }
    let mut other = gradients(0, &device);
    let transposed = Tensor::<2>::zeros([10, 6], &device.clone().inner());
    other.register(1.into(), transposed);
    assert!(step(LR, other).contains("`gradient`"));
    assert_eq!(optimizer.time(), 0);
    let norm = clip_grad_norm(&net, gradients(0, &device), 0.0);
    assert!(norm.unwrap_err().to_string().contains("`max_norm`"));
}

/// Parameters and gradients on several devices are refused before anything is queued.
#[cfg(all(feature = "flex", feature = "cpu"))]
#[test]
fn several_devices_are_refused() {
    let flex = Device::flex().autodiff();
    let mut optimizer = config(MomentType::F32).init();
    let plain = Tensor::<2>::zeros([6, 10], &Device::cpu());
    let mut given = GradientsParams::new();
    given.register(1.into(), plain);
    let error = optimizer.try_step(LR, Net::new(&flex), given).unwrap_err();
    assert!(error.to_string().contains("`gradient`"), "{error}");

    let mut net = Net::new(&flex);
    let away = Tensor::<1>::zeros([7], &Device::cpu().autodiff()).require_grad();
    net.gain = Param::initialized(ParamId::from(3), away);
    let mut given = GradientsParams::new();
    given.register(1.into(), Tensor::<2>::zeros([6, 10], &Device::flex()));
    given.register(3.into(), Tensor::<1>::zeros([7], &Device::cpu()));
    let error = optimizer.try_step(LR, net, given).unwrap_err();
    assert!(error.to_string().contains("`parameter`"), "{error}");
}
