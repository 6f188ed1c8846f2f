"""The server over real sockets: what OpenAI's client sees, refusals, and clients that misbehave."""

import concurrent.futures
import contextlib
import gc
import http.client
import json
import logging
import math
import time

import jax
import pytest

from domino_jax.decoding.queue import Queue
from domino_jax.decoding.requests import Request
from domino_jax.method.settings import SamplingParams
from domino_jax.serve import LOOPBACK
from tests.helpers.serving import (
    MODEL,
    QUESTION,
    asked,
    get,
    listening,
    post,
    raw_stream,
    start_command,
    stream_of,
    wait_for,
)

pytest.importorskip("starlette", reason="requirements-serve.txt is not installed")
from domino_jax.serving.protocol import read_request

openai = pytest.importorskip("openai", reason="openai is not installed")


@pytest.fixture(scope="session")
def client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def plain_ids(engine, *bodies: dict) -> list[list[int]]:
    """The answers of plain decoding to these bodies."""
    served = engine.served
    prompts = [read_request(body, True, served).prompt for body in bodies]
    values = [{name: body[name] for name in ("temperature", "seed") if name in body} for body in bodies]
    requests = [Request(0, value.get("seed", 0), 96, SamplingParams(value.get("temperature", 0.0))) for value in values]
    answers = served.generator.generate(served.models, prompts, "autoregressive", requests).answers
    return [answer.token_ids for answer in answers]


def plain_texts(engine, *bodies: dict) -> list[str]:
    return [engine.served.tokenizer.decode(ids, skip_special_tokens=True) for ids in plain_ids(engine, *bodies)]


def metric(port: int, name: str) -> float:
    lines = [line for line in get(port, "/metrics")[1].splitlines() if line.startswith(f"domino:{name} ")]
    return float(lines[0].split()[1])


def idle(port: int) -> bool:
    return metric(port, "num_requests_running") == metric(port, "num_requests_waiting") == 0


@pytest.mark.long
def test_texts_are_those_of_decode_whatever_else_is_in_the_batch(engine, client):
    """Greedy and sampled requests of both modes together, whole and streamed."""
    cases = [
        (QUESTION.replace("46", str(46 + index)), "draft" if index % 3 else "autoregressive", 0.9 * (index % 2), index)
        for index in range(8)
    ]

    def ask(case):
        content, mode, temperature, seed = case
        fields = {"temperature": temperature, "seed": seed, "extra_body": {"mode": mode}}
        message = [{"role": "user", "content": content}]
        if seed % 2:
            return client.chat.completions.create(model=MODEL, messages=message, **fields).choices[0].message.content
        parts = client.chat.completions.create(model=MODEL, messages=message, stream=True, **fields)
        return "".join(part.choices[0].delta.content or "" for part in parts)

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        texts = list(pool.map(ask, cases))
    bodies = [asked(content, temperature=temperature, seed=seed) for content, _, temperature, seed in cases]
    assert texts == plain_texts(engine, *bodies)


def test_usage_counts_tokens_drafts_and_the_prefix_of_an_earlier_turn(client):
    first = asked("Say what 2 + 3 is, please.")["messages"]

    def two_turns():
        before = client.chat.completions.create(model=MODEL, messages=first)
        answer = {"role": "assistant", "content": before.choices[0].message.content}
        choices = {"stream": True, "stream_options": {"include_usage": True}}
        turn = [*first, answer, *asked("And 4 + 5?")["messages"]]
        parts = list(client.chat.completions.create(model=MODEL, messages=turn, **choices))
        # The first turns are read whole, while the programs that keep caches and start from them are compiled.
        return parts if parts[-1].usage.prompt_tokens_details.cached_tokens else None

    *parts, last = wait_for(two_turns)
    usage, details = last.usage, last.usage.completion_tokens_details
    assert all(part.usage is None for part in parts) and last.choices == []
    assert usage.prompt_tokens_details.cached_tokens >= 16
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    # A round emits its accepted drafts and one token more; the prompt's pass emits the first token.
    rounds = usage.completion_tokens - 1 - details.accepted_prediction_tokens
    assert 0 < rounds and details.accepted_prediction_tokens + details.rejected_prediction_tokens <= 8 * rounds
    record = last.metrics["speculative_decoding"]  # as vLLM reports it
    both = details.accepted_prediction_tokens + details.rejected_prediction_tokens
    assert (record["num_spec_steps"], record["num_draft_tokens"]) == (rounds, both)


