//! GEMM kernels, in a folder per architecture. The first page of each folder says which kernels it
//! has, what calls them, and whether they have run on hardware.
//!
//! | folder | devices | has run on hardware |
//! |---|---|---|
//! | `portable` | any device; `cmma` needs matrix instructions | yes |
//! | `small_m` | sm_80 and later, up to 16 rows | yes, on sm_90 |
//! | `sm90` | Hopper | yes |
//! | `sm100` | data-center Blackwell | **no** |
//! | `sm120` | consumer Blackwell | **no** |
//! | `cublaslt` | sm_100 and sm_103, by NVIDIA's library | bf16 and FP8 yes, FP4 **no** |

// `#[cube]` generates public items that cannot carry documentation.
pub mod cublaslt;
#[allow(missing_docs)]
pub(crate) mod portable;
#[allow(missing_docs)]
pub mod sm100;
#[allow(missing_docs)]
pub(crate) mod sm120;
#[allow(missing_docs)]
pub(crate) mod sm90;
#[allow(missing_docs)]
pub(crate) mod small_m;
