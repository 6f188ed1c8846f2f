"""evaluate.py --server over the tiny pair: faults that are planted into a server are named."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.data.chat import TextCodec
from domino_jax.evals import server_check
from domino_jax.evaluate import ask_server
from domino_jax.method.pair import Pair
from domino_jax.recipe import cli
from domino_jax.recipe.open_keys import decode_settings
from domino_jax.runtime.errors import DominoError
from domino_jax.weights.hf import load_tokenizer
from domino_jax.weights.loading import load_target
from tests.helpers.answering import IDS, TARGET, answering, check_flags, read_rows, stored_answers
from tests.helpers.commands import run

pytestmark = pytest.mark.long


@pytest.fixture
def flags(tmp_path):
    return check_flags(tmp_path)


@pytest.fixture
def check(flags, tmp_path, capsys):
    """check(url): exit code, evaluation.json's "server", the drafter's "server", the printed text."""

    def start(url):
        code = run("evaluate", f"--server={url}", *flags)
        printed = " ".join("".join(capsys.readouterr()).split())
        assert (tmp_path / "out" / "evaluation.json").exists(), printed
        evaluation = json.loads((tmp_path / "out" / "evaluation.json").read_text())
        [drafter] = evaluation["drafters"].values()
        assert "the target&#39;s own" in (tmp_path / "out" / "evaluation.html").read_text()
        return code, evaluation["server"], drafter["server"], printed

    return start


def test_faults_of_a_server_are_named(check, monkeypatch):
    loaded = load_target(str(TARGET), "float32")
    answers = {name: answer for name, (_, answer) in stored_answers().items()}
    # A near tie: the second choice where the target is least sure, and a limit above that difference.
    prompt, answer = stored_answers()[IDS[0]]
    logits = Pair(loaded.model, loaded.params).run_target(jnp.asarray([prompt + answer]))["logits"][0]
    logits = np.asarray(logits, np.float64)[len(prompt) - 1 : -1]
    ranked = np.sort(logits, axis=-1)
    place = int((ranked[:, -1] - ranked[:, -2]).argmin())
    margin = ranked[place, -1] - ranked[place, -2]
    monkeypatch.setitem(server_check.NEAR_TIE, "float32", margin * 1.01)
    answers[IDS[0]] = [*answer[:place], int(np.argsort(logits[place])[-2])]
    # A wrong token at place 7, and an answer that stops early.
    answers[IDS[1]] = [*answers[IDS[1]][:7], answers[IDS[1]][7] + 1, *answers[IDS[1]][8:]]
    answers[IDS[2]] = answers[IDS[2]][:12]
    # A drafter that is shifted by one: nearly all rounds emit one token.
    tokens = sum(map(len, answers.values()))
    counts = {IDS[3]: {"lengths": [2] + [1] * (tokens - 6), "drafts": 8 * (tokens - 5)}}

    choices = {"limited": {IDS[0]}, "extra_tokens": 4, "counts": counts, "per_request": False}
    with answering("vllm", loaded.tokenizer, answers=answers, **choices) as server:
        code, checked, tau, printed = check(server.url)
    texts, first = checked["texts"], checked["texts"]["first_wrong"]
    assert code == 3, printed
    assert (texts["own"], texts["near_tie"], texts["wrong"]) == (1, 1, 2)
    assert (first["id"], first["token"], first["target_id"]) == (IDS[1], 7, stored_answers()[IDS[1]][1][7])
    assert f"First wrong answer: {IDS[1]}, token 7 is {first['target_id'] + 1}" in printed
    other = {"id": IDS[0], "server": len(prompt) + 4, "here": len(prompt)}
    assert checked["prompts"] == {"same": 0, "of": 4, "first_other": other}
    assert checked["cut"] == 1 and "1 answers were cut" in printed
    # The early end counts as one stop token.
    assert tau["tau"] == pytest.approx((tokens - 3) / (tokens - 5)) and tau["drafts"] == 8
    assert "check the shift, the mask token" in tau["hint"] and tau["hint"] in printed


def test_a_call_that_was_cut_off_is_continued_and_a_finished_one_asks_again(flags, tmp_path):
    flags = cli.parse(["evaluate", "--server=SERVER", *flags], ("config", "output"), ("server", "requests"))
    settings = decode_settings(flags.config.decode, flags.config.drafter.head, "")
    codec, output = TextCodec(load_tokenizer(TARGET), False), tmp_path / "rows.jsonl"
    with answering("sglang", codec.tokenizer, refused={IDS[3]}) as server:
        flags = dataclasses.replace(flags, server=server.url)

        def ask():
            server.asked = []
            ask_server(flags, settings, {"weights": "a"}, output)
            return sum(path == "/generate" for path, _ in server.asked)

        with pytest.raises(DominoError, match=f"prompt {IDS[3]}: .*maximum context length is 64"):
            ask()
        server.refused, kept = set(), len(read_rows(output))
        assert 0 < kept < len(IDS)
        assert [ask(), ask()] == [len(IDS) - kept, len(IDS)]
        assert json.loads((tmp_path / "rows.jsonl.meta.json").read_text())["temperature"] == 0
