//! Groups of layers with one format each: `config_groups` of both dialects, and ModelOpt's
//! `quantized_layers`.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::super::exclude::LINEAR;
use super::super::format::{Fp8Format, Fp8Inputs, Fp8Scales, Group, LayerFormat};
use super::super::{Dialect, Scheme};
use super::fields::{NVFP4_NAMES, expect, expect_if_given, refuse_unknown, strings, text};

/// compressed-tensors' format name of weights in NVFP4.
const NVFP4_FORMAT: &str = "nvfp4-pack-quantized";
/// compressed-tensors' format names of weights in FP8: with quantized inputs, and without.
const FP8_FORMATS: [&str; 2] = ["float-quantized", "naive-quantized"];
/// compressed-tensors' format name of files with several formats.
const MIXED_FORMAT: &str = "mixed-precision";

/// Layers of a ModelOpt file with several formats.
pub(super) type Layers = BTreeMap<String, LayerFormat>;

/// Reads `config_groups`, which may be absent.
pub(super) fn read_groups(inline: &Value, dialect: Dialect) -> Result<Option<Vec<Group>>> {
    let groups: &Map<String, Value> = match inline.get("config_groups") {
        None | Some(Value::Null) => return Ok(None),
        Some(groups) => groups
            .as_object()
            .with_context(|| format!("config_groups is {groups}, but it must be an object"))?,
    };
    ensure!(
        !groups.is_empty(),
        "config_groups is empty, but it must have a group"
    );
    let mut found: Vec<Group> = Vec::new();
    for (name, group) in groups {
        let read = read_group(group, dialect);
        let read = read.with_context(|| format!("config_groups.{name}"))?;
        match found.iter_mut().find(|other| other.format == read.format) {
            Some(other) => {
                let new = read.targets.into_iter();
                let new = new.filter(|target| !other.targets.contains(target));
                let new: Vec<String> = new.collect();
                other.targets.extend(new);
            }
            None => found.push(read),
        }
    }
    if dialect == Dialect::CompressedTensors {
        check_formats(inline, groups)?;
    }
    Ok(Some(found))
}

fn read_group(group: &Value, dialect: Dialect) -> Result<Group> {
    let known: &[&str] = match dialect {
        Dialect::ModelOpt => &["weights", "input_activations", "targets", "quant_algo"],
        Dialect::CompressedTensors => &["weights", "input_activations", "targets"],
    };
    refuse_unknown(group, known)?;
    let targets = match group.get("targets") {
        None => vec![LINEAR.into()],
        Some(_) => strings(group, "targets")?,
    };
    let inputs = group.get("input_activations").unwrap_or(&Value::Null);
    let format = match group.get("quant_algo").filter(|algo| !algo.is_null()) {
        // ModelOpt writes the name of an algorithm whose arguments it has no form for.
        Some(_) => {
            let format = read_algo(group)?;
            ensure!(
                group.get("weights").is_none() && inputs.is_null(),
                "it has both quant_algo and arguments of weights or inputs"
            );
            format
        }
        None => {
            let weights = group.get("weights").context("weights is missing")?;
            match weights.get("num_bits") == Some(&json!(8)) {
                true => LayerFormat::Fp8(read_fp8(weights, inputs, dialect)?),
                false => {
                    read_nvfp4(weights, dialect, false).context("weights")?;
                    if !inputs.is_null() {
                        read_nvfp4(inputs, dialect, true).context("input_activations")?;
                    }
                    LayerFormat::Nvfp4(match inputs.is_null() {
                        true => Scheme::W4a16,
                        false => Scheme::W4a4,
                    })
                }
            }
        }
    };
    Ok(Group { format, targets })
}

/// Checks the format names of compressed-tensors: of the file, and of each group.
fn check_formats(inline: &Value, groups: &Map<String, Value>) -> Result<()> {
    let whole = match inline.get("format") {
        None | Some(Value::Null) => None,
        Some(_) => Some(text(inline, "format")?),
    };
    let mut used: Vec<&str> = Vec::new();
    for (name, group) in groups {
        let is_fp8 = group["weights"]["num_bits"] == json!(8);
        let allowed: &[&str] = match is_fp8 {
            true => &FP8_FORMATS,
            false => &[NVFP4_FORMAT],
        };
        let own = match group.get("format") {
            None | Some(Value::Null) => whole,
            Some(_) => Some(text(group, "format")?),
        };
        let own = own.with_context(|| {
            format!("format is missing, and config_groups.{name} has none of its own")
        })?;
        ensure!(
            allowed.contains(&own),
            "config_groups.{name}: format is {own:?}, but its arguments are those of {}",
            allowed.join(" or ")
        );
        used.push(own);
    }
    if let Some(whole) = whole {
        ensure!(
            whole == MIXED_FORMAT || used.iter().all(|own| *own == whole),
            "format is {whole:?}, but groups have {used:?}: a file with several formats must be \
             {MIXED_FORMAT:?}"
        );
    }
    Ok(())
}

