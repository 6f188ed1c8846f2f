"""OpenAI's requests and answers as plain values: what a body asks for, its refusals, and the objects of an answer."""

import dataclasses
import json
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from domino_jax.data.chat import encode_prompt
from domino_jax.decoding.acceptance import acceptance_record
from domino_jax.decoding.requests import Request, request_of
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.decoding.text_stream import TextStream
from domino_jax.runtime.errors import DataError, DominoError, quote
from domino_jax.runtime.keys import LARGEST
from domino_jax.serving.engine import Refusal, Served, Update

NUMBER, TEXTS = (int, float), (str, list)
# {field: types of its value}; null is as if the field were absent.
FIELDS = {"model": str, "user": str, "mode": str, "stream": bool, "rounds": bool, "drafts": bool}
FIELDS |= {"stream_options": dict, "stop": TEXTS, "min_p": NUMBER}
FIELDS |= {"max_tokens": int, "n": int, "seed": int, "top_k": int, "temperature": NUMBER, "top_p": NUMBER}
CHAT_FIELDS = FIELDS | {"messages": list, "max_completion_tokens": int}
TEXT_FIELDS = FIELDS | {"prompt": TEXTS}
# Fields of OpenAI that are not supported, with the value that asks for nothing.
OFF = {"logprobs": False, "tools": [], "functions": [], "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
OFF |= {"best_of": 1, "echo": False, "suffix": "", "response_format": {"type": "text"}}
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
ROLES = ("system", "user", "assistant")
MOST_STOPS, LONGEST_STOP = 16, 1_000  # characters: each token is compared with the beginnings of all stop strings


@dataclasses.dataclass(frozen=True)
class Asked:
    """A body's request. rounds, drafts: the stream also has each token's round, and the drafts that rounds rejected."""

    prompt: list[int]
    request: Request
    mode: str
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    rounds: bool
    drafts: bool


def parse_body(body: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Refusal(f"the body is not JSON in UTF-8, or nested too deeply ({type(error).__name__}).") from error
    if not isinstance(raw, dict):
        raise Refusal(f"the body is a {type(raw).__name__}, expected a JSON object.")
    return {name: value for name, value in raw.items() if value is not None}


def read_request(raw: dict[str, Any], chat: bool, served: Served) -> Asked:
    """What a body asks for. Raises Refusal with the name of the field that is wrong or not supported."""
    _check_fields(raw, CHAT_FIELDS if chat else TEXT_FIELDS)
    _need(raw.get("n", 1) == 1, "n", "only n = 1 is supported")
    _need("model" in raw, "model", f"name the model, {served.name!r}")
    if raw["model"] != served.name:
        message = f"model {quote(raw['model'])} is not served here; the model is {served.name!r}."
        raise Refusal(message, 404, "model", "model_not_found")
    mode = raw.get("mode", served.modes[-1])
    _need(mode in served.modes, "mode", f"this server has {', '.join(served.modes)}")
    options = raw.get("stream_options", {})
    _need(set(options) <= {"include_usage"}, "stream_options", "only include_usage is supported")
    include_usage = options.get("include_usage", False)
    _need(isinstance(include_usage, bool), "stream_options", "include_usage is true or false")
    prompt = _encode(raw, chat, served)
    settings = served.generator.settings
    try:
        request = _request(raw, prompt, served, settings)
        served.generator.check_prompt(prompt, "the request", request)
    except DominoError as error:
        raise Refusal(str(error)) from error
    stream, rounds, drafts = (raw.get(name, False) for name in ("stream", "rounds", "drafts"))
    return Asked(prompt, request, mode, _stops(raw), stream, include_usage, rounds, drafts)


def _check_fields(raw: dict[str, Any], fields: dict[str, Any]) -> None:
    for name, value in raw.items():
        if name in OFF:
            off = OFF[name]
            same = value == off and isinstance(value, bool) == isinstance(off, bool)
            _need(same, name, "it is not supported; leave it out")
            continue
        _need(name in fields, name, "it is not a field that is supported here; leave it out")
        kinds = fields[name] if isinstance(fields[name], tuple) else (fields[name],)
        fine = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        _need(fine, name, f"it is {quote(value)}, expected {' or '.join(kind.__name__ for kind in kinds)}")


def _need(fine: bool, name: str, change: str) -> None:
    if not fine:
        raise Refusal(f"{quote(name)[1:-1]}: {change}.", param=name)


def _stops(raw: dict[str, Any]) -> tuple[str, ...]:
    stops = raw.get("stop", [])
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    fine = len(stops) <= MOST_STOPS and all(isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops)
    _need(fine, "stop", f"give a text or at most {MOST_STOPS} of them, each of 1 to {LONGEST_STOP:,} characters")
    return stops


def _encode(raw: dict[str, Any], chat: bool, served: Served) -> list[int]:
    name = "messages" if chat else "prompt"
    _need(name in raw, name, "it is missing")
    row = {"messages": [_message(message) for message in raw[name]]} if chat else _prompt(raw[name])
    try:
        return encode_prompt(served.tokenizer, row, served.generator.settings.thinking, name, today=True)
    except DataError as error:
        raise Refusal(str(error), param=name) from error


def _message(message: Any) -> dict[str, Any]:
    _need(isinstance(message, dict), "messages", f"a message is {quote(message)}, expected an object")
    other = sorted(set(message) - {"role", "content"})
    _need(not other, "messages", f"a message has {quote(other)[1:-1]}; only role and content are supported")
    _need(message.get("role") in ROLES, "messages", f"roles are {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        texts = all(isinstance(part, dict) and part.get("type") == "text" for part in content)
        texts = texts and all(isinstance(part.get("text"), str) and len(part) == 2 for part in content)
        _need(texts, "messages", "parts of a content are {type: text, text: …}; images and files are not supported")
        content = "".join(part["text"] for part in content)
    return {**message, "content": content}


def _prompt(prompt: str | list) -> dict[str, Any]:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        _need(len(prompt) == 1, "prompt", f"there are {len(prompt)} prompts; send one a request")
        [prompt] = prompt
        _need(isinstance(prompt, TEXTS), "prompt", "give a text or a list of token ids")
    return {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt}


def _request(raw: dict[str, Any], prompt: list[int], served: Served, settings: DecodeSettings) -> Request:
    limits = {raw[name] for name in ("max_tokens", "max_completion_tokens") if name in raw}
    _need(len(limits) <= 1, "max_tokens", "it is not equal to max_completion_tokens; give one of them")
    room = max(min(settings.max_new_tokens, served.generator.limits.room(0) - len(prompt)), 1)
    row = {"id": "of the request", "max_new_tokens": limits.pop() if limits else room}
    row |= {name: raw.get(name, getattr(settings.sampling, name)) for name in SAMPLING}
    # As a prompt row with a seed has it, so that `decode` gives the same text.
    return request_of({**row, "seed": raw.get("seed", secrets.randbelow(LARGEST))}, 0)


# --------------------------------------------------------------------------------------------------------- answers


class Answer:
    """One answer as it comes: its text, cut before the first stop string, and the objects that state it."""

    def __init__(self, asked: Asked, chat: bool, served: Served):
        self.asked, self.chat = asked, chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created, self.model = int(time.time()), served.name
        self.tokens, self.rounds, self.drafted, self.cached = 0, [], 0, 0
        self.finish_reason: str | None = None
        self._tokenizer, self._stream, self._held = served.tokenizer, TextStream(served.tokenizer), ""

    def add(self, update: Update) -> list[str]:
        """The text that each of the update's tokens makes certain, up to a stop string."""
        self.drafted, self.cached, texts = update.drafted, update.cached, []
        self.rounds += update.accept_lengths
        for place, token in enumerate(update.token_ids):
            last = update.finish_reason is not None and place + 1 == len(update.token_ids)
            self.tokens += 1
            texts.append(self._cut(self._stream.add([token], last=last), last))
            if self.finish_reason:
                return texts
        self.finish_reason = update.finish_reason
        return texts

    def _cut(self, text: str, last: bool) -> str:
        held, stops = self._held + text, self.asked.stop
        places = [place for place in (held.find(stop) for stop in stops) if place >= 0]
        if places:
            self.finish_reason = "stop"
            return held[: min(places)]
        # What may be the beginning of a stop string waits for the next token.
        sizes = ((stop, size) for stop in stops for size in range(1, min(len(stop), len(held) + 1)))
        starts = (size for stop, size in sizes if held.endswith(stop[:size]))
        waits = 0 if last else max(starts, default=0)
        self._held = held[len(held) - waits :]
        return held[: len(held) - waits]

    def usage(self) -> dict[str, Any]:
        prompt, accepted = len(self.asked.prompt), sum(self.rounds) - len(self.rounds)
        drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": self.drafted - accepted}
        details = {"prompt_tokens_details": {"cached_tokens": self.cached}, "completion_tokens_details": drafts}
        counts = {"prompt_tokens": prompt, "completion_tokens": self.tokens, "total_tokens": prompt + self.tokens}
        return counts | details

    def whole(self, text: str) -> dict[str, Any]:
        """The object of an answer that is not streamed."""
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {**self._head(), "choices": [self._choice(content)], "usage": self.usage(), **self._metrics()}

    def chunk(self, text: str, **more: Any) -> dict[str, Any]:
        """One object of a stream."""
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        usage = {"usage": None} if self.asked.include_usage else {}
        return {**self._head(".chunk"), "choices": [self._choice(content)], **usage, **more}

    def first_chunk(self) -> dict[str, Any]:
        chunk = self.chunk("")
        chunk["choices"][0]["delta"]["role"] = "assistant"
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head(".chunk"), "choices": [], "usage": self.usage(), **self._metrics()}

    def details(self, texts: Sequence[str], update: Update) -> dict[str, Any]:
        """What the page shows of an update: [text, round in it, whether it is the bonus token] of each token.

        The first token of an answer, from the prefill, has the round -1.
        """
        places = [(-1, False)] * (len(update.token_ids) - sum(update.accept_lengths))
        for number, length in enumerate(update.accept_lengths):
            places += [(number, place + 1 == length) for place in range(length)]
        if not update.accept_lengths:  # plain decoding: each token is a round
            places = [(number - (update.seconds == 0), False) for number in range(len(update.token_ids))]
        tokens = [[text, *place] for text, place in zip(texts, places, strict=False)]
        rejected = [self._tokenizer.decode([draft]) for draft in update.rejected]
        counts = {"rounds": update.accept_lengths, "drafted": update.drafted, "seconds": update.seconds}
        return {"tokens": tokens, "rejected": rejected, **counts}

    def _metrics(self) -> dict[str, Any]:
        """Where vLLM has it, so that AIPerf reads it."""
        return {"metrics": {"speculative_decoding": acceptance_record(Counter(self.rounds), self.drafted)}}

    def _choice(self, content: dict[str, Any]) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": self.finish_reason}

    def _head(self, suffix: str = "") -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