def test_a_plain_prompt_is_continued_as_text_or_as_ids(client):
    ids = client.completions.create(model=MODEL, prompt=[5, 6, 7, 8], max_tokens=5)
    assert (ids.usage.completion_tokens, ids.choices[0].finish_reason) == (5, "length")
    text = client.completions.create(model=MODEL, prompt="Laura starts with", max_tokens=3)
    assert text.choices[0].text and [model.id for model in client.models.list()] == [MODEL]


USER = {"role": "user", "content": "x"}
BAD = {
    "{": None,
    "[1]": None,
    "[" * 100_000: None,
    json.dumps(asked("\ud800")): "messages",
    json.dumps(asked()).replace("}", r', "role\ud800": 1}', 1): "messages",
    **{json.dumps(asked(**{name: value})): name for name, value in (
        ("logprobs", True), ("tools", [{"type": "function"}]), ("max_tokns", 1), ("temperature", "warm"),
        ("max_tokens", True), ("max_tokens", 0), ("max_completion_tokens", -1), ("min_tokens", -1), ("mode", "tree"),
        ("chat_template_kwargs", [1]), ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}), ("stop", ["a", 1]),
        ("stop", "a" * 100_000), ("reasoning_effort", "high"), ("messages", []), ("messages", [5]),
        ("messages", [{**USER, "role": "tool"}]), ("messages", [{**USER, "content": [{"type": "image_url"}]}]),
        ("temperature", -1), ("temperature", math.nan), ("top_p", 0), ("min_p", 1), ("top_k", 10**30),
    )},
    json.dumps(asked(max_tokens=4, min_tokens=5)): "min_tokens",
    json.dumps(asked(max_tokens=3, max_completion_tokens=4)): "max_tokens",
    json.dumps({"model": MODEL}): "messages",
}  # fmt: skip


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
def test_what_is_wrong_or_not_supported_is_refused_by_name_with_400(port, body):
    status, _, answer = post(port, body.encode())
    assert (status, answer["error"]["type"], answer["error"]["param"]) == (400, "invalid_request_error", BAD[body])
    message = answer["error"]["message"]
    assert "Traceback" not in message and "TypeError" not in message


def test_other_refusals_have_their_status(port):
    assert post(port, b'{"model": "\xff"}')[0] == 400
    assert post(port, asked() | {"model": "other"})[0] == 404
    assert post(port, b" " * (32 << 20))[0] == 413  # much more than a socket holds
    assert post(port, b" " * (32 << 20), path="/v1/other")[0] == 404
    assert post(port, asked(), **{"Content-Type": "text/plain"})[0] == 415  # what other sites' pages can send
    assert post(port, asked(), path="/v1/embeddings")[0] == 404
    status, _, answer = post(port, {"model": MODEL, "input": "x"}, path="/v1/responses")
    assert status == 404 and "/v1/chat/completions" in answer["error"]["message"]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.request("GET", "/v1/chat/completions")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    assert get(port, "/health") == (200, "ready") and "<!doctype html>" in get(port, "/")[1]


def test_a_key_is_needed_where_one_is_set(engine):
    with listening(engine, "secret") as port:
        for header in ("", "Bearer wrong", "secret", "Bearer é"):
            assert post(port, asked(max_tokens=1), Authorization=header)[0] == 401
        assert post(port, asked(max_tokens=1), Authorization="Bearer secret")[0] == 200


@pytest.mark.long
def test_too_many_requests_are_refused_at_once_and_all_others_answered(port):
    """Three rows and eight that may wait; 200 requests."""
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: post(port, asked(max_tokens=4)), range(200)))
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 11
    assert all("retry-after" in {name.lower() for name in headers} for status, headers, _ in answers if status == 429)
    texts = {answer["choices"][0]["message"]["content"] for status, _, answer in answers if status == 200}
    assert len(texts) == 1


