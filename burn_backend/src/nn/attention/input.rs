//! Input of a [`MultiHeadAttention`](super::MultiHeadAttention).

use burn_core::tensor::{Bool, Device, Tensor};
use nvfp4_formats::Nvfp4Error;

use super::mask::AttentionMask;
use crate::validate;

/// Names of the arguments of an attention, for errors.
#[derive(Debug, Clone, Copy)]
pub(in crate::nn) struct Names {
    pub query: &'static str,
    pub key: &'static str,
    pub value: &'static str,
    pub mask_pad: &'static str,
    pub mask_attn: &'static str,
}

/// Masks of an attention; a key is hidden from a query if any of them hides it.
#[derive(Debug, Clone, Default)]
pub(in crate::nn) struct Masks {
    /// True where a key is padding, `[batch, keys]`.
    pub pad: Option<Tensor<2, Bool>>,
    /// Mask of queries and keys.
    pub attn: Option<AttentionMask>,
    /// True if a query sees no later key. The last query sees the last key.
    pub causal: bool,
}

impl Masks {
    /// True if no query sees a later key.
    pub fn is_causal(&self) -> bool {
        self.causal || matches!(self.attn, Some(AttentionMask::Causal(_)))
    }

    /// Returns the masks of the last `queries` queries.
    fn of_last(self, queries: usize) -> Self {
        let attn = self.attn.map(|mask| match mask {
            AttentionMask::Other(mask) if mask.dims()[1] != 1 => {
                let [_, rows, _] = mask.dims();
                AttentionMask::Other(mask.narrow(1, rows - queries, queries))
            }
            // The last query sees the last key.
            mask => mask,
        });
        Self { attn, ..self }
    }

    /// Returns an error if the masks do not fit `[batch, queries, keys]` on `device`.
    fn check(
        &self,
        names: Names,
        [batch, queries, keys]: [usize; 3],
        device: &Device,
    ) -> Result<(), Nvfp4Error> {
        let fits = |argument, found: &[usize], wanted: &[usize]| {
            let mut axes = found.iter().zip(wanted);
            if axes.all(|(found, wanted)| found == wanted || *found == 1) {
                return Ok(());
            }
            let expected = format!("{wanted:?}, or 1 instead of any of them");
            Err(Nvfp4Error::shape(argument, format!("{found:?}"), expected))
        };
        let of_query = (names.query, device);
        if let Some(mask) = &self.pad {
            fits(names.mask_pad, &mask.dims(), &[batch, keys])?;
            validate::same_device(of_query, (names.mask_pad, &mask.device()))?;
        }
        if let Some(AttentionMask::Causal(mask) | AttentionMask::Other(mask)) = &self.attn {
            validate::same_device(of_query, (names.mask_attn, &mask.device()))?;
        }
        match &self.attn {
            None => {}
            Some(AttentionMask::Other(mask)) => {
                fits(names.mask_attn, &mask.dims(), &[batch, queries, keys])?;
            }
            Some(AttentionMask::Causal(mask)) => {
                let [found, time, _] = mask.dims();
                let is_batch = found == batch || found == 1;
                if !is_batch || [time; 2] != [queries, keys] {
                    return Err(Nvfp4Error::shape(
                        names.mask_attn,
                        format!("a causal mask of [{found}, {time}, {time}]"),
                        format!("[{batch}, {queries}, {keys}]; the batch may be 1"),
                    ));
                }
            }
        }
        if self.causal && queries > keys {
            return Err(Nvfp4Error::shape(
                names.query,
                format!("{queries} positions with a causal mask"),
                format!("at most {keys}, the positions of `{}`", names.key),
            ));
        }
        Ok(())
    }
}

/// Input of [`MultiHeadAttention::forward`](super::MultiHeadAttention::forward).
///
/// - `query`: `[batch, queries, d_model]`, of type `f32`, `bf16` or `f16`
/// - `key` and `value`: `[batch, keys, d_model]`, of the same type
#[derive(Debug, Clone)]
pub struct MhaInput {
    pub(in crate::nn) query: Tensor<3>,
    /// Keys and values. `None` if both are the query.
    pub(super) key_value: Option<[Tensor<3>; 2]>,
    pub(super) masks: Masks,
    pub(super) names: Names,
}

