//! Shapes and dtypes of the results, which Fusion needs before anything runs.

use burn_core::backend::fusion::custom::TensorSpec;
use burn_core::tensor::{DType, Shape};

use super::AttentionSpec;
use super::tensors::{
    AttentionForwardMetadata, AttentionInputsMetadata, AttentionRopeMetadata,
    AttentionSequencesMetadata,
};

fn same(inputs: &AttentionInputsMetadata) -> AttentionInputsMetadata {
    let same = |tensor: &TensorSpec| TensorSpec::new(tensor.shape.clone(), tensor.dtype);
    match inputs {
        AttentionInputsMetadata::Separate { q, k, v } => AttentionInputsMetadata::Separate {
            q: same(q),
            k: same(k),
            v: same(v),
        },
        AttentionInputsMetadata::Qkv(qkv) => AttentionInputsMetadata::Qkv(same(qkv)),
    }
}

pub(super) fn forward(
    inputs: &AttentionInputsMetadata,
    _sequences: &AttentionSequencesMetadata,
    _rope: &AttentionRopeMetadata,
    spec: &AttentionSpec,
) -> AttentionForwardMetadata {
    let (AttentionInputsMetadata::Separate { q, .. } | AttentionInputsMetadata::Qkv(q)) = inputs;
    let tokens = q.shape[0];
    AttentionForwardMetadata {
        inputs: same(inputs),
        out: TensorSpec::new(Shape::new([tokens, spec.heads * spec.head]), q.dtype),
        lse: TensorSpec::new(Shape::new([spec.heads, tokens]), DType::F32),
    }
}

pub(super) fn backward(
    saved: &AttentionForwardMetadata,
    _dout: &TensorSpec,
    _sequences: &AttentionSequencesMetadata,
    _rope: &AttentionRopeMetadata,
    _spec: &AttentionSpec,
) -> AttentionInputsMetadata {
    same(&saved.inputs)
}
