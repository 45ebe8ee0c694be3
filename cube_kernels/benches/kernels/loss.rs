//! Cross entropy and KL divergence in place, with and without the head, the greedy choice of the
//! next token, and embeddings.

use nvfp4_formats::{CrossEntropy, KlDivergence, reference::TablePart};
use nvfp4_kernels::{
    embedding,
    greedy::{self, Greedy},
    loss::{self, Head, LinearKlRequest, LinearLossRequest},
    tensor::{FloatKind, Matrix},
};

use crate::{
    common::device::{size, sizes},
    harness::{Section, Work},
    inputs::{self, Inputs},
};

/// Returns numbers less than `below`, in no order.
fn numbers(count: usize, below: usize) -> impl Iterator<Item = u32> {
    (0..count).map(move |i| (i as u32).wrapping_mul(2_654_435_761) % below as u32)
}

/// Times the loss of logits, with the gradient computed in place, and alone.
pub fn cross_entropy(section: &mut Section<'_>, inputs: &Inputs) {
    let client = section.client();
    let (rows, vocab) = (inputs.rows, inputs.cols);
    let targets = inputs::words(&client, numbers(rows, vocab));
    let plain = CrossEntropy::default();
    let smooth = CrossEntropy {
        smoothing: 0.1,
        z_loss: 1e-4,
        ..plain
    };
    let size = inputs.elements() * inputs.dtype.size() as f64;
    for (name, params, gradient, passes) in [
        ("loss and gradient", plain, true, 2.0),
        ("loss and gradient, smoothing, z-loss", smooth, true, 2.0),
        ("loss", plain, false, 1.0),
    ] {
        section.time(name, passes * size, |i| {
            let logits = inputs.get(i);
            loss::cross_entropy(&client, logits, &targets, gradient, &params).unwrap();
        });
    }
    let one = inputs::words(&client, [1f32.to_bits()].into_iter());
    section.time("gradient times 1", 0.0, |i| {
        loss::scale(&client, inputs.get(i), &one).unwrap();
    });
    let other = inputs::words(&client, [(-1f32).to_bits()].into_iter());
    section.time("gradient times -1", 2.0 * size, |i| {
        loss::scale(&client, inputs.get(i), &other).unwrap();
    });
}

/// Times the KL divergence of a student's logits to a teacher's.
pub fn kl_divergence(section: &mut Section<'_>, inputs: &Inputs) {
    let client = section.client();
    let rows = inputs.rows;
    let targets = inputs::words(&client, numbers(rows, inputs.cols));
    let losses = client.empty(4 * rows);
    let scale = inputs::words(&client, [(1.0 / rows as f32).to_bits()].into_iter());
    let matrix = inputs.elements() * inputs.dtype.size() as f64;
    for (name, scale, passes) in [
        ("KL divergence and gradient", Some(&scale), 3.0),
        ("KL divergence", None, 2.0),
    ] {
        section.time(name, passes * matrix, |i| {
            let pair = [inputs.get(i), inputs.get(i + 1)];
            let params = KlDivergence::default();
            loss::kl_divergence_rows(&client, pair, &targets, &losses, scale, &params).unwrap();
        });
    }
}

/// Times heads of `width` inputs with their losses and all gradients, one chunk of logits of 256
/// MiB after another.
pub fn heads(section: &mut Section<'_>, [rows, width, vocab]: [usize; 3]) {
    let client = section.client();
    let matrix = |rows, cols| Inputs::bf16(&client, rows, cols).get(0).clone();
    let [x, w] = [matrix(rows, width), matrix(width, vocab)];
    let targets = inputs::words(&client, numbers(rows, vocab));
    let gradients = LinearLossRequest {
        x: true,
        w: true,
        chunk_bytes: 256 << 20,
    };
    let product = 2.0 * (rows * width * vocab) as f64;
    let name = "head, loss and gradients";
    section.time_work(name, Work::Operations(3.0 * product), |_| {
        let params = CrossEntropy::default();
        loss::linear_cross_entropy(&client, &x, &w, &targets, &params, gradients).unwrap();
    });
    let scale = inputs::words(&client, [(1.0 / rows as f32).to_bits()].into_iter());
    let name = "two heads, KL divergence and gradients";
    section.time_work(name, Work::Operations(4.0 * product), |_| {
        let head = Head { x: &x, w: &w };
        let request = LinearKlRequest {
            student: head,
            teacher: head,
            targets: &targets,
            scale: &scale,
            params: KlDivergence::default(),
            gradients,
        };
        loss::linear_kl_divergence(&client, &request).unwrap();
    });
}

/// Times the greedy choice of the next token of 64 sequences.
pub fn greedy(section: &mut Section<'_>) {
    const RING: usize = 16;
    let client = section.client();
    let [batch, vocab] = [size(64, 4), sizes([131_072])[0]];
    let logits = Inputs::bf16(&client, batch, vocab);
    let zeros = |len: usize| inputs::words(&client, std::iter::repeat_n(0, len));
    let state = Greedy {
        tokens: zeros(batch),
        starts: zeros(batch),
        counts: zeros(batch),
        ring: zeros(batch * RING),
        ring_len: RING,
        step: zeros(batch),
    };
    let bytes = 2.0 * logits.elements();
    section.captured().time("greedy choice", bytes, |i| {
        greedy::choose(&client, logits.get(i), &state).unwrap();
    });
}

/// Times lookups in an `f32` table of `vocab` rows with bf16 output, and the table's gradient.
pub fn embeddings(section: &mut Section<'_>, inputs: &Inputs, vocab: usize) {
    let client = section.client();
    let (tokens, cols) = (inputs.rows, inputs.cols);
    let ids = inputs::words(&client, numbers(tokens, vocab));
    let table = client.empty(vocab * cols * 4);
    let table = Matrix::new(table, vocab, cols, FloatKind::F32).unwrap();
    section.time("embedding, f32 to bf16", 6.0 * inputs.elements(), |_| {
        let dtype = FloatKind::Bf16;
        embedding::embedding(
            &client,
            (&table, TablePart::whole(vocab)),
            &ids,
            tokens,
            dtype,
        )
        .unwrap();
    });
    let bytes = 2.0 * inputs.elements() + 4.0 * table.len() as f64;
    section.time("embedding gradient", bytes, |i| {
        embedding::embedding_gradient(&client, inputs.get(i), &ids, vocab).unwrap();
    });
    let same = inputs::words(&client, numbers(tokens, 1));
    section.time("embedding gradient, all ids the same", bytes, |i| {
        embedding::embedding_gradient(&client, inputs.get(i), &same, vocab).unwrap();
    });
}
