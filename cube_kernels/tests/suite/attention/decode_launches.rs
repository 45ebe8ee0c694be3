//! Consecutive launches of decoding: each resets the counters of finished runs to zero for the
//! next.

use super::{decode_bounds::Decoded, is_gpu};
use crate::support::device::{DeviceElement, assert_floats, read_bytes, upload_bytes};
use crate::support::inputs::{Generator, convert};
use cubecl::{prelude::*, server::Handle};
use half::bf16;
use nvfp4_formats::{
    AttentionParams,
    reference::attention::{DecodeShape, HostKv, HostKvMut, append},
};
use nvfp4_kernels::attention::{
    Heads,
    decode::{CacheKind, KvCache, NewTokens, decode},
    proof::uses_mma,
};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD: usize = 64;
/// New tokens per sequence.
const TIME: usize = 1;

/// Sequences whose new tokens are decoded repeatedly, at one of several positions.
pub struct Repeated {
    cache: KvCache,
    host: [Vec<bf16>; 2],
    qkv: Vec<bf16>,
    queries: Handle,
    /// Number of tokens of each sequence, for each position.
    pub starts: Vec<Vec<u32>>,
    counts: Vec<u32>,
    device_counts: Handle,
}

impl Repeated {
    /// Returns sequences with capacity `capacity` at `starts`; sequences with `counts` of 0 get no
    /// tokens.
    pub fn new(client: &Client, capacity: usize, starts: &[&[u32]], counts: &[u32]) -> Self {
        let batch = counts.len();
        let mut random = Generator::new(capacity as u32);
        let mut draw = |len: usize| {
            let drawn: Vec<f32> = (0..len).map(|_| random.normal()).collect();
            convert::<bf16>(&drawn)
        };
        let host = [0, 1].map(|_| draw(batch * capacity * KV_HEADS * HEAD));
        let qkv = draw(batch * TIME * (HEADS + 2 * KV_HEADS) * HEAD);
        let [k, v] = [0, 1].map(|i| upload_bytes(client, bytemuck::cast_slice(&host[i])));
        let cache = KvCache {
            k,
            v,
            batch,
            capacity,
            kv_heads: KV_HEADS,
            head: HEAD,
            kind: CacheKind::Float,
            scales: [1.0; 2],
        };
        Self {
            cache,
            host,
            queries: upload_bytes(client, bytemuck::cast_slice(&qkv)),
            qkv,
            starts: starts.iter().map(|starts| starts.to_vec()).collect(),
            counts: counts.to_vec(),
            device_counts: upload_bytes(client, bytemuck::cast_slice(counts)),
        }
    }

    /// Returns the output of a launch at `starts`.
    pub fn launch(&self, client: &Client, starts: &Handle) -> Handle {
        let new = self.new_tokens(&self.fused(), starts);
        let params = AttentionParams::causal(HEAD);
        decode(client, &new, &self.cache, &params).unwrap().handle
    }

    /// Asserts that the launch `found` at position `place` equals the oracle's step.
    pub fn assert_next(&mut self, client: &Client, found: &Handle, place: usize, what: &str) {
        let shape = DecodeShape {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head: HEAD,
            time: TIME,
            capacity: self.cache.capacity,
            starts: &self.starts[place],
            counts: &self.counts,
        };
        let fused = self.fused();
        let by_mma = uses_mma(
            client,
            &self.new_tokens(&fused, &self.device_counts),
            &self.cache,
            &AttentionParams::causal(HEAD),
        );
        let [k, v] = &mut self.host;
        let (mut new_k, mut new_v) = (HostKvMut::Float(k), HostKvMut::Float(v));
        let queries = append(&self.qkv, [&mut new_k, &mut new_v], &shape, None);
        let bytes = read_bytes(client, found, queries.len() * bf16::KIND.size());
        let decoded = Decoded {
            queries: &queries,
            k: HostKv::Float(k),
            v: HostKv::Float(v),
            shape: &shape,
            params: &AttentionParams::causal(HEAD),
        };
        decoded.assert(bytemuck::cast_slice(&bytes), by_mma, what);
    }

    fn fused(&self) -> Heads {
        let rows = self.counts.len() * TIME;
        let all = [rows, HEADS + 2 * KV_HEADS, HEAD];
        Heads::contiguous(self.queries.clone(), all, bf16::KIND)
    }

    fn new_tokens<'a>(&'a self, fused: &Heads, starts: &'a Handle) -> NewTokens<'a> {
        NewTokens {
            q: fused.part(0, HEADS),
            k: fused.part(HEADS, KV_HEADS),
            v: fused.part(HEADS + KV_HEADS, KV_HEADS),
            starts,
            counts: &self.device_counts,
            rope: None,
        }
    }
}

/// Sequences without runs, with one, and with many; the numbers change from launch to launch, and
/// the host does not wait between them. A batch of one sequence runs between them.
#[test]
fn launches_in_a_row_share_counters() {
    let client = client!("decode_launches::launches_in_a_row_share_counters");
    let (long, longer, launches) = match is_gpu(&client) {
        true => (900, 4000, 400),
        false => (150, 260, 4),
    };
    let starts: [&[u32]; 2] = [&[0, 9, long, longer, 0], &[7, longer, 3, long, 130]];
    let capacity = longer as usize + 1;
    let mut many = Repeated::new(&client, capacity, &starts, &[0, 1, 1, 1, 1]);
    let mut one = Repeated::new(&client, capacity, &[&[longer], &[5]], &[1]);
    let upload = |of: &Repeated, place: usize| {
        upload_bytes(&client, bytemuck::cast_slice(&of.starts[place]))
    };
    let places = [0, 1].map(|place| [upload(&many, place), upload(&one, place)]);
    let found: Vec<_> = (0..launches)
        .map(|i| {
            let [of_many, of_one] = &places[i % 2];
            (many.launch(&client, of_many), one.launch(&client, of_one))
        })
        .collect();
    for (i, (of_many, of_one)) in found.iter().enumerate() {
        let what = format!("launch {i} at place {}", i % 2);
        many.assert_next(&client, of_many, i % 2, &what);
        one.assert_next(&client, of_one, i % 2, &format!("{what}, one sequence"));
    }
}

/// No sequence has a new token: the output is zeros for any memory contents, and the next launch
/// counts from zero.
#[test]
fn sequences_that_all_rest_have_zeros() {
    let client = client!("decode_launches::sequences_that_all_rest_have_zeros");
    let starts: [&[u32]; 1] = [&[130, 0]];
    let mut rest = Repeated::new(&client, 200, &starts, &[0, 0]);
    let mut goes_on = Repeated::new(&client, 200, &starts, &[1, 1]);
    let places = upload_bytes(&client, bytemuck::cast_slice(&rest.starts[0]));
    let found = rest.launch(&client, &places);
    let next = goes_on.launch(&client, &places);
    let zeros = vec![0.0; 2 * TIME * HEADS * HEAD];
    let bytes = read_bytes(&client, &found, zeros.len() * bf16::KIND.size());
    let found_values: Vec<f32> = bytemuck::cast_slice::<u8, bf16>(&bytes)
        .iter()
        .map(|x| x.to_f32())
        .collect();
    assert_floats(&found_values, &zeros, "all rest");
    rest.assert_next(&client, &found, 0, "all rest, by the oracle");
    goes_on.assert_next(&client, &next, 0, "they go on");
}