impl MhaInput {
    /// Creates the input of self-attention: `tensor` is query, key and value.
    ///
    /// If the three projections have one recipe and mode, and all or none have a bias, they are
    /// computed together: `tensor` is quantized once, and the three weights share one global scale.
    pub fn self_attn(tensor: Tensor<3>) -> Self {
        Self {
            query: tensor,
            key_value: None,
            masks: Masks::default(),
            names: Names {
                query: "tensor",
                key: "tensor",
                value: "tensor",
                mask_pad: "mask_pad",
                mask_attn: "mask_attn",
            },
        }
    }

    /// Creates an input of separate tensors.
    pub fn new(query: Tensor<3>, key: Tensor<3>, value: Tensor<3>) -> Self {
        Self {
            key_value: Some([key, value]),
            names: Names {
                query: "query",
                key: "key",
                value: "value",
                mask_pad: "mask_pad",
                mask_attn: "mask_attn",
            },
            ..Self::self_attn(query)
        }
    }

    /// Sets the padding mask, `[batch, keys]`: true where no query attends to the key.
    pub fn mask_pad(mut self, mask_pad: Tensor<2, Bool>) -> Self {
        self.masks.pad = Some(mask_pad);
        self
    }

    /// Sets the attention mask, `[batch, queries, keys]`: true where the query does not attend to
    /// the key. The kernels support that of
    /// [`generate_autoregressive_mask`](super::generate_autoregressive_mask).
    pub fn mask_attn(mut self, mask_attn: Tensor<3, Bool>) -> Self {
        self.masks.attn = Some(mask_attn.into());
        self
    }

    /// Hides later keys from each query: query `i` of `queries` sees key `j` of `keys` only if
    /// `j <= i + keys - queries`. burn-nn's input does not have it.
    pub fn causal(mut self) -> Self {
        self.masks.causal = true;
        self
    }

    /// Replaces the masks.
    pub(in crate::nn) fn with_masks(self, masks: Masks) -> Self {
        Self { masks, ..self }
    }

    /// Replaces the names of the arguments.
    pub(in crate::nn) fn with_names(self, names: Names) -> Self {
        Self { names, ..self }
    }

    /// Replaces the query. In self-attention it is also keys and values.
    pub(in crate::nn) fn with_query(self, query: Tensor<3>) -> Self {
        Self { query, ..self }
    }

    /// Number of keys.
    pub(super) fn keys(&self) -> usize {
        let keys = self.key_value.as_ref().map(|[key, _]| key);
        keys.unwrap_or(&self.query).dims()[1]
    }

    /// Returns the queries from position `past` on. With `grows`, also only these keys and values.
    pub(in crate::nn) fn after(self, past: usize, grows: bool) -> Self {
        if past == 0 {
            return self;
        }
        let rest = |x: Tensor<3>| {
            let [_, time, _] = x.dims();
            x.narrow(1, past, time - past)
        };
        let query = rest(self.query);
        let [_, queries, _] = query.dims();
        Self {
            query,
            key_value: match grows {
                true => self.key_value.map(|both| both.map(rest)),
                false => self.key_value,
            },
            masks: self.masks.of_last(queries),
            names: self.names,
        }
    }

    /// Returns an error if the tensors do not fit each other or `d_model`.
    pub(super) fn check(&self, d_model: usize) -> Result<(), Nvfp4Error> {
        let names = self.names;
        let ([batch, queries, _], device) = (self.query.dims(), self.query.device());
        let why = || "with the d_model of the attention".into();
        let wanted = [batch, queries, d_model];
        validate::shape(names.query, self.query.dims(), wanted, why)?;
        validate::operand(names.query, &self.query)?;
        let keys = self.keys();
        for (index, x) in self.key_value.iter().flatten().enumerate() {
            let name = [names.key, names.value][index];
            let why = || {
                let Names { query, key, .. } = names;
                format!("the batch of `{query}`, the positions of `{key}` and the d_model")
            };
            validate::shape(name, x.dims(), [batch, keys, d_model], why)?;
            validate::same_device((names.query, &device), (name, &x.device()))?;
            validate::same_dtype((names.query, self.query.dtype()), (name, x.dtype()))?;
        }
        self.masks.check(names, [batch, queries, keys], &device)
    }
}
