//! Settings that are read, accepted and refused.

use super::*;

fn every() -> Vec<QuantConfig> {
    let mut all = Vec::new();
    for dialect in [Dialect::ModelOpt, Dialect::CompressedTensors] {
        for scheme in [Scheme::W4a16, Scheme::W4a4] {
            for kv_cache_fp8 in [false, true] {
                let exclude = vec!["lm_head".into(), "model.layers.0.mlp.gate".into()];
                all.push(QuantConfig {
                    dialect,
                    groups: vec![Group::linear(LayerFormat::Nvfp4(scheme))],
                    kv_cache_fp8,
                    pre_quant: false,
                    exclude,
                });
            }
        }
    }
    let of_awq = |config: &QuantConfig| {
        config.dialect == Dialect::ModelOpt && config.scheme() == Some(Scheme::W4a4)
    };
    let awq: Vec<_> = all
        .iter()
        .filter(|config| of_awq(config))
        .cloned()
        .collect();
    all.extend(awq.into_iter().map(|config| QuantConfig {
        pre_quant: true,
        ..config
    }));
    all
}

#[test]
fn what_is_written_reads_back() {
    for config in every() {
        let json = json!({"quantization_config": config.inline()});
        let file = config.hf_quant_config();
        let read = |file| QuantConfig::read(&json, file).unwrap().unwrap();
        assert_eq!(read(None), config);
        assert_eq!(read(file.as_ref()), config);
        assert_eq!(file.is_some(), config.dialect == Dialect::ModelOpt);
        if let Some(file) = file {
            let alone = QuantConfig::read(&json!({}), Some(&file)).unwrap();
            assert_eq!(alone, Some(config));
            let quantization = file["quantization"].as_object().unwrap();
            assert!(quantization.contains_key("kv_cache_quant_algo"));
        }
    }
    assert_eq!(QuantConfig::read(&json!({}), None).unwrap(), None);
}

/// Changes one field of a written configuration and returns the error on reading it.
fn refusal(dialect: Dialect, pointer: &str, value: Value) -> String {
    let mut all = every().into_iter();
    let config =
        all.find(|config| config.dialect == dialect && config.scheme() == Some(Scheme::W4a4));
    let config = config.unwrap();
    let mut inline = json!({"quantization_config": config.inline()});
    let mut file = config.hf_quant_config();
    let target = match pointer.strip_prefix("file:") {
        Some(pointer) => file.as_mut().unwrap().pointer_mut(pointer),
        None => inline.pointer_mut(&format!("/quantization_config{pointer}")),
    };
    *target.unwrap() = value;
    format!(
        "{:#}",
        QuantConfig::read(&inline, file.as_ref()).unwrap_err()
    )
}

#[test]
fn other_formats_and_contradictions_are_refused_by_field() {
    use Dialect::{CompressedTensors as Ct, ModelOpt as Mo};
    for (dialect, pointer, value, says) in [
        (Mo, "/quant_method", json!("awq"), "quant_method"),
        (
            Mo,
            "/quant_algo",
            json!("NVFP4_AWQ"),
            "scale of input features: `yes` and `no`",
        ),
        (Mo, "/quant_algo", json!("W4A8_AWQ"), "NVFP4_AWQ"),
        (Mo, "/quant_algo", json!(4), "quant_algo is 4"),
        (Mo, "/ignore", json!("lm_head"), "ignore"),
        (
            Mo,
            "/ignore",
            json!(["other"]),
            "excluded modules: `other` and `lm_head",
        ),
        (Mo, "file:/quantization/group_size", json!(32), "group_size"),
        (
            Mo,
            "file:/quantization/exclude_modules",
            json!([1]),
            "names",
        ),
        (Mo, "file:/quantization", json!({}), "quant_algo is missing"),
        (Ct, "/format", json!("pack-quantized"), "format"),
        (Ct, "/quantization_status", json!("frozen"), "frozen"),
        (
            Ct,
            "/config_groups/group_0/weights/num_bits",
            json!(8),
            "config_groups.group_0: weights: group_size is 16",
        ),
        (
            Ct,
            "/config_groups/group_0/weights/symmetric",
            json!(false),
            "config_groups.group_0: weights: symmetric is false",
        ),
        (
            Ct,
            "/config_groups/group_0/weights/strategy",
            json!("group"),
            "strategy is \"group\"",
        ),
        (
            Ct,
            "/config_groups/group_0/input_activations/dynamic",
            json!(true),
            "input_activations: dynamic is true",
        ),
        (
            Mo,
            "/config_groups/group_0/input_activations/dynamic",
            json!(true),
            "dynamic is true",
        ),
        (
            Ct,
            "/config_groups/group_0/weights/scale_dtype",
            json!("torch.bfloat16"),
            "scale_dtype",
        ),
        (
            Ct,
            "/config_groups/group_0/targets",
            json!("Linear"),
            "targets",
        ),
        (Ct, "/format", json!("mixed-precision"), "format"),
        (Ct, "/config_groups", json!([]), "config_groups"),
        (Ct, "/config_groups", json!({}), "config_groups"),
    ] {
        let error = refusal(dialect, pointer, value);
        assert!(error.contains(says), "{pointer}: {error}");
    }
}

