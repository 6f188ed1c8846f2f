"""Prompts and runs over stub generators: groups and turns."""

import json

import pytest

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.generate import Clock, Generated, Generation
from domino_jax.decoding.limits import Limits
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.evals.run import Runner
from domino_jax.evals.run_files import GENERATIONS, RunFiles
from domino_jax.recipe.prompt_rows import prepare_prompts, prompts_with_room
from domino_jax.runtime.errors import DataError
from tests.helpers.data_files import BytesTokenizer


class Answering:
    """Answers with the number of tokens of the prompt, as text."""

    def __init__(self, positions=1_000, batch_size=1):
        self.asked = []
        self.settings = DecodeSettings(
            modes=("domino", "autoregressive"), cache_length=200, max_new_tokens=4, batch_size=batch_size
        )
        self.limits = Limits(self.settings, 256, 1, positions, "target")

    def check_prompt(self, prompt, name, request):
        if len(prompt) + 5 > self.limits.settings.cache_length:
            raise DataError(f"{name} needs {len(prompt) + 5} cache rows")

    def generate(self, models, prompts, mode, requests):
        self.asked.append((mode, [bytes(prompt).decode() for prompt in prompts], list(requests)))
        texts = [str(len(prompt)).encode() for prompt in prompts]
        answers = [Generation(list(text), [] if mode == "autoregressive" else [len(text)], "stop") for text in texts]
        return Generated(answers, Clock(decode_seconds=0.25, decode_tokens=len(prompts)))


def row(name, text="Hi", **more):
    return {"id": name, "messages": [{"role": "user", "content": text}], **more}


CODEC = TextCodec(BytesTokenizer(), False)


def prompts_of(rows):
    return prepare_prompts(rows, CODEC)


def run(folder, generator, rows):
    with RunFiles(folder, {"settings": {}}) as files:
        return Runner(None, generator, CODEC).run(prompts_of(rows), files)


def test_a_group_that_had_to_compile_is_decoded_again_and_only_its_compilation_counts(tmp_path):
    class Compiling(Answering):
        def generate(self, *arguments):
            answers, clock = super().generate(*arguments)
            first = len(self.asked) == 1
            return Generated(answers, Clock(decode_seconds=10.0, compile_seconds=1.0) if first else clock)

    measured = run(tmp_path, Compiling(), [row("r")])
    clocks = {name: one.clock for name, one in measured.runs.items()}
    assert clocks["autoregressive"] == Clock(decode_seconds=0.25, compile_seconds=1.0, decode_tokens=1)
    assert clocks["domino"] == Clock(decode_seconds=0.25, decode_tokens=1)


def test_a_second_turn_follows_the_generated_first_answer_and_has_another_id(tmp_path):
    generator = Answering(batch_size=2)
    rows = [row("a", "Hi", next_turns=["More"]), row("b")]
    measured = run(tmp_path, generator, rows)
    assert generator.asked[0] == ("autoregressive", ["U(Hi|)A(", "U(Hi|)A("], [0, 1])
    assert generator.asked[2] == ("autoregressive", ["U(Hi|)A(8|)U(More|)A("], [0])
    lines = map(json.loads, (tmp_path / GENERATIONS).read_text().splitlines())
    assert [line["id"] for line in lines if line["mode"] == "domino"] == ["a", "b", "a#2"]
    assert len(measured.runs["domino"].rounds) == 3


def test_rows_that_do_not_fit_are_refused_together_or_left_out_before_anything_runs():
    generator = Answering()
    prompts = prompts_of([row("far", "x" * 300), row("near"), row("farther", "x" * 400)])
    with pytest.raises(DataError, match="prompt far needs(.|\n)*2 of 3 rows"):
        prompts_with_room(generator, prompts, CODEC, skip_bad=False)
    assert prompts_with_room(generator, prompts, CODEC, skip_bad=True) == prompts[1:2]
    assert generator.asked == []


def test_a_conversation_has_to_fit_at_its_longest():
    def check(generator, turns):
        prompts_with_room(generator, prompts_of([row("talk", next_turns=["More"] * turns)]), CODEC, False)

    check(Answering(), 9)
    with pytest.raises(DataError, match="talk, of 13 turns, needs 205 cache rows .*cache_length is 200"):
        check(Answering(), 12)
    with pytest.raises(DataError, match="talk, of 10 turns, has .* asks for 40 more, but the target's .* is 150;"):
        check(Answering(positions=150), 9)
