//! Cost and gain of decoration: four square layers with 3-D input. Runs in a separate process,
//! because decoration replaces the fusion of all layers.

use burn_nn::Linear;
use burn_nvfp4::{Nvfp4Linear, Nvfp4Recipe, decorate};

use crate::harness::{Bench, backward};
use crate::linear::plain;

/// Prefix of the names of its settings.
pub const SETTING: &str = "four layers";

/// Times forward and backward of four layers: Burn's, [`Nvfp4Linear`], and Burn's decorated.
pub fn layers(bench: &mut Bench) {
    if !bench.is_cube() {
        println!("decorated: left out, models are decorated on CubeCL's devices");
        return;
    }
    decorate::install().expect("no tensor was made before");
    let dtype = bench.activation();
    let shapes = bench.size(
        vec![(1024, 8, 512), (2048, 8, 1024), (4096, 4, 2048)],
        vec![(32, 2, 16)],
    );
    for (width, batch, length) in shapes {
        let setting = format!("{SETTING} {width} wide, {} tokens", batch * length);
        let burns: Vec<Linear> = (0..4).map(|_| plain(bench, width, width, dtype)).collect();
        let recipe = Nvfp4Recipe::new();
        let explicit: Vec<Nvfp4Linear> = burns
            .iter()
            .map(|layer| Nvfp4Linear::from_linear(layer.clone(), &recipe).expect("a layer"))
            .collect();
        let decorated = decorate(burns.clone(), &recipe).expect("layers to decorate");
        let x = bench.leaf([batch, length, width], dtype);
        bench.time(&setting, "Burn's `Linear`", || {
            backward(&x, |x| burns.iter().fold(x, |x, layer| layer.forward(x)));
        });
        bench.time(&setting, "`Nvfp4Linear`", || {
            backward(&x, |x| explicit.iter().fold(x, |x, layer| layer.forward(x)));
        });
        bench.time(&setting, "decorated", || {
            backward(&x, |x| {
                decorated.iter().fold(x, |x, layer| layer.forward(x))
            });
        });
    }
}
