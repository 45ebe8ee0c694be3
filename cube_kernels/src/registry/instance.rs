//! An instance of a kernel, and the device that it is specialized for.

use std::sync::Arc;

use cubecl::{
    ir::{
        DeviceProperties, ElemType, FloatKind, TargetProperties,
        features::{MmaConfig, Plane},
    },
    prelude::*,
    server::Handle,
};

use crate::{cube::codec::Conversion, gemm::instances::specialization::GemmInstance};

/// A device for specializing kernels without launching them.
pub struct DummyDevice {
    client: Client,
    /// Properties that kernels query.
    pub properties: Arc<DeviceProperties>,
    /// Properties that the device's compiler queries.
    pub target: Arc<TargetProperties>,
    /// Conversion method.
    pub conversion: Conversion,
    /// True if its kernels can overlap (compute capability 9.0 and later).
    pub overlaps: bool,
}

impl DummyDevice {
    /// Returns a CUDA GPU with `conversion`, whose kernels can overlap if `overlaps` is set;
    /// `target` comes from CubeCL's CUDA runtime. Any client works, because it only allocates
    /// memory.
    pub fn new(
        client: Client,
        target: TargetProperties,
        conversion: Conversion,
        overlaps: bool,
    ) -> Self {
        let mut properties = (*client.properties_shared()).clone();
        properties.features.plane.insert(Plane::Ops);
        (
            properties.hardware.plane_size_min,
            properties.hardware.plane_size_max,
        ) = (32, 32);
        properties.features.matmul.cmma.insert(MmaConfig {
            a_type: ElemType::Float(FloatKind::BF16),
            b_type: ElemType::Float(FloatKind::BF16),
            cd_type: ElemType::Float(FloatKind::F32),
            m: 16,
            n: 16,
            k: 16,
        });
        Self {
            properties: Arc::new(properties),
            target: Arc::new(target),
            client,
            conversion,
            overlaps,
        }
    }

    /// Allocates some memory.
    pub(crate) fn memory(&self) -> Handle {
        self.client.empty(1 << 16)
    }

    /// Returns a buffer of `len` elements of any type.
    pub fn buffer(&self, len: usize) -> BufferArg {
        // SAFETY: nothing is launched.
        unsafe { BufferArg::from_raw_parts(self.memory(), len) }
    }

    /// True if the device has an instruction that rounds to nearest E2M1.
    pub fn has_nearest(&self) -> bool {
        self.conversion.has_nearest() && self.conversion != Conversion::Emulated
    }

    /// True if the device has an instruction that rounds to E2M1 stochastically.
    pub fn has_stochastic(&self) -> bool {
        self.conversion == Conversion::Hardware
    }
}

/// Features that the machine code of an instance must have (`Some(true)`), must not have
/// (`Some(false)`), or may have (`None`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Conversion to E2M1 with rounding to nearest.
    pub e2m1_rn: Option<bool>,
    /// Conversion to E2M1 with stochastic rounding.
    pub e2m1_rs: Option<bool>,
    /// Conversion to E4M3.
    pub e4m3: Option<bool>,
    /// Loads and stores of spilled registers.
    pub spills: Option<bool>,
}

impl Expected {
    /// No conversion to 4 or 8 bits, and no spilled registers.
    pub const NONE: Self = Self {
        e2m1_rn: Some(false),
        e2m1_rs: None,
        e4m3: Some(false),
        spills: Some(false),
    };

    /// True if a conversion is expected or excluded.
    pub fn converts(&self) -> bool {
        self.e2m1_rn.is_some() || self.e2m1_rs.is_some() || self.e4m3.is_some()
    }
}

/// Architectures that an instance is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architectures {
    /// All architectures that the project supports, from sm_80 on.
    All,
    /// sm_90a: `wgmma` and TMA, or features that only kernels with them need.
    Sm90a,
    /// sm_100a and sm_103a: `tcgen05`.
    Sm100,
    /// sm_120a and sm_121a: block-scaled `mma`.
    Sm120,
}

impl Architectures {
    /// True if `arch`, such as `sm_90a`, is one of them.
    pub fn contains(self, arch: &str) -> bool {
        match self {
            Self::All => true,
            Self::Sm90a => arch == "sm_90a",
            Self::Sm100 => ["sm_100a", "sm_103a"].contains(&arch),
            Self::Sm120 => ["sm_120a", "sm_121a"].contains(&arch),
        }
    }
}

/// One instance of a kernel.
pub struct Instance {
    /// Name of the kernel and its variant.
    pub name: String,
    /// Specialized kernel.
    pub kernel: Box<dyn CubeKernel>,
    /// Expected features of its machine code.
    pub expected: Expected,
    /// Architectures that it is compiled for.
    pub architectures: Architectures,
    /// Parameters of a GEMM kernel, which determine its instructions.
    pub gemm: Option<GemmInstance>,
}

impl Instance {
    /// Returns an instance of the function `function`; `variant` distinguishes it from the
    /// function's other instances.
    pub fn new(
        function: &str,
        variant: impl std::fmt::Display,
        expected: Expected,
        kernel: impl CubeKernel,
    ) -> Self {
        let variant = variant.to_string();
        let dash = if variant.is_empty() { "" } else { "-" };
        Self {
            name: format!("{function}{dash}{variant}"),
            kernel: Box::new(kernel),
            expected,
            architectures: Architectures::All,
            gemm: None,
        }
    }

    /// Restricts the instance to `architectures`.
    pub(crate) fn on(self, architectures: Architectures) -> Self {
        Self {
            architectures,
            ..self
        }
    }

    /// Marks the instance as a GEMM kernel for `architectures`.
    pub fn of_gemm(self, gemm: GemmInstance, architectures: Architectures) -> Self {
        Self {
            architectures,
            gemm: Some(gemm),
            ..self
        }
    }

    /// Returns the name of the kernel's function, from the kernel's type.
    pub fn function(&self) -> &'static str {
        let path = self.kernel.name().split('<').next().unwrap_or_default();
        let mut parts = path.rsplit("::");
        // The last component is the generated type, in a module with the function's name.
        parts.nth(1).unwrap_or_default()
    }
}

/// `instance!(device, kernel, variant, expected, arguments...)` returns an [`Instance`] of `kernel`
/// in one cube of 256 units, or of `N` units if `units N,` follows the device.
macro_rules! instance {
    ($device:expr, $kernel:ident, $($rest:tt)*) => {
        instance!($device, units 256, $kernel, $($rest)*)
    };
    ($device:expr, units $units:expr, $kernel:ident, $variant:expr, $expected:expr,
     $($argument:expr),* $(,)?) => {{
        // SAFETY: nothing is launched.
        #[allow(unused_unsafe)]
        let kernel = unsafe {
            $kernel::create_dummy_kernel(
                $device.properties.clone(),
                $device.target.clone(),
                cubecl::prelude::CubeCount::Static(1, 1, 1),
                cubecl::prelude::CubeDim::new_1d($units),
                $($argument),*
            )
        };
        $crate::registry::instance::Instance::new(stringify!($kernel), $variant, $expected, kernel)
    }};
}
pub(crate) use instance;
