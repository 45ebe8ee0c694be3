//! Cross entropy in place, and embeddings.

use nvfp4_formats::{CrossEntropy, reference::TablePart};
use nvfp4_kernels::{
    embedding, loss,
    tensor::{FloatKind, Matrix},
};

use crate::{
    harness::Section,
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
