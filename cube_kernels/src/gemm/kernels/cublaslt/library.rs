//! Loads the library on first use, declares the parts of its C interface that are needed, and
//! builds the descriptors of a GEMM.
//!
//! The interface is declared with plain integers. `cudarc` finds and loads the library, but its
//! bindings are those of the CUDA toolkit at compile time: an older toolkit has no names for FP4,
//! even if the library at run time supports it. Numbers and meanings are those of `cublasLt.h` and
//! `library_types.h` (CUDA 12.8 to 13.4).

use std::{
    ffi::c_void,
    mem::size_of,
    ptr,
    sync::{Mutex, OnceLock},
};

use cubecl::device::DeviceId;
use cudarc::cublaslt::sys;

use super::{CublasLtFormat, CublasLtProblem};
use crate::tensor::FloatKind;

/// Maximum workspace of an algorithm, in bytes: NVIDIA's recommendation for Hopper and Blackwell.
const WORKSPACE: usize = 32 << 20;

type Pointer = *mut c_void;
type Status = i32;

/// Declares the functions to load.
macro_rules! interface {
    ($($field:ident = $name:literal: fn($($argument:ty),*);)*) => {
        struct Interface {
            $($field: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Interface {
            /// Loads the library, or returns the reason for failure.
            fn load() -> Result<Self, String> {
                // SAFETY: loading runs only the initializers of NVIDIA's library; no other library
                // has this name.
                unsafe {
                    if !sys::is_culib_present() {
                        return Err("libcublasLt was not found where the loader looks".into());
                    }
                    let library = sys::culib();
                    // SAFETY: the signatures are those of `cublasLt.h`, in which every enumeration
                    // has the size of an int.
                    Ok(Self {
                        $($field: *library
                            .get($name)
                            .map_err(|error| format!("libcublasLt: {error}"))?,)*
                    })
                }
            }
        }
    };
}

interface! {
    create = b"cublasLtCreate": fn(*mut Pointer);
    desc_create = b"cublasLtMatmulDescCreate": fn(*mut Pointer, i32, i32);
    desc_set = b"cublasLtMatmulDescSetAttribute": fn(Pointer, i32, *const c_void, usize);
    desc_destroy = b"cublasLtMatmulDescDestroy": fn(Pointer);
    layout_create = b"cublasLtMatrixLayoutCreate": fn(*mut Pointer, i32, u64, u64, i64);
    layout_destroy = b"cublasLtMatrixLayoutDestroy": fn(Pointer);
    preference_create = b"cublasLtMatmulPreferenceCreate": fn(*mut Pointer);
    preference_set = b"cublasLtMatmulPreferenceSetAttribute":
        fn(Pointer, i32, *const c_void, usize);
    preference_destroy = b"cublasLtMatmulPreferenceDestroy": fn(Pointer);
    heuristic = b"cublasLtMatmulAlgoGetHeuristic":
        fn(Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, Pointer, i32, *mut Heuristic, *mut i32);
    matmul = b"cublasLtMatmul":
        fn(Pointer, Pointer, *const c_void, *const c_void, Pointer, *const c_void, Pointer,
           *const c_void, *const c_void, Pointer, Pointer, Pointer, *const Algorithm, Pointer, usize,
           Pointer);
}

/// `CUBLAS_COMPUTE_32F`: products and sums in `f32`.
const COMPUTE_32F: i32 = 68;

/// Returns the `cudaDataType_t`.
const fn type_of(format: CublasLtFormat) -> i32 {
    match format {
        CublasLtFormat::Bf16 => R_16BF,
        CublasLtFormat::E4m3 => 28,
        CublasLtFormat::Nvfp4 => 33,
    }
}
const R_32F: i32 = 0;
const R_16F: i32 = 2;
const R_16BF: i32 = 14;
const fn float_type(kind: FloatKind) -> i32 {
    match kind {
        FloatKind::F32 => R_32F,
        FloatKind::F16 => R_16F,
        FloatKind::Bf16 => R_16BF,
    }
}

/// `cublasLtMatmulDescAttributes_t`, with `int` values unless stated otherwise.
mod attribute {
    /// Location of `alpha` and `beta`: 0 on the host, 1 on the device.
    pub const POINTER_MODE: i32 = 2;
    /// 0 as stored, 1 transposed.
    pub const TRANSPOSE_A: i32 = 3;
    pub const TRANSPOSE_B: i32 = 4;
    /// 1 nothing, 4 a bias.
    pub const EPILOGUE: i32 = 7;
    /// A device address.
    pub const BIAS: i32 = 8;
    /// Device addresses.
    pub const SCALE_A: i32 = 17;
    pub const SCALE_B: i32 = 18;
    pub const BIAS_TYPE: i32 = 26;
    /// 0 a single `f32`, 1 an E4M3 scale per 16 elements.
    pub const SCALE_MODE_A: i32 = 31;
    pub const SCALE_MODE_B: i32 = 32;
}

/// `cublasLtMatmulPreferenceAttributes_t`.
mod preference {
    /// Bytes, 64 bits.
    pub const WORKSPACE: i32 = 1;
    /// Reduction schemes allowed for split K, 32 bits: 1 in the output, 2 in `f32`, 4 in the type
    /// of the output.
    pub const REDUCTION: i32 = 3;
    /// First of the four attributes for `A`, `B`, `C` and `D`: bytes, 32 bits.
    pub const ALIGNMENT: i32 = 5;
}

/// `cublasLtMatmulAlgo_t`, an opaque value of the library, and its workspace size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Algorithm {
    data: [u64; 8],
    /// Bytes of workspace.
    pub workspace: usize,
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
struct Heuristic {
    algorithm: Algorithm,
    state: Status,
    waves: f32,
    reserved: [i32; 4],
}

/// The library's fastest algorithm for a problem by its heuristics, or the reason why there is
/// none.
pub type Answer = Result<Algorithm, String>;

/// Device addresses of the memory of a GEMM.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    pub a: u64,
    pub b: u64,
    pub a_scale: u64,
    pub b_scale: u64,
    pub alpha: u64,
    pub bias: u64,
    pub out: u64,
    pub workspace: u64,
}

impl Addresses {
    /// Placeholder addresses for support queries, which read no memory.
    const NONE: Self = Self {
        a: 256,
        b: 256,
        a_scale: 256,
        b_scale: 256,
        alpha: 256,
        bias: 256,
        out: 256,
        workspace: 256,
    };
}

/// The loaded library, with a handle for each device in use.
pub struct Library {
    interface: Interface,
    handles: Mutex<Vec<(DeviceId, usize)>>,
}

impl Library {
    /// Returns the library, or the reason why it is unavailable.
    pub fn get() -> Result<&'static Self, String> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        let loaded = LIBRARY.get_or_init(|| {
            Ok(Self {
                interface: Interface::load()?,
                handles: Mutex::new(Vec::new()),
            })
        });
        loaded.as_ref().map_err(Clone::clone)
    }

    /// Returns the handle of `device`, whose context must be current.
    fn handle(&self, device: DeviceId) -> Result<Pointer, String> {
        let mut handles = self.handles.lock().unwrap_or_else(|held| held.into_inner());
        if let Some((_, handle)) = handles.iter().find(|(known, _)| *known == device) {
            return Ok(*handle as Pointer);
        }
        let mut handle = ptr::null_mut();
        // SAFETY: the result is written to a local.
        check("cublasLtCreate", unsafe {
            (self.interface.create)(&mut handle)
        })?;
        handles.push((device, handle as usize));
        Ok(handle)
    }

    /// Asks the library for an algorithm for `problem` on `device`, whose context must be current.
    /// An error means that the query itself failed.
    pub fn plan(&self, device: DeviceId, problem: &CublasLtProblem) -> Result<Answer, String> {
        let handle = self.handle(device)?;
        let operation = Operation::new(&self.interface, problem, &Addresses::NONE)?;
        let preference = Object::new(
            "cublasLtMatmulPreferenceCreate",
            self.interface.preference_destroy,
            // SAFETY: the result is written to a local of `Object::new`.
            |result| unsafe { (self.interface.preference_create)(result) },
        )?;
        let set = |attribute: i32, value: &[u8]| {
            // SAFETY: the attribute is copied, and the given length is that of `value`.
            check("cublasLtMatmulPreferenceSetAttribute", unsafe {
                let set = self.interface.preference_set;
                set(preference.0, attribute, value.as_ptr().cast(), value.len())
            })
        };
        set(preference::WORKSPACE, &(WORKSPACE as u64).to_ne_bytes())?;
        // Forces the output to be rounded only once.
        set(preference::REDUCTION, &2u32.to_ne_bytes())?;
        for matrix in 0..4 {
            let attribute = preference::ALIGNMENT + matrix;
            set(attribute, &problem.alignment.to_ne_bytes())?;
        }
        let mut found = Heuristic {
            algorithm: Algorithm {
                data: [0; 8],
                workspace: 0,
            },
            state: 0,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut count = 0;
        let Operation { desc, a, b, out } = &operation;
        let name = "cublasLtMatmulAlgoGetHeuristic";
        // SAFETY: all descriptors are alive, and room is given for the one result that is asked
        // for.
        let status = unsafe {
            let heuristic = self.interface.heuristic;
            heuristic(
                handle,
                desc.0,
                a.0,
                b.0,
                out.0,
                out.0,
                preference.0,
                1,
                &mut found,
                &mut count,
            )
        };
        match (check(name, status), count) {
            (Err(refusal), _)
                if [INVALID_VALUE, ARCH_MISMATCH, NOT_SUPPORTED].contains(&status) =>
            {
                Ok(Err(refusal))
            }
            (Err(failure), _) => Err(failure),
            (Ok(()), 0) => Ok(Err(format!("{name} found no algorithm"))),
            (Ok(()), _) => Ok(check("the algorithm found", found.state).map(|()| found.algorithm)),
        }
    }

    /// Queues a GEMM on `stream`.
    ///
    /// # Safety
    /// The context of `device` must be current, and `stream` must be one of its streams. The
    /// addresses must point to device memory of at least the size that
    /// [`CublasLtGemm::check`](super::CublasLtGemm::check) requires, and to a workspace of the size
    /// that `algorithm` requires. All of it must stay alive until the stream has passed the GEMM;
    /// until then no other stream may write any of it or read the output.
    pub unsafe fn queue(
        &self,
        device: DeviceId,
        problem: &CublasLtProblem,
        algorithm: &Algorithm,
        at: &Addresses,
        stream: Pointer,
    ) -> Result<(), String> {
        let handle = self.handle(device)?;
        let operation = Operation::new(&self.interface, problem, at)?;
        let one = [1.0f32, problem.accumulate.into()];
        let alpha = match problem.alpha {
            true => at.alpha as *const f32,
            false => one.as_ptr(),
        };
        let Operation { desc, a, b, out } = &operation;
        let matmul = self.interface.matmul;
        // SAFETY: descriptors are alive; `alpha` is followed by `beta` on host and device; the
        // caller guarantees the rest. Our `a` is the library's `B`.
        check("cublasLtMatmul", unsafe {
            matmul(
                handle,
                desc.0,
                alpha.cast(),
                at.b as *const c_void,
                a.0,
                at.a as *const c_void,
                b.0,
                alpha.wrapping_add(1).cast(),
                at.out as *const c_void,
                out.0,
                at.out as Pointer,
                out.0,
                algorithm,
                at.workspace as Pointer,
                algorithm.workspace,
                stream,
            )
        })
    }
}

