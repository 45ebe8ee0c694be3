//! Small-M linear layers with RMSNorm prologue and SwiGLU epilogue in one kernel, bit-identical to
//! the separate kernels.

use crate::support::device::{assert_floats, read_matrix, upload, upload_bytes};
use crate::support::inputs::{Generator, Kind, convert, values};
use crate::support::packed::Packed;
use cubecl::{prelude::*, server::Handle};
use half::bf16;
use nvfp4_formats::{
    Nvfp4Error,
    reference::{Activation, Norm},
};
use nvfp4_kernels::{
    activation::activation,
    capabilities::{Capabilities, GemmBackend},
    gemm::{FusedLinear, FusedNorm, Gemm, Operand, fused_linear, gemm},
    norm::{NormRequest, norm},
    quantize::AmaxRequest,
    tensor::{FloatKind, Matrix},
};

const EPSILON: f32 = 1e-5;

/// A layer with its operands on the device.
struct Case {
    x: Matrix,
    residual: Option<Matrix>,
    gain: Handle,
    weight: nvfp4_kernels::tensor::DeviceQuantized,
    bias: Option<Matrix>,
    norm: bool,
    swiglu: bool,
    shape: (usize, usize, usize),
}

/// Fused operations around the GEMM.
#[derive(Debug, Clone, Copy)]
struct Around {
    norm: bool,
    residual: bool,
    bias: bool,
    swiglu: bool,
}

/// No fused operations.
const NONE: Around = Around {
    norm: false,
    residual: false,
    bias: false,
    swiglu: false,
};

fn factors(len: usize, seed: u32) -> Vec<f32> {
    let mut random = Generator::new(seed);
    (0..len).map(|_| random.normal()).collect()
}

impl Case {
    fn new(client: &Client, (m, n, k): (usize, usize, usize), around: Around, seed: u32) -> Self {
        let rows = |kind, seed| {
            let rows: Vec<bf16> = convert(&values(kind, m * k, seed));
            upload(client, &rows, m, k)
        };
        let vector = |len, seed| upload_bytes(client, bytemuck::cast_slice(&factors(len, seed)));
        let bias = |seed| Matrix::new(vector(n, seed), 1, n, FloatKind::F32).unwrap();
        Self {
            x: rows(Kind::Normal, seed),
            residual: around.residual.then(|| rows(Kind::Normal, seed + 1)),
            gain: vector(k, seed + 2),
            weight: Packed::random(n, k, seed + 3).device(client),
            bias: around.bias.then(|| bias(seed + 4)),
            norm: around.norm,
            swiglu: around.swiglu,
            shape: (m, n, k),
        }
    }

    fn request(&self) -> FusedLinear<'_> {
        FusedLinear {
            x: &self.x,
            norm: self.norm.then_some(FusedNorm {
                residual: self.residual.as_ref(),
                gain: &self.gain,
                epsilon: EPSILON,
            }),
            weight: Operand::from(&self.weight),
            bias: self.bias.as_ref(),
            swiglu: self.swiglu,
        }
    }

    /// Computes the sum and the output by separate kernels.
    fn separate(&self, client: &Client) -> (Option<Matrix>, Matrix) {
        let made = self.norm.then(|| {
            let request = NormRequest {
                norm: Norm::Rms,
                x: &self.x,
                residual: self.residual.as_ref(),
                gain: &self.gain,
                bias: None,
                epsilon: EPSILON,
                amax: AmaxRequest::default(),
            };
            norm(client, &request).unwrap()
        });
        let x = made.as_ref().map_or(&self.x, |made| &made.normed);
        let request = Gemm::new(x, &self.weight).bias(self.bias.as_ref());
        let y = gemm(client, &request).unwrap().matrix;
        let y = match self.swiglu {
            true => activation(client, Activation::SwiGlu, &y).unwrap(),
            false => y,
        };
        (made.and_then(|made| made.sum), y)
    }

    /// Checks that one kernel supports the layer and gives the bits of the separate ones, twice.
    fn check(&self, client: &Client) {
        let (m, n, k) = self.shape;
        let request = self.request();
        let what = format!(
            "{m} x {n} x {k}, norm {}, residual {}, bias {}, SwiGLU {}",
            self.norm,
            self.residual.is_some(),
            self.bias.is_some(),
            self.swiglu
        );
        assert_eq!(request.refusal(client).unwrap(), None, "{what}");
        let (sum, expected) = self.separate(client);
        let expected: Vec<bf16> = read_matrix(client, &expected);
        let width = if self.swiglu { n / 2 } else { n };
        assert_eq!(expected.len(), m * width, "{what}");
        let numbers = expected.iter().filter(|value| value.is_finite());
        assert!(numbers.filter(|value| value.to_f32() != 0.0).count() > expected.len() / 8);
        for _ in 0..2 {
            let found = fused_linear(client, &request).unwrap();
            assert_floats(
                &read_matrix::<bf16>(client, &found.matrix),
                &expected,
                &what,
            );
            assert_eq!(found.sum.is_some(), sum.is_some(), "{what}");
            if let (Some(found), Some(sum)) = (&found.sum, &sum) {
                let [found, sum] = [found, sum].map(|sum| read_matrix::<bf16>(client, sum));
                assert_floats(&found, &sum, &format!("{what}: the sum"));
            }
        }
    }
}

