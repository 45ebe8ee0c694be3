//! Measures the bytes and types that ranks exchange in a step.

use std::collections::BTreeMap;
use std::sync::Mutex;

use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, span};

use super::*;

/// Bytes that a rank contributes to collectives of one kind and type, and the number of these
/// collectives.
type Traffic = BTreeMap<(String, String), (u64, usize)>;

/// One collective.
#[derive(Default)]
struct Exchange {
    step: String,
    dtype: String,
    bytes: u64,
}

impl Visit for Exchange {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "dtype" {
            self.dtype = format!("{value:?}");
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "step" {
            self.step = value.into();
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "bytes" {
            self.bytes = value;
        }
    }
}

/// Sums the exchanges of its thread.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Traffic>>);

impl tracing::Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "burn_nvfp4::collective"
    }

    fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

    fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut exchange = Exchange::default();
        event.record(&mut exchange);
        let mut all = self.0.lock().unwrap();
        let own = all.entry((exchange.step, exchange.dtype)).or_default();
        *own = (own.0 + exchange.bytes, own.1 + 1);
    }

    fn enter(&self, _span: &span::Id) {}

    fn exit(&self, _span: &span::Id) {}
}

/// Returns the traffic of the second of four steps of a rank.
fn traffic(config: &RunConfig, corpus: &Corpus, ranks: usize) -> Traffic {
    on_ranks(config, corpus, &Folder::new(), ranks, |run| {
        run.train_to(Some(1));
        let collector = Collector::default();
        let found = collector.0.clone();
        tracing::subscriber::with_default(collector, || run.train_to(Some(2)));
        let found = found.lock().unwrap();
        found.clone()
    })
}

/// With experts on two ranks, tokens and token gradients are exchanged in the type of the
/// activations, by an all-gather and a reduce-scatter in forward and backward, regardless of the
/// recipe. The remaining traffic is expert indices, weights, losses, and gradients of replicated
/// parameters.
#[test]
fn tokens_travel_in_the_type_of_the_activations() {
    let corpus = corpus();
    let [ranks, layers] = [2, 2];
    // Excludes the traffic of the optimizer: sums of squares of expert gradients, for the global
    // norm, and the amax of weights that are quantized.
    let of_step = |config: &RunConfig, expected: &Traffic| {
        let mut found = traffic(config, &corpus, ranks);
        let mut remove = |step: &str| {
            let kind = (step.into(), "F32".into());
            let (bytes, calls) = found.get_mut(&kind).expect("there are more");
            let more = *bytes - expected[&kind].0;
            assert!(more > 0 && more < 128, "{step}: {more} bytes");
            (*bytes, *calls) = (*bytes - more, *calls - 1);
        };
        remove("all_gather");
        if !config.recipe.is_high_precision() {
            remove("all_reduce");
        }
        found
    };
    for (activation, name, size) in [(Activation::Bf16, "BF16", 2), (Activation::F32, "F32", 4)] {
        let high_precision = match activation {
            Activation::Bf16 => RecipeName::bf16(),
            Activation::F32 => RecipeName::f32(),
        };
        for recipe in [high_precision, RecipeName::nvidia()] {
            let config = RunConfig {
                activation,
                recipe: recipe.clone(),
                ..experts_by(ExpertDispatchName::AllGather, 4, ranks)
            };
            let model = &config.model;
            let (width, top_k) = (model.width, model.top_k);
            let tokens = config.batch / ranks * model.context;
            // Matrices of attention, embedding, head and router, and gains, which are replicated on
            // both ranks.
            let replicated = config.parameters() - config.model.expert_parameters();
            let expected = |reduced: Option<&str>| {
                let mut all = Traffic::new();
                let mut add = |step: &str, dtype: &str, bytes: usize, calls: usize| {
                    let own = all.entry((step.into(), dtype.into())).or_default();
                    *own = (own.0 + (calls * bytes) as u64, own.1 + calls);
                };
                // Forward: tokens, then results. Backward: gradients of both.
                add("all_gather", name, size * tokens * width, 2 * layers);
                add(
                    "reduce_scatter",
                    name,
                    size * ranks * tokens * width,
                    2 * layers,
                );
                add("all_gather", "I32", 4 * tokens * top_k, layers);
                add("all_gather", "F32", 4 * tokens * top_k, layers);
                add("reduce_scatter", "F32", 4 * ranks * tokens * top_k, layers);
                add("all_reduce", "F32", 8, 2 * layers);
                match reduced {
                    Some(dtype) => add("all_reduce", dtype, 2 * replicated, 1),
                    None => add("all_reduce", "F32", 4 * replicated, 1),
                }
                all
            };
            let of_f32 = expected(None);
            let found = of_step(&config, &of_f32);
            assert_eq!(found, of_f32, "{recipe}, {name}");
            let of_bf16 = expected(Some("BF16"));
            let found = of_step(&in_bf16(config.clone()), &of_bf16);
            assert_eq!(found, of_bf16, "{recipe}, {name}, in bf16");
        }
    }
}

