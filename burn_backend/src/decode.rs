//! Decoding: attention over a key-value cache that is updated in place, and selection of the next
//! token on the device.
//!
//! A [`KvLayer`] holds the keys and values of one layer in memory of a fixed size. The positions of
//! the new tokens are in device memory too ([`Places`]), so no shape and no launch argument depends
//! on the length of a sequence: on a CUDA GPU, a decoding step can be captured as a graph and
//! replayed for every token.
//!
//! [`KvLayer::attend`] is for a small number of new tokens. For a prompt, [`KvLayer::append`]
//! writes the keys and values, and [`try_attention`](crate::attention::try_attention) of
//! [`KvLayer::keys_and_values`] computes the attention.

use burn_core::backend::Dispatch;
use burn_core::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use nvfp4_formats::Nvfp4Error;
use nvfp4_formats::format::e4m3;

use crate::attention::{AttentionParams, RotaryTables, checked_spec};
use crate::ops::attention::{AttentionInputs, AttentionSpec};
use crate::ops::decode::{ChunkPlaces, DecodeOps, DecodeSpec, KvTensors, TokenState};
use crate::validate;

/// Storage format of keys and values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KvFormat {
    /// Dtype of the activations.
    Float(FloatDType),
    /// E4M3 with one scale for all keys and one for all values: an element is the value divided by
    /// the scale, rounded with saturation.
    E4m3 {
        /// Scale that dequantizes keys.
        k_scale: f32,
        /// Scale that dequantizes values.
        v_scale: f32,
    },
}

/// Sizes of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Number of sequences.
    pub batch: usize,
    /// Maximum number of tokens per sequence.
    pub capacity: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Head size, a multiple of 8.
    pub head: usize,
}

/// Positions of the new tokens of a call in their sequences.
#[derive(Debug, Clone)]
pub struct Places {
    /// Number of tokens already in each sequence, `u32[batch]`.
    pub starts: Tensor<1, Int>,
    /// Number of new tokens of each sequence, `u32[batch]`; its remaining rows are padding.
    pub counts: Tensor<1, Int>,
}

impl Places {
    /// Copies these numbers to `device`.
    pub fn new(starts: &[u32], counts: &[u32], device: &Device) -> Self {
        let words = |values: &[u32]| {
            let data = TensorData::new(values.to_vec(), [values.len()]);
            Tensor::from_data(data, (device, DType::U32))
        };
        Self {
            starts: words(starts),
            counts: words(counts),
        }
    }

    fn check(&self, device: &Device, batch: usize) -> Result<(), Nvfp4Error> {
        for (name, tensor) in [("starts", &self.starts), ("counts", &self.counts)] {
            validate::same_device(("cache", device), (name, &tensor.device()))?;
            validate::buffer(name, tensor, [batch], DType::U32)?;
        }
        Ok(())
    }
}

/// Queries, keys and values of new tokens; the tokens of a sequence are contiguous.
#[derive(Debug, Clone)]
#[allow(
    clippy::large_enum_variant,
    reason = "handles of tensors, one set a call"
)]
pub enum NewTokens {
    /// Output of one fused projection, `[tokens, (heads + 2 kv_heads) head]`.
    Qkv(Tensor<2>),
    /// Three separate tensors, `[tokens, heads, head]`.
    Separate([Tensor<3>; 3]),
}

/// Keys and values of one layer, in memory that is written in place: clones share it.
#[derive(Debug, Clone)]
pub struct KvLayer {
    memory: Memory,
    shape: KvShape,
    scales: [f32; 2],
}

#[derive(Debug, Clone)]
enum Memory {
    Float([Tensor<1>; 2]),
    E4m3([Tensor<1, Int>; 2]),
    /// Only while an operation owns the memory.
    Taken,
}