def test_clients_that_vanish_free_their_rows(port):
    """In a stream, before its first token, and while they wait for a whole answer."""
    for stream in (True, False):
        connections = [raw_stream(port, asked(stream=stream, max_tokens=96)) for _ in range(6)]
        if stream:
            connections[0].recv(10)
        before = metric(port, "generation_tokens_total")
        for connection in connections:
            connection.close()
        wait_for(lambda: idle(port), 60)
        assert metric(port, "generation_tokens_total") - before < 6 * 96
    assert post(port, asked(max_tokens=2))[0] == 200


def test_a_slow_reader_and_half_sent_requests_hold_up_nobody(engine, port):
    slow = raw_stream(port, asked(stream=True))
    half = raw_stream(port, asked())
    half_open = [raw_stream(port, {}, b"POST /v1/chat/completions HTTP/1.1\r\nContent-Le") for _ in range(3)]
    status, _, answer = post(port, asked())
    [text] = plain_texts(engine, asked())
    assert status == 200 and answer["choices"][0]["message"]["content"] == text
    received = b""
    while b"[DONE]" not in received:
        time.sleep(0.005)
        received += slow.recv(64)
    lines = [json.loads(line[6:]) for line in received.decode().splitlines() if line.startswith("data: {")]
    assert "".join(part["choices"][0]["delta"]["content"] for part in lines) == text
    for connection in (slow, half, *half_open):
        connection.close()


def test_a_body_and_a_stream_that_never_end_are_cut_when_the_server_stops(engine, caplog, monkeypatch):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with listening(engine) as port:
        monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)  # a new server resets it
        half = raw_stream(port, {}, head + b"Content-Length: 500\r\nExpect: 100-continue\r\n\r\n{")
        assert half.recv(4096).startswith(b"HTTP/1.1 100")  # the application waits for the body
        stream = raw_stream(port, asked(stream=True, max_tokens=96))
        assert stream.recv(4096)
        monkeypatch.setattr(engine, "cancel", lambda request: None)
        monkeypatch.setattr(engine, "_step", lambda mode: time.sleep(0.01))  # no part comes any more
    with contextlib.closing(half), contextlib.closing(stream):
        assert half.recv(4096).startswith(b"HTTP/1.1 503")
    assert "Cancel" in caplog.text and "Traceback" not in caplog.text


def test_a_top_k_of_the_whole_vocabulary_is_off(engine):
    """Each power of two above it would be a program."""
    vocab = engine.served.generator.limits.vocab
    kept = [read_request(asked(top_k=top_k), True, engine.served) for top_k in (vocab - 1, vocab, 2**31 - 1)]
    assert [one.request.sampling.top_k for one in kept] == [vocab - 1, 0, 0]


