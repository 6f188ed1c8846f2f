"""assets/make_smollm2.py and its recipe, on a tiny model of the same format; on the real one if it is installed."""

import numpy as np
import pytest

import domino_jax
from assets import make_smollm2
from domino_jax.data.chat import encode_prompt, encode_training_row
from domino_jax.decoding.generate import new_generator
from domino_jax.method.pair import Models
from domino_jax.method.settings import DecodeSettings
from domino_jax.recipe import loading, rules
from domino_jax.runtime.errors import DataError
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


def test_the_folder_loads_strictly_with_every_tensor_in_its_place(tmp_path):
    given = tensors()
    make_smollm2.write(tmp_path, metadata(), given, "float32")
    loaded = load_target(str(tmp_path), "float32")
    layer, attention = loaded.params["layers_0"], loaded.params["layers_0"]["self_attn"]
    np.testing.assert_array_equal(loaded.params["embed_tokens"]["embedding"], given["token_embd.weight"])
    np.testing.assert_array_equal(attention["v_proj"]["kernel"], given["blk.0.attn_v.weight"].T)
    order = [0, 2, 1, 3]
    np.testing.assert_array_equal(attention["q_proj"]["kernel"].T[:4], given["blk.0.attn_q.weight"][order])
    np.testing.assert_array_equal(attention["k_proj"]["kernel"].T, given["blk.0.attn_k.weight"][order])
    np.testing.assert_array_equal(layer["mlp"]["down_proj"]["kernel"], given["blk.0.ffn_down.weight"].T)
    np.testing.assert_array_equal(layer["post_attention_layernorm"]["scale"], given["blk.0.ffn_norm.weight"])


def test_the_config_is_a_tied_llama_with_the_decimal_eps_and_the_files_stop_id(tmp_path):
    make_smollm2.write(tmp_path, metadata(), tensors(), "bfloat16")
    raw = hf.read_config(tmp_path)
    assert (raw["model_type"], raw["tie_word_embeddings"], raw["dtype"]) == ("llama", True, "bfloat16")
    assert (raw["rms_norm_eps"], raw["rope_theta"], raw["head_dim"], raw["vocab_size"]) == (1e-5, 1e5, 4, len(TOKENS))
    assert hf.stop_ids(tmp_path) == (2,)
    given = {**tensors(), "output.weight": np.ones((len(TOKENS), 8), np.float32)}  # an output matrix unties it
    make_smollm2.write(tmp_path / "untied", metadata(), given, "float32")
    assert not load_target(str(tmp_path / "untied"), "float32").model.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "tensor", "message"),
    [
        ({"general.architecture": "qwen2"}, {}, "'qwen2'"),
        ({"llama.rope.scaling.type": "linear"}, {}, "rope.scaling.type"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, {}, "llama-bpe"),
        ({}, {"blk.0.attn_q_norm.weight": np.ones(4)}, "blk.0.attn_q_norm.weight"),
    ],
    ids=["architecture", "scaling", "pre-tokenizer", "tensor"],
)
def test_a_file_of_another_model_is_refused(changes, tensor, message, tmp_path):
    with pytest.raises(DataError, match=message):
        make_smollm2.write(tmp_path / "out", metadata(**changes), tensors() | tensor, "float32")
    assert not (tmp_path / "out").exists()


def tokenizer(folder):
    make_smollm2.write(folder, metadata(), tensors(), "float32")
    return hf.load_tokenizer(folder)


def test_text_is_split_by_the_files_merges_and_control_tokens_are_one_id_each(tmp_path):
    built = tokenizer(tmp_path)
    assert [TOKENS[index] for index in built.encode("he he12")] == ["he", "Ġhe", "1", "2"]  # digits are separate
    assert built.encode("<|im_start|>a<|im_end|>") == [1, TOKENS.index("a"), 2]
    assert built.decode([1, TOKENS.index("a"), 2]) == "<|im_start|>a<|im_end|>"
    assert built.decode([1, TOKENS.index("a"), 2], skip_special_tokens=True) == "a"


def test_the_chat_template_of_the_file_makes_prompts_and_supervised_answers(tmp_path):
    built = tokenizer(tmp_path)
    asked = [{"role": "user", "content": "he"}]
    ids = encode_prompt(built, {"messages": asked}, False)
    assert built.decode(ids) == "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"
    row = encode_training_row(built, {"messages": [*asked, {"role": "assistant", "content": "ab"}]}, False)
    assert built.decode(row.token_ids[row.loss_mask == 1]) == "ab<|im_end|>"


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
