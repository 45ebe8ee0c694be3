//! Tests of the commands that describe devices.

use crate::support::*;

/// Returns the section of a device in the output of `doctor`.
fn section<'a>(said: &'a str, device: &str) -> Vec<&'a str> {
    let heading = format!("{device}\n");
    let mut sections = said.split("\n\n");
    let section = sections.find(|section| section.starts_with(&heading));
    section.expect(device).lines().map(str::trim).collect()
}

#[test]
fn doctor_names_the_kernels() {
    let said = succeeds(nvfp4("doctor", &[]));
    let reasons = succeeds(nvfp4("doctor --why", &[]));
    let flex = [
        "amax, quantize, dequantize",
        "MS-EDEN, MXFP8",
        "GEMM, NVFP4 or MXFP8",
        "GEMM, bf16, f16 or f32",
        "grouped GEMM",
        "RMSNorm, SwiGLU",
    ];
    let cpu = [
        "quantize rowwise, 1x16",
        "quantize columnwise, 16x1",
        "quantize both",
        "quantize both, 16x16",
        "quantize by amax per row",
        "random Hadamard transform",
        "round to nearest",
        "round stochastically",
        "MS-EDEN, both",
        "MXFP8, rowwise",
        "128x4 scale layout",
        "amax, quantize, dequantize",
        "GEMM, NVFP4 x NVFP4",
        "GEMM, MXFP8 x MXFP8",
        "GEMM, bf16 x NVFP4",
        "GEMM, bf16 x NVFP4, dgrad",
        "GEMM, bf16 x bf16",
        "GEMM, f32 or f16",
        "M-grouped GEMM, NVFP4",
        "K-grouped GEMM, NVFP4",
        "M-grouped GEMM, MXFP8",
        "K-grouped GEMM, MXFP8",
        "RMSNorm, SwiGLU",
    ];
    // One section per device lists each operation with its kernel, and the reason on request.
    let devices: [(&str, &[&str], bool); 2] =
        [("flex", &flex, true), ("cpu", &cpu, cfg!(feature = "cpu"))];
    for (device, operations, _) in devices.into_iter().filter(|(.., is_there)| *is_there) {
        for (said, has_reasons) in [(&said, false), (&reasons, true)] {
            let lines = section(said, device);
            assert!(lines.iter().any(|line| line.starts_with("types: f32")));
            for operation in operations {
                let line = lines.iter().position(|line| {
                    let rest = line.strip_prefix(operation);
                    rest.is_some_and(|rest| rest.starts_with(' ') && !rest.trim().is_empty())
                });
                let line = line.unwrap_or_else(|| panic!("{operation} on {device}: {said}"));
                let next = lines.get(line + 1);
                let is_reason = next.is_some_and(|line| line.starts_with("because "));
                assert_eq!(is_reason, has_reasons, "{said}");
            }
        }
    }
    for said in [&said, &reasons] {
        assert!(
            said.lines().all(|line| line.chars().count() <= 100),
            "{said}"
        );
    }
    let said = succeeds(nvfp4("doctor", &["--shape", "64,128,256"]));
    assert!(said.contains("M 64, N 128, K 256"), "{said}");
}

/// The JSON document has what the text has, and the reasons.
#[test]
fn doctor_prints_json() {
    let said = succeeds(nvfp4("doctor --json", &["--shape", "64,128,256"]));
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["backends"][0], "flex");
    let devices = report["devices"].as_array().unwrap();
    assert_eq!(devices[0]["device"], "flex");
    let text = succeeds(nvfp4("doctor", &[]));
    for device in devices {
        let name = device["device"].as_str().unwrap();
        assert!(text.contains(&format!("\n{name}\n")), "{name}: {text}");
        assert_eq!(device["types"][0], "f32", "{name}");
        let shape = &device["shape"];
        assert_eq!((&shape["m"], &shape["k"]), (&64.into(), &256.into()));
        let operations = device["operations"].as_array().unwrap();
        for operation in operations {
            let part = |key: &str| operation[key].as_str().unwrap();
            assert!(!part("reason").is_empty(), "{operation}");
            assert!(text.contains(part("kernel")), "{operation}: {text}");
        }
        assert!(operations.len() > 5, "{name}: {operations:?}");
    }
}

