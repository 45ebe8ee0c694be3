//! Post-training quantization of weights on the device: statistics of inputs, block scales by
//! search, GPTQ.
//!
//! [`InputMoments`] sums the moments of a layer's input over the tokens of a calibration;
//! [`InverseFactor`] is the factor of the inverse second moments that GPTQ needs. [`round_rows`]
//! quantizes each block by itself, [`gptq`] compensates rounding errors in later columns. Sums are
//! `f64` in the order of [`nvfp4_formats::ptq`], so results equal those of its functions byte for
//! byte.

mod block;
mod compensate;
mod factor;
#[cfg(feature = "proof")]
pub(crate) mod instances;
mod moments;
mod products;
mod round;
mod square;

pub use compensate::gptq;
pub use factor::InverseFactor;
pub use moments::{FeatureSums, InputMoments};
pub use round::round_rows;