/// A descriptor that is destroyed with its owner.
struct Object(Pointer, unsafe extern "C" fn(Pointer) -> Status);

impl Object {
    fn new(
        name: &str,
        destroy: unsafe extern "C" fn(Pointer) -> Status,
        create: impl FnOnce(*mut Pointer) -> Status,
    ) -> Result<Self, String> {
        let mut object = ptr::null_mut();
        check(name, create(&mut object))?;
        Ok(Self(object, destroy))
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: created by the counterpart of the destroy function, and destroyed once.
        unsafe { (self.1)(self.0) };
    }
}

/// Descriptors of one GEMM: the operation, and the layouts of the library's `A`, `B` and `D`.
struct Operation {
    desc: Object,
    a: Object,
    b: Object,
    out: Object,
}

impl Operation {
    fn new(
        interface: &Interface,
        problem: &CublasLtProblem,
        at: &Addresses,
    ) -> Result<Self, String> {
        let CublasLtProblem {
            format, m, n, k, ..
        } = *problem;
        let desc = Object::new(
            "cublasLtMatmulDescCreate",
            interface.desc_destroy,
            // SAFETY: the result is written to a local of `Object::new`.
            |result| unsafe { (interface.desc_create)(result, COMPUTE_32F, R_32F) },
        )?;
        let set = |attribute: i32, value: &[u8]| {
            // SAFETY: the attribute is copied, and the given length is that of `value`.
            let status = unsafe {
                (interface.desc_set)(desc.0, attribute, value.as_ptr().cast(), value.len())
            };
            check(
                &format!("cublasLtMatmulDescSetAttribute({attribute})"),
                status,
            )
        };
        let set_int = |attribute: i32, value: i32| set(attribute, &value.to_ne_bytes());
        let set_address = |attribute: i32, value: u64| set(attribute, &value.to_ne_bytes());
        const { assert!(size_of::<Pointer>() == size_of::<u64>()) };
        set_int(attribute::TRANSPOSE_A, 1)?;
        set_int(attribute::TRANSPOSE_B, 0)?;
        if problem.alpha {
            set_int(attribute::POINTER_MODE, 1)?;
        }
        if problem.bias {
            set_int(attribute::EPILOGUE, 4)?;
            set_int(attribute::BIAS_TYPE, float_type(format.bias(problem.out)))?;
            set_address(attribute::BIAS, at.bias)?;
        }
        if format != CublasLtFormat::Bf16 {
            set_address(attribute::SCALE_A, at.b_scale)?;
            set_address(attribute::SCALE_B, at.a_scale)?;
        }
        // The default is one `f32` per operand, the only mode that versions before 12.8 know.
        if format == CublasLtFormat::Nvfp4 {
            set_int(attribute::SCALE_MODE_A, 1)?;
            set_int(attribute::SCALE_MODE_B, 1)?;
        }
        let layout = |elements: i32, rows: usize, cols: usize| {
            Object::new(
                "cublasLtMatrixLayoutCreate",
                interface.layout_destroy,
                // SAFETY: the result is written to a local of `Object::new`.
                |result| unsafe {
                    let create = interface.layout_create;
                    create(result, elements, rows as u64, cols as u64, rows as i64)
                },
            )
        };
        Ok(Self {
            a: layout(type_of(format), k, n)?,
            b: layout(type_of(format), k, m)?,
            out: layout(float_type(problem.out), n, m)?,
            desc,
        })
    }
}

const INVALID_VALUE: Status = 7;
const ARCH_MISMATCH: Status = 8;
const NOT_SUPPORTED: Status = 15;

/// Converts `cublasStatus_t` to a result.
fn check(what: &str, status: Status) -> Result<(), String> {
    let name = match status {
        0 => return Ok(()),
        1 => "NOT_INITIALIZED",
        3 => "ALLOC_FAILED",
        INVALID_VALUE => "INVALID_VALUE",
        ARCH_MISMATCH => "ARCH_MISMATCH",
        11 => "MAPPING_ERROR",
        13 => "EXECUTION_FAILED",
        14 => "INTERNAL_ERROR",
        NOT_SUPPORTED => "NOT_SUPPORTED",
        16 => "LICENSE_ERROR",
        _ => "unknown",
    };
    Err(format!("{what}: CUBLAS_STATUS_{name} ({status})"))
}
