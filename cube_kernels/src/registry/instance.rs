//! One instance of a kernel, and the device that it is specialized for.

use std::sync::Arc;

use cubecl::{
    ir::{
        DeviceProperties, ElemType, FloatKind, TargetProperties,
        features::{MmaConfig, Plane},
    },
    prelude::*,
    server::Handle,
};

use crate::{cube::codec::Conversion, gemm::specialization::GemmInstance};

/// A device that kernels are specialized for, and that nothing is launched on.
pub struct DummyDevice {
    client: Client,
    /// The properties that kernels ask for.
    pub properties: Arc<DeviceProperties>,
    /// What the compiler of the device needs to know.
    pub target: Arc<TargetProperties>,
    /// How it converts.
    pub conversion: Conversion,
    /// Whether its kernels can overlap (compute capability 9.0 and later).
    pub overlaps: bool,
}

impl DummyDevice {
    /// A CUDA GPU with `conversion`, whose kernels can overlap or not; `target` is that of CubeCL's CUDA runtime. Any client will do:
    /// it allocates memory, and nothing else.
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

    /// Some memory.
    pub(crate) fn memory(&self) -> Handle {
        self.client.empty(1 << 16)
    }

    /// A buffer of `len` elements, whatever their type.
    pub fn buffer(&self, len: usize) -> BufferArg {
        // SAFETY: nothing is launched.
        unsafe { BufferArg::from_raw_parts(self.memory(), len) }
    }

    /// Whether it has an instruction that rounds to nearest E2M1.
    pub fn has_nearest(&self) -> bool {
        self.conversion.has_nearest() && self.conversion != Conversion::Emulated
    }

    /// Whether it has an instruction that rounds to E2M1 stochastically.
    pub fn has_stochastic(&self) -> bool {
        self.conversion == Conversion::Hardware
    }
}

/// What the machine code of an instance must hold (`Some(true)`), must not hold (`Some(false)`), or
/// may (`None`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// The conversion to E2M1, to nearest.
    pub e2m1_rn: Option<bool>,
    /// The conversion to E2M1, stochastic.
    pub e2m1_rs: Option<bool>,
    /// The conversion to E4M3.
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

    /// Whether a conversion is expected, or excluded.
    pub fn converts(&self) -> bool {
        self.e2m1_rn.is_some() || self.e2m1_rs.is_some() || self.e4m3.is_some()
    }
}

/// The architectures that an instance is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architectures {
    /// All that the project names, from sm_80 on.
    All,
    /// sm_90a: `wgmma` and TMA, or what only kernels with them need.
    Sm90a,
    /// sm_100a and sm_103a: `tcgen05`.
    Sm100,
    /// sm_120a and sm_121a: block-scaled `mma`.
    Sm120,
}

impl Architectures {
    /// Whether `arch`, such as `sm_90a`, is one of them.
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
    /// The kernel's name and what tells its instances apart.
    pub name: String,
    /// The instance itself.
    pub kernel: Box<dyn CubeKernel>,
    /// What its machine code must hold.
    pub expected: Expected,
    /// What it is compiled for.
    pub architectures: Architectures,
    /// What a GEMM kernel was specialized for, from which its instructions follow.
    pub gemm: Option<GemmInstance>,
}

impl Instance {
    /// An instance of the function `function`; `variant` tells it from the function's others.
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

    /// The same, for `architectures` alone.
    pub(crate) fn on(self, architectures: Architectures) -> Self {
        Self {
            architectures,
            ..self
        }
    }

    /// The same, of a GEMM kernel for `architectures`.
    pub fn of_gemm(self, gemm: GemmInstance, architectures: Architectures) -> Self {
        Self {
            architectures,
            gemm: Some(gemm),
            ..self
        }
    }

    /// The name of the kernel's function, from the kernel's type.
    pub fn function(&self) -> &'static str {
        let path = self.kernel.name().split('<').next().unwrap_or_default();
        let mut parts = path.rsplit("::");
        // The last is the generated type, in a module with the function's name.
        parts.nth(1).unwrap_or_default()
    }
}

/// `instance!(device, kernel, variant, expected, arguments...)`: an [`Instance`] of `kernel`, in
/// one cube of 256 units, or of as many as `units N,` says behind the device.
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
