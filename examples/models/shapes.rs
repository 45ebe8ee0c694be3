//! Generated images: a shape of one colour on black, with its size and place at random.

use std::error::Error;
use std::fs;
use std::path::Path;

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::training::{Random, ids, percent_equal};

/// Height and width of an image.
pub const SIDE: usize = 16;
/// Height and width of a patch.
const PATCH: usize = 4;
const GRID: usize = SIDE / PATCH;
/// Number of patches, and number of values in each.
pub const PATCHES: usize = GRID * GRID;
pub const PATCH_VALUES: usize = 3 * PATCH * PATCH;

/// Names of the shapes.
pub const SHAPES: [&str; 4] = ["disc", "square", "cross", "ring"];
/// Number of words in a prompt: a colour and a shape.
pub const WORDS: usize = 2;
/// Red, green, blue and yellow, from -1 to 1.
pub const COLOURS: [[f32; 3]; 4] = [
    [1.0, -1.0, -1.0],
    [-1.0, 1.0, -1.0],
    [-1.0, -1.0, 1.0],
    [1.0, 1.0, -1.0],
];

/// Returns true if the point is in the shape with this radius around the origin.
fn is_inside(shape: usize, x: f32, y: f32, radius: f32) -> bool {
    let (x, y) = (x.abs() / radius, y.abs() / radius);
    let square = x * x + y * y;
    match SHAPES[shape] {
        "disc" => square < 1.0,
        "square" => x.max(y) < 0.85,
        "cross" => x.max(y) < 1.0 && x.min(y) < 0.3,
        _ => (0.35..1.0).contains(&square),
    }
}

/// Returns the words of a prompt. Those of shapes come after those of colours.
fn prompt(colour: usize, shape: usize) -> [i32; WORDS] {
    [colour as i32, (COLOURS.len() + shape) as i32]
}

/// Returns all prompts, `[prompts, WORDS]`.
pub fn every_prompt(device: &Device) -> Tensor<2, Int> {
    let count = COLOURS.len() * SHAPES.len();
    let words = (0..count).flat_map(|i| prompt(i / SHAPES.len(), i % SHAPES.len()));
    ids(words.collect(), [count, WORDS], device)
}

/// Images `[count, 3, SIDE, SIDE]`, their shapes `[count]` and prompts `[count, WORDS]`.
pub struct Images {
    pub images: Tensor<4>,
    pub shapes: Tensor<1, Int>,
    pub prompts: Tensor<2, Int>,
}

impl Images {
    pub fn new(count: usize, seed: u64, device: &Device) -> Self {
        let mut random = Random(seed);
        let mut values = Vec::with_capacity(count * 3 * SIDE * SIDE);
        let (mut shapes, mut prompts) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let [shape, colour] = random.below(SHAPES.len());
            let [radius, x, y] = random.below(100).map(|number| number as f32 / 100.0);
            let middle = SIDE as f32 / 2.0 - 0.5;
            let (radius, x, y) = (
                4.0 + 2.5 * radius,
                middle + 2.0 * x - 1.0,
                middle + 2.0 * y - 1.0,
            );
            for channel in COLOURS[colour] {
                values.extend((0..SIDE * SIDE).map(|at| {
                    let (row, column) = ((at / SIDE) as f32, (at % SIDE) as f32);
                    match is_inside(shape, column - x, row - y, radius) {
                        true => channel,
                        false => -1.0,
                    }
                }));
            }
            shapes.push(shape as i32);
            prompts.extend(prompt(colour, shape));
        }
        let values = TensorData::new(values, [count, 3, SIDE, SIDE]);
        Self {
            images: Tensor::from_data(values, device),
            shapes: ids(shapes, [count], device),
            prompts: ids(prompts, [count, WORDS], device),
        }
    }

    /// Says how many shapes `logits` name rightly.
    pub fn percent_named(&self, logits: Tensor<2>) -> String {
        let found = logits.argmax(1).squeeze_dim(1);
        let percent = percent_equal(found, self.shapes.clone());
        format!("{percent:.0} % of new images right")
    }
}

/// Returns the patches of images, `[count, PATCHES, PATCH_VALUES]`.
pub fn to_patches(images: Tensor<4>) -> Tensor<3> {
    let [count, ..] = images.dims();
    let patches = images.reshape([count, 3, GRID, PATCH, GRID, PATCH]);
    let patches = patches.permute([0, 2, 4, 3, 5, 1]);
    patches.reshape([count, PATCHES, PATCH_VALUES])
}

/// Inverse of [`to_patches`].
pub fn from_patches(patches: Tensor<3>) -> Tensor<4> {
    let [count, ..] = patches.dims();
    let patches = patches.reshape([count, GRID, GRID, PATCH, PATCH, 3]);
    let images = patches.permute([0, 5, 1, 3, 2, 4]);
    images.reshape([count, 3, SIDE, SIDE])
}

/// Writes images side by side, `columns` in a row, as a file in the format PPM.
pub fn write(images: Tensor<4>, columns: usize, path: &Path) -> Result<(), Box<dyn Error>> {
    /// Height and width of a value in pixels.
    const ZOOM: usize = 4;
    let [count, ..] = images.dims();
    let rows = count / columns;
    let images = images.reshape([rows, columns, 3, SIDE, SIDE]);
    let values = images.permute([0, 3, 1, 4, 2]).into_data();
    let values = values.try_to_vec::<f32>()?;
    let (height, width) = (rows * SIDE, columns * SIDE);
    let mut file = format!("P6 {} {} 255\n", width * ZOOM, height * ZOOM).into_bytes();
    for at in 0..height * width * ZOOM * ZOOM {
        let (row, column) = (at / (width * ZOOM) / ZOOM, at % (width * ZOOM) / ZOOM);
        let pixel = &values[3 * (row * width + column)..][..3];
        file.extend(pixel.iter().map(|value| ((value + 1.0) * 127.5) as u8));
    }
    Ok(fs::write(path, file)?)
}
