//! Attention on Cube: launches of the CubeCL kernels.

use burn_core::tensor::{DType, Shape};
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};
use nvfp4_kernels::attention::{
    self, Attention, AttentionGradients, AttentionOutput, Heads, Rope, Rotation, Sequences,
};
use nvfp4_kernels::tensor::{FloatKind, Groups, Matrix};

use super::super::dtype::float_kind;
use super::{
    AttentionForward, AttentionInputs, AttentionOps, AttentionRope, AttentionSequences,
    AttentionSpec,
};
use crate::ops::{
    cube::{
        found_amax,
        tensors::{launched, new_tensor, owned},
    },
    float_dtype, trace_op,
};

impl AttentionOps for CubeBackend {
    fn nvfp4_attention_forward(
        inputs: AttentionInputs<Self>,
        sequences: AttentionSequences<Self>,
        rope: AttentionRope<Self>,
        spec: AttentionSpec,
    ) -> AttentionForward<Self> {
        let rope = tables(rope, &spec);
        let mut inputs = contiguous(inputs);
        let (sequences, client) = (device_sequences(sequences), like(&inputs).client.clone());
        if let Some(rope) = &rope {
            inputs = exclusive(inputs);
            let turn = |x: Heads, sequences| {
                let turned = attention::rope(&client, &x, sequences, rope, Rotation::Forward, &x);
                launched(turned);
            };
            match &inputs {
                // Queries and keys are adjacent and have the same sequences.
                AttentionInputs::Qkv(qkv) => {
                    let both = fused(qkv, &spec).part(0, spec.heads + spec.kv_heads);
                    turn(both, sequences.of_q());
                }
                AttentionInputs::Separate { .. } => {
                    let [q, k, _] = views(&inputs, &spec);
                    turn(q, sequences.of_q());
                    turn(k, sequences.of_k());
                }
            }
        }
        let [q, k, v] = views(&inputs, &spec);
        trace_op("attention", "forward", q.tokens, q.heads * q.head);
        let tokens = q.tokens;
        let request = found_amax::request(spec.amax);
        let (found, amax) = launched(attention::forward_with_amaxes(
            &client,
            &Attention {
                q,
                k,
                v,
                sequences,
                params: spec.params,
            },
            &request,
        ));
        let like = like(&inputs).clone();
        let width = spec.heads * spec.head;
        let matrix = Matrix::new(found.out.handle.clone(), tokens, width, found.out.dtype);
        found_amax::remember((&launched(matrix), &Groups::One), request, amax);
        let shape = Shape::new([tokens, width]);
        let rows = Shape::new([spec.heads, tokens]);
        AttentionForward {
            inputs,
            out: new_tensor(&like, found.out.handle, shape, like.dtype),
            lse: new_tensor(&like, found.lse, rows, DType::F32),
        }
    }

    fn nvfp4_attention_backward(
        saved: AttentionForward<Self>,
        dout: CubeTensor,
        sequences: AttentionSequences<Self>,
        rope: AttentionRope<Self>,
        spec: AttentionSpec,
    ) -> AttentionInputs<Self> {
        let rope = tables(rope, &spec);
        let inputs = contiguous(saved.inputs);
        let like = like(&inputs).clone();
        let [q, k, v] = views(&inputs, &spec);
        let shape = q.shape();
        let heads = |x: CubeTensor| Heads::contiguous(into_contiguous(x).handle, shape, q.dtype);
        let output = AttentionOutput {
            out: heads(saved.out),
            lse: into_contiguous(saved.lse).handle,
        };
        let dout = heads(dout);
        let gradients = inputs.map(|x| {
            let bytes = x.meta.shape().num_elements() * x.dtype.size();
            let handle = like.client.empty(bytes.max(1));
            new_tensor(&like, handle, x.meta.shape().clone(), x.dtype)
        });
        let [dq, dk, dv] = views(&gradients, &spec);
        trace_op("attention", "backward", q.tokens, q.heads * q.head);
        launched(attention::backward(
            &like.client,
            &Attention {
                q: q.clone(),
                k,
                v,
                sequences: device_sequences(sequences),
                params: spec.params,
            },
            &output,
            &dout,
            rope.as_ref(),
            &AttentionGradients { dq, dk, dv },
        ));
        gradients
    }
}

pub(in crate::ops) fn contiguous(
    inputs: AttentionInputs<CubeBackend>,
) -> AttentionInputs<CubeBackend> {
    inputs.map(into_contiguous)
}

/// Makes the memory of the inputs writable: copies it if something else holds it.
fn exclusive(inputs: AttentionInputs<CubeBackend>) -> AttentionInputs<CubeBackend> {
    let own = |x: CubeTensor| owned("attention", x);
    match inputs {
        // Values are not rotated.
        AttentionInputs::Separate { q, k, v } => AttentionInputs::Separate {
            q: own(q),
            k: own(k),
            v,
        },
        AttentionInputs::Qkv(qkv) => AttentionInputs::Qkv(own(qkv)),
    }
}

fn like(inputs: &AttentionInputs<CubeBackend>) -> &CubeTensor {
    let (AttentionInputs::Separate { q, .. } | AttentionInputs::Qkv(q)) = inputs;
    q
}

fn kind(x: &CubeTensor) -> FloatKind {
    float_kind(float_dtype(x.dtype))
}

/// Returns views of queries, keys and values of contiguous inputs.
pub(in crate::ops) fn views(
    inputs: &AttentionInputs<CubeBackend>,
    spec: &AttentionSpec,
) -> [Heads; 3] {
    let (wide, narrow) = (spec.heads, spec.kv_heads);
    match inputs {
        AttentionInputs::Separate { q, k, v } => {
            [(q, wide), (k, narrow), (v, narrow)].map(|(x, heads)| {
                let tokens = x.meta.shape()[0];
                Heads::contiguous(x.handle.clone(), [tokens, heads, spec.head], kind(x))
            })
        }
        AttentionInputs::Qkv(qkv) => {
            let all = fused(qkv, spec);
            [
                all.part(0, wide),
                all.part(wide, narrow),
                all.part(wide + narrow, narrow),
            ]
        }
    }
}

/// Returns a view of all heads of the output of a fused projection.
fn fused(qkv: &CubeTensor, spec: &AttentionSpec) -> Heads {
    let heads = spec.heads + 2 * spec.kv_heads;
    let shape = [qkv.meta.shape()[0], heads, spec.head];
    Heads::contiguous(qkv.handle.clone(), shape, kind(qkv))
}

fn device_sequences(sequences: AttentionSequences<CubeBackend>) -> Sequences {
    match sequences {
        AttentionSequences::Equal(count) => Sequences::Equal(count),
        AttentionSequences::Offsets { q, k } => {
            let count = q.meta.shape()[0] - 1;
            Sequences::Offsets {
                q: into_contiguous(q).handle,
                k: into_contiguous(k).handle,
                count,
            }
        }
    }
}

pub(in crate::ops) fn tables(
    rope: AttentionRope<CubeBackend>,
    spec: &AttentionSpec,
) -> Option<Rope> {
    match rope {
        AttentionRope::Absent => None,
        AttentionRope::Tables { cos, sin } => Some(Rope {
            positions: cos.meta.shape().num_elements() / (spec.head / 2),
            cos: into_contiguous(cos).handle,
            sin: into_contiguous(sin).handle,
        }),
    }
}
