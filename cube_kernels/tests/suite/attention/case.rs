//! One problem: operands on the host and on the device, the results of the kernels, and the
//! expected results.

use crate::support::device::{DeviceElement, assert_floats, read_bytes, read_f32s, upload_bytes};
use crate::support::inputs::{Generator, convert};
use cubecl::{prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_formats::{
    AttentionParams,
    reference::attention::{
        AttentionBackward, AttentionF64, AttentionForward, AttentionShape, Bounded, HostHeads,
        Precision, attention_backward, attention_f64, attention_forward, rope,
    },
};
use nvfp4_kernels::attention::{
    self, Attention, AttentionGradients, AttentionOutput, Heads, Rope, Sequences,
    proof::mma_supports,
};

/// Types of operands.
pub trait Operand: DeviceElement {
    const PRECISION: Precision;
}
impl Operand for f32 {
    const PRECISION: Precision = Precision::F32;
}
impl Operand for bf16 {
    const PRECISION: Precision = Precision::BF16;
}
impl Operand for f16 {
    const PRECISION: Precision = Precision::F16;
}

/// Shapes and parameters of a problem.
#[derive(Debug, Clone)]
pub struct Case {
    pub heads: usize,
    pub kv_heads: usize,
    pub head: usize,
    /// Lengths of sequences, in queries and in keys.
    pub lengths: Vec<(usize, usize)>,
    /// Tokens after the last sequence.
    pub behind: usize,
    /// True if sequences are given by offsets, not by their number.
    pub offsets: bool,
    /// True if operands are column ranges of one matrix, and gradients, too.
    pub fused: bool,
    pub params: AttentionParams,
    /// Standard deviation of queries and keys.
    pub magnitude: f32,
    pub seed: u32,
}

impl Case {
    /// Returns a case with one sequence and two heads.
    pub fn new(head: usize, sq: usize, sk: usize) -> Self {
        Self {
            heads: 2,
            kv_heads: 2,
            head,
            lengths: vec![(sq, sk)],
            behind: 0,
            offsets: false,
            fused: false,
            params: AttentionParams::new(head),
            magnitude: 1.0,
            seed: (sq * 7 + sk * 3 + head) as u32,
        }
    }

    pub fn causal(mut self) -> Self {
        self.params.causal = true;
        self
    }

    pub fn sequences(mut self, lengths: &[(usize, usize)], behind: usize) -> Self {
        self.lengths = lengths.to_vec();
        self.offsets = true;
        self.behind = behind;
        self
    }

    pub fn starts(&self, of: fn(&(usize, usize)) -> usize) -> Vec<u32> {
        let mut starts = vec![0u32];
        for length in &self.lengths {
            starts.push(starts[starts.len() - 1] + of(length) as u32);
        }
        starts
    }

    pub fn tokens(&self, of: fn(&(usize, usize)) -> usize) -> usize {
        self.lengths.iter().map(of).sum::<usize>() + self.behind
    }
}

/// Contiguous operands and gradient of the output.
#[derive(Clone)]
pub struct Data<T> {
    pub q: Vec<T>,
    pub k: Vec<T>,
    pub v: Vec<T>,
    pub dout: Vec<T>,
}

impl<T: Operand> Data<T> {
    pub fn new(case: &Case) -> Self {
        let mut random = Generator::new(case.seed);
        let mut draw = |len: usize, magnitude: f32| -> Vec<T> {
            convert(
                &(0..len)
                    .map(|_| random.normal() * magnitude)
                    .collect::<Vec<f32>>(),
            )
        };
        let (q, k) = (case.tokens(|l| l.0), case.tokens(|l| l.1));
        let (wide, narrow) = (case.heads * case.head, case.kv_heads * case.head);
        Self {
            q: draw(q * wide, case.magnitude),
            k: draw(k * narrow, case.magnitude),
            v: draw(k * narrow, 1.0),
            dout: draw(q * wide, 1.0),
        }
    }
}

/// Results of the kernels.
#[derive(Clone)]
pub struct Found<T> {
    pub out: Vec<T>,
    pub lse: Vec<f32>,
    pub dq: Vec<T>,
    pub dk: Vec<T>,
    pub dv: Vec<T>,
}

impl<T: Operand> Found<T> {
    /// Returns all results with their names.
    pub fn parts(&self) -> [(&'static str, Vec<f32>); 5] {
        let values = |x: &[T]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
        [
            ("out", values(&self.out)),
            ("lse", self.lse.clone()),
            ("dq", values(&self.dq)),
            ("dk", values(&self.dk)),
            ("dv", values(&self.dv)),
        ]
    }

    /// Asserts equal bits, or NaN on both sides.
    pub fn assert_equal(&self, other: &Self, what: &str) {
        for ((name, found), (_, expected)) in self.parts().iter().zip(other.parts()) {
            assert_floats(found, &expected, &format!("{what}: {name}"));
        }
    }
}

/// Tables for rotary positions.
pub struct Tables {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    pub positions: usize,
}

impl Tables {
    pub fn new(positions: usize, head: usize) -> Self {
        let half = head / 2;
        let angle =
            |i: usize| (i / half) as f64 * 10_000f64.powf(-2.0 * (i % half) as f64 / head as f64);
        let table = |of: fn(f64) -> f64| {
            (0..positions * half)
                .map(|i| of(angle(i)) as f32)
                .collect::<Vec<f32>>()
        };
        Self {
            cos: table(f64::cos),
            sin: table(f64::sin),
            positions,
        }
    }

    pub fn upload(&self, client: &Client) -> Rope {
        let table = |values: &[f32]| upload_bytes(client, bytemuck::cast_slice(values));
        Rope {
            cos: table(&self.cos),
            sin: table(&self.sin),
            positions: self.positions,
        }
    }
}

/// Returns memory filled with NaN.
pub fn nan_memory(client: &Client, bytes: usize) -> Handle {
    upload_bytes(client, &vec![0xFF; bytes])
}

/// A matrix of three concatenated column ranges, after `margin` elements.
struct Fused {
    widths: [usize; 3],
    margin: usize,
}

impl Fused {
    fn of(case: &Case) -> Self {
        let narrow = case.kv_heads * case.head;
        Self {
            widths: [case.heads * case.head, narrow, narrow],
            margin: 16,
        }
    }

    fn stride(&self) -> usize {
        self.widths.iter().sum::<usize>() + 8
    }

    fn offset(&self, part: usize) -> usize {
        self.margin + self.widths[..part].iter().sum::<usize>()
    }

    fn len(&self, tokens: usize) -> usize {
        self.margin + tokens * self.stride()
    }

    fn views(&self, case: &Case, handle: &Handle, kind: Heads) -> [Heads; 3] {
        let heads = [case.heads, case.kv_heads, case.kv_heads];
        std::array::from_fn(|part| Heads {
            handle: handle.clone(),
            offset: self.offset(part),
            row_stride: self.stride(),
            heads: heads[part],
            ..kind.clone()
        })
    }
}

/// The problem on the device.
pub struct OnDevice {
    pub attention: Attention,
    pub dout: Heads,
}

pub fn upload<T: Operand>(client: &Client, case: &Case, data: &Data<T>) -> OnDevice {
    let (sq, sk) = (case.tokens(|l| l.0), case.tokens(|l| l.1));
    let heads = |values: &[T], tokens: usize, heads: usize| {
        let handle = upload_bytes(client, bytemuck::cast_slice(values));
        Heads::contiguous(handle, [tokens, heads, case.head], T::KIND)
    };
    let dout = heads(&data.dout, sq, case.heads);
    let [q, k, v] = if case.fused {
        assert_eq!(sq, sk, "one matrix");
        let fused = Fused::of(case);
        let mut matrix = vec![T::from_f32(f32::NAN); fused.len(sq)];
        for (part, values) in [&data.q, &data.k, &data.v].into_iter().enumerate() {
            let width = fused.widths[part];
            for (token, row) in values.chunks(width).enumerate() {
                let at = fused.offset(part) + token * fused.stride();
                matrix[at..at + width].copy_from_slice(row);
            }
        }
        let handle = upload_bytes(client, bytemuck::cast_slice(&matrix));
        fused.views(case, &handle, dout.clone())
    } else {
        [
            heads(&data.q, sq, case.heads),
            heads(&data.k, sk, case.kv_heads),
            heads(&data.v, sk, case.kv_heads),
        ]
    };
    let starts = |of| upload_bytes(client, bytemuck::cast_slice(&case.starts(of)));
    let sequences = match case.offsets {
        true => Sequences::Offsets {
            q: starts(|l| l.0),
            k: starts(|l| l.1),
            count: case.lengths.len(),
        },
        false => Sequences::Equal(case.lengths.len()),
    };
    OnDevice {
        attention: Attention {
            q,
            k,
            v,
            sequences,
            params: case.params,
        },
        dout,
    }
}

pub fn read<T: Operand>(client: &Client, heads: &Heads) -> Vec<T> {
    let len = match heads.tokens {
        0 => 0,
        tokens => heads.offset + (tokens - 1) * heads.row_stride + heads.heads * heads.head,
    };
    let bytes = read_bytes(client, &heads.handle, len * size_of::<T>());
    let all: Vec<T> = bytes
        .chunks_exact(size_of::<T>())
        .map(bytemuck::pod_read_unaligned)
        .collect();
    let rows = (0..heads.tokens).flat_map(|token| {
        all[heads.offset + token * heads.row_stride..][..heads.heads * heads.head].to_vec()
    });
    rows.collect()
}

/// Runs forward and backward into memory filled with NaN.
pub fn run<T: Operand>(
    client: &Client,
    case: &Case,
    data: &Data<T>,
    tables: Option<&Tables>,
) -> Found<T> {
    let OnDevice { attention, dout } = upload(client, case, data);
    let (q, k) = (&attention.q, &attention.k);
    let size = size_of::<T>();
    let full = |shape: [usize; 3]| {
        let handle = nan_memory(client, shape.iter().product::<usize>() * size);
        Heads::contiguous(handle, shape, T::KIND)
    };
    let output = AttentionOutput {
        out: full(q.shape()),
        lse: nan_memory(client, q.heads * q.tokens * 4),
    };
    attention::proof::forward_into(client, &attention, &output).unwrap();
    let [dq, dk, dv] = match case.fused {
        true => {
            let fused = Fused::of(case);
            let handle = nan_memory(client, fused.len(q.tokens) * size);
            fused.views(case, &handle, dout.clone())
        }
        false => [full(q.shape()), full(k.shape()), full(k.shape())],
    };
    let gradients = AttentionGradients { dq, dk, dv };
    let rope = tables.map(|tables| tables.upload(client));
    attention::backward(
        client,
        &attention,
        &output,
        &dout,
        rope.as_ref(),
        &gradients,
    )
    .unwrap();
    let AttentionGradients { dq, dk, dv } = &gradients;
    Found {
        out: read(client, &output.out),
        lse: read_f32s(client, &output.lse, q.heads * q.tokens),
        dq: read(client, dq),
        dk: read(client, dk),
        dv: read(client, dv),
    }
}

/// Calls `work` with the case's shape, for the reference.
pub fn with_shape<R>(case: &Case, work: impl FnOnce(&AttentionShape<'_>) -> R) -> R {
    let (q_starts, k_starts) = (case.starts(|l| l.0), case.starts(|l| l.1));
    work(&AttentionShape {
        heads: case.heads,
        kv_heads: case.kv_heads,
        head: case.head,
        q_tokens: case.tokens(|l| l.0),
        k_tokens: case.tokens(|l| l.1),
        q_starts: &q_starts,
        k_starts: &k_starts,
        params: case.params,
    })
}

fn operands<'a, T: Operand>(case: &Case, data: &'a Data<T>) -> [HostHeads<'a, T>; 4] {
    let (wide, narrow) = (case.heads * case.head, case.kv_heads * case.head);
    [
        HostHeads::contiguous(&data.q, wide),
        HostHeads::contiguous(&data.k, narrow),
        HostHeads::contiguous(&data.v, narrow),
        HostHeads::contiguous(&data.dout, wide),
    ]
}

/// Returns the results of the oracle.
pub fn oracle<T: Operand>(case: &Case, data: &Data<T>, tables: Option<&Tables>) -> Found<T> {
    with_shape(case, |shape| {
        let [q, k, v, dout] = operands(case, data);
        let AttentionForward { out, lse } = attention_forward(q, k, v, shape);
        let saved = HostHeads::contiguous(&out, case.heads * case.head);
        let AttentionBackward { mut dq, mut dk, dv } =
            attention_backward((q, k, v), (saved, &lse), dout, shape);
        if let Some(tables) = tables {
            let angles = (&tables.cos[..], &tables.sin[..]);
            dq = rope(&dq, (case.heads, case.head), shape.q_starts, angles, true);
            dk = rope(
                &dk,
                (case.kv_heads, case.head),
                shape.k_starts,
                angles,
                true,
            );
        }
        Found {
            out,
            lse,
            dq,
            dk,
            dv,
        }
    })
}

/// Returns the results in `f64`, with error bounds.
pub fn exact<T: Operand>(case: &Case, data: &Data<T>) -> AttentionF64 {
    with_shape(case, |shape| {
        let [q, k, v, dout] = operands(case, data);
        attention_f64((q, k, v), dout, shape, T::PRECISION)
    })
}

/// Rotates a gradient in `f64` back, with its bounds.
fn turn_back(
    gradient: &Bounded,
    (heads, head): (usize, usize),
    starts: &[u32],
    tables: &Tables,
    precision: Precision,
) -> Bounded {
    let half = head / 2;
    let mut turned = gradient.clone();
    for token in 0..gradient.value.len() / (heads * head) {
        let sequence = starts[..starts.len() - 1].partition_point(|&s| s as usize <= token);
        let position = token - starts[sequence - 1] as usize;
        let angle =
            |table: &[f32], i: usize| table[position.min(tables.positions - 1) * half + i] as f64;
        for h in 0..heads {
            for i in 0..half {
                let (near, far) = (
                    (token * heads + h) * head + i,
                    (token * heads + h) * head + i + half,
                );
                let (cos, sin) = (angle(&tables.cos, i), angle(&tables.sin, i));
                let (a, b) = (gradient.value[near], gradient.value[far]);
                let (ea, eb) = (gradient.error[near], gradient.error[far]);
                let rounding = 2f64.powi(-21) * (a.abs() + b.abs()) + precision.smallest;
                turned.value[near] = a * cos + b * sin;
                turned.value[far] = b * cos - a * sin;
                for (at, first, second) in [(near, ea, eb), (far, eb, ea)] {
                    turned.error[at] = first * cos.abs()
                        + second * sin.abs()
                        + precision.unit * turned.value[at].abs()
                        + rounding;
                }
            }
        }
    }
    turned
}

/// Asserts that results are within their bounds of `f64`.
pub fn assert_within<T: Operand>(found: &Found<T>, exact: &AttentionF64, what: &str) {
    let bounds = [&exact.out, &exact.lse, &exact.dq, &exact.dk, &exact.dv];
    for ((name, values), bound) in found.parts().iter().zip(bounds) {
        let values = values.iter().map(|&value| value as f64);
        if let Some((at, ratio)) = bound.worst(values.clone()) {
            let value = values.clone().nth(at).unwrap();
            assert!(
                ratio <= 1.0,
                "{what}: {name}[{at}] is {value:e}, expected {:e} with an error of {:e}: {ratio}",
                bound.value[at],
                bound.error[at]
            );
        }
    }
}

/// Checks that results equal the oracle's if kernels without matrix instructions run, and are
/// within the bounds of `f64` in any case.
pub fn check<T: Operand>(client: &Client, case: &Case) -> Found<T> {
    let what = format!("{case:?} {:?}", T::KIND);
    let data = Data::<T>::new(case);
    let found = run(client, case, &data, None);
    let attention = upload(client, case, &data).attention;
    if mma_supports(client, &attention).is_err() {
        found.assert_equal(&oracle(case, &data, None), &what);
    }
    assert_within(&found, &exact(case, &data), &what);
    found
}

/// Checks the results if the gradients of queries and keys are rotated back by `tables`.
pub fn check_turned<T: Operand>(client: &Client, case: &Case, tables: &Tables) {
    let what = format!("{case:?} {:?}, {} positions", T::KIND, tables.positions);
    let data = Data::<T>::new(case);
    let found = run(client, case, &data, Some(tables));
    if mma_supports(client, &upload(client, case, &data).attention).is_err() {
        found.assert_equal(&oracle(case, &data, Some(tables)), &what);
    }
    let mut expected = exact(case, &data);
    let turn = |gradient: &Bounded, heads, of| {
        let starts = case.starts(of);
        turn_back(gradient, (heads, case.head), &starts, tables, T::PRECISION)
    };
    expected.dq = turn(&expected.dq, case.heads, |l| l.0);
    expected.dk = turn(&expected.dk, case.kv_heads, |l| l.1);
    assert_within(&found, &expected, &what);
}
