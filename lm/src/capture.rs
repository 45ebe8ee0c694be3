//! Captured steps, if a backend with graphs is compiled in.

#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) use burn_nvfp4::graph::{GraphSteps, copy_into};

#[cfg(not(any(feature = "cpu", feature = "cuda")))]
pub(crate) use absent::{GraphSteps, copy_into};

/// Stand-ins for builds without graphs: beginning a graph fails.
#[cfg(not(any(feature = "cpu", feature = "cuda")))]
mod absent {
    use std::convert::Infallible;

    use anyhow::{Result, bail};
    use burn::tensor::{Device, Int, Tensor};

    pub(crate) struct GraphSteps(Infallible);

    impl GraphSteps {
        pub(crate) fn begin<M>(_: &M, _: &Device) -> Result<Self> {
            bail!("this build has no CUDA graphs: build with --features cuda")
        }

        pub(crate) unsafe fn overlap_kernels(&mut self) {
            match self.0 {}
        }

        pub(crate) fn is_captured(&self) -> bool {
            match self.0 {}
        }

        pub(crate) fn is_before_capture(&self) -> bool {
            match self.0 {}
        }

        pub(crate) fn step(&mut self, _: impl FnOnce()) -> Result<()> {
            match self.0 {}
        }

        pub(crate) fn launch(&mut self, _: impl FnOnce()) -> Result<()> {
            match self.0 {}
        }
    }

    pub(crate) fn copy_into<const D: usize>(
        _: Tensor<D, Int>,
        _: Tensor<D, Int>,
    ) -> Result<Tensor<D, Int>> {
        bail!("this build has no CUDA graphs: build with --features cuda")
    }
}
