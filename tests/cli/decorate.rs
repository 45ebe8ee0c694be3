//! Decorated models.

use crate::support::*;

/// A model of Burn's own layers: trained, stopped, resumed, sampled, with an account of every
/// product.
#[cfg(feature = "cpu")]
#[test]
fn a_decorated_model_trains_and_resumes() {
    let out = folder("decorated");
    let sizes = "--decorate --recipe nvidia --no-compare --device cpu --width 16 --layers 1 \
                 --heads 1 --hidden 32 --context 8 --batch 2 --steps 2 --eval-every 2 \
                 --eval-batches 1 --log-every 1 --checkpoint-every 2 --stop-at 1";
    let paths = ["--data", text(), "--out", out.to_str().unwrap()];
    let said = succeeds(nvfp4(&format!("train {sizes}"), &paths));
    assert!(
        said.contains("encoder.layers.0.pwff.linear_outer"),
        "{said}"
    );
    let mut heads = said.lines().filter(|line| line.starts_with("head"));
    let head = heads.next().expect("a line of the head");
    assert!(head.ends_with("not decorated"), "{said}");
    assert!(said.contains("NVFP4"), "{said}");
    let said = succeeds(nvfp4("train --resume", &[out.to_str().unwrap()]));
    assert!(said.contains("encoder.layers.0.mha.query"), "{said}");
    let rows = metrics(&out.join("nvidia").join("metrics.csv"));
    let steps: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(steps, ["0", "1", "2"]);
    let checkpoint = [out.to_str().unwrap(), "--prompt", "a"];
    fails(
        nvfp4("generate --device flex", &checkpoint),
        &["CubeCL CPU or CUDA"],
    );
}
