//! Flex: the oracle's arithmetic, in the cache's memory if nothing else holds it.

use burn_core::backend::ops::FloatTensorOps;
use burn_core::backend::{Flex, TensorMetadata};
use burn_core::tensor::{DType, Element as BurnElement, FloatDType, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};
use nvfp4_formats::reference::Element;
use nvfp4_formats::reference::attention::{
    DecodeShape, HostKv, HostKvMut, HostTables, append, attention_decode,
};

use super::super::attention::{AttentionInputs, AttentionRope};
use super::{Attended, ChunkPlaces, DecodeOps, DecodeSpec, KvTensors, TokenState};
use crate::ops::trace_op;

impl DecodeOps for Flex {
    fn nvfp4_append_kv(
        inputs: AttentionInputs<Self>,
        cache: KvTensors<Self>,
        places: ChunkPlaces<Self>,
        rope: AttentionRope<Self>,
        spec: DecodeSpec,
    ) -> Attended<Self> {
        trace_op(
            "attention",
            "append",
            inputs.q_tokens(),
            spec.attention.heads,
        );
        run(inputs, cache, places, rope, (spec, false))
    }

    fn nvfp4_decode(
        inputs: AttentionInputs<Self>,
        cache: KvTensors<Self>,
        places: ChunkPlaces<Self>,
        rope: AttentionRope<Self>,
        spec: DecodeSpec,
    ) -> Attended<Self> {
        trace_op(
            "attention",
            "decode",
            inputs.q_tokens(),
            spec.attention.heads,
        );
        run(inputs, cache, places, rope, (spec, true))
    }

    fn nvfp4_choose_greedy(logits: FlexTensor, state: TokenState<Self>) -> TokenState<Self> {
        let logits = Flex::float_cast(logits, FloatDType::F32).to_contiguous();
        let batch = logits.shape()[0];
        let rows = logits.storage::<f32>();
        let vocab = rows.len() / batch;
        let TokenState {
            mut tokens,
            mut starts,
            counts,
            mut ring,
            mut step,
        } = state;
        let length = ring.shape()[0];
        for (row, logits) in rows.chunks(vocab).enumerate() {
            let token = most_probable(logits);
            tokens.storage_mut::<i32>()[row] = token;
            let at = step.storage::<u32>()[row] as usize % length;
            ring.storage_mut::<i32>()[at * batch + row] = token;
            starts.storage_mut::<u32>()[row] += counts.storage::<u32>()[row];
            step.storage_mut::<u32>()[row] += 1;
        }
        TokenState {
            tokens,
            starts,
            counts,
            ring,
            step,
        }
    }

    fn nvfp4_write_words(_out: FlexTensor, from: FlexTensor) -> FlexTensor {
        from
    }
}

/// Returns the index of the largest logit, on ties the first; -1 if there is a NaN or no number
/// above `-inf`.
fn most_probable(logits: &[f32]) -> i32 {
    let mut best = (f32::NEG_INFINITY, -1);
    for (place, logit) in logits.iter().enumerate() {
        if logit.is_nan() {
            return -1;
        }
        if *logit > best.0 {
            best = (*logit, place as i32);
        }
    }
    best.1
}

fn run(
    inputs: AttentionInputs<Flex>,
    cache: KvTensors<Flex>,
    places: ChunkPlaces<Flex>,
    rope: AttentionRope<Flex>,
    (spec, attends): (DecodeSpec, bool),
) -> Attended<Flex> {
    let dtype = inputs.dtype();
    let call = Call {
        inputs,
        places,
        rope,
        spec,
        attends,
    };
    match dtype {
        DType::F32 => call.run::<f32>(cache),
        DType::BF16 => call.run::<bf16>(cache),
        DType::F16 => call.run::<f16>(cache),
        other => panic!("element type {other:?}: expected F32, BF16 or F16"),
    }
}

/// Element of a Flex tensor.
trait HostElement: Element + BurnElement {
    /// Returns the elements of a contiguous tensor.
    fn slice(x: &FlexTensor) -> &[Self];
    /// Returns the elements of a contiguous tensor, mutably, in exclusive memory.
    fn slice_mut(x: &mut FlexTensor) -> &mut [Self];
}

