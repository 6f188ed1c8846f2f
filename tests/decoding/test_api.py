"""The package's front and what a person sees at a terminal, on the shipped pair."""

import functools

import jax
import numpy as np
import pytest

import domino_jax
from domino_jax.decoding.text_stream import TextStream
from domino_jax.runtime.errors import DataError, DominoError
from tests.helpers.golden_files import folder_of, raw_config, stored_tensors, write_model
from tests.helpers.paths import ASSETS, GOLDEN

pytestmark = pytest.mark.long

PROMPT = "Laura has 46 plums. She breaks 5. She buys 9 more. How many plums does Laura have now?"
PAIR = str(ASSETS / "tiny_qwen3"), str(ASSETS / "tiny_domino")
SIZES = {"dtype": "float32", "cache_length": 256, "max_new_tokens": 96}


@functools.lru_cache
def decoder() -> domino_jax.Decoder:
    return domino_jax.load(*PAIR, **SIZES, width="fixed")


@functools.lru_cache
def answer() -> domino_jax.Answer:
    return decoder().generate([PROMPT])[0]


def test_a_text_is_a_users_message_and_the_answer_is_text():
    assert answer().text and answer().finish_reason == "stop"
    assert answer() == decoder().generate([[{"role": "user", "content": PROMPT}]])[0]
    assert 1 + sum(answer().accept_lengths) == len(answer().token_ids)


def test_by_default_the_width_adapts_and_the_text_stays():
    made = domino_jax.load(*PAIR, **SIZES)
    assert made.generator.settings.adaptive
    for prompts in ([PROMPT], [PROMPT, PROMPT]):
        assert {tuple(one.token_ids) for one in made.generate(prompts)} == {tuple(answer().token_ids)}


def test_the_drafter_makes_the_default_mode_and_changes_no_token():
    assert decoder().default_mode == "draft"
    assert decoder().generate([PROMPT], mode="autoregressive")[0].token_ids == answer().token_ids


def test_a_tree_is_the_mode_where_one_is_given_and_changes_no_token():
    planted = domino_jax.load(*PAIR, **SIZES, tree=domino_jax.TreeSettings(nodes=16, lanes=4, candidates=32))
    found = planted.generate([PROMPT])[0]
    assert planted.default_mode == "tree" and found.token_ids == answer().token_ids
    assert len(found.accept_lengths) < len(answer().accept_lengths)


def test_a_tree_that_is_no_shape_or_has_no_drafter_is_refused():
    tree, chains = domino_jax.TreeSettings(nodes=8), str(GOLDEN / "eagle3" / "drafter")
    with pytest.raises(DominoError, match="tree is {'nodes': 16}: give its shape"):
        domino_jax.load(*PAIR, tree={"nodes": 16})
    with pytest.raises(DominoError, match="tree is given, but no drafter"):
        domino_jax.load(PAIR[0], tree=tree)
    with pytest.raises(DominoError, match="tree is given, but mode 'tree' needs a drafter that scores paths"):
        domino_jax.load(str(GOLDEN / "tied_shift" / "target"), chains, dtype="float32", tree=tree)


def test_answers_fit_the_model_that_knows_fewer_positions(tmp_path):
    raw = raw_config("tied_shift", "drafter") | {"max_position_embeddings": 300}
    drafter = write_model(tmp_path, raw, stored_tensors("tied_shift", "drafter"))
    decoder = domino_jax.load(str(folder_of("tied_shift", "target")), str(drafter), dtype="float32")
    assert decoder.generator.settings.max_new_tokens == 150


def test_pieces_join_to_the_answer():
    pieces = list(decoder().stream(PROMPT))
    assert "".join(piece.text for piece in pieces) == answer().text
    assert [piece.finish_reason for piece in pieces][-2:] == [None, "stop"]
    assert max(len(piece.token_ids) for piece in pieces) > 1


