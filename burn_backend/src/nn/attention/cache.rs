//! Caches of autoregressive inference.

use burn_core::tensor::Tensor;
use nvfp4_formats::Nvfp4Error;

use super::input::MhaInput;

/// Outputs of the positions of earlier calls, `[batch, positions, d_model]`.
#[derive(Debug, Default)]
pub(in crate::nn) struct OutputCache(Option<Tensor<3>>);

impl OutputCache {
    /// Returns the number of cached positions, or an error if `x`, called `name`, does not continue
    /// them.
    pub fn past(&self, name: &'static str, x: &Tensor<3>) -> Result<usize, Nvfp4Error> {
        let Some(cached) = &self.0 else {
            return Ok(0);
        };
        let ([batch, past, width], [found_batch, time, found_width]) = (cached.dims(), x.dims());
        if found_width != width || cached.dtype() != x.dtype() || cached.device() != x.device() {
            return Err(Nvfp4Error::value(
                "cache",
                format!(
                    "outputs of {width}, {:?} on {:?}",
                    cached.dtype(),
                    cached.device()
                ),
                format!(
                    "{found_width}, {:?} on {:?}, as `{name}`",
                    x.dtype(),
                    x.device()
                ),
            ));
        }
        if found_batch != batch || time <= past {
            return Err(Nvfp4Error::shape(
                name,
                format!("a batch of {found_batch} with {time} positions"),
                format!("a batch of {batch} with more than the {past} positions in the cache"),
            ));
        }
        Ok(past)
    }

    /// Appends the outputs of the next positions and returns the outputs of all.
    pub fn append(&mut self, next: Tensor<3>) -> Tensor<3> {
        let all = appended(self.0.take(), next);
        self.0 = Some(all.clone());
        all
    }
}

/// Appends the positions of `next`.
fn appended(past: Option<Tensor<3>>, next: Tensor<3>) -> Tensor<3> {
    match past {
        Some(past) => Tensor::cat(vec![past, next], 1),
        None => next,
    }
}

/// Cache of a [`MultiHeadAttention`](super::MultiHeadAttention) for autoregressive inference: the
/// projected keys and values, and the output, of the positions of earlier calls.
///
/// Each call passes the whole sequence. The attention computes the positions that are not in the
/// cache, at least one. burn-nn's computes exactly one after the first call.
#[derive(Debug)]
pub struct MhaCache {
    /// Projected keys and values, `[batch, keys, d_model]`.
    keys: Option<[Tensor<3>; 2]>,
    /// True if each call appends keys and values.
    grows: bool,
    pub(super) output: OutputCache,
}

impl MhaCache {
    /// Creates an empty cache of self-attention: keys and values grow with the queries.
    pub fn autoregressive() -> Self {
        Self {
            keys: None,
            grows: true,
            output: OutputCache::default(),
        }
    }

    /// Creates an empty cache of cross-attention: the first call projects all keys and values, and
    /// later calls use them.
    pub fn autoregressive_cross_attention() -> Self {
        Self {
            grows: false,
            ..Self::autoregressive()
        }
    }

    /// True if each call appends keys and values.
    pub(super) fn grows(&self) -> bool {
        self.grows
    }

    /// Returns the keys and values of all queries, if they are known.
    pub(super) fn fixed(&self) -> Option<[Tensor<3>; 2]> {
        self.keys.clone().filter(|_| !self.grows)
    }

    /// Appends projected keys and values and returns all.
    pub(super) fn append(&mut self, [keys, values]: [Tensor<3>; 2]) -> [Tensor<3>; 2] {
        let (past_keys, past_values) = self.keys.take().map(|[k, v]| (k, v)).unzip();
        let all = [appended(past_keys, keys), appended(past_values, values)];
        self.keys = Some(all.clone());
        all
    }

    /// Returns an error if the keys of `input`, of all positions, do not continue those cached.
    pub(in crate::nn) fn check_keys(&self, input: &MhaInput) -> Result<(), Nvfp4Error> {
        let [_, queries, _] = input.query.dims();
        let keys = input.keys();
        let expected = match (&self.keys, self.grows) {
            (_, true) if keys != queries => {
                format!(
                    "{queries}, as `{}`: the cache grows by both",
                    input.names.query
                )
            }
            (Some([cached, _]), false) if cached.dims()[1] != keys => {
                format!("the {} in the cache", cached.dims()[1])
            }
            _ => return Ok(()),
        };
        let found = format!("{keys} positions");
        Err(Nvfp4Error::shape(input.names.key, found, expected))
    }
}