/// Returns an error unless the quantization arguments `args`, of weights or of inputs, describe
/// NVFP4 with a static global scale.
fn read_nvfp4(args: &Value, dialect: Dialect, is_input: bool) -> Result<()> {
    let known = [
        "num_bits",
        "type",
        "group_size",
        "symmetric",
        "strategy",
        "dynamic",
        "actorder",
        "scale_dtype",
        "zp_dtype",
    ];
    refuse_unknown(args, &known)?;
    expect(args, "num_bits", &json!(4))?;
    expect(args, "type", &json!("float"))?;
    expect(args, "group_size", &json!(16))?;
    expect_if_given(args, "symmetric", &[json!(true)])?;
    expect_if_given(args, "strategy", &[json!("tensor_group")])?;
    // Block scales of inputs are computed at run time; the global scale comes from the file.
    let dynamic = match (is_input, dialect) {
        (false, _) => vec![json!(false)],
        (true, Dialect::ModelOpt) => vec![json!(false), json!("local")],
        (true, Dialect::CompressedTensors) => vec![json!("local")],
    };
    expect_if_given(args, "dynamic", &dynamic)?;
    // Other values permute the input features.
    let order = [json!(false), json!("weight"), json!("static")];
    expect_if_given(args, "actorder", &order)?;
    let scale = ["torch.float8_e4m3fn", "float8_e4m3fn"].map(Value::from);
    expect_if_given(args, "scale_dtype", &scale)
}

/// Reads the arguments of a group in FP8.
fn read_fp8(weights: &Value, inputs: &Value, dialect: Dialect) -> Result<Fp8Format> {
    let scales = read_fp8_weights(weights).context("weights")?;
    if dialect == Dialect::ModelOpt {
        // ModelOpt describes inputs with a scale per token as static.
        let format = Fp8Format {
            scales,
            inputs: match (inputs.is_null(), scales) {
                (true, _) => Fp8Inputs::HighPrecision,
                (false, Fp8Scales::Tensor) => Fp8Inputs::Static,
                (false, _) => Fp8Inputs::PerToken,
            },
        };
        if !inputs.is_null() {
            fp8_args(inputs, &["dynamic"]).context("input_activations")?;
            expect_if_given(inputs, "dynamic", &[json!(false), json!(true)])?;
        }
        return Ok(format);
    }
    let inputs = read_fp8_inputs(inputs).context("input_activations")?;
    Ok(Fp8Format { scales, inputs })
}

/// Checks the arguments that all uses of FP8 have; `known` are further ones.
fn fp8_args(args: &Value, known: &[&str]) -> Result<()> {
    let common = ["num_bits", "type", "symmetric", "scale_dtype", "zp_dtype"];
    refuse_unknown(args, &[&common[..], known].concat())?;
    expect(args, "num_bits", &json!(8))?;
    expect(args, "type", &json!("float"))?;
    expect_if_given(args, "symmetric", &[json!(true)])?;
    // Scales are numbers in the type of the file; other types of scales are other formats.
    expect_if_given(args, "scale_dtype", &[])
}

fn read_fp8_weights(args: &Value) -> Result<Fp8Scales> {
    fp8_args(args, &["dynamic", "strategy", "block_structure"])?;
    expect_if_given(args, "dynamic", &[json!(false)])?;
    let structure = args.get("block_structure").unwrap_or(&Value::Null);
    let strategy = args.get("strategy").unwrap_or(&Value::Null);
    let scales = match strategy.as_str() {
        None if strategy.is_null() => Fp8Scales::Tensor,
        Some("tensor") => Fp8Scales::Tensor,
        Some("channel") => Fp8Scales::Channel,
        Some("block") => Fp8Scales::Block(block(structure).with_context(|| {
            format!(
                "block_structure is {structure}, but it must be the rows and columns of a block"
            )
        })?),
        _ => bail!("strategy is {strategy}, but FP8 has \"tensor\", \"channel\" or \"block\""),
    };
    ensure!(
        structure.is_null() || matches!(scales, Fp8Scales::Block(_)),
        "block_structure is {structure}, but strategy is {strategy}"
    );
    Ok(scales)
}

