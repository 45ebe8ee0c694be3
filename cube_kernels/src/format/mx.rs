//! An MXFP8 matrix on the host.

use serde::{Deserialize, Serialize};

use crate::{Nvfp4Error, Usage, format::check_extent};

/// Elements that share one UE8M0 scale.
pub const MX_BLOCK: usize = 32;

/// A matrix in MXFP8: E4M3 codes, and one UE8M0 scale for each block of 32 along the packed axis.
///
/// The source is `rows` x `cols`; what is stored is `outer` x `inner`, the source for
/// [`Usage::Rowwise`] and its transpose for [`Usage::Columnwise`]. Where `inner` is no multiple of
/// 32, the last block is padded with zeros. An element decodes to `e4m3(code) · 2^(scale - 127)`
/// (specification, section 10).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Parts")]
pub struct MxPacked {
    rows: usize,
    cols: usize,
    usage: Usage,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

/// An [`MxPacked`] as it is read, before it is checked.
#[derive(Deserialize)]
#[serde(rename = "MxPacked")]
struct Parts {
    rows: usize,
    cols: usize,
    usage: Usage,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl TryFrom<Parts> for MxPacked {
    type Error = Nvfp4Error;

    fn try_from(parts: Parts) -> Result<Self, Nvfp4Error> {
        Self::from_parts(
            (parts.rows, parts.cols),
            parts.usage,
            parts.codes,
            parts.scales,
        )
    }
}

impl MxPacked {
    /// A packed matrix from its parts: `codes` is `[outer, blocks * 32]`, `scales` `[outer, blocks]`.
    ///
    /// # Errors
    /// When a length does not fit the shape.
    pub fn from_parts(
        (rows, cols): (usize, usize),
        usage: Usage,
        codes: Vec<u8>,
        scales: Vec<u8>,
    ) -> Result<Self, Nvfp4Error> {
        check_extent("rows, cols", rows, cols)?;
        let (outer, inner) = usage.stored_shape(rows, cols);
        let blocks = outer * inner.div_ceil(MX_BLOCK);
        let check = |argument, found: usize, expected: usize| {
            if found == expected {
                return Ok(());
            }
            Err(Nvfp4Error::shape(
                argument,
                format!("{found} bytes"),
                format!("{expected}, for {rows}x{cols} packed along {usage:?}"),
            ))
        };
        check("codes", codes.len(), blocks * MX_BLOCK)?;
        check("scales", scales.len(), blocks)?;
        Ok(Self {
            rows,
            cols,
            usage,
            codes,
            scales,
        })
    }

    /// Rows of the source matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the source matrix.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The axis of the source along which it is packed.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Stored rows.
    pub fn outer(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).0
    }

    /// Length of the packed axis, without padding.
    pub fn inner(&self) -> usize {
        self.usage.stored_shape(self.rows, self.cols).1
    }

    /// Blocks in one stored row.
    pub fn blocks(&self) -> usize {
        self.inner().div_ceil(MX_BLOCK)
    }

    /// The E4M3 codes: `[outer, blocks * 32]`.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// The UE8M0 scales: `[outer, blocks]`.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_part_is_named() {
        let build = |shape, codes, scales| {
            MxPacked::from_parts(shape, Usage::Columnwise, vec![1; codes], vec![2; scales])
        };
        let good = build((40, 3), 192, 6).unwrap();
        let text = serde_json::to_string(&good).unwrap();
        assert_eq!(serde_json::from_str::<MxPacked>(&text).unwrap(), good);
        for (shape, codes, scales, parts) in [
            ((40, 3), 191, 6, ["`codes`", "found 191"]),
            ((40, 3), 192, 5, ["`scales`", "found 5"]),
            ((64, 1 << 62), 0, 0, ["`rows, cols`", "64 x 4611"]),
        ] {
            let error = build(shape, codes, scales).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        let torn = text.replace("\"rows\":40", "\"rows\":400");
        let error = serde_json::from_str::<MxPacked>(&torn).unwrap_err();
        assert!(error.to_string().contains("`codes`"), "{error}");
    }
}
