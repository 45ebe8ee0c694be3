//! The bits: codecs of the two small floats, and the packed matrix with its scale layouts.

pub mod e2m1;
pub mod e4m3;
pub mod mx;
pub mod packed;
pub mod ue8m0;
