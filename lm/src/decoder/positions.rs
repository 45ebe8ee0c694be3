//! Cosine and sine tables of the rotary embedding, on the device.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_nvfp4::attention::RotaryTables;

use crate::hf::{DecoderConfig, Rope};
use crate::model::cast;

/// Minimum number of positions of a table.
const LEAST: usize = 256;

/// Rotary embeddings of a model.
#[derive(Clone, Debug)]
pub struct Positions(Vec<Rotary>);

impl Positions {
    pub(super) fn new(config: &DecoderConfig) -> Self {
        let rotary = |rope: &Rope| Rotary {
            rope: rope.clone(),
            head: config.rotary_head(),
            made: Arc::default(),
        };
        Self(config.ropes.iter().map(rotary).collect())
    }

    /// Returns true if the angles of texts of up to `length` tokens do not depend on their length.
    pub fn is_fixed(&self, length: usize) -> bool {
        self.0.iter().all(|rotary| rotary.is_fixed(length))
    }

    /// Returns the tables of each rotary embedding, with at least `length` positions, for texts of
    /// `length`, on `device`.
    ///
    /// # Errors
    /// Returns an error if there are no frequencies for heads of this size.
    pub fn tables(&self, length: usize, device: &Device) -> Result<Vec<Tables>> {
        let all = self.0.iter();
        all.map(|rotary| rotary.tables(length, device)).collect()
    }
}

/// One rotary embedding. Tables are made on first use, for at least the positions needed, and kept
/// for all layers and calls.
#[derive(Clone, Debug)]
struct Rotary {
    rope: Rope,
    head: usize,
    made: Arc<Mutex<Option<Tables>>>,
}

/// Cosine and sine tables, `f32[positions, head / 2]` each: entry `(p, i)` rotates elements `i` and
/// `i + head / 2` of a head at position `p`.
#[derive(Clone, Debug)]
pub struct Tables {
    /// Cosines.
    pub cos: Tensor<2>,
    /// Sines.
    pub sin: Tensor<2>,
    /// Text length for which the frequencies were computed.
    length: usize,
}

impl Rotary {
    fn is_fixed(&self, length: usize) -> bool {
        self.rope.dynamic_beyond().is_none_or(|most| length <= most)
    }

    fn tables(&self, length: usize, device: &Device) -> Result<Tables> {
        // Frequencies that depend on the length are computed for exactly that length.
        let exact = self.rope.dynamic_beyond().is_some_and(|most| length > most);
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tables) = made.as_ref().filter(|t| t.cos.device() == *device) {
            let is_exact = self
                .rope
                .dynamic_beyond()
                .is_some_and(|m| tables.length > m);
            let fits = match exact || is_exact {
                true => tables.length == length,
                false => tables.length >= length,
            };
            if fits {
                return Ok(tables.clone());
            }
        }
        let rows = match self.rope.dynamic_beyond() {
            _ if exact => length,
            Some(most) => length.next_power_of_two().max(LEAST).min(most),
            None => length.next_power_of_two().max(LEAST),
        };
        let (cos, sin) = self.rope.tables(self.head, rows)?;
        let table = |values| {
            let data = TensorData::new(values, [rows, self.head / 2]);
            Tensor::from_data(data, (device, DType::F32))
        };
        let tables = Tables {
            cos: table(cos),
            sin: table(sin),
            length: rows,
        };
        *made = Some(tables.clone());
        Ok(tables)
    }
}

impl Tables {
    /// Returns the tables in the format of the fused attention.
    pub(super) fn rotary(&self) -> Result<RotaryTables> {
        Ok(RotaryTables::try_from_parts(
            self.cos.clone(),
            self.sin.clone(),
        )?)
    }

    /// Looks up the rows of each position, `[batch or 1, time, 1, head / 2]`.
    pub(super) fn at(&self, places: &Places) -> [Tensor<4>; 2] {
        let half = self.cos.dims()[1];
        [&self.cos, &self.sin].map(|table| match places {
            Places::FromZero { time } => {
                let rows = table.clone().narrow(0, 0, *time);
                rows.reshape([1, *time, 1, half])
            }
            Places::Of { positions, shape } => {
                let rows = table.clone().select(0, positions.clone());
                rows.reshape([shape[0], shape[1], 1, half])
            }
        })
    }
}

/// Positions of the tokens of a call.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one in a call")]
pub(super) enum Places {
    /// Positions 0 to `time - 1` in every sequence.
    FromZero {
        /// Tokens per sequence.
        time: usize,
    },
    /// A given position per token.
    Of {
        /// Positions, `[batch * time]`.
        positions: Tensor<1, burn::tensor::Int>,
        /// Batch size and time.
        shape: [usize; 2],
    },
}

/// Applies the rotary embedding to each head of `x`, `[batch, time, heads, head]`, computed in
/// `f32`.
pub(super) fn rotate(x: Tensor<4>, [cos, sin]: &[Tensor<4>; 2]) -> Tensor<4> {
    let dtype: FloatDType = x.dtype().into();
    let half = x.dims()[3] / 2;
    let x = cast(x, FloatDType::F32);
    let (first, second) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
    let real = first.clone() * cos.clone() - second.clone() * sin.clone();
    let imaginary = second * cos.clone() + first * sin.clone();
    cast(Tensor::cat(vec![real, imaginary], 3), dtype)
}
