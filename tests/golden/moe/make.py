"""Makes tests/golden/moe: three folders of tiny random Qwen3 MoE models and the logits of transformers in float32.

python tests/golden/moe/make.py OUTPUT        (torch 2.13, transformers 5.24, no GPU)
"""

import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

TILE = 128
SHAPE = {
    "vocab_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    "bos_token_id": None,
    "eos_token_id": 63,
    "pad_token_id": None,
}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 16, "num_experts": 8}
WIDE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 256, "head_dim": 64, "num_experts": 4}
FOLDERS = {
    "every_layer": SMALL | {"num_hidden_layers": 2, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "some_layers": SMALL
    | {"num_hidden_layers": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}
    | {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "fp8": WIDE | {"num_hidden_layers": 2, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [1]},
}


def random_model(fields: dict) -> Qwen3MoeForCausalLM:
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **fields)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.normal_(1, 0.2)
            else:  # routers sharp enough that no choice is near a tie
                weight.normal_(0, weight.shape[-1] ** -0.5 * (3 if name.endswith("gate.weight") else 1))
    return model


def in_tiles(folder: pathlib.Path) -> None:
    """Rewrites a folder in the layout of Qwen's FP8 folders: the scales, in bfloat16, are multiplied with."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        weight = tensors[name]
        tiles = weight.reshape(weight.shape[0] // TILE, TILE, weight.shape[1] // TILE, TILE)
        scale = (tiles.abs().amax((1, 3)) / 448).to(torch.bfloat16)
        values = (tiles / scale.float()[:, None, :, None]).clamp(-448, 448)
        tensors[name] = values.reshape(weight.shape).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    routers = [name.removesuffix(".weight") for name in tensors if name.endswith(".mlp.gate.weight")]
    raw["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", *routers],
        "quant_method": "fp8",
        "weight_block_size": [TILE, TILE],
    }
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def main(output: pathlib.Path) -> None:
    torch.manual_seed(7)
    tokens = torch.randint(0, 63, (2, 32))
    golden = {"input_ids": tokens}
    for name, fields in FOLDERS.items():
        folder = output / name
        shutil.rmtree(folder, ignore_errors=True)
        model = random_model(fields)
        model.save_pretrained(folder)
        choices = {}
        if name == "fp8":
            in_tiles(folder)
            choices = {"quantization_config": FineGrainedFP8Config(dequantize=True)}
        model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, **choices).float().eval()
        with torch.no_grad():
            golden[name] = model(tokens).logits
        if name == "every_layer":  # as folders that older versions wrote, those of the hub among them
            raw = json.loads((folder / "config.json").read_text())
            raw["num_experts"] = raw.pop("num_local_experts")
            (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        (folder / "generation_config.json").unlink(missing_ok=True)
    save_file({name: value.contiguous() for name, value in golden.items()}, output / "golden.safetensors")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