/// Reads a written configuration with an additional field in the object at `pointer`.
fn with_field(dialect: Dialect, pointer: &str, field: &str, value: &Value) -> Result<()> {
    let of = |config: &QuantConfig| config.dialect == dialect && config.kv_cache_fp8;
    let config = every()
        .into_iter()
        .filter(|config| config.scheme() == Some(Scheme::W4a4));
    let config = config.into_iter().find(of).unwrap();
    let mut inline = json!({"quantization_config": config.inline()});
    let mut file = config.hf_quant_config();
    let target = match pointer.strip_prefix("file:") {
        Some(pointer) => file.as_mut().unwrap().pointer_mut(pointer),
        None => inline.pointer_mut(&format!("/quantization_config{pointer}")),
    };
    target.unwrap()[field] = value.clone();
    QuantConfig::read(&inline, file.as_ref()).map(drop)
}

/// Tests every object of both files, with arbitrary field names.
#[test]
fn fields_that_are_not_known_are_refused_unless_they_say_nothing() {
    use Dialect::{CompressedTensors as Ct, ModelOpt as Mo};
    let groups = "/config_groups/group_0";
    for (dialect, pointer) in [
        (Ct, ""),
        (Mo, ""),
        (Ct, groups),
        (Mo, groups),
        (Ct, "/config_groups/group_0/weights"),
        (Mo, "/config_groups/group_0/weights"),
        (Ct, "/config_groups/group_0/input_activations"),
        (Ct, "/kv_cache_scheme"),
        (Mo, "/kv_cache_scheme"),
        (Mo, "file:"),
        (Mo, "file:/quantization"),
    ] {
        for value in [
            json!("x"),
            json!(3),
            json!(true),
            json!([1]),
            json!({"a": 1}),
        ] {
            let error = with_field(dialect, pointer, "rotated", &value);
            let error = format!("{:#}", error.unwrap_err());
            assert!(error.contains("rotated"), "{pointer}: {error}");
        }
        for value in [json!(null), json!(false), json!([]), json!({}), json!("")] {
            with_field(dialect, pointer, "rotated", &value).unwrap();
        }
    }
    for (dialect, pointer, field, value, says) in [
        (
            Ct,
            groups,
            "output_activations",
            json!({"num_bits": 4}),
            "output_activations",
        ),
        (
            Ct,
            "/config_groups/group_0/weights",
            "actorder",
            json!("group"),
            "actorder",
        ),
        (
            Ct,
            "",
            "sparsity_config",
            json!({"format": "sparse-24"}),
            "sparse-24",
        ),
        (
            Mo,
            "file:/quantization",
            "has_zero_point",
            json!(true),
            "has_zero_point",
        ),
        (
            Mo,
            "file:/quantization",
            "pre_quant_scale",
            json!(true),
            "pre_quant_scale",
        ),
        (
            Mo,
            "file:/quantization",
            "quantized_layers",
            json!({"a": 1}),
            "quantized_layers",
        ),
        (
            Mo,
            "",
            "kv_cache_quant_algo",
            json!(null),
            "do not say the same",
        ),
    ] {
        let error = format!(
            "{:#}",
            with_field(dialect, pointer, field, &value).unwrap_err()
        );
        assert!(error.contains(says), "{error}");
    }
    for (dialect, pointer, field, value) in [
        (
            Ct,
            "/config_groups/group_0/weights",
            "actorder",
            json!("static"),
        ),
        (
            Ct,
            "/config_groups/group_0/weights",
            "observer_kwargs",
            json!({"averaging": 0.5}),
        ),
        (Ct, "", "sparsity_config", json!({"format": "dense"})),
        (Ct, "", "version", json!("0.19.0")),
        (Mo, "file:/quantization", "has_zero_point", json!(false)),
        (Mo, "", "kv_cache_quant_algo", json!("FP8")),
    ] {
        with_field(dialect, pointer, field, &value).unwrap();
    }
}

#[test]
fn transforms_are_refused_with_their_places() {
    let ct = Dialect::CompressedTensors;
    let read = |value: Value| with_field(ct, "", "transform_config", &value);
    let apply = json!([{"targets": ["re:.*o_proj$"], "location": "input", "inverse": false}]);
    let group = json!({"config_groups": {"R4": {"type": "hadamard", "apply": apply}}});
    let error = format!("{:#}", read(group).unwrap_err());
    for part in [
        "quantization_config",
        "transform_config",
        "R4 (hadamard)",
        "input",
        "o_proj",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert!(read(json!({"rotation": "R1"})).is_err() && read(json!("R1")).is_err());
    for neutral in [json!(null), json!({}), json!({"config_groups": {}})] {
        read(neutral).unwrap();
    }
}