/// Gradients in `bf16` halve the bytes, with data parallelism and with sharded state.
#[test]
fn gradients_in_bf16_are_half_the_bytes() {
    let corpus = corpus();
    let total = |traffic: &Traffic, steps: &[&str]| -> [u64; 2] {
        ["F32", "BF16"].map(|dtype| {
            let of = |step: &&str| traffic.get(&(step.to_string(), dtype.into()));
            steps.iter().filter_map(of).map(|found| found.0).sum()
        })
    };
    for config in [config(4), fsdp(config(4)), zero1(config(4))] {
        let reductions = ["all_reduce", "reduce_scatter"];
        let [wide, none] = total(&traffic(&config, &corpus, 2), &reductions);
        assert_eq!(none, 0);
        assert!(wide >= 4 * config.parameters() as u64);
        let [rest, narrow] = total(&traffic(&in_bf16(config.clone()), &corpus, 2), &reductions);
        assert_eq!(narrow, 2 * config.parameters() as u64);
        // Norms and similar small values.
        assert_eq!(rest + 2 * narrow, wide);
    }
}

/// For a stack of experts that they share, ranks gather the operands of the GEMMs: codes and block
/// scales for fprop and dgrad, or values in the type of the activations if nothing is quantized.
/// Only the amax values of the experts are exchanged in `f32`.
#[test]
fn shared_experts_travel_as_operands() {
    let corpus = corpus();
    for (ranks, ep) in [(2, 1), (4, 1), (4, 2)] {
        let config = fsdp(RunConfig {
            activation: Activation::Bf16,
            ..experts(4, ep)
        });
        let (model, layers) = (&config.model, 2);
        // Elements that a rank contributes to a gather: of its experts, and of attention matrices.
        let of_experts = model.expert_parameters() / ranks;
        let of_attention = 4 * layers * model.width * model.width / ranks;
        let elements = (2 * (of_experts + of_attention)) as u64;
        let of_others = config.parameters() / ranks - of_experts - of_attention;
        let [quantized, plain] = [RecipeName::nvidia(), RecipeName::bf16()].map(|recipe| {
            let config = RunConfig {
                recipe,
                ..config.clone()
            };
            traffic(&config, &corpus, ranks)
        });
        let gathered = |found: &Traffic, dtype: &str| found[&("all_gather".into(), dtype.into())].0;
        let what = format!("{ranks} ranks, {ep} with other experts");
        assert_eq!(gathered(&quantized, "U32"), elements / 2, "{what}");
        assert_eq!(gathered(&quantized, "U8"), elements / 16, "{what}");
        for found in [&quantized, &plain] {
            let found = gathered(found, "F32");
            // The rest: amax values, expert weights of tokens, sums for the global gradient norm.
            let most = 4 * of_others as u64 + 2048;
            assert!(found < most, "{what}: {found} bytes of {most}");
        }
        if ep == 1 {
            let found = gathered(&plain, "BF16");
            assert_eq!(found, 2 * elements, "{what}");
        }
    }
}