macro_rules! host_element {
    ($($element:ty)*) => {$(
        impl HostElement for $element {
            fn slice(x: &FlexTensor) -> &[Self] {
                x.storage()
            }
            fn slice_mut(x: &mut FlexTensor) -> &mut [Self] {
                x.storage_mut()
            }
        }
    )*};
}
host_element!(f32 bf16 f16);

struct Call {
    inputs: AttentionInputs<Flex>,
    places: ChunkPlaces<Flex>,
    rope: AttentionRope<Flex>,
    spec: DecodeSpec,
    attends: bool,
}

impl Call {
    fn run<T: HostElement>(self, mut cache: KvTensors<Flex>) -> Attended<Flex> {
        let Self {
            inputs,
            places,
            rope,
            spec,
            attends,
        } = self;
        let (starts, counts) = (places.starts.to_contiguous(), places.counts.to_contiguous());
        let tokens = inputs.q_tokens();
        let attention = spec.attention;
        let shape = DecodeShape {
            heads: attention.heads,
            kv_heads: attention.kv_heads,
            head: attention.head,
            time: tokens / spec.batch,
            capacity: spec.capacity,
            starts: starts.storage(),
            counts: counts.storage(),
        };
        let tables = match rope {
            AttentionRope::Absent => None,
            AttentionRope::Tables { cos, sin } => Some((cos.to_contiguous(), sin.to_contiguous())),
        };
        let tables: Option<HostTables<'_>> = tables
            .as_ref()
            .map(|(cos, sin)| (cos.storage(), sin.storage()));
        let qkv = rows::<T>(inputs, &spec);
        let [k_scale, v_scale] = spec.scales;
        let queries = match &mut cache {
            KvTensors::Float { k, v } => {
                let mut k = HostKvMut::Float(T::slice_mut(k));
                let mut v = HostKvMut::Float(T::slice_mut(v));
                append(&qkv, [&mut k, &mut v], &shape, tables)
            }
            KvTensors::E4m3 { k, v } => {
                let mut k = HostKvMut::E4m3(k.storage_mut::<u8>(), k_scale);
                let mut v = HostKvMut::E4m3(v.storage_mut::<u8>(), v_scale);
                append(&qkv, [&mut k, &mut v], &shape, tables)
            }
        };
        let out = match (&cache, attends) {
            (_, false) => queries,
            (KvTensors::Float { k, v }, true) => {
                let (k, v) = (HostKv::Float(T::slice(k)), HostKv::Float(T::slice(v)));
                attention_decode(&queries, k, v, &shape, &attention.params)
            }
            (KvTensors::E4m3 { k, v }, true) => {
                let k = HostKv::E4m3(k.storage(), k_scale);
                let v = HostKv::E4m3(v.storage(), v_scale);
                attention_decode(&queries, k, v, &shape, &attention.params)
            }
        };
        let width = attention.heads * attention.head;
        let out = FlexTensor::from_data(TensorData::new(out, [tokens, width]));
        Attended { out, cache }
    }
}

/// Concatenates queries, keys and values of each token.
fn rows<T: HostElement>(inputs: AttentionInputs<Flex>, spec: &DecodeSpec) -> Vec<T> {
    match inputs {
        AttentionInputs::Qkv(qkv) => T::slice(&qkv.to_contiguous()).to_vec(),
        AttentionInputs::Separate { q, k, v } => {
            let [q, k, v] = [q, k, v].map(|x| x.to_contiguous());
            let wide = spec.attention.heads * spec.attention.head;
            let narrow = spec.attention.kv_heads * spec.attention.head;
            let rows = T::slice(&q).chunks(wide);
            let rows = rows.zip(T::slice(&k).chunks(narrow));
            let rows = rows.zip(T::slice(&v).chunks(narrow));
            rows.flat_map(|((q, k), v)| q.iter().chain(k).chain(v).copied())
                .collect()
        }
    }
}
