"""Bodies as clients of the field send them with their defaults, and what their fields mean."""

import concurrent.futures
import json
import logging

import pytest

from domino_jax.decoding.requests import Request
from tests.helpers.serving import MODEL, QUESTION, asked, get, post, stream_of

pytestmark = pytest.mark.long

pytest.importorskip("starlette", reason="requirements-serve.txt is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USAGE = {"include_usage": True, "continuous_usage_stats": True}
LONG = {"max_completion_tokens": 8, "stream": True, "ignore_eos": True}
MESSAGES = asked()["messages"]
ECHO = {"role": "assistant", "content": "55", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
# Recorded with the versions in docs/serving.md; texts and lengths are shorter.
BODIES = {
    "guidellm": (CHAT, {**LONG, "stream_options": USAGE, "stop": None}),
    "sglang bench_serving": (CHAT, {**LONG, "temperature": 0.0}),
    "sglang --disable-ignore-eos": (CHAT, {**LONG, "ignore_eos": False}),
    "vllm bench serve": (TEXT, {"repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None, "stream": True}),
    "aiperf": (CHAT, {**LONG, "min_tokens": 8, "stream_options": USAGE}),
    "evalscope": (CHAT, {"max_tokens": 2048, "min_tokens": 1, "n": 1, "seed": 2**63 - 1, "top_k": -1, "top_p": 1.0}),
    "lm-eval": (TEXT, {"max_tokens": 256, "temperature": 0, "seed": 1234, "stop": ["\n\n"], "prompt": [[5], [7, 8]]}),
    "LangChain": (TEXT, {"max_tokens": 256, "temperature": 0.7, "prompt": ["a b", "c"], "logit_bias": {}, "n": 1}),
    "openai, echoed": (CHAT, {"messages": [*MESSAGES, ECHO, *MESSAGES], "max_tokens": 4, "store": False}),
    "litellm": (CHAT, {"max_tokens": 4, "tool_choice": "none", "tools": [], "parallel_tool_calls": True, "user": "me"}),
    "vLLM's examples": (CHAT, {"max_tokens": 4, "chat_template_kwargs": {"enable_thinking": False}, "min_tokens": 0}),
}


@pytest.fixture(scope="session")
def reads(engine):
    """What a body with these fields asks for."""
    from domino_jax.serving.protocol import read_request

    return lambda chat=True, **fields: read_request(
        {"model": MODEL, **({"messages": MESSAGES} if chat else {"prompt": "x"}), **fields}, chat, engine.served
    )


@pytest.mark.parametrize("client", BODIES)
def test_the_bodies_of_clients_are_answered(port, client):
    path, body = BODIES[client]
    body = {"model": MODEL, **({"messages": MESSAGES} if path == CHAT else {"prompt": "a b"}), **body}
    if body.get("stream"):
        assert stream_of(port, body, path)[-1]["choices" if "stream_options" not in body else "usage"]
    else:
        status, _, answer = post(port, body, path)
        assert status == 200, answer


NEUTRAL = [
    {"min_tokens": 0}, {"length_penalty": 1.0}, {"skip_special_tokens": True}, {"use_beam_search": False}, {"n": 1.0},
    {"stop_token_ids": []}, {"top_logprobs": 0}, {"modalities": ["text"]}, {"service_tier": "auto"}, {"best_of": 1},
    {"chat_template_kwargs": {}}, {"add_generation_prompt": True}, {"safety_identifier": "x"}, {"logprobs": False},
    {"stream_options": {"include_obfuscation": False}}, {"max_tokens": 5.0}, {"response_format": {"type": "text"}},
    {"reasoning_effort": "none"}, {"repeat_penalty": 1, "repeat_last_n": 64}, {"typical_p": 1.0}, {"mirostat": 0},
    {"dry_multiplier": 0.0, "dry_base": 1.75}, {"xtc_probability": 0, "xtc_threshold": 0.1}, {"top_n_sigma": -1.0},
    {"n_probs": 0, "grammar": "", "cache_prompt": True, "timings_per_token": True, "id_slot": -1}, {"unheard": 1},
]  # fmt: skip


def test_what_asks_for_nothing_is_accepted(reads):
    assert all(reads(**fields).prompt == reads().prompt for fields in NEUTRAL)


def test_all_that_would_change_the_text_is_refused_in_one_message_and_a_line_of_the_log(port, caplog):
    fields = {"logit_bias": {"5": 1}, "presence_penalty": 0.5, "n": 2, "tools": [{}], "temperature": "x"}
    fields |= {
        "temprature": 0.5,
        "repeat_penalty": 1.1,
        "typical_p": 0.9,
        "mirostat": 2,
        "grammar": "root",
        "echo": True,
    }
    body = asked(stream_options={"include_usages": True}, **fields)
    body["messages"][0]["tool_call_id"] = "x"
    names = [*fields, "stream_options.include_usages", "messages.tool_call_id"]
    with caplog.at_level(logging.WARNING):
        status, _, answer = post(port, body)
    assert status == 400
    for text in (answer["error"]["message"], caplog.text):
        assert all(name in text for name in names)


def test_messages_as_clients_send_them_back(engine, reads):
    def shown(*messages):
        return engine.served.tokenizer.decode(reads(messages=list(messages)).prompt)

    system, developer = ({"role": role, "content": "Be brief."} for role in ("system", "developer"))
    assert shown(developer, *MESSAGES) == shown(system, *MESSAGES)
    plain = shown(*MESSAGES, {"role": "assistant", "content": "55"}, *MESSAGES)
    assert shown(*MESSAGES, ECHO, {**MESSAGES[0], "name": "bob"}) == plain
    parts = [{"type": "text", "text": QUESTION[:9], "cache_control": {}}, {"type": "text", "text": QUESTION[9:]}]
    assert shown({"role": "user", "content": parts}) == shown(*MESSAGES)
    empty, null = ({"role": "assistant", "content": content} for content in ("", None))
    assert shown(*MESSAGES, empty, *MESSAGES) == shown(*MESSAGES, null, *MESSAGES)
    for name in ("reasoning", "reasoning_content"):  # the template of the target drops thoughts of earlier turns
        assert shown(*MESSAGES, {**ECHO, name: "hm"}, *MESSAGES) == plain


def test_thinking_seeds_and_top_k_have_their_usual_meanings(engine, reads):
    on, off = (reads(chat_template_kwargs={"enable_thinking": value}).prompt for value in (True, False))
    assert on != off == reads().prompt
    assert "<think>" in engine.served.tokenizer.decode(off) and "<think>" not in engine.served.tokenizer.decode(on)
    assert reads(seed=7).request.seed == 7 == reads(seed=7 + 2**63).request.seed
    assert reads(seed=-1).request.seed != reads(seed=-1).request.seed
    assert reads(top_k=-1, seed=1).request == reads(top_k=0, seed=1).request


def test_a_max_tokens_above_the_limit_is_cut_to_what_fits(port, reads):
    assert reads(max_tokens=5_000).request.max_new_tokens == 96  # the recipe's
    long = "x " * 90
    with_long = reads(messages=[{"role": "user", "content": long}], max_tokens=5_000)
    _, text = get(port, "/v1/models")
    [model] = json.loads(text)["data"]
    assert with_long.request.max_new_tokens == min(96, model["max_model_len"] - len(with_long.prompt)) < 5_000
    answer = post(port, asked(max_tokens=5_000, ignore_eos=True))[2]
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (96, "length")
    assert "max_tokens: it is 0, expected 1 or more" in post(port, asked(max_tokens=0))[2]["error"]["message"]


def test_ignore_eos_and_min_tokens_give_the_text_of_plain_decoding(engine, port, reads):
    served, prompt = engine.served, reads().prompt
    usual = post(port, asked(mode="draft"))[2]["usage"]["completion_tokens"]
    cases = ({"ignore_eos": True}, {"min_tokens": usual + 6})
    requests = [Request(0, 0, 96, served.generator.settings.sampling, **fields) for fields in cases]
    plain = served.generator.generate(served.models, [prompt] * 2, "autoregressive", requests).answers
    for fields, expected in zip(cases, plain, strict=True):
        answer = post(port, asked(mode="draft", **fields))[2]
        assert answer["choices"][0]["message"]["content"] == served.tokenizer.decode(expected.token_ids, True)
        assert answer["usage"]["completion_tokens"] == len(expected.token_ids) >= usual + 6


def test_until_min_tokens_no_stop_string_ends_the_answer_either(port):
    """As in vLLM, where the end of a stop string has to be after them. A later one ends it as usual."""
    text = post(port, asked(ignore_eos=True))[2]["choices"][0]["message"]["content"]
    stop = text[10:13]
    cut = post(port, asked(stop=stop))[2]["usage"]["completion_tokens"]
    late = text[text.index(stop) + len(stop) :][8:12]
    answer = post(port, asked(stop=[stop, late], min_tokens=cut, ignore_eos=True))[2]
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] > cut
    assert stop in answer["choices"][0]["message"]["content"]
    # Neither may a limit end it earlier in silence.
    _, _, answer = post(port, asked(min_tokens=97, max_tokens=500))
    assert "97" in answer["error"]["message"] and "96" in answer["error"]["message"]


def test_answers_have_the_ids_of_their_tokens_where_vllm_has_them(engine, port):
    decode = engine.served.tokenizer.decode
    for chat, path, body in (
        (True, CHAT, asked()),
        (False, TEXT, {"model": MODEL, "prompt": ["a b", "What is 2 + 3?"]}),
    ):
        body |= {"return_token_ids": True, "max_tokens": 12, "stop": ["qq"]}
        whole = post(port, body, path)[2]
        chunks = stream_of(port, body, path)
        for choice in whole["choices"]:
            parts = [(chunk, one) for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
            prompt = (whole if chat else choice)["prompt_token_ids"]
            assert decode(prompt) in (body.get("prompt") or [decode(prompt)])
            text = choice["message"]["content"] if chat else choice["text"]
            assert decode(choice["token_ids"], skip_special_tokens=True) == text
            assert sum((part["token_ids"] for _, part in parts), []) == choice["token_ids"]
            holders = [chunk if chat else part for chunk, part in parts]
            assert holders[0]["prompt_token_ids"] == prompt
            assert all("prompt_token_ids" not in holder for holder in holders[1:])
        assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    assert "token_ids" not in post(port, asked(max_tokens=2))[2]["choices"][0]


def test_a_stream_has_what_load_testers_read(port):
    """The first text in the first chunk, whose arrival is that of the first token however long it waited;
    the usage so far in every chunk, and the times in the last one."""
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        others = [pool.submit(post, port, asked(seed=seed, temperature=1.0)) for seed in range(4)]
        first, *rest, last = stream_of(port, asked(stream_options=USAGE))
        assert all(other.result()[0] == 200 for other in others)
    assert first["choices"][0]["delta"]["role"] == "assistant" and first["choices"][0]["delta"]["content"]
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in rest)
    counts = [chunk["usage"]["completion_tokens"] for chunk in (first, *rest)]
    assert counts == sorted(counts) and counts[0] < counts[-1] and rest[-1]["usage"] == last["usage"]
    assert last["metrics"]["queue_time_ms"] >= 0 and last["metrics"]["time_to_first_token_ms"] > 0
    assert all("usage" not in chunk for chunk in stream_of(port, asked(max_tokens=4)))
    several = post(port, {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 2}, TEXT)[2]
    assert "queue_time_ms" not in several["metrics"]


def test_each_prompt_of_a_list_is_answered_as_if_it_came_alone(port):
    prompts = ["Laura starts with", "a b", "What is 2 + 3?"]
    body = {"model": MODEL, "max_tokens": 9, "seed": 5, "temperature": 0.8, "stop": "."}
    alone = [post(port, {**body, "prompt": prompt}, TEXT)[2] for prompt in prompts]
    whole = post(port, {**body, "prompt": prompts}, TEXT)[2]
    texts = [answer["choices"][0]["text"] for answer in alone]
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == list(enumerate(texts))
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert whole["usage"][name] == sum(answer["usage"][name] for answer in alone)
    *chunks, last = stream_of(port, {**body, "prompt": prompts, "stream_options": USAGE}, TEXT)
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert ["".join(part["text"] for part in parts if part["index"] == index) for index in range(3)] == texts
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert post(port, {**body, "prompt": ["a", 5]}, TEXT)[0] == post(port, {**body, "prompt": []}, TEXT)[0] == 400


def test_readers_of_lines_do_not_cut_an_event():
    from domino_jax.serving.app import Json, line

    for letter in ("\u2028", "\u2029", "\u0085", "\u000b", "\U0001f600", "é"):
        value = {"content": f"one{letter}two"}
        [event] = [part for part in line(value).splitlines() if part]
        assert json.loads(event.removeprefix("data: ")) == value == json.loads(Json(value).body)


def test_clients_find_the_model_and_its_length(engine, port):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    model = client.models.retrieve(MODEL)
    assert model.max_model_len == engine.served.generator.limits.room(0) > 96
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.models.retrieve("other/model")


def test_counters_may_have_the_prefix_that_vllms_clients_read():
    from prometheus_client import generate_latest

    from domino_jax.serving.metrics import Metrics

    names = {line.split()[0] for line in generate_latest(Metrics("vllm").registry).decode().splitlines()}
    parts = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert {f"vllm:spec_decode_{part}_total" for part in parts} <= names
