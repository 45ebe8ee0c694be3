"""Makes tiny seeded models with transformers, and texts: models.py FOLDER."""
import json
import os
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

folder = sys.argv[1]
torch.set_num_threads(1)
VOCAB = 288
TEXT = [
    "The quick brown fox jumps over the lazy dog. Numbers: 1234567 and 89.",
    "Quantization maps the weights of the model to four bits; the scales are stored in eight.",
    "Norms, projections and rotary positions: a decoder has many of each, in every layer.",
    "The tokens of this text are few, and the models that read it are random.",
]

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer.train_from_iterator(
    TEXT,
    trainers.BpeTrainer(vocab_size=VOCAB - 1, initial_alphabet=alphabet, show_progress=False),
)
tokenizer.add_special_tokens(["<|end|>"])
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")

common = dict(
    vocab_size=VOCAB,
    hidden_size=96,
    num_hidden_layers=2,
    max_position_embeddings=256,
    initializer_range=0.06,
    eos_token_id=tokenizer.token_to_id("<|end|>"),
    bos_token_id=None,
    pad_token_id=None,
)
default = dict(rope_type="default", rope_theta=1e6)
llama3 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
experts = dict(num_experts_per_tok=2, tie_word_embeddings=False)
ALL = {
    "llama3": LlamaForCausalLM(
        LlamaConfig(
            **common,
            intermediate_size=160,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=False,
            rope_parameters=llama3,
        )
    ),
    "qwen3": Qwen3ForCausalLM(
        Qwen3Config(
            **common,
            **heads,
            intermediate_size=160,
            tie_word_embeddings=True,
            rope_parameters=default,
        )
    ),
    "qwen3moe": Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **common,
            **heads,
            **experts,
            intermediate_size=160,
            moe_intermediate_size=48,
            num_experts=4,
            norm_topk_prob=True,
            rope_parameters=default,
        )
    ),
    "mixtral": MixtralForCausalLM(
        MixtralConfig(
            **common,
            **experts,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            num_local_experts=4,
            sliding_window=None,
            rope_parameters=default,
        )
    ),
}

# What reads the norms of a decoder layer.
READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj", "mlp.gate")

for seed, (name, model) in enumerate(ALL.items()):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # In the order of their names. Columns of different sizes, so that scales differ.
        for key, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                weight.normal_(std=0.06, generator=generator)
                weight.mul_(1 + 2 * torch.rand(weight.shape[-1], generator=generator))
            else:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
            # Features that are far larger than others, as large models have them: what smoothing is
            # for.
            if key.endswith("layernorm.weight"):
                weight[3::7] *= 24.0
            elif key.removesuffix(".weight").endswith(READERS):
                weight[..., 3::7] /= 6.0
            if key.endswith("layers.0.self_attn.q_proj.weight"):
                # A block of zeros, a block of scales that underflow, and an outlier.
                weight[0, :16] = 0.0
                weight[2, :16] *= 1e-5
                weight[3, 5] = 1.0
    out = os.path.join(folder, name)
    model.to(torch.bfloat16).save_pretrained(out)
    fast.save_pretrained(out)
    tokenizer.save(os.path.join(out, "tokenizer.json"))

with open(os.path.join(folder, "text.txt"), "w", encoding="utf-8") as file:
    file.write("\n".join(TEXT * 4))
with open(os.path.join(folder, "text.jsonl"), "w", encoding="utf-8") as file:
    file.writelines(json.dumps({"text": text}) + "\n" for text in TEXT * 16)