/// Reads a block: `[128, 128]`, or `"128x128"` in older files.
fn block(value: &Value) -> Option<[usize; 2]> {
    let sizes: Vec<u64> = match value {
        Value::Array(sizes) => sizes.iter().map(Value::as_u64).collect::<Option<_>>()?,
        Value::String(text) => {
            let sizes = text.split('x').map(|size| size.parse().ok());
            sizes.collect::<Option<_>>()?
        }
        _ => return None,
    };
    let allowed = 1..=1 << 20;
    match sizes[..] {
        [rows, columns] if allowed.contains(&rows) && allowed.contains(&columns) => {
            Some([rows as usize, columns as usize])
        }
        _ => None,
    }
}

fn read_fp8_inputs(args: &Value) -> Result<Fp8Inputs> {
    if args.is_null() {
        return Ok(Fp8Inputs::HighPrecision);
    }
    fp8_args(args, &["dynamic", "strategy", "group_size"])?;
    let [dynamic, strategy, size] =
        ["dynamic", "strategy", "group_size"].map(|name| args.get(name).unwrap_or(&Value::Null));
    let is_dynamic = *dynamic == json!(true);
    let is_static = dynamic.is_null() || *dynamic == json!(false);
    match (strategy.as_str(), size.as_u64()) {
        (Some("tensor"), None) if is_static && size.is_null() => Ok(Fp8Inputs::Static),
        (None, None) if is_static && strategy.is_null() && size.is_null() => Ok(Fp8Inputs::Static),
        (Some("token"), None) if is_dynamic && size.is_null() => Ok(Fp8Inputs::PerToken),
        (Some("group"), Some(size @ 1..=0x10_0000)) if is_dynamic => {
            Ok(Fp8Inputs::Groups(size as usize))
        }
        _ => bail!(
            "strategy is {strategy} with dynamic {dynamic} and group_size {size}, but inputs in FP8 \
             are static per tensor, dynamic per token, or dynamic in groups"
        ),
    }
}

/// Reads `quantized_layers` of ModelOpt's `MIXED_PRECISION`.
pub(super) fn read_layers(object: &Value) -> Result<Layers> {
    let layers = object
        .get("quantized_layers")
        .context("quantized_layers is missing, but quant_algo is MIXED_PRECISION")?;
    let layers = layers
        .as_object()
        .filter(|layers| !layers.is_empty())
        .with_context(|| {
            format!("quantized_layers is {layers}, but it must be an object of layers")
        })?;
    let read = |(name, layer): (&String, &Value)| {
        let read = || {
            refuse_unknown(layer, &["quant_algo", "group_size"])?;
            read_algo(layer)
        };
        let format = read().with_context(|| format!("quantized_layers.{name}"))?;
        Ok((name.clone(), format))
    };
    layers.iter().map(read).collect()
}

/// Reads the algorithm of a layer of ModelOpt, and its `group_size`.
fn read_algo(layer: &Value) -> Result<LayerFormat> {
    let format = match text(layer, "quant_algo")? {
        "NVFP4" => LayerFormat::Nvfp4(Scheme::W4a4),
        "W4A16_NVFP4" => LayerFormat::Nvfp4(Scheme::W4a16),
        name => LayerFormat::Fp8(Fp8Format::of_modelopt(name).with_context(|| {
            format!(
                "quant_algo is {name:?}, but a layer may be NVFP4, W4A16_NVFP4, FP8, \
                 FP8_PER_CHANNEL_PER_TOKEN or fp8_pb_wo"
            )
        })?),
    };
    match format {
        LayerFormat::Nvfp4(_) => expect(layer, "group_size", &json!(16))?,
        LayerFormat::Fp8(_) => expect_if_given(layer, "group_size", &[json!(0), json!(128)])?,
    }
    Ok(format)
}

/// Groups `layers` by format, in the order of the formats.
pub(super) fn by_format(layers: &Layers) -> Vec<Group> {
    let mut groups: BTreeMap<LayerFormat, Vec<String>> = BTreeMap::new();
    for (name, format) in layers {
        groups.entry(*format).or_default().push(name.clone());
    }
    let groups = groups.into_iter();
    groups
        .map(|(format, targets)| Group { format, targets })
        .collect()
}

/// Returns an error unless `groups` give the same formats as `layers`.
pub(super) fn check_layers(groups: &[Group], layers: &Layers) -> Result<()> {
    let mut found = Layers::new();
    for group in groups {
        for target in &group.targets {
            let listed = layers.get(target);
            ensure!(
                listed == Some(&group.format),
                "config_groups make {target} {}, but quantized_layers make it {}",
                group.format,
                listed.map_or("nothing".into(), LayerFormat::to_string)
            );
            found.insert(target.clone(), group.format);
        }
    }
    match layers.iter().find(|(name, _)| !found.contains_key(*name)) {
        None => Ok(()),
        Some((name, format)) => {
            bail!("quantized_layers make {name} {format}, but no group of config_groups names it")
        }
    }
}

