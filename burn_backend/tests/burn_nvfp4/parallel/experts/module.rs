//! Parameters of the ranks, and errors.

use burn_core::module::{Module, ModuleVisitor, Param, ParamId};
use burn_core::tensor::Tensor;
use burn_nvfp4::nn::{ExpertDispatch, ExpertParallelMoe, expert_parameters};
use burn_nvfp4::parallel::ProcessGroup;
use burn_nvfp4::{Nvfp4GroupedLinear, Nvfp4Moe, Nvfp4MoeConfig, Nvfp4Recipe, Nvfp4State};

use super::{Case, HIDDEN, WIDTH, on_ranks};
use crate::support::{device, values};

fn case() -> Case {
    let mut case = Case::new(&Nvfp4Recipe::new(), 4, 2, &[4, 4]);
    case.shared = true;
    case
}

/// Ids and values of all parameters.
#[derive(Default)]
struct Parameters(Vec<(ParamId, Vec<f32>)>);

impl ModuleVisitor for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push((param.id, values(param.val())));
    }
}

fn parameters<M: Module>(module: &M) -> Vec<(ParamId, Vec<f32>)> {
    let mut found = Parameters::default();
    module.visit(&mut found);
    found.0
}

#[test]
fn ranks_have_parts_and_gather_them() {
    for size in [1, 2, 4] {
        on_ranks(size, |group| {
            let device = device().autodiff();
            let whole = case().moe(&device);
            let expected = parameters(&whole);
            let state = Nvfp4State::collect(&whole);
            let part = ExpertParallelMoe::from_moe(whole, &group);
            let held = 4 / size;
            assert_eq!(part.gate_up.weight.dims(), [held, WIDTH, 2 * HIDDEN]);
            assert_eq!(part.down.weight.dims(), [held, HIDDEN, WIDTH]);
            assert_eq!(Nvfp4State::collect(&part), state);
            for (found, expected) in parameters(&part).iter().zip(&expected) {
                assert_eq!(found.0, expected.0, "ids");
                let len = found.1.len();
                let is_part = len < expected.1.len();
                let first = if is_part { group.rank() * len } else { 0 };
                assert_eq!(found.1, expected.1[first..first + len]);
            }
            assert!(part.gate_up.weight.val().is_require_grad());
            let whole = part.into_moe();
            assert_eq!(parameters(&whole), expected);
            assert!(whole.down.weight.val().is_require_grad());
            assert_eq!(Nvfp4State::collect(&whole), state);
        });
    }
}

/// Experts that were separate layers become separate layers again, with their ids.
#[test]
fn gathered_experts_come_apart() {
    let device = device().autodiff();
    let linear = |d_in, d_out| burn_nn::LinearConfig::new(d_in, d_out).init(&device);
    let gate_up: Vec<_> = (0..4).map(|_| linear(WIDTH, 2 * HIDDEN)).collect();
    let ids = |linears: &[burn_nn::Linear]| -> Vec<_> {
        let ids =
            |linear: &burn_nn::Linear| (linear.weight.id, linear.bias.as_ref().map(|bias| bias.id));
        linears.iter().map(ids).collect()
    };
    let expected = ids(&gate_up);
    on_ranks(2, |group| {
        let mut whole = case().moe(&device);
        let recipe = Nvfp4Recipe::new();
        whole.gate_up = Nvfp4GroupedLinear::from_linears(gate_up.clone(), &recipe).unwrap();
        let part = ExpertParallelMoe::from_moe(whole, &group);
        let own = ids(&part.gate_up.clone().into_linears());
        assert_eq!(own, expected[2 * group.rank()..][..2]);
        let back = part.into_moe().gate_up.into_linears();
        assert_eq!(ids(&back), expected);
        for (found, expected) in back.iter().zip(&gate_up) {
            let [found, expected] = [found, expected].map(|linear| linear.bias.clone().unwrap());
            assert_eq!(values(found.val()), values(expected.val()));
        }
    });
}

