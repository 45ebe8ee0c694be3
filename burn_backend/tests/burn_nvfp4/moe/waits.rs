//! The host never reads the number of tokens of an expert, or any other result of a step.
//!
//! The test uses failures instead of a clock: CubeCL and Burn store the failure of a launch with
//! the buffers that it should have written, skip everything computed from them, and report it to a
//! reader. Therefore a step whose input and parameters were never written queues all its work and
//! returns, but does not return if it reads anything that depends on them. A bare `sync` reads no
//! buffer, and is not detected.
//!
//! Runs in a separate process, one test at a time: the observer that makes launches fail sees every
//! launch of the process.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn_core::module::{Module, ModuleMapper, Param};
use burn_core::tensor::{DType, Device, Tensor};
use burn_nvfp4::nn::MoeOutput;
use burn_nvfp4::{Nvfp4Moe, Nvfp4Recipe};
use nvfp4_kernels::cubecl::logging::{LaunchObservation, LaunchObserver};

use super::{WIDTH, exempt, moe};
use crate::support::own_process::own_process;
use crate::support::{Matrix, activation, cube_only, device};

/// Held by the running test.
static ALONE: Mutex<()> = Mutex::new(());

/// Fails every launch, and counts them.
#[derive(Default)]
struct Refusal(AtomicUsize);

impl LaunchObserver for Refusal {
    fn launched(&self, _kernel: &'static str) {
        self.0.fetch_add(1, Ordering::Relaxed);
        // Without the message of a panic: this one is expected.
        resume_unwind(Box::new("refused by the test"));
    }
}

/// Returns the exponentials of `x`, whose launch fails: a tensor that carries the failure.
fn unwritten<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let device = x.device();
    device.sync().unwrap();
    let refusal = Arc::new(Refusal::default());
    let observation = LaunchObservation::new(refusal.clone());
    let computed = x.exp();
    device.sync().unwrap();
    drop(observation);
    assert_eq!(refusal.0.load(Ordering::Relaxed), 1, "one kernel");
    computed
}

/// Replaces parameters by tensors that carry a failure.
struct Unwritten;

impl ModuleMapper for Unwritten {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|values| Tensor::from_inner(unwritten(values.inner())).require_grad())
    }
}

/// Returns a mixture and an input that were never written.
fn unwritten_case(recipe: &Nvfp4Recipe, device: &Device) -> (Nvfp4Moe, Tensor<2>) {
    let mixture = moe(8, 2, recipe, device).map(&mut Unwritten);
    let x = Matrix::gaussian(32, WIDTH, activation(), 1).tensor(device);
    (mixture, Tensor::from_inner(unwritten(x.inner())))
}

/// Runs forward and backward of `mixture` on `x`, with `between` after the forward. Returns the
/// names of the results that can be read.
fn step(
    mixture: &Nvfp4Moe,
    x: &Tensor<2>,
    between: impl FnOnce(&MoeOutput<2>),
) -> Vec<&'static str> {
    let leaf = x.clone().require_grad();
    let out = mixture.forward(leaf.clone());
    between(&out);
    let loss = out.output.clone().cast(DType::F32).square().mean() + out.balance_loss.clone();
    let grads = loss.backward();
    fn readable<const D: usize>(tensor: Option<Tensor<D>>) -> bool {
        tensor.expect("a gradient").try_into_data().is_ok()
    }
    let found = [
        ("loss", readable(Some(loss))),
        ("y", readable(Some(out.output))),
        ("counts", out.counts.try_into_data().is_ok()),
        ("dx", readable(leaf.grad(&grads))),
        ("router", readable(mixture.router.weight.grad(&grads))),
        ("gate_up", readable(mixture.gate_up.weight.grad(&grads))),
        ("down", readable(mixture.down.weight.grad(&grads))),
    ];
    let found = found.into_iter().filter(|(_, readable)| *readable);
    found.map(|(name, _)| name).collect()
}

#[test]
fn nothing_waits_for_the_device() {
    own_process!("moe::waits");
    cube_only!();
    let _alone = ALONE.lock().unwrap_or_else(|held| held.into_inner());
    let device = device().autodiff();
    for recipe in [Nvfp4Recipe::new(), exempt()] {
        let (mixture, x) = unwritten_case(&recipe, &device);
        // The assertion is that the step returns. Since none of its results can be read, any read
        // in it would have failed.
        assert_eq!(step(&mixture, &x, |_| ()), [""; 0]);
    }
}

/// Shows that the test above can fail: if one result is read in the step, it does not return.
#[test]
fn a_read_is_noticed() {
    own_process!("moe::waits");
    cube_only!();
    let _alone = ALONE.lock().unwrap_or_else(|held| held.into_inner());
    let device = device().autodiff();
    let (mixture, x) = unwritten_case(&Nvfp4Recipe::new(), &device);
    type Read = fn(&MoeOutput<2>);
    let reads: [(&str, Read); 3] = [
        ("counts", |out| drop(out.counts.clone().into_data())),
        ("y", |out| drop(out.output.clone().into_data())),
        ("balance loss", |out| {
            out.balance_loss.clone().into_scalar::<f32>();
        }),
    ];
    for (what, read) in reads {
        let step = catch_unwind(AssertUnwindSafe(|| step(&mixture, &x, read)));
        assert!(step.is_err(), "the read of {what} was not noticed");
    }
}
