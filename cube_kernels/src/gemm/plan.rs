//! Interface of GEMM kernels to dispatch: a kernel that is asked, and the plan that it returns.
//!
//! A new kernel implements [`GemmKernel`] and [`GemmPlan`] in its file. Nothing else matches on
//! kernels: dispatch asks a list of them, and a GEMM launches the plan that it got.

use std::{
    any::Any,
    fmt, ptr,
    sync::{Mutex, PoisonError},
};

use cubecl::client::Client;

use super::{
    epilogue::EpilogueArgs,
    materialize::Materialized,
    operand::OperandLayout,
    output::Output,
    problem::{Device, GemmShape, Problem, Refusal, block_scaled},
    scheduler::GroupArgs,
};
use crate::{
    Nvfp4Error, StoredForm,
    capabilities::{Capabilities, GemmBackend},
    cube::ptx::BlockScaled,
};

/// Kernel that dispatch asks: the single source for which kernel runs, and why others do not.
pub(crate) trait GemmKernel: Sync {
    /// Returns the name that `nvfp4 doctor` shows.
    fn name(&self) -> &'static str;

    /// Returns the backend that the kernel belongs to on this device and for this problem.
    fn backend(&self, device: &Device, problem: &Problem) -> GemmBackend;

    /// Checks whether the kernel supports the problem on this device.
    ///
    /// # Errors
    /// Returns the reason if it does not.
    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal>;

    /// Returns the plan of a problem that the kernel supports.
    fn plan(&self, device: &Device, problem: &Problem) -> Candidate;

    /// Returns true if the kernel reads MXFP8. For other kernels MXFP8 operands are dequantized to
    /// bf16, exactly, and they are queried with [`Problem::without_mxfp8`].
    fn takes_mxfp8(&self) -> bool {
        false
    }

    /// Returns true if the kernel multiplies codes and block scales directly on devices of this
    /// compute capability. GEMMs that it refuses there are reported.
    fn multiplies_codes_on(&self, compute_capability: Option<u32>) -> bool {
        let _ = compute_capability;
        false
    }
}

/// A kernel with its configuration for one problem. Its [`Display`](fmt::Display) describes it.
pub(crate) trait GemmPlan: Any + fmt::Debug + fmt::Display + Send + Sync {
    /// Returns the kernel.
    fn kernel(&self) -> &'static dyn GemmKernel;

    /// Returns the form in which the kernel reads packed operands.
    fn reads(&self) -> StoredForm {
        StoredForm::Rows
    }

    /// Returns true if the kernel reads MN-major bf16.
    fn reads_mn_major(&self) -> bool {
        false
    }

    /// Returns the layout to which operands that are stored as `layout` are converted.
    fn layout_read(&self, layout: OperandLayout) -> OperandLayout {
        let is_read = match layout {
            OperandLayout::Packed => self.reads() != StoredForm::Bf16Unscaled,
            OperandLayout::Mxfp8 => self.kernel().takes_mxfp8(),
            OperandLayout::MnMajor => self.reads_mn_major(),
            OperandLayout::KMajor | OperandLayout::PackedMnMajor => true,
        };
        if is_read {
            layout
        } else {
            OperandLayout::KMajor
        }
    }

    /// Returns the required alignment of groups along K of packed operands, and of the end of all
    /// their columns; 1 if any is supported.
    fn k_alignment(&self) -> usize {
        1
    }

    /// Returns true if the kernel computes the output amax in its epilogue.
    fn finds_amax(&self) -> bool {
        true
    }

    /// Returns true if no kernel of the device would read packed operands faster.
    fn reads_codes_directly(&self) -> bool {
        false
    }

    /// Returns the backend whose instructions are emulated by plain arithmetic, if any, so that
    /// other devices can run the rest of the kernel.
    fn emulated_backend(&self) -> Option<GemmBackend> {
        None
    }

    /// Queues the kernel after the work that it depends on.
    ///
    /// # Errors
    /// Returns an error if a requested plan does not fit the operands, or if a library fails.
    fn launch(&self, launch: &Launch) -> Result<(), Nvfp4Error>;
}

/// A kernel with its configuration.
///
/// Equal plans share one object, which lives as long as the process: there are at most as many as
/// tiles times heights of bands.
#[derive(Clone, Copy)]
pub struct Plan(&'static dyn GemmPlan);

impl<P: GemmPlan + PartialEq> From<P> for Plan {
    fn from(plan: P) -> Self {
        static KNOWN: Mutex<Vec<&'static dyn GemmPlan>> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let found = (known.iter()).find(|known| Plan(**known).get::<P>() == Some(&plan));
        if let Some(found) = found {
            return Self(*found);
        }
        let plan = Box::leak(Box::new(plan));
        known.push(plan);
        Self(plan)
    }
}

impl Plan {
    /// Returns the plan as one of type `P`, if it is one.
    pub fn get<P: 'static>(self) -> Option<&'static P> {
        let plan: &'static dyn Any = self.0;
        plan.downcast_ref()
    }

    /// Returns true if the plan is of type `P`.
    pub fn is<P: 'static>(self) -> bool {
        self.get::<P>().is_some()
    }

    /// Returns the object.
    pub(crate) fn object(self) -> &'static dyn GemmPlan {
        self.0
    }
}

impl PartialEq for Plan {
    fn eq(&self, other: &Self) -> bool {
        let (a, b): (&dyn Any, &dyn Any) = (self.0, other.0);
        // Plans without a configuration have no memory, and may share an address.
        a.type_id() == b.type_id() && ptr::addr_eq(self.0, other.0)
    }
}

impl Eq for Plan {}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.0, f)
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.0, f)
    }
}

/// A plan with its estimated time, if several kernels are compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Candidate {
    pub plan: Plan,
    pub estimate: Option<f64>,
}

impl<P: GemmPlan + PartialEq> From<P> for Candidate {
    fn from(plan: P) -> Self {
        Self {
            plan: plan.into(),
            estimate: None,
        }
    }
}

/// A GEMM that is ready to run, with all buffers that the kernel reads.
pub(crate) struct Launch<'a> {
    pub client: &'a Client,
    pub capabilities: &'a Capabilities,
    pub shape: GemmShape,
    pub a: &'a Materialized,
    pub b: &'a Materialized,
    pub groups: &'a GroupArgs,
    /// Alignment of groups along K, and of the end of their columns.
    pub k_alignment: usize,
    /// True if all memory begins at multiples of 16 bytes; see [`Problem::aligned`].
    pub aligned: bool,
    pub epilogue: &'a EpilogueArgs,
    pub output: &'a Output<'a>,
}

impl Launch<'_> {
    /// Returns the format of block-scaled instructions, if both operands have the same one.
    pub fn block_scaled(&self) -> Option<BlockScaled> {
        block_scaled([self.a.layout, self.b.layout])
    }

    /// Returns the error of a plan that does not fit the operands.
    pub fn misfit(&self, plan: &dyn GemmPlan) -> Nvfp4Error {
        let GemmShape { m, n, k } = self.shape;
        let layouts = [self.a.layout, self.b.layout];
        let grouped = self.groups.grouping;
        Nvfp4Error::value(
            "plan",
            format!("{plan} for {m} x {n} x {k}, {grouped:?}, operands {layouts:?}"),
            "one that takes the operands",
        )
    }
}
