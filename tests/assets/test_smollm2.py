"""The recipe of SmolLM2, and the real model with the shipped drafter if it is installed."""

import numpy as np
import pytest

import domino_jax
from assets import make_smollm2
from domino_jax.data.chat import encode_prompt
from domino_jax.decoding.generate import new_generator
from domino_jax.method.pair import Models
from domino_jax.method.settings import DecodeSettings
from domino_jax.recipe import loading, rules
from domino_jax.weights import hf
from domino_jax.weights.loading import load_target
from tests.helpers.paths import ASSETS, ROOT

TURN = "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATE = "{% for message in messages %}" + TURN + "{% endfor %}" + ASK
LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789_Ċ", "Ġ"]
MERGES = ["h e", "1 2", "Ġ he"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *LETTERS, "he", "12", "Ġhe"]


def metadata(**changes) -> dict:
    """One layer, 8 wide, 2 heads of 4 over 1 key/value head."""
    fields = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 12,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.rope.freq_base": 100_000.0,
        "llama.rope.dimension_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    return {**fields, **changes}


def tensors() -> dict[str, np.ndarray]:
    shapes = {
        "token_embd": (len(TOKENS), 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.ffn_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_gate": (12, 8),
        "blk.0.ffn_up": (12, 8),
        "blk.0.ffn_down": (8, 12),
    }
    draw = np.random.default_rng(0)
    return {f"{name}.weight": draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def tokenizer(folder):
    make_smollm2.write(folder, metadata(), tensors(), "float32")
    return hf.load_tokenizer(folder)


def test_the_recipe_loads_passes_the_checks_and_carries_its_commands():
    config = loading.load_recipe(str(ROOT / "configs" / "smollm2_135m.py"))
    rules.check(config, "train")
    base = loading.resolved(loading.load_recipe(str(ROOT / "configs" / "qwen3_8b.py")))
    own = loading.resolved(config)
    sections = [name for name, values in base.items() if isinstance(values, dict)]
    assert all(sorted(own[name]) == sorted(base[name]) for name in sections)
    text = (ROOT / "configs" / "smollm2_135m.py").read_text()
    assert "python -m domino_jax.train --config=configs/smollm2_135m.py" in text and "To expect:" in text


@pytest.mark.slow
def test_the_real_model_answers_in_english(smollm2):
    loaded = load_target(str(smollm2), "float32")
    row = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    models = Models(loaded.model, loaded.params)
    generator = new_generator(models, DecodeSettings(cache_length=96, max_new_tokens=24), loaded.stop_ids)
    prompt = encode_prompt(loaded.tokenizer, row, False)
    [answer] = generator.generate(models, [prompt], "autoregressive").answers
    assert loaded.tokenizer.decode(answer.token_ids) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow(minutes=2)
def test_the_shipped_drafter_changes_no_token_of_the_real_model(smollm2):
    drafter = ASSETS / "smollm2_domino"
    settings = {"dtype": "float32", "cache_length": 256, "max_new_tokens": 48, "head_candidates": 0}
    decoder = domino_jax.load(str(smollm2), str(drafter), width="fixed", **settings)
    asked = ["List three healthy breakfast ideas.", "What is the difference between a lake and a pond?"]
    for temperature in (0.0, 0.7):
        plain, drafted = (
            decoder.generate(asked, mode=mode, temperature=temperature) for mode in ("autoregressive", "domino")
        )
        assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
        lengths = [length for answer in drafted for length in answer.accept_lengths]
        assert max(lengths) > 1 and sum(lengths) / len(lengths) > 1.2
