//! Attention on Flex: the oracle's arithmetic.

use burn_core::backend::{Flex, TensorMetadata};
use burn_core::tensor::{DType, Element as BurnElement, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};
use nvfp4_kernels::reference::Element;
use nvfp4_kernels::reference::attention::{
    self, AttentionBackward, AttentionShape, HostHeads, rope_rows,
};

use super::{
    AttentionForward, AttentionInputs, AttentionOps, AttentionRope, AttentionSequences,
    AttentionSpec,
};
use crate::ops::{flex::tensors::with_elements, trace_op};

impl AttentionOps for Flex {
    fn nvfp4_attention_forward(
        inputs: AttentionInputs<Self>,
        sequences: AttentionSequences<Self>,
        rope: AttentionRope<Self>,
        spec: AttentionSpec,
    ) -> AttentionForward<Self> {
        let sizes = Sizes::new(&inputs, &sequences, spec);
        let inputs = sizes.rotate(inputs, &tables(rope), false);
        trace_op(
            "attention",
            "forward",
            sizes.q_tokens,
            spec.heads * spec.head,
        );
        let (out, lse) = with_elements!(first(&inputs), |q| {
            sizes.forward(Views::new(q, &inputs))
        });
        AttentionForward { inputs, out, lse }
    }

    fn nvfp4_attention_backward(
        saved: AttentionForward<Self>,
        dout: FlexTensor,
        sequences: AttentionSequences<Self>,
        rope: AttentionRope<Self>,
        spec: AttentionSpec,
    ) -> AttentionInputs<Self> {
        let AttentionForward { inputs, out, lse } = saved;
        let sizes = Sizes::new(&inputs, &sequences, spec);
        trace_op(
            "attention",
            "backward",
            sizes.q_tokens,
            spec.heads * spec.head,
        );
        let (out, dout) = (out.to_contiguous(), dout.to_contiguous());
        let lse = lse.to_contiguous();
        let is_fused = matches!(inputs, AttentionInputs::Qkv(_));
        let found = with_elements!(first(&inputs), |q| {
            let views = Views::new(q, &inputs);
            sizes.backward(views, (&out, lse.storage()), &dout, is_fused)
        });
        sizes.rotate(found, &tables(rope), true)
    }
}

/// Queries, or the matrix that they are columns of.
fn first(inputs: &AttentionInputs<Flex>) -> FlexTensor {
    let (AttentionInputs::Separate { q, .. } | AttentionInputs::Qkv(q)) = inputs;
    q.clone()
}

/// Cosines and sines.
fn tables(rope: AttentionRope<Flex>) -> Option<(Vec<f32>, Vec<f32>)> {
    let values = |table: FlexTensor| table.to_contiguous().storage::<f32>().to_vec();
    match rope {
        AttentionRope::Absent => None,
        AttentionRope::Tables { cos, sin } => Some((values(cos), values(sin))),
    }
}

/// Elements of Flex tensors.
trait HostElement: Element + BurnElement {
    /// Those of a contiguous tensor.
    fn slice(x: &FlexTensor) -> &[Self];
}

macro_rules! host_element {
    ($($element:ty)*) => {$(
        impl HostElement for $element {
            fn slice(x: &FlexTensor) -> &[Self] {
                x.storage()
            }
        }
    )*};
}
host_element!(f32 bf16 f16);

/// Queries, keys and values, contiguous.
struct Views<'a, T> {
    q: &'a [T],
    /// Keys and values, where they are tensors of their own.
    kv: Option<[FlexTensor; 2]>,
}

impl<'a, T: HostElement> Views<'a, T> {
    fn new(q: &'a [T], inputs: &AttentionInputs<Flex>) -> Self {
        let kv = match inputs {
            AttentionInputs::Separate { k, v, .. } => Some([k.to_contiguous(), v.to_contiguous()]),
            AttentionInputs::Qkv(_) => None,
        };
        Self { q, kv }
    }

    fn heads(&self, spec: &AttentionSpec) -> [HostHeads<'_, T>; 3] {
        let (wide, narrow) = (spec.heads * spec.head, spec.kv_heads * spec.head);
        match &self.kv {
            Some([k, v]) => [
                HostHeads::contiguous(self.q, wide),
                HostHeads::contiguous(T::slice(k), narrow),
                HostHeads::contiguous(T::slice(v), narrow),
            ],
            None => [0, wide, wide + narrow].map(|offset| HostHeads {
                data: self.q,
                offset,
                row_stride: wide + 2 * narrow,
            }),
        }
    }
}

/// The sizes of one call.
struct Sizes {
    spec: AttentionSpec,
    q_tokens: usize,
    k_tokens: usize,
    q_starts: Vec<u32>,
    k_starts: Vec<u32>,
}

