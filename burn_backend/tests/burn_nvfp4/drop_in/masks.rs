//! Masks of attention: what the kernels compute, and what training says of all else.

use std::sync::{Arc, Mutex};

use burn_core::module::Module;
use burn_core::tensor::{Bool, Device, Tensor, TensorData};
use burn_nn::attention as burn_attention;
use burn_nvfp4::nn::attention::{
    self as attention, MhaInput, MultiHeadAttentionConfig, generate_autoregressive_mask,
};
use tracing::field::{Field, Visit};
use tracing::span;

use super::{BATCH, HEADS, MEMORY, TIME, WIDTH, input, padding, same, thirds, without_padding};
use crate::attention::assert_near;
use crate::support::{counted, device, flex_only, values};

/// Masks of which each sequence has at least one key: padding at the end, at the start, between
/// other keys.
fn paddings(keys: usize, device: &Device) -> Vec<Tensor<2, Bool>> {
    let masks: [fn(usize, usize) -> bool; 3] = [
        |keys, at| at % keys >= 3 && at >= keys,
        |keys, at| at % keys < 2 && at < keys,
        |keys, at| at % keys == 1 || at == 2,
    ];
    let mask = |hides: fn(usize, usize) -> bool| {
        let values: Vec<bool> = (0..BATCH * keys).map(|at| hides(keys, at)).collect();
        Tensor::from_data(TensorData::new(values, [BATCH, keys]), device)
    };
    masks.map(mask).into()
}

/// With a padding mask and with burn-nn's causal mask, the kernels compute. Outputs and gradients
/// are burn-nn's, except that those of a causal attention are compared without padding.
#[test]
fn masks_reach_the_kernels() {
    flex_only!();
    let plain = device();
    let device = plain.clone().autodiff();
    let _alone = counted::collect();
    // Sizes that no other test has.
    const LONG: usize = 7;
    const ROWS: u64 = (BATCH * LONG) as u64;
    let burns = burn_attention::MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.0);
    let ours = MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.0);
    let (burns, ours) = same(burns.init(&device), ours.init(&device));
    let leaf = |time, seed| Tensor::from_inner(input(time, seed, &plain));
    for (causal, cross) in [(false, false), (true, false), (false, true)] {
        let keys = if cross { MEMORY } else { LONG };
        let mut pads: Vec<_> = paddings(keys, &plain).into_iter().map(Some).collect();
        pads.push(None);
        for (index, pad) in pads.iter().enumerate() {
            macro_rules! results {
                ($module:ident, $attention:ident) => {{
                    let (x, memory) = (leaf(LONG, 1).require_grad(), leaf(MEMORY, 2));
                    let mut input = match cross {
                        true => $module::MhaInput::new(x.clone(), memory.clone(), memory * 0.5),
                        false => $module::MhaInput::self_attn(x.clone()),
                    };
                    if let Some(pad) = pad {
                        input = input.mask_pad(pad.clone());
                    }
                    if causal {
                        let mask = $module::generate_autoregressive_mask(BATCH, LONG, &plain);
                        input = input.mask_attn(mask);
                    }
                    let mut y = $attention.forward(input).context;
                    if let (Some(pad), true) = (pad, causal) {
                        y = without_padding(y, pad);
                    }
                    let grads = (y.clone() * leaf(LONG, 3)).sum().backward();
                    let mut found = vec![values(y), values(x.grad(&grads).unwrap())];
                    for layer in [&$attention.query, &$attention.key, &$attention.value] {
                        found.push(values(layer.weight.grad(&grads).unwrap()));
                    }
                    found
                }};
            }
            counted::taken();
            let found = results!(attention, ours);
            let work = counted::taken();
            let is_kernel = |work: &&counted::Work| work.op == "attention" && work.rows == ROWS;
            let kernels = work.iter().filter(is_kernel).count();
            assert_eq!(
                kernels, 2,
                "forward and backward of {causal}, {cross}, {index}"
            );
            let expected = results!(burn_attention, burns);
            for (part, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let what = format!("causal {causal}, cross {cross}, mask {index}: {part}");
                assert_near(&what, found, expected, 2e-4);
            }
        }
    }
}

/// Texts of the warnings of this thread.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Visit for Warnings {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "reason" {
            self.0.lock().unwrap().push(format!("{value:?}"));
        }
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN && metadata.target().starts_with("burn_nvfp4")
    }

    fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

    fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        event.record(&mut self.clone());
    }

    fn enter(&self, _span: &span::Id) {}

    fn exit(&self, _span: &span::Id) {}
}

/// A module whose training does not reach the kernels says so once, with the reason.
#[test]
fn training_without_the_kernels_warns_once() {
    flex_only!();
    let plain = device();
    let device = plain.clone().autodiff();
    let warnings = Warnings::default();
    // A listener must exist before the first event: otherwise tracing disables the events.
    let _listener = tracing::Dispatch::new(warnings.clone());
    tracing::subscriber::with_default(warnings.clone(), || {
        let x = Tensor::from_inner(input(TIME, 1, &plain));
        let own = || MhaInput::self_attn(x.clone());
        let taken = || std::mem::take(&mut *warnings.0.lock().unwrap());
        let dropping = MultiHeadAttentionConfig::new(WIDTH, HEADS).init(&device);
        dropping
            .valid()
            .forward(MhaInput::self_attn(x.clone().inner()));
        assert_eq!(taken(), [""; 0], "inference drops nothing");
        dropping.forward(own());
        dropping.clone().forward(own().causal());
        let found = taken();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("dropout"), "{found:?}");

        let attention = MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.0);
        let attention = attention.init(&device);
        attention.forward(own().mask_attn(generate_autoregressive_mask(BATCH, TIME, &plain)));
        attention.forward(own().causal().mask_pad(padding(TIME, &plain)));
        assert_eq!(taken(), [""; 0], "by the kernels");
        attention.forward(own().mask_attn(thirds(TIME, TIME, &plain)));
        let found = taken();
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("mask_attn"), "{found:?}");
    });
}