/// Returns `quantized_layers` of `groups`.
pub(super) fn layers_json(groups: &[Group]) -> Value {
    let mut layers = Map::new();
    for group in groups {
        let algo = match group.format {
            LayerFormat::Nvfp4(scheme) => {
                json!({"quant_algo": NVFP4_NAMES[scheme as usize], "group_size": 16})
            }
            LayerFormat::Fp8(fp8) => json!({"quant_algo": fp8.modelopt_algo()}),
        };
        let targets = group.targets.iter();
        layers.extend(targets.map(|target| (target.clone(), algo.clone())));
    }
    Value::Object(layers)
}

/// Returns `config_groups` of `groups`.
pub(super) fn groups_json(groups: &[Group], dialect: Dialect) -> Value {
    let group = |(index, group): (usize, &Group)| {
        let mut json = match dialect {
            Dialect::ModelOpt => modelopt_group(group.format),
            Dialect::CompressedTensors => compressed_tensors_group(group.format),
        };
        if dialect == Dialect::CompressedTensors && groups.len() > 1 {
            json["format"] = json!(format_name(group.format));
        }
        json["targets"] = json!(group.targets);
        (format!("group_{index}"), json)
    };
    groups.iter().enumerate().map(group).collect()
}

/// Returns compressed-tensors' format name of a file with `groups`.
pub(super) fn format_of(groups: &[Group]) -> &'static str {
    match groups {
        [group] => format_name(group.format),
        _ => MIXED_FORMAT,
    }
}

fn format_name(format: LayerFormat) -> &'static str {
    match format {
        LayerFormat::Nvfp4(_) => NVFP4_FORMAT,
        LayerFormat::Fp8(fp8) => FP8_FORMATS[usize::from(!fp8.quantizes_inputs())],
    }
}

fn modelopt_group(format: LayerFormat) -> Value {
    let args = |bits: u8| json!({"dynamic": false, "num_bits": bits, "type": "float"});
    match format {
        LayerFormat::Nvfp4(scheme) => {
            let mut args = args(4);
            args["group_size"] = json!(16);
            match scheme {
                Scheme::W4a16 => json!({"weights": args}),
                Scheme::W4a4 => json!({"weights": args, "input_activations": args}),
            }
        }
        LayerFormat::Fp8(fp8) => match fp8.scales {
            Fp8Scales::Tensor => json!({"weights": args(8), "input_activations": args(8)}),
            Fp8Scales::Channel => {
                let mut weights = args(8);
                weights["strategy"] = json!("channel");
                json!({"weights": weights, "input_activations": args(8)})
            }
            Fp8Scales::Block(_) => json!({"quant_algo": fp8.modelopt_algo()}),
        },
    }
}

/// pydantic rejects unknown keys inside the arguments: nothing may be added here.
fn compressed_tensors_group(format: LayerFormat) -> Value {
    match format {
        LayerFormat::Nvfp4(scheme) => {
            let args = |dynamic: Value| {
                json!({
                    "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                    "symmetric": true, "dynamic": dynamic, "scale_dtype": "torch.float8_e4m3fn",
                })
            };
            let mut group = json!({"weights": args(json!(false))});
            if scheme == Scheme::W4a4 {
                group["input_activations"] = args(json!("local"));
            }
            group
        }
        LayerFormat::Fp8(Fp8Format { scales, inputs }) => {
            let args = |strategy: &str, dynamic: bool| {
                json!({
                    "num_bits": 8, "type": "float", "strategy": strategy, "symmetric": true,
                    "dynamic": dynamic,
                })
            };
            let weights = match scales {
                Fp8Scales::Tensor => args("tensor", false),
                Fp8Scales::Channel => args("channel", false),
                Fp8Scales::Block(block) => {
                    let mut args = args("block", false);
                    args["block_structure"] = json!(block);
                    args
                }
            };
            let mut group = json!({"weights": weights});
            match inputs {
                Fp8Inputs::HighPrecision => {}
                Fp8Inputs::Static => group["input_activations"] = args("tensor", false),
                Fp8Inputs::PerToken => group["input_activations"] = args("token", true),
                Fp8Inputs::Groups(size) => {
                    group["input_activations"] = args("group", true);
                    group["input_activations"]["group_size"] = json!(size);
                }
            }
            group
        }
    }
}