impl Sizes {
    fn new(
        inputs: &AttentionInputs<Flex>,
        sequences: &AttentionSequences<Flex>,
        spec: AttentionSpec,
    ) -> Self {
        let (q_tokens, k_tokens) = (inputs.q_tokens(), inputs.k_tokens());
        let (q_starts, k_starts) = match sequences {
            AttentionSequences::Equal(count) => {
                let starts = |tokens: usize| {
                    (0..=*count)
                        .map(|i| (i * (tokens / count)) as u32)
                        .collect()
                };
                (starts(q_tokens), starts(k_tokens))
            }
            AttentionSequences::Offsets { q, k } => {
                (ascending(q, q_tokens), ascending(k, k_tokens))
            }
        };
        Self {
            spec,
            q_tokens,
            k_tokens,
            q_starts,
            k_starts,
        }
    }

    fn shape(&self) -> AttentionShape<'_> {
        AttentionShape {
            heads: self.spec.heads,
            kv_heads: self.spec.kv_heads,
            head: self.spec.head,
            q_tokens: self.q_tokens,
            k_tokens: self.k_tokens,
            q_starts: &self.q_starts,
            k_starts: &self.k_starts,
            params: self.spec.params,
        }
    }

    /// Queries and keys turned by their positions, or back.
    fn rotate(
        &self,
        inputs: AttentionInputs<Flex>,
        tables: &Option<(Vec<f32>, Vec<f32>)>,
        inverse: bool,
    ) -> AttentionInputs<Flex> {
        let Some((cos, sin)) = tables else {
            return inputs;
        };
        let AttentionSpec {
            heads,
            kv_heads,
            head,
            ..
        } = self.spec;
        let turn = |x: FlexTensor, stride: usize, heads: usize, starts: &[u32]| {
            let shape = x.shape();
            with_elements!(x, |values| {
                let mut values = values.to_vec();
                let angles = (&cos[..], &sin[..]);
                rope_rows(&mut values, stride, (heads, head), starts, angles, inverse);
                FlexTensor::from_data(TensorData::new(values, shape))
            })
        };
        match inputs {
            AttentionInputs::Separate { q, k, v } => AttentionInputs::Separate {
                q: turn(q, heads * head, heads, &self.q_starts),
                k: turn(k, kv_heads * head, kv_heads, &self.k_starts),
                v,
            },
            // Queries and keys lie side by side and have the same sequences.
            AttentionInputs::Qkv(qkv) => {
                let (all, turned) = (heads + 2 * kv_heads, heads + kv_heads);
                AttentionInputs::Qkv(turn(qkv, all * head, turned, &self.q_starts))
            }
        }
    }

    fn forward<T: HostElement>(&self, views: Views<'_, T>) -> (FlexTensor, FlexTensor) {
        let [q, k, v] = views.heads(&self.spec);
        let found = attention::attention_forward(q, k, v, &self.shape());
        let AttentionSpec { heads, head, .. } = self.spec;
        let out = TensorData::new(found.out, [self.q_tokens, heads * head]);
        let lse = TensorData::new(found.lse, [heads, self.q_tokens]);
        (FlexTensor::from_data(out), FlexTensor::from_data(lse))
    }

    fn backward<T: HostElement>(
        &self,
        views: Views<'_, T>,
        (out, lse): (&FlexTensor, &[f32]),
        dout: &FlexTensor,
        is_fused: bool,
    ) -> AttentionInputs<Flex> {
        let AttentionSpec {
            heads,
            kv_heads,
            head,
            ..
        } = self.spec;
        let (wide, narrow) = (heads * head, kv_heads * head);
        let [q, k, v] = views.heads(&self.spec);
        let out = HostHeads::contiguous(T::slice(out), wide);
        let dout = HostHeads::contiguous(T::slice(dout), wide);
        let AttentionBackward { dq, dk, dv } =
            attention::attention_backward((q, k, v), (out, lse), dout, &self.shape());
        if is_fused {
            let rows = dq
                .chunks(wide)
                .zip(dk.chunks(narrow))
                .zip(dv.chunks(narrow));
            let all: Vec<T> = rows
                .flat_map(|((dq, dk), dv)| dq.iter().chain(dk).chain(dv).copied())
                .collect();
            let data = TensorData::new(all, [self.q_tokens, wide + 2 * narrow]);
            return AttentionInputs::Qkv(FlexTensor::from_data(data));
        }
        let tensor = |values: Vec<T>, tokens: usize, heads: usize| {
            FlexTensor::from_data(TensorData::new(values, [tokens, heads, head]))
        };
        AttentionInputs::Separate {
            q: tensor(dq, self.q_tokens, heads),
            k: tensor(dk, self.k_tokens, kv_heads),
            v: tensor(dv, self.k_tokens, kv_heads),
        }
    }
}

/// Offsets as the kernels read them: none beyond the tokens, none before the one before it.
fn ascending(offsets: &FlexTensor, tokens: usize) -> Vec<u32> {
    let offsets = offsets.to_contiguous();
    let mut least = 0;
    let ascending = offsets.storage::<u32>().iter().map(|&offset| {
        least = offset.min(tokens as u32).max(least);
        least
    });
    ascending.collect()
}