impl KvLayer {
    /// Allocates a cache of `shape`, filled with zeros.
    ///
    /// # Errors
    /// Returns an error if a size is zero, the head size is not a multiple of 8, or a scale is not
    /// positive.
    pub fn try_new(shape: KvShape, format: KvFormat, device: &Device) -> Result<Self, Nvfp4Error> {
        let KvShape {
            batch,
            capacity,
            kv_heads,
            head,
        } = shape;
        let len = batch * capacity * kv_heads * head;
        if len == 0 || !head.is_multiple_of(8) {
            return Err(Nvfp4Error::shape(
                "cache",
                format!("{shape:?}"),
                "positive sizes, and heads of a multiple of 8",
            ));
        }
        let (memory, scales) = match format {
            KvFormat::Float(dtype) => {
                let zeros = || Tensor::zeros([len], (device, DType::from(dtype)));
                (Memory::Float([zeros(), zeros()]), [1.0; 2])
            }
            KvFormat::E4m3 { k_scale, v_scale } => {
                let zeros = || Tensor::zeros([len], (device, DType::U8));
                (Memory::E4m3([zeros(), zeros()]), [k_scale, v_scale])
            }
        };
        for (name, scale) in ["k_scale", "v_scale"].into_iter().zip(scales) {
            if !(scale > 0.0 && scale.is_finite() && (1.0 / scale).is_finite()) {
                return Err(Nvfp4Error::value(
                    name,
                    scale.to_string(),
                    "a positive number whose reciprocal is finite",
                ));
            }
        }
        Ok(Self {
            memory,
            shape,
            scales,
        })
    }

    /// Returns the sizes of the cache.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Rotates new keys by their positions and appends them and the new values to their sequences.
    /// Returns the rotated queries, `[tokens, heads, head]`. Tokens beyond the capacity are not
    /// written.
    ///
    /// # Errors
    /// Returns an error if dtypes, shapes or devices do not fit.
    pub fn append(
        &mut self,
        new: NewTokens,
        places: &Places,
        rotary: Option<&RotaryTables>,
        heads: usize,
    ) -> Result<Tensor<3>, Nvfp4Error> {
        let params = AttentionParams::causal(self.shape.head);
        let out = self.run(new, places, rotary, (heads, params), false)?;
        let [tokens, _] = out.dims();
        Ok(out.reshape([tokens, heads, self.shape.head]))
    }

    /// Calls [`append`](Self::append), and computes the causal attention of the new queries over
    /// the keys of their sequences: `[tokens, heads * head]`, 0 for padding.
    ///
    /// # Errors
    /// Same as [`append`](Self::append); also if a parameter is out of range, or the softmax is not
    /// causal or is quiet.
    pub fn attend(
        &mut self,
        new: NewTokens,
        places: &Places,
        rotary: Option<&RotaryTables>,
        (heads, params): (usize, AttentionParams),
    ) -> Result<Tensor<2>, Nvfp4Error> {
        if !params.causal || params.quiet_softmax {
            return Err(Nvfp4Error::value(
                "params",
                format!("{params:?}"),
                "a causal softmax that is not quiet",
            ));
        }
        self.run(new, places, rotary, (heads, params), true)
    }

    /// Returns all keys and values, `[batch * capacity, kv_heads, head]`, in the layout that
    /// attention takes. The contents after the end of a sequence are undefined. E4M3 elements are
    /// dequantized to `dtype`.
    pub fn keys_and_values(&self, dtype: FloatDType) -> [Tensor<3>; 2] {
        let KvShape {
            batch,
            capacity,
            kv_heads,
            head,
        } = self.shape;
        let shape = [batch * capacity, kv_heads, head];
        match &self.memory {
            Memory::Float(pair) => pair.clone().map(|x| x.reshape(shape)),
            Memory::E4m3(pair) => {
                let device = pair[0].device();
                let [k, v] = pair.clone();
                [(k, self.scales[0]), (v, self.scales[1])].map(|(codes, scale)| {
                    let values: Vec<f32> = (0..=255u8)
                        .map(|code| e4m3::decode_element(code) * scale)
                        .collect();
                    let data = TensorData::new(values, [256]);
                    let table = Tensor::<1>::from_data(data, (&device, DType::F32)).cast(dtype);
                    table
                        .select(0, codes.cast(burn_core::tensor::IntDType::I32))
                        .reshape(shape)
                })
            }
            Memory::Taken => unreachable!("an operation puts it back"),
        }
    }

