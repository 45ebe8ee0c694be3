//! Tests of studies.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::*;

/// A study in two parts and two sessions equals one in a single run.
#[test]
fn a_study_is_resumed_and_reports() {
    let folder = folder("study");
    let plan = folder.join("plan.json");
    let written = serde_json::json!({
        "options": {
            "device": "flex", "data": [text()], "width": 32, "layers": 2, "heads": 2, "hidden": 48,
            "context": 32, "batch": 4, "lr": 0.01, "steps": 8, "warmup": 1, "log_every": 4,
            "eval_every": 4, "eval_batches": 1, "checkpoint_every": 4
        },
        "runs": [
            {"recipe": "f32", "seeds": [0, 1]},
            {"recipe": "nvidia", "healing": ["0.5:forward"]}
        ]
    });
    fs::write(&plan, written.to_string()).unwrap();
    let (whole, parts) = (folder.join("whole"), folder.join("parts"));
    let study = |out: &Path, more: &[&str]| {
        let arguments = [plan.to_str().unwrap(), "--out", out.to_str().unwrap()];
        succeeds(nvfp4("dev study", &[&arguments, more].concat()))
    };
    let said = study(&whole, &[]);
    assert!(
        said.contains("| `nvidia+healing-0.5-forward` | 1 |"),
        "{said}"
    );
    assert!(said.contains("Seeds alone move"), "{said}");
    study(&parts, &["--part", "1/2"]);
    study(&parts, &["--part", "2/2", "--seconds", "0"]);
    study(&parts, &["--part", "2/2"]);
    study(&parts, &["--report"]);
    let losses = |out: &Path| -> Vec<(String, f64)> {
        let results = json(&out.join("results.json"));
        let results = results.as_array().unwrap().iter();
        results
            .map(|run| {
                let loss = run["final_valid_loss"].as_f64().unwrap();
                (run["name"].as_str().unwrap().to_string(), loss)
            })
            .collect()
    };
    let found = losses(&whole);
    assert_eq!(found.len(), 4);
    assert_eq!(losses(&parts), found);
    // Up to its healing point, the healed run equals the plain one.
    let rows = |name: &str| metrics(&whole.join(name).join("metrics.csv"));
    let (plain, healed) = (
        rows("nvidia-seed0"),
        rows("nvidia+healing-0.5-forward-seed0"),
    );
    assert_eq!(plain[..2], healed[..2]);
    assert_ne!(plain[2][3], healed[2][3]);
    let error = fails(
        nvfp4(
            "dev study",
            &[plan.to_str().unwrap(), "--out", "x", "--part", "3/2"],
        ),
        &["3/2"],
    );
    assert!(error.contains("I/N"), "{error}");
}

/// A study of decorated models, stopped after a step and resumed.
#[cfg(feature = "cpu")]
#[test]
fn a_study_decorates() {
    let folder = folder("decorated-study");
    let plan = folder.join("plan.json");
    let written = serde_json::json!({
        "options": {
            "decorate": "strict", "device": "cpu", "data": [text()], "width": 16,
            "layers": 1, "heads": 1, "hidden": 32, "context": 8, "batch": 2, "lr": 0.01, "steps": 2, "log_every": 1,
            "eval_every": 2, "eval_batches": 1, "checkpoint_every": 2
        },
        "runs": [{"recipe": "nvidia", "healing": ["0.5"]}]
    });
    fs::write(&plan, written.to_string()).unwrap();
    let out = folder.join("out");
    // Resuming a decorated run is tested in `decorate`; here each process would recompile its
    // kernels.
    let arguments = [plan.to_str().unwrap(), "--out", out.to_str().unwrap()];
    let said = succeeds(nvfp4("dev study", &arguments));
    for part in [
        "nvidia-seed0: GEMMs by backend",
        "encoder.layers.0.mha.query",
        "nvidia+healing-0.5-seed0: GEMMs by backend",
        "1 blocks of Burn's own layers",
        "| `nvidia+healing-0.5` | 1 |",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let rows = |name: &str| metrics(&out.join(name).join("metrics.csv"));
    let (plain, healed) = (rows("nvidia-seed0"), rows("nvidia+healing-0.5-seed0"));
    assert_eq!((plain.len(), healed.len()), (3, 3));
    assert_eq!(plain[..2], healed[..2], "up to where it heals");
    assert_ne!(plain[2][3], healed[2][3]);
}

/// Conflicting options are refused before training starts.
#[test]
fn a_study_refuses_what_cannot_be() {
    let folder = folder("refused-study");
    let plan = folder.join("plan.json");
    let out = folder.join("out");
    let cases: [(Value, &[&str], &[&str]); 3] = [
        (
            serde_json::json!({"decorate": "strict", "device": "flex"}),
            &[],
            &["decorate on device flex", "cpu and cuda:N"],
        ),
        (
            serde_json::json!({"decorate": "lenient", "device": "cpu", "model": "moe"}),
            &[],
            &["decorate is given and experts is 8"],
        ),
        (
            serde_json::json!({"decorate": "perhaps", "device": "cpu"}),
            &[],
            &["perhaps", "strict", "lenient"],
        ),
    ];
    for (options, more, names) in cases {
        let mut options = options;
        options["data"] = serde_json::json!([text()]);
        let written = serde_json::json!({"options": options, "runs": [{"recipe": "nvidia"}]});
        fs::write(&plan, written.to_string()).unwrap();
        let arguments = [plan.to_str().unwrap(), "--out", out.to_str().unwrap()];
        fails(nvfp4("dev study", &[&arguments, more].concat()), names);
        let trained = out.join("nvidia-seed0");
        assert!(!trained.exists(), "{names:?}");
    }
}