def test_a_prompt_may_have_all_tokens_but_one(engine, port):
    most = engine.served.generator.limits.room(0)
    body = {"model": MODEL, "prompt": [5] * (most - 1), "max_tokens": 9}
    status, _, answer = post(port, body, "/v1/completions")
    assert (status, answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (200, 1, "length")
    status, _, answer = post(port, body | {"prompt": [5] * most}, "/v1/completions")
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")


@pytest.mark.parametrize("part", ["prefill", "advance"])
def test_a_step_without_memory_answers_its_requests_and_the_server_goes_on(port, monkeypatch, part):
    def fails(queue, *arguments):
        queue.state = None
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")

    wait_for(lambda: idle(port), 60)
    with monkeypatch.context() as patch:
        patch.setattr(Queue, part, fails)
        status, _, answer = post(port, asked())
        assert status == 500 and "RESOURCE_EXHAUSTED" in answer["error"]["message"]
    assert post(port, asked(max_tokens=3))[0] == 200


def test_another_error_ends_the_engine_and_answers_what_it_has(engine, monkeypatch):
    """The command then ends with exit code 1 and the error's traceback."""
    failing = type(engine)(lambda: contextlib.nullcontext(engine.served), 8, 120.0)
    failing.start()
    wait_for(lambda: failing.status == "ready")

    def fails(queue, rounds):
        raise ValueError("a fault")

    monkeypatch.setattr(Queue, "advance", fails)
    with listening(failing) as port, concurrent.futures.ThreadPoolExecutor(6) as pool:
        stream = raw_stream(port, asked(stream=True))
        answers = list(pool.map(lambda _: post(port, asked()), range(6)))
        assert {status for status, _, _ in answers} <= {500, 503}
        assert {answer["error"]["type"] for _, _, answer in answers} == {"server_error"}
        received = b"".join(iter(lambda: stream.recv(4096), b""))
        assert b"server_error" in received and b"[DONE]" not in received
        failing.join(60)
        assert isinstance(failing.failure, ValueError) and get(port, "/health")[0] == 503


def test_a_model_that_cannot_be_loaded_ends_the_command_with_its_exit_code(tmp_path):
    process, _ = start_command(tmp_path / "log", "--config.target.path=/nowhere/model")
    assert process.wait(120) == 2
    assert "/nowhere/model" in (tmp_path / "log").read_text() and "Traceback" not in (tmp_path / "log").read_text()


def test_an_idle_server_holds_no_batch(engine, port):
    """Its arrays are those of before the requests, but for the caches of finished texts."""

    def held() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    wait_for(lambda: idle(port), 60)
    engine.served.prefixes.clear()
    before = held()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: post(port, asked(max_tokens=8, seed=seed)), range(8)))
    wait_for(lambda: idle(port), 60)
    engine.served.prefixes.clear()
    wait_for(lambda: held() <= before, 20)


@pytest.mark.parametrize("place", [0, 20, 47])
def test_a_stop_string_ends_the_text_before_it_and_the_tokens_are_counted_to_its_end(engine, port, place):
    [ids] = plain_ids(engine, asked())
    decoded = [engine.served.tokenizer.decode(ids[:end], True) for end in range(1, len(ids) + 1)]
    text, stop = decoded[-1], decoded[-1][place : place + 7]  # several tokens
    tokens = 1 + next(count for count, begun in enumerate(decoded) if stop in begun)
    for stream in (False, True):
        before = metric(port, "generation_tokens_total")
        body = asked(stop=[stop, "nowhere"], stream=stream, stream_options={"include_usage": True})
        *chunks, answer = stream_of(port, body) if stream else [post(port, body)[2]]
        wait_for(lambda: idle(port), 60)
        assert metric(port, "generation_tokens_total") - before == answer["usage"]["completion_tokens"] == tokens
        if not stream:
            chunks = [{"choices": [choice | {"delta": choice["message"]}]} for choice in answer["choices"]]
        shown = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        assert (shown, chunks[-1]["choices"][0]["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_on_the_loopback_other_host_names_are_refused(engine):
    with listening(engine, hosts=LOOPBACK) as port:
        for host in ("localhost", "127.0.0.1:80", "[::1]:8000"):
            assert get(port, "/v1/models", Host=host)[0] == 200
        for host in ("example.com", "[", "localhost.example.com", ""):
            assert get(port, "/v1/models", Host=host) == (400, "Invalid host header")


def test_pages_of_an_allowed_origin_may_ask_and_others_may_not(engine):
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization,content-type"
    for origin, allowed in ((None, None), ("https://b.example", None), ("https://a.example", "https://a.example")):
        with listening(engine, origin=origin) as port:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            with contextlib.closing(connection):
                connection.request("OPTIONS", "/v1/chat/completions", headers=asks)
                answer = connection.getresponse()
                text = answer.read().decode()
            assert answer.getheader("Access-Control-Allow-Origin") == allowed
            assert (answer.status == 200) == bool(allowed) and (origin or "--allow_origin" in text)
            headers = post(port, asked(max_tokens=1), Origin="https://a.example")[1]
            assert ("access-control-allow-origin" in map(str.lower, headers)) == bool(allowed)
