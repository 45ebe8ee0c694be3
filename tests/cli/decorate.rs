//! Tests of decorated models.

#[cfg(feature = "cpu")]
use std::path::Path;

use crate::support::*;

/// Run of a decorated model. No gradient is clipped: ranks that shard the optimizer's
/// state sum the norm in another order.
#[cfg(feature = "cpu")]
const DECORATED: &str = "--decorate --recipe nvidia --no-compare --device cpu --width 16 \
                         --layers 1 --heads 1 --hidden 32 --context 8 --batch 2 --steps 2 \
                         --eval-every 2 --eval-batches 1 --log-every 1 --checkpoint-every 2 \
                         --grad-clip 1e9";

/// A model of Burn's own layers is trained, stopped and resumed, and every GEMM is accounted for. Two
/// ranks, each with a share of every batch, also average the gradients of decorated layers: a
/// checkpoint is not written if their weights differ. Ranks that shard the optimizer's state
/// have the same losses, also if they are stopped and resumed.
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
    let launch = |out: &Path, flags: &str| {
        let paths = ["--data", text(), "--out", out.to_str().unwrap()];
        let command = format!("launch --gpus 2 -- train {DECORATED} {flags}");
        let said = succeeds(nvfp4(&command, &paths));
        assert!(said.contains("encoder.layers.0.mha.query"), "{said}");
    };
    let two = folder("decorated-two");
    launch(&two, "");
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
    let sharded = folder("decorated-zero1");
    launch(&sharded, "--zero1 --stop-at 1");
    let files = checkpoint(&sharded.join("nvidia"));
    assert!(files.join("optimizer-1.bpk").exists());
    let resumed = [sharded.to_str().unwrap()];
    succeeds(nvfp4("launch --gpus 2 -- train --resume", &resumed));
    let found = losses(&metrics(&sharded.join("nvidia").join("metrics.csv")));
    assert_eq!(found, two);
    fails(
        nvfp4(&format!("train {DECORATED} --fsdp"), &["--data", text()]),
        &["fsdp is true", "decorate", "zero1"],
    );
    let prompt = [out.to_str().unwrap(), "--prompt", "a"];
    fails(
        nvfp4("generate --device flex", &prompt),
        &["CubeCL CPU or CUDA"],
    );
}
