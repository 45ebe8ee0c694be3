//! Compares with every byte of TransformerEngine's reference quantizer, except the sign of exact
//! zeros.

use std::{cell::RefCell, collections::BTreeSet};

use half::bf16;
use nvfp4_formats::{
    Amax, BlockScaling, ErrorNorm, Hadamard, QuantParams, QuantizedTensor, Rounding, Usage,
    reference,
};
use safetensors::{Dtype, SafeTensors};

const DATA: &[u8] = include_bytes!("../data/te_reference.safetensors");

/// One input of the file.
struct Case<'a> {
    file: &'a SafeTensors<'a>,
    name: String,
    x: Vec<bf16>,
    rows: usize,
    cols: usize,
    /// Keys that were read, without the name.
    read: RefCell<BTreeSet<String>>,
}

impl Case<'_> {
    fn bytes(&self, key: &str) -> &[u8] {
        self.read.borrow_mut().insert(key.to_owned());
        self.file
            .tensor(&format!("{}.{key}", self.name))
            .unwrap()
            .data()
    }

    fn amax(&self, mode: &str, side: &str) -> Vec<f32> {
        let bytes = self.bytes(&format!("{mode}.{side}.amax"));
        bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    }

    /// Compares amax, codes and scales; the reference drops the sign of zeros.
    fn check(&self, mode: &str, side: &str, packed: &QuantizedTensor) {
        let what = format!("{}.{mode}.{side}", self.name);
        let ours = packed.amax().values();
        assert_eq!(ours, self.amax(mode, side), "{what}: amax");
        let expected = self.bytes(&format!("{mode}.{side}.scales"));
        assert_eq!(packed.scales(), expected, "{what}: scales");
        let expected = self.bytes(&format!("{mode}.{side}.codes"));
        assert_eq!(
            packed.codes().len(),
            expected.len(),
            "{what}: length of codes"
        );
        for (i, (&ours, &theirs)) in packed.codes().iter().zip(expected).enumerate() {
            for shift in [0, 4] {
                let (ours, theirs) = (ours >> shift & 15, theirs >> shift & 15);
                assert!(
                    ours == theirs || (ours == 8 && theirs == 0),
                    "{what}: byte {i}, code {ours} instead of {theirs}"
                );
            }
        }
    }
}

/// Modes in the file for each input.
const MODES: [&str; 8] = [
    "1x16",
    "16x16",
    "token",
    "rht",
    "4over6_mae_1x16",
    "4over6_mse_1x16",
    "4over6_mae_16x16",
    "4over6_mse_16x16",
];

/// Runs `check` on every input; together the calls must read everything that the file has for
/// `modes`. The inputs are the twelve that the file is known to contain.
fn for_each_case(modes: &[&str], check: impl Fn(&Case)) {
    let file = SafeTensors::deserialize(DATA).unwrap();
    let mut seen = 0;
    for (name, tensor) in file.tensors() {
        let Some(name) = name.strip_suffix(".x") else {
            continue;
        };
        assert_eq!(tensor.dtype(), Dtype::BF16);
        let case = Case {
            file: &file,
            name: name.to_string(),
            x: tensor
                .data()
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]))
                .collect(),
            rows: tensor.shape()[0],
            cols: tensor.shape()[1],
            read: RefCell::default(),
        };
        check(&case);
        let all = file.names().into_iter().filter_map(|key| {
            let key = key.strip_prefix(&format!("{name}."))?;
            let (mode, _) = key.split_once('.')?;
            assert!(MODES.contains(&mode), "no test reads {key}");
            modes.contains(&mode).then(|| key.to_owned())
        });
        assert_eq!(case.read.into_inner(), all.collect(), "read of {name}");
        seen += 1;
    }
    assert_eq!(seen, 12, "inputs in the file");
}

fn tensor_amax(case: &Case) -> Amax {
    Amax::Tensor(reference::amax(&case.x))
}

#[test]
fn one_by_16() {
    for_each_case(&["1x16"], |case| {
        let amax = tensor_amax(case);
        let (rows, cols, nearest) = (case.rows, case.cols, Rounding::Nearest);
        let row = reference::quantize_row(&case.x, rows, cols, &amax, &nearest).unwrap();
        case.check("1x16", "row", &row);
        let col = reference::quantize_col(&case.x, rows, cols, &amax, &nearest, None).unwrap();
        case.check("1x16", "col", &col);
    });
}

fn tiles_of(case: &Case, amax: &Amax, scaling: BlockScaling) -> (QuantizedTensor, QuantizedTensor) {
    reference::quantize_tile(&case.x, case.rows, case.cols, amax, scaling).unwrap()
}

#[test]
fn tiles() {
    for_each_case(&["16x16"], |case| {
        let amax = tensor_amax(case);
        let (row, col) = tiles_of(case, &amax, BlockScaling::Standard);
        case.check("16x16", "row", &row);
        case.check("16x16", "col", &col);
    });
}

#[test]
fn per_token() {
    for_each_case(&["token"], |case| {
        let (rows, cols, nearest) = (case.rows, case.cols, Rounding::Nearest);
        let amax = reference::amax_rows(&case.x, rows, cols);
        let amax = Amax::PerRow(amax);
        let row = reference::quantize_row(&case.x, rows, cols, &amax, &nearest).unwrap();
        case.check("token", "row", &row);
        let amax = reference::amax_cols(&case.x, rows, cols);
        let amax = Amax::PerRow(amax);
        let col = reference::quantize_col(&case.x, rows, cols, &amax, &nearest, None).unwrap();
        case.check("token", "col", &col);
    });
}

#[test]
fn hadamard() {
    for_each_case(&["rht"], |case| {
        let (rows, cols, nearest) = (case.rows, case.cols, Rounding::Nearest);
        let hadamard = Hadamard::default();
        let amax = reference::amax_rht(&case.x, rows, cols, &hadamard);
        let amax = Amax::Tensor(amax);
        let col =
            reference::quantize_col(&case.x, rows, cols, &amax, &nearest, Some(&hadamard)).unwrap();
        case.check("rht", "col", &col);
        let amax = tensor_amax(case);
        let row = reference::quantize_row(&case.x, rows, cols, &amax, &nearest).unwrap();
        case.check("rht", "row", &row);
    });
}

#[test]
fn four_over_six() {
    for_each_case(&MODES[4..], |case| {
        for (norm, name) in [(ErrorNorm::Mae, "mae"), (ErrorNorm::Mse, "mse")] {
            let scaling = BlockScaling::FourOverSix(norm);
            let (rows, cols) = (case.rows, case.cols);

            let mode = format!("4over6_{name}_1x16");
            let amax = tensor_amax(case);
            let policy = QuantParams {
                scaling,
                ..QuantParams::nvfp4(Rounding::Nearest)
            };
            let row = reference::quantize(&case.x, rows, cols, Usage::Rowwise, &amax, &policy, 0);
            case.check(&mode, "row", &row.unwrap());

            // For tiles the file contains the rowwise tensor; the other one is its transpose, which
            // the oracle's tests check.
            let mode = format!("4over6_{name}_16x16");
            let amax = tensor_amax(case);
            let (row, _) = tiles_of(case, &amax, scaling);
            case.check(&mode, "row", &row);
        }
    });
}
