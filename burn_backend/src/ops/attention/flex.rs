//! Attention on Flex, in [blocks](super::blocked).

use burn_core::backend::Flex;
use burn_core::tensor::{DType, Element as BurnElement, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};
use nvfp4_formats::reference::Element;
use nvfp4_formats::reference::attention::{AttentionShape, HostHeads, rope_rows};

use super::blocked::{self, Columns};
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

/// Returns the queries, or the matrix that contains them.
fn first(inputs: &AttentionInputs<Flex>) -> FlexTensor {
    let (AttentionInputs::Separate { q, .. } | AttentionInputs::Qkv(q)) = inputs;
    q.clone()
}

/// Returns cosines and sines.
fn tables(rope: AttentionRope<Flex>) -> Option<(Vec<f32>, Vec<f32>)> {
    let values = |table: FlexTensor| table.to_contiguous().storage::<f32>().to_vec();
    match rope {
        AttentionRope::Absent => None,
        AttentionRope::Tables { cos, sin } => Some((values(cos), values(sin))),
    }
}

/// Element of a Flex tensor.
trait HostElement: Element + BurnElement {
    /// Returns the elements of a contiguous tensor.
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

/// Contiguous queries, keys and values.
struct Views<'a, T> {
    q: &'a [T],
    /// Keys and values, if they are separate tensors.
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

/// Sizes of one call.
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

    /// Rotates queries and keys by their positions, or back.
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
            let (sizes, angles) = ((heads, head), (&cos[..], &sin[..]));
            // In place if nothing else holds the memory.
            let mut x = x.to_contiguous();
            match x.dtype() {
                DType::F32 => {
                    rope_rows::<f32>(x.storage_mut(), stride, sizes, starts, angles, inverse)
                }
                DType::BF16 => {
                    rope_rows::<bf16>(x.storage_mut(), stride, sizes, starts, angles, inverse)
                }
                DType::F16 => {
                    rope_rows::<f16>(x.storage_mut(), stride, sizes, starts, angles, inverse)
                }
                other => panic!("element type {other:?}: expected F32, BF16 or F16"),
            }
            x
        };
        match inputs {
            AttentionInputs::Separate { q, k, v } => AttentionInputs::Separate {
                q: turn(q, heads * head, heads, &self.q_starts),
                k: turn(k, kv_heads * head, kv_heads, &self.k_starts),
                v,
            },
            // Queries and keys are adjacent and have the same sequences.
            AttentionInputs::Qkv(qkv) => {
                let (all, turned) = (heads + 2 * kv_heads, heads + kv_heads);
                AttentionInputs::Qkv(turn(qkv, all * head, turned, &self.q_starts))
            }
        }
    }

    fn forward<T: HostElement>(&self, views: Views<'_, T>) -> (FlexTensor, FlexTensor) {
        let found = blocked::forward(views.heads(&self.spec), &self.shape());
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
        let out = HostHeads::contiguous(T::slice(out), wide);
        let dout = HostHeads::contiguous(T::slice(dout), wide);
        let shape = self.shape();
        let found = blocked::backward(views.heads(&self.spec), (out, lse), dout, &shape);
        // Tokens of no sequence get zeros.
        let zeros = |tokens: usize, width: usize| vec![T::from_f32(0.0); tokens * width];
        if is_fused {
            let row_stride = wide + 2 * narrow;
            let [q, k, v] = [0, wide, wide + narrow].map(|offset| Columns { row_stride, offset });
            let mut all = zeros(self.q_tokens, row_stride);
            found.write_queries(q, &mut all);
            found.write_keys(k, &mut all);
            found.write_values(v, &mut all);
            let data = TensorData::new(all, [self.q_tokens, row_stride]);
            return AttentionInputs::Qkv(FlexTensor::from_data(data));
        }
        let alone = |row_stride| Columns {
            row_stride,
            offset: 0,
        };
        let mut dq = zeros(self.q_tokens, wide);
        found.write_queries(alone(wide), &mut dq);
        let [mut dk, mut dv] = [(); 2].map(|()| zeros(self.k_tokens, narrow));
        found.write_keys(alone(narrow), &mut dk);
        found.write_values(alone(narrow), &mut dv);
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

/// Clamps offsets as the kernels do: to the number of tokens, and to ascending order.
fn ascending(offsets: &FlexTensor, tokens: usize) -> Vec<u32> {
    let offsets = offsets.to_contiguous();
    let mut least = 0;
    let ascending = offsets.storage::<u32>().iter().map(|&offset| {
        least = offset.min(tokens as u32).max(least);
        least
    });
    ascending.collect()
}