def test_the_same_seed_gives_the_same_sample_and_another_one_another():
    warm = {"temperature": 1.5, "max_new_tokens": 24}
    one, two, three = (decoder().generate([PROMPT], seed=seed, **warm)[0].token_ids for seed in (1, 1, 2))
    assert one == two != three


def test_sampling_that_a_call_leaves_out_is_that_of_load():
    values = {"temperature": 1.5, "top_k": 20, "seed": 4}
    sizes = {"dtype": "float32", "cache_length": 64, "max_new_tokens": 12}
    warm = domino_jax.load(str(GOLDEN / "tied_shift" / "target"), **sizes, **values)
    assert warm.generate([[5, 6, 7]]) == warm.generate([[5, 6, 7]], **values) != warm.generate([[5, 6, 7]], seed=5)


def test_a_value_out_of_range_is_refused_by_name():
    for name, value in (
        ("temperature", -1.0),
        ("top_k", -3),
        ("top_k", 2.9),
        ("top_p", "0.9"),
        ("seed", 2**32 - 1),
        ("seed", 1.5),
    ):
        with pytest.raises(DominoError, match=f"{name} is {value!r}: "):
            decoder().generate([PROMPT], **{name: value})
    for values, name in (
        ({"temperature": -1.0}, "temperature"),
        ({"mode": "none"}, "mode"),
        ({"max_new_tokens": 2.5}, "max"),
    ):
        with pytest.raises(DominoError, match=name):
            decoder().stream(PROMPT, **values)  # before the first piece
    for name, value in (
        ("dtype", "float16"),
        ("batch_size", 2.0),
        ("cache_length", 384.0),
        ("draft_sharpness", float("nan")),
    ):
        with pytest.raises(DominoError, match=f"{name} is {value!r}: "):
            domino_jax.load("no folder", **{name: value})
    with pytest.raises(TypeError, match="heat"):
        decoder().generate([PROMPT], heat=1.0)


def test_prompts_may_come_from_an_iterator_and_values_from_numpy_and_none_is_the_default():
    values = {"temperature": np.float32(0.0), "top_k": None, "seed": np.int64(0), "max_new_tokens": np.int32(4)}
    expected = decoder().generate([PROMPT], max_new_tokens=4)
    assert decoder().generate(map(str, [PROMPT]), **values) == expected


def test_a_mesh_of_the_callers_own_is_refused():
    with jax.set_mesh(jax.make_mesh((1,), ("x",))), pytest.raises(DominoError, match="a mesh is set"):
        domino_jax.load(*PAIR)


def test_a_prompt_that_is_none_is_refused():
    message = {"role": "user", "content": PROMPT}
    for prompts in (PROMPT, message, [message], [5, 6], np.array([5, 6])):
        with pytest.raises(DataError, match="prompts is a single prompt; put it into a list"):
            decoder().generate(prompts)
    for prompt in ("", [], [{"role": "user"}], [1.5], [True], ["a"], None, b"a"):
        with pytest.raises(DataError, match="prompt 0"):
            decoder().generate([prompt])


class Bytes:
    """A tokenizer whose tokens are single bytes, so that a character takes several of them."""

    def decode(self, ids, skip_special_tokens):
        return bytes(ids).decode("utf-8", errors="replace")


def test_a_character_is_shown_once_all_its_bytes_are_there():
    stream = TextStream(Bytes())
    text = "aé€😀z"
    pieces = [stream.add([byte]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "z"]


def test_float32_is_exact_whatever_the_process_has_set_and_loading_sets_nothing():
    with jax.default_matmul_precision(None):
        made = domino_jax.load(str(GOLDEN / "tied_shift/target"), str(GOLDEN / "tied_shift/drafter"), dtype="float32")
        made.generate([[5, 6, 7]], max_new_tokens=2)
        assert jax.config.jax_default_matmul_precision is None
    for program in made.generator.compiled.values():
        text = program.as_text()
        assert text.count("operand_precision={highest,highest}") == text.count(" dot(")
    assert len(made.generator.compiled) > 1
