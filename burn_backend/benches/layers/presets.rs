//! The parts of a linear layer that TransformerEngine measures one by one, for every preset:
//! quantization with block scales in 128x4 tiles, the GEMM of quantized operands, the forward, and
//! the backward. `linear.rs` has forward and backward together.

use burn_core::backend::Dispatch;
use burn_core::tensor::{DType, FloatDType, Tensor};
use burn_nvfp4::ops::{
    BackwardSource, GemmGroups, MaybeTensor, Nvfp4KernelOps, Operand, OperandSpec, QuantParams,
    QuantizeRequest, StoredForm,
};
use burn_nvfp4::{Nvfp4Linear, Nvfp4Recipe, RngState, Usage};

use crate::harness::Bench;
use crate::linear::plain;

/// Prefix of the names of its settings, each a column of one table.
pub const SETTING: &str = "presets";

/// Times the parts at the shape of TransformerEngine's benchmark of linear layers: 16384 tokens,
/// 4096 inputs and outputs.
pub fn parts(bench: &mut Bench) {
    let [tokens, inputs, outputs] = bench.size([16384, 4096, 4096], [64, 64, 128]);
    let columns = |part: &str| format!("{SETTING} {tokens}x{inputs}x{outputs}, {part}");
    let dtype = bench.activation();
    let x = bench.leaf([tokens, inputs], dtype);
    // The sum whose gradient starts a backward is part of forward and backward.
    let y = bench.leaf([tokens, outputs], dtype);
    forward_and_backward(bench, &columns, "the sum alone", &y, |y| y);
    for preset in Nvfp4Recipe::preset_names() {
        let recipe = Nvfp4Recipe::preset(preset).expect("a preset");
        let name = format!("`{preset}`");
        let linear = plain(bench, inputs, outputs, dtype);
        let weight = linear.weight.val().detach();
        let rng_state = RngState {
            seed: 1,
            layer: 1,
            offset: 0,
            rht_signs: 0,
        };
        let spec = recipe.spec(&rng_state);
        // The operands of `x` in a training step. In the backward of other presets it is made from
        // the codes of the forward.
        let for_wgrad = match spec.source {
            BackwardSource::Original => spec.wgrad_x,
            BackwardSource::Forward => OperandSpec::HighPrecision,
        };
        let wanted = [
            (Usage::Rowwise, spec.fprop_x),
            (Usage::Columnwise, for_wgrad),
        ];
        let wanted = wanted.map(|(usage, operand)| operand.params().map(|&by| (usage, by)));
        if wanted.iter().any(Option::is_some) {
            bench.time(&columns("quantize with 128x4 scales"), &name, || {
                let request = QuantizeRequest::of_matrix(x.clone().into_dispatch());
                let request = wanted.into_iter().flatten().fold(request, |request, one| {
                    let (usage, params) = one;
                    let tiles = match usage {
                        Usage::Rowwise => StoredForm::Tiles,
                        Usage::Columnwise => StoredForm::WholeTiles,
                    };
                    request.along(usage, params, params.stored_form(tiles))
                });
                drop(Dispatch::nvfp4_quantize(request));
            });
        }
        let reads = bench.packed_form();
        let a = operand(&x, Usage::Rowwise, &spec.fprop_x, reads);
        let b = operand(&weight, Usage::Columnwise, &spec.fprop_w, reads);
        bench.time(&columns("GEMM"), &name, || {
            let (a, b) = (a.clone(), b.clone());
            let (bias, dtype) = (MaybeTensor::Absent, FloatDType::from(dtype));
            drop(Dispatch::nvfp4_gemm(a, b, bias, GemmGroups::None, dtype));
        });
        let layer = Nvfp4Linear::from_linear(linear, &recipe).expect("a layer of multiples of 16");
        forward_and_backward(bench, &columns, &name, &x, |x| layer.forward(x));
    }
}

/// Times forward, and backward of a sum after it.
fn forward_and_backward(
    bench: &mut Bench,
    columns: &dyn Fn(&str) -> String,
    name: &str,
    x: &Tensor<2>,
    layer: impl Fn(Tensor<2>) -> Tensor<2>,
) {
    bench.time(&columns("forward"), name, || drop(layer(x.clone())));
    bench.time_after(
        &columns("backward"),
        name,
        // Rows first: Burn sums all elements in one cube.
        || layer(x.clone()).cast(DType::F32).sum_dim(1).sum(),
        |loss| {
            let grads = loss.backward();
            x.grad(&grads).expect("x requires a gradient");
        },
    );
}

/// Returns `x` as an operand with K along `usage`, its scales in `form` if it is quantized.
fn operand(x: &Tensor<2>, usage: Usage, spec: &OperandSpec, form: StoredForm) -> Operand<Dispatch> {
    let x = x.clone().into_dispatch();
    match spec.params() {
        None => Operand::Float(x, usage),
        Some(params) => {
            let params: QuantParams = *params;
            let request = QuantizeRequest::of_matrix(x);
            let request = request.along(usage, params, params.stored_form(form));
            Operand::Quantized(Dispatch::nvfp4_quantize(request).into_one())
        }
    }
}