#[test]
fn new_mixtures_have_the_parameters_of_rank_0() {
    let found = on_ranks(2, |group| {
        let device = device().autodiff();
        let part = ExpertParallelMoe::new(&case().config(), &device, &group);
        assert!(part.router.weight.val().is_require_grad());
        assert_eq!((part.top_k(), part.group().size()), (2, 2));
        let own = values(part.gate_up.weight.val());
        let all = parameters(&part.into_moe());
        (
            own,
            all.into_iter()
                .map(|(_, values)| values)
                .collect::<Vec<_>>(),
        )
    });
    assert_eq!(found[0].1, found[1].1);
    assert_ne!(found[0].0, found[1].0, "other experts");
}

#[test]
fn parameters_of_experts_are_told() {
    #[derive(Module, Debug)]
    struct Model {
        first: Nvfp4Moe,
        blocks: Vec<ExpertParallelMoe>,
        gate_up: burn_nn::Linear,
    }
    use burn_core as burn;

    let device = device().autodiff();
    let group = ProcessGroup::single();
    let part = || ExpertParallelMoe::from_moe(case().moe(&device), &group);
    let model = Model {
        first: case().moe(&device),
        blocks: vec![part(), part()],
        gate_up: burn_nn::LinearConfig::new(4, 4).init(&device),
    };
    let ids = |part: &ExpertParallelMoe| [part.gate_up.weight.id, part.down.weight.id];
    let expected: Vec<_> = model.blocks.iter().flat_map(ids).collect();
    assert_eq!(expert_parameters(&model), expected);
    assert_eq!(expert_parameters(&model.first), []);
}

#[test]
fn bad_arguments_are_errors() {
    let device = device().autodiff();
    let groups = ProcessGroup::loopback(3, std::time::Duration::ZERO);
    let config = Nvfp4MoeConfig::new(WIDTH, HIDDEN, 4);
    let expected = "`experts`: found 4, expected a multiple of 3, the number of ranks";
    let error = ExpertParallelMoe::try_new(&config, &device, &groups[0]).unwrap_err();
    assert!(error.to_string().contains(expected), "{error}");
    let error = ExpertParallelMoe::try_from_moe(config.init(&device), &groups[0]).unwrap_err();
    assert!(error.to_string().contains(expected), "{error}");

    let single = ProcessGroup::single();
    let mut unlike = config.init(&device);
    unlike.down = Nvfp4MoeConfig::new(WIDTH, HIDDEN, 8).init(&device).down;
    let error = ExpertParallelMoe::try_from_moe(unlike, &single).unwrap_err();
    assert!(error.to_string().contains("`down.weight`"), "{error}");

    // Before anything is exchanged: the other rank does not call, and this one does not wait for
    // it.
    let groups = ProcessGroup::loopback(2, std::time::Duration::ZERO);
    let part = ExpertParallelMoe::from_moe(config.init(&device), &groups[0]);
    for shape in [[0, WIDTH], [2, 16]] {
        let error = part.try_forward(Tensor::<2>::zeros(shape, &device));
        assert!(error.unwrap_err().to_string().contains("`x`"));
    }
    let mut unlike = part.clone();
    unlike.gate_up = config.init(&device).gate_up;
    let error = unlike.try_forward(Tensor::<2>::zeros([2, WIDTH], &device));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("`gate_up.weight`"), "{error}");
}

/// An all-gather requires the same number of tokens on each rank: otherwise the call of each rank
/// fails with an error.
#[test]
fn unequal_tokens_are_not_gathered() {
    let groups = ProcessGroup::loopback(2, std::time::Duration::from_secs(60));
    std::thread::scope(|scope| {
        let threads = groups.into_iter().map(|group| {
            scope.spawn(move || {
                let device = device().autodiff();
                let part = ExpertParallelMoe::from_moe(case().moe(&device), &group);
                let part = part.with_dispatch(ExpertDispatch::AllGather);
                assert_eq!(part.dispatch(), ExpertDispatch::AllGather);
                part.forward(Tensor::<2>::zeros([4 + group.rank(), WIDTH], &device))
            })
        });
        let threads: Vec<_> = threads.collect();
        for thread in threads {
            let panic = thread.join().expect_err("the call fails");
            let message = panic.downcast_ref::<String>().expect("a message");
            assert!(message.contains("rank"), "{message}");
        }
    });
}
