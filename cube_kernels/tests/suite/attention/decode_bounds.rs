//! Expected results of `attention::decode`: the oracle's bits, or, with matrix instructions,
//! results within the bounds of attention in `f64`.

use super::case::Operand;
use crate::support::device::assert_floats;
use nvfp4_formats::{
    AttentionParams,
    reference::attention::{
        AttentionShape, Bounded, DecodeShape, HostHeads, HostKv, attention_decode, attention_f64,
    },
};

/// A decoding step on the host: rotated queries, and the caches with the new tokens.
pub struct Decoded<'a, T> {
    pub queries: &'a [T],
    pub k: HostKv<'a, T>,
    pub v: HostKv<'a, T>,
    pub shape: &'a DecodeShape<'a>,
    pub params: &'a AttentionParams,
}

impl<T: Operand> Decoded<'_, T> {
    /// Asserts that `found` is a valid result of a kernel, with or without matrix instructions
    /// (`by_mma`).
    pub fn assert(&self, found: &[T], by_mma: bool, what: &str) {
        let values = |x: &[T]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
        let found = values(found);
        if by_mma {
            self.assert_within(&found, what);
        } else {
            let expected = attention_decode(self.queries, self.k, self.v, self.shape, self.params);
            assert_floats(&found, &values(&expected), what);
        }
    }

    fn assert_within(&self, found: &[f32], what: &str) {
        let DecodeShape {
            heads,
            kv_heads,
            head,
            time,
            capacity,
            ..
        } = *self.shape;
        let (HostKv::Float(k), HostKv::Float(v)) = (self.k, self.v) else {
            panic!("matrix instructions take no E4M3 cache");
        };
        let (wide, narrow) = (heads * head, kv_heads * head);
        for sequence in 0..self.shape.starts.len() {
            let (start, end) = self.shape.extent(sequence);
            let new = end - start;
            let rows = &found[sequence * time * wide..][..time * wide];
            let of = |x: &'_ [T]| x[sequence * capacity * narrow..][..end * narrow].to_vec();
            let (k, v) = (of(k), of(v));
            let q = &self.queries[sequence * time * wide..][..new * wide];
            let shape = AttentionShape {
                heads,
                kv_heads,
                head,
                q_tokens: new,
                k_tokens: end,
                q_starts: &[0, new as u32],
                k_starts: &[0, end as u32],
                params: *self.params,
            };
            let exact = attention_f64(
                (
                    HostHeads::contiguous(q, wide),
                    HostHeads::contiguous(&k, narrow),
                    HostHeads::contiguous(&v, narrow),
                ),
                HostHeads::contiguous(q, wide),
                &shape,
                T::PRECISION,
            );
            let what = format!("{what}, sequence {sequence}");
            within(&exact.out, &rows[..new * wide], &what);
            assert_floats(
                &rows[new * wide..],
                &vec![0.0; (time - new) * wide],
                &format!("{what}, padding"),
            );
        }
    }
}

fn within(exact: &Bounded, found: &[f32], what: &str) {
    if let Some((at, ratio)) = exact.worst(found.iter().map(|&value| value as f64)) {
        assert!(
            ratio <= 1.0,
            "{what}: element {at} is {:e}, expected {:e} with an error of {:e}: {ratio}",
            found[at],
            exact.value[at],
            exact.error[at]
        );
    }
}