/// Whole chunks and a tail, rows that end in half a vector, fewer rows of the weight than a cube
/// has, one row of `x` and several groups, and the layers of Llama 3.2 1B and 3.1 8B.
#[test]
fn swiglu_behind() {
    let client = gpu!("swiglu_behind");
    let shapes = [
        (1, 16384, 2048),
        (1, 28672, 4096),
        (1, 16, 256),
        (1, 12, 128),
        (1, 3076, 1152),
        (2, 2064, 2064),
        (5, 4112, 512),
        (8, 8192, 2048),
        (16, 4096, 1024),
    ];
    for (i, shape) in shapes.into_iter().enumerate() {
        let around = Around {
            bias: i.is_multiple_of(3),
            swiglu: true,
            ..NONE
        };
        Case::new(&client, shape, around, 10 * i as u32).check(&client);
    }
}

/// Rows shared by one plane, by several, and by all of a cube, with units that have no block; one
/// row and as many as fit.
#[test]
fn norm_in_front() {
    let client = gpu!("norm_in_front");
    let shapes = [
        (1, 2048, 2048),
        (1, 2064, 4096),
        (1, 272, 128),
        (1, 528, 896),
        (1, 64, 1152),
        (3, 144, 1152),
        (4, 1040, 2048),
        (2, 2048, 2048),
        (16, 66, 512),
        (9, 2048, 384),
    ];
    for (i, shape) in shapes.into_iter().enumerate() {
        for residual in [true, false] {
            let around = Around {
                norm: true,
                residual,
                bias: i.is_multiple_of(4),
                ..NONE
            };
            Case::new(&client, shape, around, 1000 + 10 * i as u32).check(&client);
        }
    }
}

#[test]
fn both() {
    let client = gpu!("both");
    let shapes = [
        (1, 2048, 2048),
        (1, 2048, 4096),
        (1, 72, 256),
        (2, 1056, 2048),
        (7, 1040, 640),
    ];
    for (i, shape) in shapes.into_iter().enumerate() {
        let around = Around {
            norm: true,
            residual: true,
            bias: i.is_multiple_of(2),
            swiglu: true,
        };
        Case::new(&client, shape, around, 2000 + 10 * i as u32).check(&client);
    }
}

/// Requests that are too large, or not small M, are refused before anything is launched.
#[test]
fn refusals() {
    let client = client!("refusals");
    let around = Around {
        norm: true,
        residual: true,
        swiglu: true,
        ..NONE
    };
    // Too many rows to normalize in every CTA; too many CTAs; partial chunks; more blocks than
    // units; no pairs of columns; more rows than the kernel supports.
    let mut refused = vec![
        (16, 64, 1024),
        (1, 65536, 128),
        (1, 64, 144),
        (1, 64, 8192),
        (1, 66, 128),
        (17, 64, 128),
    ];
    if Capabilities::of(&client).gemm == GemmBackend::Scalar {
        refused.push((1, 64, 128));
    }
    for shape in refused {
        let case = Case::new(&client, shape, around, 3000);
        let refusal = case.request().refusal(&client).unwrap();
        assert!(refusal.is_some(), "{shape:?}");
        let error = fused_linear(&client, &case.request()).unwrap_err();
        let Nvfp4Error::Value { argument, .. } = &error else {
            panic!("{shape:?}: {error}");
        };
        assert_eq!(*argument, "request");
    }
}

/// Operands that do not fit are errors that name them.
#[test]
fn bad_operands() {
    let client = client!("bad_operands");
    let around = Around {
        norm: true,
        residual: true,
        swiglu: true,
        ..NONE
    };
    let case = Case::new(&client, (2, 64, 128), around, 4000);
    let other = Case::new(&client, (1, 63, 128), around, 4010);
    let short = upload_bytes(&client, &[0; 16]);
    let norm = case.request().norm.unwrap();
    let with = |norm| FusedLinear {
        norm: Some(norm),
        ..case.request()
    };
    let requests = [
        (
            "residual",
            with(FusedNorm {
                residual: other.residual.as_ref(),
                ..norm
            }),
        ),
        (
            "gain",
            with(FusedNorm {
                gain: &short,
                ..norm
            }),
        ),
        ("weight", other.request()),
    ];
    for (argument, request) in requests {
        for error in [
            request.refusal(&client).map(|_| ()).unwrap_err(),
            fused_linear(&client, &request).map(|_| ()).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(text.contains(argument), "{argument}: {text}");
        }
    }
}
