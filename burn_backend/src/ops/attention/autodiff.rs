//! Backward of attention.

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::FloatTensor,
};

use super::saved::{Saved, register};
use super::sinks_autodiff;
use super::{
    AttentionForward, AttentionInputs, AttentionOps, AttentionRope, AttentionSequences,
    AttentionSpec,
};

/// Attention of three tensors: parents `[q, k, v]`.
#[derive(Debug)]
struct Separate;

impl<B: AttentionOps> Backward<B, 3> for Separate {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dout = grads.consume::<B>(&ops.node);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        if let AttentionInputs::Separate { q, k, v } = ops.state.backward(dout) {
            register::<B, 3>(nodes, [q, k, v], grads);
        }
    }
}

/// Attention of one fused matrix: parents `[qkv]`.
#[derive(Debug)]
struct Fused;

impl<B: AttentionOps> Backward<B, 1> for Fused {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dout = grads.consume::<B>(&ops.node);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        if let AttentionInputs::Qkv(qkv) = ops.state.backward(dout) {
            register::<B, 1>(nodes, [qkv], grads);
        }
    }
}

impl<B: AttentionOps, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn nvfp4_attention_forward(
        inputs: AttentionInputs<Self>,
        sequences: AttentionSequences<Self>,
        rope: AttentionRope<Self>,
        spec: AttentionSpec,
    ) -> AttentionForward<Self> {
        let inputs = inputs.map(|tensor| tensor.into_primitive());
        let (sequences, rope) = (inner_sequences(sequences), inner_rope(rope));
        let found = B::nvfp4_attention_forward(inputs, sequences, rope, spec);
        AttentionForward {
            inputs: found.inputs.map(Self::from_inner),
            out: Self::from_inner(found.out),
            lse: Self::from_inner(found.lse),
        }
    }

    fn nvfp4_attention_backward(
        saved: AttentionForward<Self>,
        dout: FloatTensor<Self>,
        sequences: AttentionSequences<Self>,
        rope: AttentionRope<Self>,
        spec: AttentionSpec,
    ) -> AttentionInputs<Self> {
        let saved = AttentionForward {
            inputs: saved.inputs.map(|tensor| tensor.into_primitive()),
            out: saved.out.into_primitive(),
            lse: saved.lse.into_primitive(),
        };
        let (sequences, rope) = (inner_sequences(sequences), inner_rope(rope));
        let dout = dout.into_primitive();
        B::nvfp4_attention_backward(saved, dout, sequences, rope, spec).map(Self::from_inner)
    }

    fn nvfp4_attention(
        inputs: AttentionInputs<Self>,
        sequences: AttentionSequences<Self>,
        rope: AttentionRope<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        let (sequences, rope) = (inner_sequences(sequences), inner_rope(rope));
        let run = |inputs| {
            let forward = B::nvfp4_attention_forward(inputs, sequences.clone(), rope.clone(), spec);
            let out = forward.out.clone();
            let saved = Saved {
                forward,
                sequences,
                rope,
                spec,
            };
            (saved, out)
        };
        match inputs {
            AttentionInputs::Separate { q, k, v } => {
                let ((q, q_node), (k, k_node)) = (q.into_parts(), k.into_parts());
                let (v, v_node) = v.into_parts();
                let step = Separate.prepare::<C>([q_node, k_node, v_node]);
                let (saved, out) = run(AttentionInputs::Separate { q, k, v });
                match step.compute_bound().stateful() {
                    OpsKind::Tracked(prep) => prep.finish(saved, out),
                    OpsKind::UnTracked(prep) => prep.finish(out),
                }
            }
            AttentionInputs::Qkv(qkv) => {
                let (qkv, node) = qkv.into_parts();
                let step = Fused.prepare::<C>([node]);
                let (saved, out) = run(AttentionInputs::Qkv(qkv));
                match step.compute_bound().stateful() {
                    OpsKind::Tracked(prep) => prep.finish(saved, out),
                    OpsKind::UnTracked(prep) => prep.finish(out),
                }
            }
        }
    }

    fn nvfp4_attention_with_sinks(
        inputs: AttentionInputs<Self>,
        sequences: AttentionSequences<Self>,
        rope: AttentionRope<Self>,
        sinks: FloatTensor<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        let (sequences, rope) = (inner_sequences(sequences), inner_rope(rope));
        sinks_autodiff::attention(inputs, sequences, rope, sinks, spec)
    }
}

fn inner_sequences<B: Backend, C: CheckpointStrategy>(
    sequences: AttentionSequences<Autodiff<B, C>>,
) -> AttentionSequences<B> {
    match sequences {
        AttentionSequences::Equal(count) => AttentionSequences::Equal(count),
        AttentionSequences::Offsets { q, k } => AttentionSequences::Offsets { q, k },
    }
}

fn inner_rope<B: Backend, C: CheckpointStrategy>(
    rope: AttentionRope<Autodiff<B, C>>,
) -> AttentionRope<B> {
    match rope {
        AttentionRope::Absent => AttentionRope::Absent,
        AttentionRope::Tables { cos, sin } => AttentionRope::Tables {
            cos: cos.into_primitive(),
            sin: sin.into_primitive(),
        },
    }
}
