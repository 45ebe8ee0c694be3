//! Shapes and dtypes of the results, which Fusion needs before anything runs.

use burn_core::backend::fusion::custom::TensorSpec;
use burn_core::tensor::Shape;

use super::super::attention::{AttentionInputsMetadata, AttentionRopeMetadata};
use super::DecodeSpec;
use super::tensors::{
    AttendedMetadata, ChunkPlacesMetadata, KvTensorsMetadata, TokenStateMetadata,
};

fn same(tensor: &TensorSpec) -> TensorSpec {
    TensorSpec::new(tensor.shape.clone(), tensor.dtype)
}

pub(super) fn attended(
    inputs: &AttentionInputsMetadata,
    cache: &KvTensorsMetadata,
    _places: &ChunkPlacesMetadata,
    _rope: &AttentionRopeMetadata,
    spec: &DecodeSpec,
) -> AttendedMetadata {
    let (AttentionInputsMetadata::Separate { q, .. } | AttentionInputsMetadata::Qkv(q)) = inputs;
    let width = spec.attention.heads * spec.attention.head;
    AttendedMetadata {
        out: TensorSpec::new(Shape::new([q.shape[0], width]), q.dtype),
        cache: match cache {
            KvTensorsMetadata::Float { k, v } => KvTensorsMetadata::Float {
                k: same(k),
                v: same(v),
            },
            KvTensorsMetadata::E4m3 { k, v } => KvTensorsMetadata::E4m3 {
                k: same(k),
                v: same(v),
            },
        },
    }
}

pub(super) fn choose(_logits: &TensorSpec, state: &TokenStateMetadata) -> TokenStateMetadata {
    TokenStateMetadata {
        tokens: same(&state.tokens),
        starts: same(&state.starts),
        counts: same(&state.counts),
        ring: same(&state.ring),
        step: same(&state.step),
    }
}

pub(super) fn write(out: &TensorSpec, _from: &TensorSpec) -> TensorSpec {
    same(out)
}
