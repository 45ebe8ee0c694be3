//! Tests of decorated models.

use crate::support::*;

/// Sizes of a decorated model.
#[cfg(feature = "cpu")]
const DECORATED: &str = "--decorate --recipe nvidia --no-compare --device cpu --width 16 \
                         --layers 1 --heads 1 --hidden 32 --context 8 --batch 2 --steps 2 \
                         --eval-every 2 --eval-batches 1 --log-every 1 --checkpoint-every 2";

/// A model of Burn's own layers is trained, stopped and resumed, and every GEMM is accounted for. Two
/// ranks, each with a share of every batch, also average the gradients of decorated layers: a
/// checkpoint is not written if their weights differ.
#[cfg(feature = "cpu")]
#[test]
fn a_decorated_model_trains_and_resumes() {
    let out = folder("decorated");
    let paths = ["--data", text(), "--out", out.to_str().unwrap()];
    let said = succeeds(nvfp4(&format!("train {DECORATED} --stop-at 1"), &paths));
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
    let two = folder("decorated-two");
    let paths = ["--data", text(), "--out", two.to_str().unwrap()];
    let said = succeeds(nvfp4(
        &format!("launch --gpus 2 -- train {DECORATED}"),
        &paths,
    ));
    assert!(said.contains("encoder.layers.0.mha.query"), "{said}");
    let losses = |rows: &[Vec<String>]| -> Vec<f64> {
        let losses = rows.iter().flat_map(|row| [&row[2], &row[3]]);
        let losses = losses.filter(|loss| !loss.is_empty());
        losses.map(|loss| loss.parse().unwrap()).collect()
    };
    let one = losses(&rows);
    let two = losses(&metrics(&two.join("nvidia").join("metrics.csv")));
    assert_eq!(one.len(), two.len());
    // Each rank uses the amax and the random bits of its own tokens.
    for (one, two) in one.iter().zip(&two) {
        assert!(
            (two / one - 1.0).abs() < 0.01,
            "{one} on one rank, {two} on two"
        );
    }
    let prompt = [out.to_str().unwrap(), "--prompt", "a"];
    fails(
        nvfp4("generate --device flex", &prompt),
        &["CubeCL CPU or CUDA"],
    );
}
