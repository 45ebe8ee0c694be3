//! A mixture of experts and its components, in NVFP4 and in bf16.

use burn_core::module::{Module, ParamGroup};
use burn_core::tensor::activation::{silu, softmax};
use burn_core::tensor::{DType, Int, Tensor, TensorData};
use burn_nvfp4::nn::Routing;
use burn_nvfp4::{
    ExpertOffsets, Nvfp4GroupedLinearConfig, Nvfp4MoeConfig, Nvfp4Recipe, Nvfp4SwiGluConfig,
};

use crate::harness::{Bench, backward, read};

/// Experts per token.
const TOP_K: usize = 2;

/// Sizes of the mixture.
#[derive(Clone, Copy)]
struct Sizes {
    tokens: usize,
    width: usize,
    hidden: usize,
    experts: usize,
}

impl Sizes {
    fn setting(self) -> String {
        let Self {
            tokens,
            width,
            hidden,
            experts,
        } = self;
        format!("mixture of {experts}, top {TOP_K}, {tokens}x{width}, hidden {hidden}")
    }
}

/// NVFP4, and the same layers in high precision.
fn recipes() -> [(&'static str, Nvfp4Recipe); 2] {
    let exempt = Nvfp4Recipe::new().with_high_precision(Some(ParamGroup::all()));
    [("`nvidia`", Nvfp4Recipe::new()), ("high precision", exempt)]
}

/// Times forward and step of a mixture, of a dense feed-forward with the same work, and of the
/// components.
pub fn mixture(bench: &mut Bench) {
    let [tokens, width, hidden, experts] = bench.size([16384, 2048, 1408, 16], [128, 32, 48, 4]);
    let sizes = Sizes {
        tokens,
        width,
        hidden,
        experts,
    };
    let dtype = bench.activation();
    let x = bench.leaf([tokens, width], dtype);
    for (name, recipe) in recipes() {
        whole(bench, sizes, name, &recipe, &x);
    }
    let router = bench.leaf([width, experts], DType::F32);
    let logits = x.clone().cast(DType::F32).matmul(router.clone());
    let (_, chosen) = logits.clone().detach().topk_with_indices(TOP_K, 1);
    routing(bench, sizes, &x, &router, chosen.clone());
    let routing = Routing::try_new(chosen, experts).expect("choices of the experts");
    let rows = sorted(&routing, &x);
    grouped(bench, sizes, &routing, &rows);
}

/// Times a mixture by `recipe`, and a dense feed-forward as wide as the experts of a token
/// together.
fn whole(bench: &mut Bench, sizes: Sizes, name: &str, recipe: &Nvfp4Recipe, x: &Tensor<2>) {
    let Sizes {
        width,
        hidden,
        experts,
        ..
    } = sizes;
    let setting = sizes.setting();
    let moe = Nvfp4MoeConfig::new(width, hidden, experts)
        .with_top_k(TOP_K)
        .with_recipe(recipe.clone())
        .init(&bench.device);
    recipe.apply(&moe).expect("a recipe that fits");
    let constant = moe.valid();
    let inner = x.clone().inner();
    bench.time(&setting, &format!("{name} mixture, forward"), || {
        read(constant.forward(inner.clone()).output);
    });
    bench.time(&setting, &format!("{name} mixture, step"), || {
        read(backward(x, |x| moe.forward(x).output));
    });
    let dense = Nvfp4SwiGluConfig::new(width, TOP_K * hidden)
        .with_recipe(recipe.clone())
        .init(&bench.device);
    recipe.apply(&dense).expect("a recipe that fits");
    bench.time(
        &setting,
        &format!("{name} dense feed-forward, step"),
        || {
            read(backward(x, |x| dense.forward(x)));
        },
    );
}

/// Returns the rows of `x` sorted by expert, as a leaf.
fn sorted(routing: &Routing, x: &Tensor<2>) -> Tensor<2> {
    let rows = routing.dispatch(x.clone().detach());
    Tensor::from_inner(rows.inner()).require_grad()
}

/// Times the router and the permutation of tokens to the experts and back.
fn routing(
    bench: &mut Bench,
    sizes: Sizes,
    x: &Tensor<2>,
    router: &Tensor<2>,
    chosen: Tensor<2, Int>,
) {
    let Sizes {
        tokens, experts, ..
    } = sizes;
    let setting = sizes.setting();
    bench.time(&setting, "router product, step", || {
        read(backward(x, |x| x.cast(DType::F32).matmul(router.clone())));
    });
    let scores = bench.leaf([tokens, experts], DType::F32);
    bench.time(&setting, "top 2", || {
        read(scores.clone().inner().topk_with_indices(TOP_K, 1).1.float());
    });
    bench.time(&setting, "choice, step", || {
        read(backward(&scores, |scores| {
            let weights = softmax(scores, 1).gather(1, chosen.clone());
            weights.clone() / weights.sum_dim(1)
        }));
    });
    bench.time(&setting, "sorting", || {
        let routing = Routing::try_new(chosen.clone(), experts);
        read(
            routing
                .expect("choices of the experts")
                .places()
                .clone()
                .float(),
        );
    });
    let routing = Routing::try_new(chosen.clone(), experts).expect("choices of the experts");
    bench.time(&setting, "dispatch, step", || {
        read(backward(x, |x| routing.dispatch(x)));
    });
    let rows = sorted(&routing, x);
    let weights = bench.leaf([tokens, TOP_K], DType::F32);
    bench.time(&setting, "combine, step", || {
        read(backward(&rows, |rows| {
            routing.combine(rows, weights.clone())
        }));
    });
    bench.time(&setting, "activation, step", || {
        read(backward(&rows, |both| {
            let half = both.dims()[1] / 2;
            silu(both.clone().narrow(1, 0, half)) * both.narrow(1, half, half)
        }));
    });
}

/// Times the GEMM of gate and up: with the tokens of `routing`, and with equally many per expert.
fn grouped(bench: &mut Bench, sizes: Sizes, routing: &Routing, sorted: &Tensor<2>) {
    let Sizes {
        tokens,
        width,
        hidden,
        experts,
    } = sizes;
    let setting = sizes.setting();
    let counts = vec![(tokens * TOP_K / experts) as i64; experts];
    let counts = Tensor::<1, Int>::from_data(TensorData::new(counts, [experts]), &bench.device);
    let even = ExpertOffsets::from_counts(counts, tokens * TOP_K);
    for (name, recipe) in recipes() {
        let layer = Nvfp4GroupedLinearConfig::new(experts, width, 2 * hidden)
            .with_recipe(recipe.clone())
            .init(&bench.device);
        recipe.apply(&layer).expect("a recipe that fits");
        bench.time(&setting, &format!("{name} gate and up, step"), || {
            read(backward(sorted, |x| layer.forward(x, routing.experts())));
        });
        bench.time(&setting, &format!("{name} gate and up, even, step"), || {
            read(backward(sorted, |x| layer.forward(x, &even)));
        });
    }
}
