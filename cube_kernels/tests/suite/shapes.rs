//! The shapes of TransformerEngine's quantization tests, and one of more than 2^31 elements, with
//! every policy; large ones are for a GPU.

use crate::support::device::read_f32;
use crate::support::quantize::{self, AmaxRequest};
use crate::support::samples;
use crate::support::samples::{ONE, Sample};
use nvfp4_formats::{
    AmaxGranularity, Hadamard,
    reference::{self},
};

const SMALL: [(usize, usize); 7] = [
    (128, 128),
    (256, 256),
    (256, 272),
    (304, 304),
    (320, 256),
    (1024, 256),
    (256, 1024),
];
const LARGE: [(usize, usize); 5] = [
    (1024, 2048),
    (2048, 1024),
    (2048, 2048),
    (8192, 8192),
    (14336, 16384),
];
const HUGE: (usize, usize) = ((1 << 17) + 24, 16384);

/// Defines a test of each of the `check`s at each of `shapes`.
macro_rules! shape_tests {
    ($($test:ident, $large:ident: $check:ident;)*) => {$(
        #[test]
        fn $test() {
            let client = client!(stringify!($test));
            for shape in SMALL {
                samples::$check(&client, &Sample::new(&client, shape));
            }
        }

        #[test]
        fn $large() {
            let client = on_gpu!(stringify!($large), "large matrices are for a GPU");
            for shape in LARGE {
                samples::$check(&client, &Sample::new(&client, shape));
            }
        }
    )*};
}

shape_tests! {
    shapes_of_blocks, large_shapes_of_blocks: blocks;
    shapes_of_tiles, large_shapes_of_tiles: tiles;
    shapes_per_token, large_shapes_per_token: per_token;
    shapes_of_mxfp8_and_values, large_shapes_of_mxfp8_and_values: mxfp8;
    shapes_of_ms_eden, large_shapes_of_ms_eden: ms_eden;
    shapes_of_prologues, large_shapes_of_prologues: prologues;
}

/// The amax values of a large matrix: of each row, of each column and of all elements.
#[test]
fn maxima_of_a_large_matrix() {
    let client = on_gpu!("maxima_of_a_large_matrix", "large matrices are for a GPU");
    let sample = Sample::new(&client, (8192, 8192));
    let (rows, cols) = sample.shape();
    let hadamard = Hadamard::default();
    let request = AmaxRequest {
        rows: Some(AmaxGranularity::PerTensor),
        cols: Some((AmaxGranularity::PerTensor, Some(hadamard))),
    };
    let found = quantize::amaxes(&client, &sample.matrix, ONE, &request).unwrap();
    assert_eq!(
        read_f32(&client, &found.rows.unwrap()),
        reference::amax(&sample.x)
    );
    let expected = reference::amax_rht(&sample.x, rows, cols, &hadamard);
    assert_eq!(read_f32(&client, &found.cols.unwrap()), expected);
}

/// One pass of every kind over more than 2^31 elements: indices beyond 32 bits.
#[test]
fn beyond_two_to_the_31_elements() {
    let client = on_gpu!(
        "beyond_two_to_the_31_elements",
        "large matrices are for a GPU"
    );
    let sample = Sample::new(&client, HUGE);
    for check in samples::CHECKS {
        check(&client, &sample);
        client.memory_cleanup().unwrap();
    }
}