/// Shows the kernels of a shape, dense and in groups; CubeCL's CPU runtime has one kernel for all
/// operands.
#[cfg(feature = "cpu")]
#[test]
fn doctor_names_the_kernels_of_a_shape() {
    let dense = [
        "GEMM, NVFP4 x NVFP4",
        "GEMM, MXFP8 x MXFP8",
        "GEMM, bf16 x NVFP4",
        "GEMM, bf16 x NVFP4, dgrad",
        "GEMM, bf16 x bf16",
    ];
    let grouped = [
        "M-grouped GEMM, NVFP4",
        "K-grouped GEMM, NVFP4",
        "M-grouped GEMM, MXFP8",
        "K-grouped GEMM, MXFP8",
    ];
    let cases: [(_, _, &[&str]); 2] = [
        (vec![], "1 group(s)", &dense),
        (vec!["--groups", "8"], "8 group(s)", &grouped),
    ];
    for (more, groups, operations) in cases {
        let arguments = [vec!["--shape", "64,128,256"], more].concat();
        let said = succeeds(nvfp4("doctor", &arguments));
        let mut lines = section(&said, "cpu").into_iter();
        let shape = format!("M 64, N 128, K 256, {groups}");
        assert!(lines.any(|line| line == shape), "{shape}: {said}");
        for operation in operations {
            let row = format!("{operation:<26} Scalar");
            let line = lines.next().expect("a row");
            assert!(line.starts_with(&row), "{row}: {said}");
        }
    }
    fails(nvfp4("doctor", &["--shape", "64,128"]), &["64,128"]);
}

#[cfg(feature = "cpu")]
#[test]
fn the_oracle_reads_random_bits() {
    let said = succeeds(nvfp4("dev oracle cvt-rs --device cpu --count 4096", &[]));
    for part in [
        "in software",
        "      0 7 6 5 4 3 2 1 0",
        "      3 31 30 29 28 27 26 25 24",
        "this is the order of the software form",
        "4096 of 4096 random questions",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    fails(
        nvfp4("dev oracle cvt-rs --device flex", &[]),
        &["flex", "cuda:N"],
    );
}

/// Every check has a result in the single report file, even on a device without tensor memory.
#[cfg(feature = "cpu")]
#[test]
fn the_oracle_writes_a_report() {
    use std::fs;

    use serde_json::Value;

    let folder = folder("oracle");
    let file = folder.join("report.json");
    let (path, source) = (file.to_str().unwrap(), folder.to_str().unwrap());
    let arguments = ["--out", path, "--source", source];
    let said = succeeds(nvfp4("dev oracle all --device cpu", &arguments));
    assert!(said.contains("0 failed"), "{said}");
    let read = || -> Value { serde_json::from_slice(&fs::read(&file).unwrap()).unwrap() };
    let report = read();
    let checks = report["checks"].as_array().unwrap();
    let result = |name: &str| {
        let check = checks.iter().find(|check| check["name"] == name).unwrap();
        check["result"].as_str().unwrap().to_owned()
    };
    for name in [
        "scale-copy-dump",
        "one-hot-mma",
        "one-hot-mma-mxfp8",
        "integer-gemm-dense",
        "integer-gemm-per-token",
        "integer-gemm-m-grouped",
        "integer-gemm-k-grouped",
        "integer-gemm-mxfp8",
        "integer-gemm-two-cta",
        "integer-gemm-swap-ab",
        "cvt-rs-order",
    ] {
        assert_eq!(result(name), "passed", "{name}: {report}");
    }
    for name in ["tmem-round-trip", "equal-to-cublaslt", "test-suite"] {
        assert_eq!(result(name), "left-out", "{name}: {report}");
    }
    assert_eq!(report["device"], "cpu");
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["passed"], 11);

    let only = ["--out", path, "--only", "scale-copy-dump"];
    succeeds(nvfp4("dev oracle tcgen05 --device cpu", &only));
    assert_eq!(read()["checks"].as_array().unwrap().len(), 1);
    // A check that times out is a failure in the report.
    let hasty = [&only[..], &["--timeout", "0"]].concat();
    fails(
        nvfp4("dev oracle tcgen05 --device cpu", &hasty),
        &["1 checks failed"],
    );
    let check = &read()["checks"][0];
    assert!(
        check["detail"].as_str().unwrap().contains("0 seconds"),
        "{check}"
    );
    let unknown = ["--out", path, "--only", "luck"];
    fails(
        nvfp4("dev oracle tcgen05 --device cpu", &unknown),
        &["luck", "one-hot-mma"],
    );
}