    fn run(
        &mut self,
        new: NewTokens,
        places: &Places,
        rotary: Option<&RotaryTables>,
        (heads, params): (usize, AttentionParams),
        attends: bool,
    ) -> Result<Tensor<2>, Nvfp4Error> {
        let KvShape {
            batch,
            capacity,
            kv_heads,
            head,
        } = self.shape;
        let spec = checked_spec([heads, kv_heads, head], params)?;
        let inputs = self.inputs(new, &spec)?;
        let device = match &self.memory {
            Memory::Float([k, _]) => k.device(),
            Memory::E4m3([k, _]) => k.device(),
            Memory::Taken => unreachable!("an operation puts it back"),
        };
        places.check(&device, batch)?;
        if let Some(rotary) = rotary {
            rotary.check(&device, head, 1)?;
        }
        let cache = match std::mem::replace(&mut self.memory, Memory::Taken) {
            Memory::Float(pair) => {
                let [k, v] = pair.map(|x| x.into_dispatch());
                KvTensors::Float { k, v }
            }
            Memory::E4m3(pair) => {
                let [k, v] = pair.map(|x| x.into_dispatch());
                KvTensors::E4m3 { k, v }
            }
            Memory::Taken => unreachable!("an operation puts it back"),
        };
        let chunk = ChunkPlaces {
            starts: places.starts.clone().into_dispatch(),
            counts: places.counts.clone().into_dispatch(),
        };
        let rope = RotaryTables::into_dispatch(rotary.cloned());
        let spec = DecodeSpec {
            attention: spec,
            batch,
            capacity,
            scales: self.scales,
        };
        let found = match attends {
            true => Dispatch::nvfp4_decode(inputs, cache, chunk, rope, spec),
            false => Dispatch::nvfp4_append_kv(inputs, cache, chunk, rope, spec),
        };
        self.memory = match found.cache {
            KvTensors::Float { k, v } => Memory::Float([k, v].map(Tensor::from_dispatch)),
            KvTensors::E4m3 { k, v } => Memory::E4m3([k, v].map(Tensor::from_dispatch)),
        };
        Ok(Tensor::from_dispatch(found.out))
    }

    fn inputs(
        &self,
        new: NewTokens,
        spec: &AttentionSpec,
    ) -> Result<AttentionInputs<Dispatch>, Nvfp4Error> {
        let KvShape { batch, head, .. } = self.shape;
        let (tokens, dtype) = match &new {
            NewTokens::Qkv(qkv) => {
                validate::operand("qkv", qkv)?;
                let width = (spec.heads + 2 * spec.kv_heads) * head;
                let [tokens, _] = qkv.dims();
                validate::shape("qkv", qkv.dims(), [tokens, width], || {
                    "(heads + 2 kv_heads) head columns".into()
                })?;
                (tokens, qkv.dtype())
            }
            NewTokens::Separate([q, k, v]) => {
                let [tokens, _, _] = q.dims();
                for (name, x, heads) in [
                    ("q", q, spec.heads),
                    ("k", k, spec.kv_heads),
                    ("v", v, spec.kv_heads),
                ] {
                    validate::operand(name, x)?;
                    validate::shape(name, x.dims(), [tokens, heads, head], || {
                        "heads of all tokens".into()
                    })?;
                    if x.dtype() != q.dtype() {
                        return Err(Nvfp4Error::DType {
                            argument: name,
                            found: format!("{:?}", x.dtype()),
                            expected: format!("{:?}, as `q`", q.dtype()),
                        });
                    }
                }
                (tokens, q.dtype())
            }
        };
        if !tokens.is_multiple_of(batch) {
            return Err(Nvfp4Error::shape(
                "q",
                format!("{tokens} tokens"),
                format!("a multiple of {batch}, the sequences of the cache"),
            ));
        }
        if let Memory::Float([k, _]) = &self.memory
            && k.dtype() != dtype
        {
            return Err(Nvfp4Error::DType {
                argument: "q",
                found: format!("{dtype:?}"),
                expected: format!("{:?}, that of the cache", k.dtype()),
            });
        }
        Ok(match new {
            NewTokens::Qkv(qkv) => AttentionInputs::Qkv(qkv.into_dispatch()),
            NewTokens::Separate(heads) => {
                let [q, k, v] = heads.map(|x| x.into_dispatch());
                AttentionInputs::Separate { q, k, v }
            }
        })
    }
}

/// Next tokens of a batch and the other state of a decoding step, in device memory that is written
/// in place.
#[derive(Debug, Clone)]
pub struct NextTokens {
    /// Next token of each sequence, `i32[batch]`.
    pub tokens: Tensor<1, Int>,
    /// Number of tokens in each sequence, and number that a step adds: 1, or 0 for inactive
    /// sequences.
    pub places: Places,
    /// Tokens of the last steps, `i32[length, batch]`: row `step % length` of each. -1 if the
    /// logits were NaN.
    pub ring: Tensor<2, Int>,
    /// Number of steps so far of each sequence, `u32[batch]`.
    step: Tensor<1, Int>,
}

