//! Classifies modules by name: routers, experts, and projections that share a global scale.

/// Group of projections that consumers fuse into one GEMM.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FusedGroup {
    /// Module that contains the projections, such as `model.layers.0.self_attn`.
    pub parent: String,
    /// Name of the fused projection: `qkv_proj` or `gate_up_proj`.
    pub kind: &'static str,
}

/// Splits a module's name into its last component and the rest.
fn split(module: &str) -> (&str, &str) {
    module.rsplit_once('.').unwrap_or(("", module))
}

/// Returns the group of projections that must share global scales with `module`, if any: consumers
/// fuse q/k/v (DeepSeek's q_a and kv_a) and gate/up (w1/w3 of Mixtral) and keep one scale for all.
pub fn fused_group(module: &str) -> Option<FusedGroup> {
    let (parent, leaf) = split(module);
    let kind = match leaf {
        "q_proj" | "k_proj" | "v_proj" | "q_a_proj" | "kv_a_proj_with_mqa" => "qkv_proj",
        "gate_proj" | "up_proj" | "w1" | "w3" => "gate_up_proj",
        _ => return None,
    };
    let parent = parent.to_owned();
    Some(FusedGroup { parent, kind })
}

/// Returns the projection of all experts of one layer that `module` belongs to, without the
/// expert's number: `model.layers.0.mlp.experts.*.down_proj`.
pub fn expert_projection(module: &str) -> Option<String> {
    let (layer, rest) = module.split_once(".experts.")?;
    let (expert, projection) = rest.split_once('.')?;
    let is_number = !expert.is_empty() && expert.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| format!("{layer}.experts.*.{projection}"))
}

/// Returns the layer of an expert's module: the name before the expert's number.
pub fn expert_layer(module: &str) -> Option<&str> {
    expert_projection(module)?;
    module.split_once(".experts.").map(|(layer, _)| layer)
}

/// Returns true if `module` is a router, which is never quantized and always excluded by name.
pub fn is_router(module: &str) -> bool {
    [
        ".mlp.gate",
        ".mlp.router",
        ".block_sparse_moe.gate",
        ".mlp.shared_expert_gate",
    ]
    .iter()
    .any(|suffix| module.ends_with(suffix))
}

/// Returns true if `module` is the output head.
pub fn is_head(module: &str) -> bool {
    split(module).1 == "lm_head"
}

/// Returns true if `module` is the embedding.
pub fn is_embedding(module: &str) -> bool {
    split(module).1 == "embed_tokens"
}

/// Returns true if `module` is, by its name, a linear layer of a supported family.
pub fn is_linear(module: &str) -> bool {
    let leaf = split(module).1;
    is_head(module)
        || is_router(module)
        || leaf.ends_with("_proj")
        || matches!(leaf, "kv_a_proj_with_mqa" | "w1" | "w2" | "w3")
}

/// Returns true if a weight `[d_out, d_in]` of the module may belong to a linear layer, in an
/// architecture with unknown names. Readers build every linear layer that is not excluded as a
/// quantized one.
pub fn may_be_linear(module: &str) -> bool {
    let leaf = split(module).1;
    let is_table = leaf.contains("embed") || matches!(leaf, "wte" | "wpe" | "shared");
    is_linear(module) || !is_table && !leaf.contains("norm")
}

/// Returns the transformers name of the module: Mixtral's experts are `w1`, `w2` and `w3`, which
/// llm-compressor calls `gate_proj`, `down_proj` and `up_proj`.
pub fn canonical(module: &str) -> String {
    let (parent, leaf) = split(module);
    let is_mixtral = module.contains(".block_sparse_moe.experts.");
    let name = match leaf {
        "gate_proj" if is_mixtral => "w1",
        "down_proj" if is_mixtral => "w2",
        "up_proj" if is_mixtral => "w3",
        _ => return module.to_owned(),
    };
    format!("{parent}.{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projections_are_grouped_as_consumers_fuse_them() {
        let same = |a: &str, b: &str| fused_group(a).unwrap() == fused_group(b).unwrap();
        let attention = "model.layers.3.self_attn";
        assert!(same(
            &format!("{attention}.q_proj"),
            &format!("{attention}.v_proj")
        ));
        assert!(same(
            &format!("{attention}.q_a_proj"),
            &format!("{attention}.kv_a_proj_with_mqa")
        ));
        assert!(same("a.mlp.experts.7.gate_proj", "a.mlp.experts.7.up_proj"));
        assert!(!same(
            "a.mlp.experts.7.gate_proj",
            "a.mlp.experts.8.up_proj"
        ));
        let experts = "a.block_sparse_moe.experts.0";
        assert!(same(&format!("{experts}.w1"), &format!("{experts}.w3")));
        for alone in [
            "a.self_attn.o_proj",
            "a.self_attn.q_b_proj",
            "a.self_attn.kv_b_proj",
            "a.mlp.down_proj",
            "lm_head",
            "a.experts.0.w2",
        ] {
            assert_eq!(fused_group(alone), None);
        }
    }

    #[test]
    fn modules_are_told_apart_by_name() {
        assert!(is_router("model.layers.0.mlp.gate"));
        assert!(is_router("model.layers.0.block_sparse_moe.gate"));
        assert!(!is_router("model.layers.0.mlp.gate_proj"));
        assert!(is_linear("lm_head") && is_linear("a.self_attn.o_proj"));
        assert!(!is_linear("model.norm") && !is_linear("model.embed_tokens"));
        assert!(is_embedding("model.embed_tokens"));
        for module in [
            "model.decoder.layers.0.fc1",
            "projector.linear_1",
            "h.0.attn.c_attn",
        ] {
            assert!(may_be_linear(module) && !is_linear(module), "{module}");
        }
        for module in [
            "wte",
            "embed_positions",
            "encoder.position_embedding",
            "a.norm1",
        ] {
            assert!(!may_be_linear(module), "{module}");
        }
        let expert = "m.layers.0.block_sparse_moe.experts.11.up_proj";
        assert_eq!(
            canonical(expert),
            "m.layers.0.block_sparse_moe.experts.11.w3"
        );
        assert_eq!(
            canonical("m.mlp.experts.1.up_proj"),
            "m.mlp.experts.1.up_proj"
        );
        let all = "m.layers.0.block_sparse_moe.experts.*.up_proj";
        assert_eq!(expert_projection(expert).as_deref(), Some(all));
        assert_eq!(expert_projection("m.mlp.experts.up_proj"), None);
    }
}
