//! Invalid arguments are refused by name before anything is launched.

use super::case::{Case, Data, Tables, upload};
use crate::support::device::upload_bytes;
use cubecl::prelude::*;
use nvfp4_formats::Nvfp4Error;
use nvfp4_kernels::{
    attention::{
        self, Attention, AttentionGradients, AttentionOutput, Heads, Rotation, Sequences,
        TokenSequences,
    },
    tensor::FloatKind,
};

fn argument(result: Result<(), Nvfp4Error>) -> &'static str {
    match result.unwrap_err() {
        Nvfp4Error::Shape { argument, .. }
        | Nvfp4Error::DType { argument, .. }
        | Nvfp4Error::Value { argument, .. } => argument,
        other => panic!("{other}"),
    }
}

fn valid(client: &Client) -> (Attention, Heads) {
    let case = Case {
        heads: 4,
        ..Case::new(8, 6, 6)
    };
    let found = upload(client, &case, &Data::<f32>::new(&case));
    (found.attention, found.dout)
}

#[test]
fn operands_that_do_not_fit() {
    let client = client!("attention::errors::operands_that_do_not_fit");
    let (good, _) = valid(&client);
    let refused = |change: fn(&mut Attention)| {
        let mut attention = good.clone();
        change(&mut attention);
        argument(attention::forward(&client, &attention).map(|_| ()))
    };
    assert_eq!(refused(|a| a.q.head = 0), "q");
    assert_eq!(refused(|a| a.q.head = 257), "q");
    assert_eq!(refused(|a| a.q.heads = 0), "q");
    assert_eq!(refused(|a| a.q.row_stride = 31), "q");
    assert_eq!(refused(|a| a.q.tokens = 7), "q");
    assert_eq!(refused(|a| a.q.offset = 1), "q");
    assert_eq!(refused(|a| a.q.tokens = usize::MAX / 1024), "q");
    assert_eq!(refused(|a| a.k.head = 4), "v");
    assert_eq!(refused(|a| (a.k.head, a.v.head) = (4, 4)), "k");
    assert_eq!(refused(|a| a.v.heads = 1), "v");
    assert_eq!(refused(|a| a.q.heads = 3), "k");
    assert_eq!(refused(|a| a.v.dtype = FloatKind::Bf16), "v");
    assert_eq!(refused(|a| a.q.dtype = FloatKind::Bf16), "k");
    assert_eq!(refused(|a| a.sequences = Sequences::Equal(0)), "sequences");
    assert_eq!(refused(|a| a.sequences = Sequences::Equal(4)), "q");
    assert_eq!(refused(|a| a.params.scale = f32::NAN), "scale");
    assert_eq!(refused(|a| a.params.softcap = Some(0.0)), "softcap");
    assert_eq!(
        refused(|a| a.params.softcap = Some(f32::INFINITY)),
        "softcap"
    );
    assert_eq!(refused(|a| a.params.window = Some(2)), "window");
    let empty = |a: &mut Attention| (a.params.causal, a.params.window) = (true, Some(0));
    assert_eq!(refused(empty), "window");
    let mut attention = good.clone();
    let few = upload_bytes(&client, &[0; 8]);
    attention.sequences = Sequences::Offsets {
        q: few.clone(),
        k: few,
        count: 2,
    };
    let found = argument(attention::forward(&client, &attention).map(|_| ()));
    assert_eq!(found, "sequences.offsets");
}

#[test]
fn results_that_do_not_fit() {
    let client = client!("attention::errors::results_that_do_not_fit");
    let (attention, dout) = valid(&client);
    let saved = attention::forward(&client, &attention).unwrap();
    let empty = |heads: &Heads| Heads::empty(&client, heads.shape(), heads.dtype);
    let gradients = || AttentionGradients {
        dq: empty(&attention.q),
        dk: empty(&attention.k),
        dv: empty(&attention.v),
    };
    let run = |saved: &AttentionOutput, dout: &Heads, gradients: &AttentionGradients| {
        attention::backward(&client, &attention, saved, dout, None, gradients)
    };
    run(&saved, &dout, &gradients()).unwrap();
    let short = AttentionOutput {
        lse: upload_bytes(&client, &[0; 16]),
        ..saved.clone()
    };
    assert_eq!(argument(run(&short, &dout, &gradients())), "lse");
    let gap = AttentionOutput {
        out: Heads {
            offset: 0,
            row_stride: 33,
            ..Heads::empty(&client, [12, 4, 8], FloatKind::F32)
        },
        ..saved.clone()
    };
    let gap = AttentionOutput {
        out: Heads {
            tokens: 6,
            ..gap.out
        },
        ..gap
    };
    assert_eq!(argument(run(&gap, &dout, &gradients())), "out");
    let other = Heads {
        heads: 3,
        ..dout.clone()
    };
    assert_eq!(argument(run(&saved, &other, &gradients())), "dout");
    let mut wrong = gradients();
    wrong.dq.tokens = 5;
    assert_eq!(argument(run(&saved, &dout, &wrong)), "dq");
    let mut wrong = gradients();
    wrong.dk = empty(&attention.q);
    assert_eq!(argument(run(&saved, &dout, &wrong)), "dk");
    let mut wrong = gradients();
    wrong.dv.dtype = FloatKind::F16;
    assert_eq!(argument(run(&saved, &dout, &wrong)), "dv");
    let few = Tables::new(5, 8).upload(&client);
    let turned = attention::backward(&client, &attention, &saved, &dout, Some(&few), &gradients());
    assert_eq!(argument(turned), "rope.positions");
}

#[test]
fn rotations_that_do_not_fit() {
    let client = client!("attention::errors::rotations_that_do_not_fit");
    let (attention, _) = valid(&client);
    let x = &attention.q;
    let all = TokenSequences::Equal(2);
    let tables = Tables::new(3, 8).upload(&client);
    let turn = |x: &Heads, tables: &attention::Rope, out: &Heads| {
        attention::rope(&client, x, all, tables, Rotation::Forward, out)
    };
    turn(x, &tables, x).unwrap();
    let odd = Heads {
        heads: 1,
        head: 5,
        ..x.clone()
    };
    assert_eq!(argument(turn(&odd, &tables, &odd)), "x");
    let mut short = tables.clone();
    short.sin = upload_bytes(&client, &[0; 4]);
    assert_eq!(argument(turn(x, &short, x)), "rope.sin");
    assert_eq!(argument(turn(x, &tables, &x.part(0, 2))), "out");
    let three = TokenSequences::Equal(4);
    let found = attention::rope(&client, x, three, &tables, Rotation::Forward, x);
    assert_eq!(argument(found), "x");
}