impl NextTokens {
    /// Creates the state of sequences that have `starts` tokens each, followed by one of `tokens`
    /// each. The ring holds the tokens of `length` steps.
    ///
    /// # Errors
    /// Returns an error if there is no sequence, the numbers of `tokens` and `starts` differ, or
    /// `length` is zero.
    pub fn try_new(
        tokens: &[u32],
        starts: &[u32],
        counts: &[u32],
        length: usize,
        device: &Device,
    ) -> Result<Self, Nvfp4Error> {
        let batch = tokens.len();
        if batch == 0 || starts.len() != batch || counts.len() != batch || length == 0 {
            return Err(Nvfp4Error::shape(
                "tokens",
                format!(
                    "{batch} tokens, {} starts, {} counts and a ring of {length}",
                    starts.len(),
                    counts.len()
                ),
                "equally many, and a ring of at least 1",
            ));
        }
        let tokens: Vec<i32> = tokens.iter().map(|token| *token as i32).collect();
        let data = TensorData::new(tokens, [batch]);
        Ok(Self {
            tokens: Tensor::from_data(data, (device, DType::I32)),
            places: Places::new(starts, counts, device),
            // Created flat and reshaped: on CUDA, a matrix may have padded rows.
            ring: Tensor::<1, Int>::zeros([length * batch], (device, DType::I32))
                .reshape([length, batch]),
            step: Tensor::zeros([batch], (device, DType::U32)),
        })
    }

    /// Sets the next `tokens` and the number `counts` that a step adds. Both are written in place,
    /// so that the next step of a captured graph uses them.
    ///
    /// # Errors
    /// Returns an error if their numbers differ from the number of sequences.
    pub fn set(self, tokens: &[u32], counts: &[u32]) -> Result<Self, Nvfp4Error> {
        let [batch] = self.tokens.dims();
        if tokens.len() != batch || counts.len() != batch {
            return Err(Nvfp4Error::shape(
                "tokens",
                format!("{} tokens and {} counts", tokens.len(), counts.len()),
                format!("{batch} each, the sequences"),
            ));
        }
        let device = self.tokens.device();
        let write = |out: Tensor<1, Int>, data: TensorData| {
            let from = Tensor::<1, Int>::from_data(data, (&device, out.dtype()));
            let made = Dispatch::nvfp4_write_words(out.into_dispatch(), from.into_dispatch());
            Tensor::from_dispatch(made)
        };
        let tokens: Vec<i32> = tokens.iter().map(|token| *token as i32).collect();
        Ok(Self {
            tokens: write(self.tokens, TensorData::new(tokens, [batch])),
            places: Places {
                starts: self.places.starts,
                counts: write(
                    self.places.counts,
                    TensorData::new(counts.to_vec(), [batch]),
                ),
            },
            ..self
        })
    }

    /// Selects the most probable tokens of `logits`, `[batch, vocab]` of a float dtype; on ties the
    /// first. They become the next tokens, and the previous ones part of their sequences.
    ///
    /// # Errors
    /// Returns an error if dtype, shape or device do not fit.
    pub fn choose_greedy(self, logits: Tensor<2>) -> Result<Self, Nvfp4Error> {
        let [batch] = self.tokens.dims();
        let [_, vocab] = logits.dims();
        validate::float("logits", logits.dtype())?;
        validate::shape("logits", logits.dims(), [batch, vocab.max(1)], || {
            "a row for each sequence".into()
        })?;
        validate::same_device(
            ("tokens", &self.tokens.device()),
            ("logits", &logits.device()),
        )?;
        let state = TokenState {
            tokens: self.tokens.into_dispatch(),
            starts: self.places.starts.into_dispatch(),
            counts: self.places.counts.into_dispatch(),
            ring: self.ring.into_dispatch(),
            step: self.step.into_dispatch(),
        };
        let found = Dispatch::nvfp4_choose_greedy(logits.into_dispatch(), state);
        Ok(Self {
            tokens: Tensor::from_dispatch(found.tokens),
            places: Places {
                starts: Tensor::from_dispatch(found.starts),
                counts: Tensor::from_dispatch(found.counts),
            },
            ring: Tensor::from_dispatch(found.ring),
            step: Tensor::from_dispatch(found.step),
        })
    }
}
