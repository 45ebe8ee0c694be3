//! Greedy choice of the next token on the device.

use half::bf16;

use crate::support::device::{read_u32, upload, upload_bytes};
use crate::support::inputs::Generator;
use nvfp4_kernels::greedy::{Greedy, choose};

/// Steps of three sequences through a ring of two rows, with vocabularies of one chunk and of
/// several.
#[test]
fn the_first_of_the_largest_comes_next() {
    let client = client!("greedy::the_first_of_the_largest_comes_next");
    for vocab in [5, 2048, 6001, 9000] {
        let batch = 3;
        let words = |values: [u32; 3]| upload_bytes(&client, bytemuck::cast_slice(&values));
        let greedy = Greedy {
            tokens: words([7; 3]),
            starts: words([10, 20, 30]),
            counts: words([1, 0, 1]),
            ring: upload_bytes(&client, &[0; 24]),
            ring_len: 2,
            step: words([0; 3]),
        };
        let mut random = Generator::new(vocab as u32);
        let mut ring = [[0u32; 3]; 2];
        for step in 0..3 {
            let mut logits: Vec<f32> = (0..batch * vocab).map(|_| random.normal()).collect();
            let expected = match step {
                0 => {
                    // Equal maxima, in different chunks if there are several.
                    let places = [vocab / 3, vocab / 2, vocab - 1];
                    for (row, place) in places.into_iter().enumerate() {
                        logits[row * vocab + place] = 9.0;
                        logits[row * vocab + vocab - 1] = 9.0;
                    }
                    places.map(|place| place as u32)
                }
                1 => {
                    // Both zeros are equal; -inf is an ordinary logit; NaN is an error.
                    logits[..vocab].fill(-0.0);
                    logits[2] = 0.0;
                    logits[vocab..2 * vocab].fill(f32::NEG_INFINITY);
                    logits[2 * vocab - 2] = -1e30;
                    logits[2 * vocab + 1] = f32::NAN;
                    [0, vocab as u32 - 2, u32::MAX]
                }
                _ => {
                    logits[..vocab].fill(f32::NEG_INFINITY);
                    logits[vocab + 3] = f32::INFINITY;
                    logits[2 * vocab..].fill(-3.0);
                    [u32::MAX, 3, 0]
                }
            };
            // The last step is in bf16.
            let matrix = match step {
                0 | 1 => upload(&client, &logits, batch, vocab),
                _ => {
                    let rounded: Vec<bf16> = logits.iter().map(|it| bf16::from_f32(*it)).collect();
                    upload(&client, &rounded, batch, vocab)
                }
            };
            choose(&client, &matrix, &greedy).unwrap();
            ring[step % 2] = expected;
            assert_eq!(
                read_u32(&client, &greedy.tokens, 3),
                expected,
                "{vocab}, {step}"
            );
            assert_eq!(
                read_u32(&client, &greedy.ring, 6),
                ring.concat(),
                "{vocab}, {step}"
            );
            let step = step as u32 + 1;
            assert_eq!(
                read_u32(&client, &greedy.starts, 3),
                [10 + step, 20, 30 + step]
            );
            assert_eq!(read_u32(&client, &greedy.step, 3), [step; 3]);
        }
        let matrix = upload(&client, &[0f32; 8], 4, 2);
        assert!(choose(&client, &matrix, &greedy).is_err());
    }
}
