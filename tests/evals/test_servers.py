"""evals/servers.py: each engine's fields, what is asked, and what is kept where a server fails."""

import dataclasses
import json

import pytest

from domino_jax.data.answer_files import AnswerFiles
from domino_jax.data.chat import TextCodec
from domino_jax.decoding.conversations import first_turn
from domino_jax.evals.servers import Server, ask_prompts, server_row
from domino_jax.runtime.errors import DominoError
from domino_jax.weights import hf
from tests.helpers.answering import IDS, MOST, TARGET, answering, stored_answers

ENGINES = ("domino_jax", "vllm", "sglang", "llamacpp", "another")
ROUNDS = {"lengths": [5, 1, 3], "drafts": 24}


@pytest.fixture(scope="module")
def codec():
    return TextCodec(hf.load_tokenizer(TARGET), False)


@pytest.fixture(scope="module")
def prompts(codec):
    rows = map(json.loads, (TARGET / "prompts_train.jsonl").read_text().splitlines())
    return [first_turn(row, place, codec) for place, row in enumerate(rows) if row["id"] in IDS]


def open_server(server, most=MOST, key=None):
    return Server(server.url, key, str(TARGET), most)


def stop_ids(codec):
    return hf.stop_ids(TARGET, codec.tokenizer)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_answer_is_read_from_each_engine(engine, codec, prompts):
    prompt, name = prompts[0], prompts[0].id
    with answering(engine, codec.tokenizer, counts={name: ROUNDS}, extra_tokens=4) as server:
        answer = open_server(server).answer(prompt)
    row = server_row(codec, stop_ids(codec), prompt, answer)
    ids, length = list(prompt.token_ids), len(prompt.token_ids)
    assert (
        row["token_ids"] == ids + stored_answers()[name][1] and sum(row["loss_mask"]) == len(row["token_ids"]) - length
    )
    assert row["finish_reason"] == "stop" and row["server"]["whole"]
    assert row["server"]["prompt_tokens"] == length + 4  # of the messages, as its template has them
    kept = {} if engine == "llamacpp" else {"kept_first": 2}
    if engine == "llamacpp":  # the rounds follow from the number of tokens
        kept["rounds"] = len(stored_answers()[name][1]) - 1 - 6
    expected = None if engine == "another" else {"rounds": 3, "drafts": 24, **kept}
    assert row["server"]["counts"] == expected


def test_token_ids_are_asked_for_as_they_are(codec, prompts):
    prompt = dataclasses.replace(prompts[0], row={"id": prompts[0].id, "token_ids": list(prompts[0].token_ids)})
    for engine in ("vllm", "another"):
        with answering(engine, codec.tokenizer, extra_tokens=4) as server:
            answer = open_server(server).answer(prompt)
            assert [path for path, _ in server.asked] == ["/v1/completions"]
        assert answer.prompt_tokens == len(prompt.token_ids)


def test_a_text_that_does_not_encode_back_to_itself_is_marked(codec, prompts):
    with answering("another", codec.tokenizer) as server:
        server.text = lambda ids: "a \ufffd b"
        asked = open_server(server).answer(prompts[0])
        assert not server_row(codec, stop_ids(codec), prompts[0], asked)["server"]["whole"]


def test_what_was_answered_is_kept_and_the_next_call_goes_on(codec, prompts, tmp_path):
    files = AnswerFiles(tmp_path / "rows.jsonl", [prompt.id for prompt in prompts], {"a": 1})

    def ask(server):
        return ask_prompts(
            open_server(server),
            prompts,
            files,
            lambda *answer: server_row(codec, stop_ids(codec), *answer),
            requests=2,
        )

    with answering("vllm", codec.tokenizer, per_request=False, counts={IDS[3]: ROUNDS}) as server:
        server.refused = {IDS[2]}
        with pytest.raises(DominoError, match=f"prompt {IDS[2]}: .*status 400.*maximum context length is 64"):
            ask(server)
        kept = len((tmp_path / "rows.jsonl").read_text().splitlines())
        assert 0 < kept < len(prompts)
        server.refused, server.asked = set(), []
        gained = ask(server)
        assert len(gained["ids"]) == len(prompts) - kept
        assert {path for path, _ in server.asked} == {"/v1/completions", "/v1/chat/completions"}
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == IDS
    counts = {"rounds": 3, "drafts": 24, "kept_first": 2} if IDS[3] in gained["ids"] else dict.fromkeys(counts_of(), 0)
    assert {name: gained[name] for name in counts} == counts


def counts_of():
    return ("rounds", "drafts", "kept_first")


def test_a_server_that_cannot_be_asked_is_one_sentence(codec, prompts):
    with answering("vllm", codec.tokenizer, key="secret") as server:
        with pytest.raises(DominoError, match="refuses the key .401.; set DOMINO_API_KEY"):
            open_server(server).answer(prompts[0])
        assert open_server(server, key="secret").answer(prompts[0]).stopped
        server.forms["/v1/completions"] = lambda *answer: {"choices": []}
        with pytest.raises(DominoError, match="another form than docs/serving.md lists .IndexError"):
            open_server(server, key="secret").answer(prompts[0])
    with pytest.raises(DominoError, match="does not answer .Connection refused.; start the server"):
        open_server(server)


def test_of_several_models_the_one_with_the_name_of_the_target_is_asked(codec, monkeypatch):
    cards = [{"id": "adapter", "root": "/x/adapter"}, {"id": "chat", "root": "/x/tiny_qwen3", "owned_by": "vllm"}]
    monkeypatch.setattr(Server, "send", lambda *arguments: json.dumps({"data": cards}))
    assert Server("localhost:1", None, str(TARGET), 1).facts["model"] == "chat"
    del cards[1]["root"]
    with pytest.raises(DominoError, match="serves adapter, chat, but config.target.path is"):
        Server("localhost:1", None, str(TARGET), 1)
