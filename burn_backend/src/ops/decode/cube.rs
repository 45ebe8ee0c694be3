//! Cube: launches of the CubeCL kernels, which write to the cache in place.

use burn_core::backend::tensor::FloatTensor;
use burn_core::tensor::Shape;
use burn_cubecl::{CubeBackend, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::server::Handle;
use nvfp4_kernels::attention::{
    Heads, Rope,
    decode::{self, CacheKind, KvCache, NewTokens},
};
use nvfp4_kernels::graph;
use nvfp4_kernels::greedy::{self, Greedy};

use super::super::attention::cube::{contiguous, tables, views};
use super::super::attention::{AttentionInputs, AttentionRope};
use super::super::cube::tensors::{launched, matrix, new_tensor};
use super::super::trace_op;
use super::{Attended, ChunkPlaces, DecodeOps, DecodeSpec, KvTensors, TokenState};

impl DecodeOps for CubeBackend {
    fn nvfp4_append_kv(
        inputs: AttentionInputs<Self>,
        cache: KvTensors<Self>,
        places: ChunkPlaces<Self>,
        rope: AttentionRope<Self>,
        spec: DecodeSpec,
    ) -> Attended<Self> {
        let call = Call::new(inputs, cache, places, rope, spec);
        let (new, q) = (call.new_tokens(), &call.heads[0]);
        trace_op("attention", "append", q.tokens, q.heads * q.head);
        let client = &call.like.client;
        let queries = Heads::empty(client, q.shape(), q.dtype);
        launched(decode::append(client, &new, &call.cache, &queries));
        call.attended(queries)
    }

    fn nvfp4_decode(
        inputs: AttentionInputs<Self>,
        cache: KvTensors<Self>,
        places: ChunkPlaces<Self>,
        rope: AttentionRope<Self>,
        spec: DecodeSpec,
    ) -> Attended<Self> {
        let call = Call::new(inputs, cache, places, rope, spec);
        let (new, q) = (call.new_tokens(), &call.heads[0]);
        trace_op("attention", "decode", q.tokens, q.heads * q.head);
        let params = &spec.attention.params;
        let out = decode::decode(&call.like.client, &new, &call.cache, params);
        call.attended(launched(out))
    }

    fn nvfp4_choose_greedy(logits: FloatTensor<Self>, state: TokenState<Self>) -> TokenState<Self> {
        let logits = into_contiguous(logits);
        let [batch, vocab] = [0, 1].map(|axis| logits.meta.shape()[axis]);
        trace_op("choose", "greedy", batch, vocab);
        let TokenState {
            tokens,
            starts,
            counts,
            ring,
            step,
        } = &state;
        let greedy = Greedy {
            tokens: in_place(tokens),
            starts: in_place(starts),
            counts: in_place(counts),
            ring: in_place(ring),
            ring_len: ring.meta.shape()[0],
            step: in_place(step),
        };
        launched(greedy::choose(&logits.client, &matrix(&logits), &greedy));
        state
    }

    fn nvfp4_write_words(out: CubeTensor, from: CubeTensor) -> CubeTensor {
        let (to, from) = (in_place(&out), into_contiguous(from));
        let words = out.meta.shape().num_elements();
        launched(graph::copy_words(&out.client, &from.handle, &to, words));
        out
    }
}

/// Returns the memory of a tensor that is written to, even if other owners exist.
fn in_place(tensor: &CubeTensor) -> Handle {
    assert!(
        tensor.is_contiguous(),
        "what decoding writes to is contiguous"
    );
    tensor.handle.clone()
}

/// Arguments of one call for the kernels.
struct Call {
    like: CubeTensor,
    heads: [Heads; 3],
    cache: KvCache,
    tensors: KvTensors<CubeBackend>,
    starts: Handle,
    counts: Handle,
    rope: Option<Rope>,
}

impl Call {
    fn new(
        inputs: AttentionInputs<CubeBackend>,
        tensors: KvTensors<CubeBackend>,
        places: ChunkPlaces<CubeBackend>,
        rope: AttentionRope<CubeBackend>,
        spec: DecodeSpec,
    ) -> Self {
        let inputs = contiguous(inputs);
        let (AttentionInputs::Separate { q, .. } | AttentionInputs::Qkv(q)) = &inputs;
        let (k, v, kind) = match &tensors {
            KvTensors::Float { k, v } => (k, v, CacheKind::Float),
            KvTensors::E4m3 { k, v } => (k, v, CacheKind::E4m3),
        };
        Self {
            like: q.clone(),
            heads: views(&inputs, &spec.attention),
            cache: KvCache {
                k: in_place(k),
                v: in_place(v),
                batch: spec.batch,
                capacity: spec.capacity,
                kv_heads: spec.attention.kv_heads,
                head: spec.attention.head,
                kind,
                scales: spec.scales,
            },
            tensors,
            starts: into_contiguous(places.starts).handle,
            counts: into_contiguous(places.counts).handle,
            rope: tables(rope, &spec.attention),
        }
    }

    fn new_tokens(&self) -> NewTokens<'_> {
        let [q, k, v] = self.heads.clone();
        NewTokens {
            q,
            k,
            v,
            starts: &self.starts,
            counts: &self.counts,
            rope: self.rope.as_ref(),
        }
    }

    fn attended(self, out: Heads) -> Attended<CubeBackend> {
        let shape = Shape::new([out.tokens, out.heads * out.head]);
        let dtype = self.like.dtype;
        Attended {
            out: new_tensor(&self.like, out.handle, shape, dtype),
            cache: self.tensors,
        }
    }
}
