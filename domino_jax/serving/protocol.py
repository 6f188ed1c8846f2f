"""OpenAI's requests and answers as plain values: what a body asks for, its refusals, and the objects of an answer."""

import copy
import dataclasses
import inspect
import json
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.acceptance import acceptance_record
from domino_jax.decoding.generate import Generator
from domino_jax.decoding.requests import Request, request_of
from domino_jax.decoding.text_stream import TextStream
from domino_jax.method.settings import SAMPLING_VALUES, SamplingParams
from domino_jax.runtime.errors import DataError, DominoError, quote
from domino_jax.runtime.keys import LARGEST
from domino_jax.serving.fields import (
    CHAT,
    CHAT_CHANGES,
    MESSAGE,
    PART,
    STREAM_OPTIONS,
    TEXT,
    TEXT_CHANGES,
    read_fields,
)
from domino_jax.serving.requests import AnswerPart, Refusal, ServedModel

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MOST_STOPS, LONGEST_STOP = 16, 1_000  # characters: each token is compared with the beginnings of all stop strings
LONGEST_MESSAGE = 2_000  # characters of a refusal
MOST_PROMPTS = 1_024  # of a body


@dataclasses.dataclass(frozen=True)
class BodyRequest:
    """A request for one prompt, as a body states it.

    rounds: the stream also has each token's round.
    continuous_usage: every chunk of the stream has the usage so far.
    return_token_ids: the answer also has the ids of its tokens and of the prompt's, where vLLM has them.
    """

    prompt: list[int]
    request: Request
    mode: str
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    rounds: bool
    continuous_usage: bool
    return_token_ids: bool


def read_requests(body: bytes, chat: bool, served: ServedModel) -> list[BodyRequest]:
    """The requests for each prompt of a body, as if each came alone. Raises Refusal."""
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Refusal(f"the body is not JSON in UTF-8, or nested too deeply ({type(error).__name__}).") from error
    if not isinstance(raw, dict):
        raise Refusal(f"the body is a {type(raw).__name__}, expected a JSON object.")
    prompts = raw.get("prompt")
    if chat or not isinstance(prompts, list) or not prompts or isinstance(prompts[0], (int, float)):
        return [read_request(raw, chat, served)]
    _need(len(prompts) <= MOST_PROMPTS, "prompt", f"send at most {MOST_PROMPTS:,} texts at once")
    return [read_request({**raw, "prompt": prompt}, chat, served) for prompt in prompts]


def read_request(raw: dict[str, Any], chat: bool, served: ServedModel) -> BodyRequest:
    """The request of a body with one prompt. Raises Refusal with the names of the fields that are wrong."""
    problems: dict[str, str] = {}
    fields = read_fields(raw, *((CHAT, problems, CHAT_CHANGES) if chat else (TEXT, problems, TEXT_CHANGES)))
    options = read_fields(fields.get("stream_options", {}), STREAM_OPTIONS, problems, within="stream_options.")
    messages = [_message(message, problems) for message in fields.get("messages", [])]
    if problems:
        text = " ".join(f"{name}: {problem}." for name, problem in problems.items())
        raise Refusal(text[:LONGEST_MESSAGE], param=next(iter(problems)).partition(".")[0])
    _need("model" in fields, "model", f"name the model, {served.name!r}")
    if fields["model"] != served.name:
        message = f"model {quote(fields['model'])} is not served here; the model is {served.name!r}."
        raise Refusal(message, 404, "model", "model_not_found")
    mode = fields.get("mode", served.modes[-1])
    _need(mode in served.modes, "mode", f"this server has {', '.join(served.modes)}")
    effort = fields.get("reasoning_effort", "none")
    _need(effort == "none", "reasoning_effort", f"it is {quote(effort)}; send none, or chat_template_kwargs")
    prompt = _encode(fields, messages if chat else None, served)
    stop = _stops(fields)
    try:
        request = _request(fields, prompt, served.generator)
        served.generator.check_prompt(prompt, "the request", request)
    except DominoError as error:
        raise Refusal(str(error)) from error
    chosen = {name: fields.get(name, False) for name in ("stream", "rounds", "return_token_ids")}
    usage, continuous = (options.get(name, False) for name in ("include_usage", "continuous_usage_stats"))
    chosen |= {"include_usage": usage, "continuous_usage": usage and continuous}
    return BodyRequest(prompt, request, mode, stop, **chosen)


def _need(fine: bool, name: str, change: str) -> None:
    if not fine:
        raise Refusal(f"{name}: {change}.", param=name)


def _stops(fields: dict[str, Any]) -> tuple[str, ...]:
    stops = fields.get("stop", [])
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    fine = len(stops) <= MOST_STOPS and all(isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP for stop in stops)
    _need(fine, "stop", f"give a text or at most {MOST_STOPS} of them, each of 1 to {LONGEST_STOP:,} characters")
    return stops


def _encode(fields: dict[str, Any], messages: list[dict] | None, served: ServedModel) -> list[int]:
    name = "prompt" if messages is None else "messages"
    _need(name in fields, name, "it is missing")
    if messages is None:
        row = {"prompt" if isinstance(fields[name], str) else "token_ids": fields[name]}
    else:
        variables = fields.get("chat_template_kwargs", {})
        if "reasoning_effort" in fields:  # "none" is without thoughts, as in vLLM
            variables = {"enable_thinking": False} | variables
        # A template of the client's could run for hours.
        parameters = inspect.signature(served.tokenizer.apply_chat_template).parameters if served.tokenizer else ()
        taken = sorted(set(parameters) & set(variables))
        _need(not taken, "chat_template_kwargs", f"{', '.join(taken)} cannot be chosen by requests; leave it out")
        row = {"messages": messages, "chat_template_kwargs": variables}
    try:
        return TextCodec(served.tokenizer, served.generator.settings.thinking, today=True).encode(row, name)
    except DataError as error:
        raise Refusal(str(error), param=name) from error


def _message(message: Any, problems: dict[str, str]) -> dict[str, Any]:
    """A message as the chat template reads it."""
    _need(isinstance(message, dict), "messages", f"a message is {quote(message)}, expected an object")
    fields = read_fields(message, MESSAGE, problems, within="messages.")
    role, content = fields.get("role"), fields.get("content")
    if role not in ROLES:
        problems["messages.role"] = f"it is {quote(message.get('role'))}, expected one of {', '.join(ROLES)}"
    if isinstance(content, list):
        content = "".join(_part(part, problems) for part in content)
    elif content is None and role == "assistant":
        content = ""  # an answer without text, as clients send it back
    thoughts = fields.pop("reasoning", None)
    fields |= {"reasoning_content": thoughts} if thoughts and "reasoning_content" not in fields else {}
    return {**fields, "role": ROLES.get(role), "content": content}


def _part(part: Any, problems: dict[str, str]) -> str:
    fields = read_fields(part, PART, problems, within="messages.content.") if isinstance(part, dict) else {}
    if fields.get("type") != "text" or "text" not in fields:
        problems["messages.content"] = "its parts are {type: text, text: …}; images and files are not supported"
    return fields.get("text", "")


def _request(fields: dict[str, Any], prompt: list[int], generator: Generator) -> Request:
    settings = generator.settings
    limits = {fields[name]: name for name in ("max_tokens", "max_completion_tokens") if name in fields}
    _need(len(limits) <= 1, "max_tokens", "it is not equal to max_completion_tokens; give one of them")
    most = generator.limits.room(0)
    if len(prompt) >= most:
        text = f"the prompt has {len(prompt):,} tokens, and room is for {most - 1:,} (max_model_len is {most:,})."
        raise Refusal(text, 400, "messages" if "messages" in fields else "prompt", "context_length_exceeded")
    # A larger limit than there is room for is cut, as in vLLM: the answer then ends with `length`.
    room = min(settings.max_new_tokens, most - len(prompt))
    limit, name = limits.popitem() if limits else (room, "max_tokens")
    _need(limit >= 1, name, f"it is {limit}, expected 1 or more; an answer has at least one token")
    least, limit = fields.get("min_tokens", 0), min(limit, room)
    _need(0 <= least <= limit, "min_tokens", f"it is {least}, but this answer can have {limit} tokens; lower it")
    row = {"id": "of the request", "max_new_tokens": limit}
    row |= {name: fields.get(name, getattr(settings.sampling, name)) for name in SAMPLING_VALUES}
    row["top_k"] = 0 if row["top_k"] == -1 else row["top_k"]  # both are off, in vLLM and SGLang too
    if problem := SamplingParams(**{name: row[name] for name in SAMPLING_VALUES}).problem():
        raise Refusal(str(problem), param=problem.name)
    row["top_k"] = row["top_k"] if row["top_k"] < generator.limits.vocab else 0  # each larger one would be a program
    # As a prompt row with a seed has it, so that `decode` gives the same text. -1 is no seed, as in vLLM.
    seed = fields.get("seed", -1)
    row["seed"] = secrets.randbelow(LARGEST) if seed == -1 else seed % (LARGEST + 1)
    choices = {"min_tokens": least, "ignore_eos": fields.get("ignore_eos", False)}
    return dataclasses.replace(request_of(row, 0), **choices)


# --------------------------------------------------------------------------------------------------------- answers


class Answer:
    """The answer to one prompt as it comes: its text, cut before the first stop string, and the objects that state it.

    token_ids: up to that cut.  cut: the last part, with its tokens up to there.  rounds, drafted: as they ran.
    times: how long the request waited for a row and then for its first token, as vLLM states it.
    """

    def __init__(self, body: BodyRequest, chat: bool, served: ServedModel, index: int, name: str):
        self.body, self.chat, self.index, self.id = body, chat, index, name
        self.created, self.model = int(time.time()), served.name
        self.prompt_tokens, self.token_ids, self.rounds, self.drafted, self.cached = len(body.prompt), [], [], 0, 0
        self.times: dict[str, float] = {}
        self.finish_reason: str | None = None
        self.cut: AnswerPart | None = None
        self._stream, self._held, self._started = TextStream(served.tokenizer), "", False

    def add(self, part: AnswerPart) -> list[str]:
        """The text that each of the part's tokens makes certain, up to a stop string."""
        texts = []
        if not self.token_ids:
            seconds = {"queue_time_ms": part.queued, "time_to_first_token_ms": part.first}
            self.times = {name: round(1_000 * value, 3) for name, value in seconds.items()}
        for token in part.token_ids:
            last = part.finish_reason is not None and len(texts) + 1 == len(part.token_ids)
            early = len(self.token_ids) + len(texts) < self.body.request.min_tokens
            texts.append(self._cut_text(self._stream.add([token], last=last), last, early))
            if self.finish_reason:
                break
        self.finish_reason = self.finish_reason or part.finish_reason
        tokens = part.token_ids[: len(texts)]
        self.cut = dataclasses.replace(part, token_ids=tokens, finish_reason=self.finish_reason)
        self.token_ids += tokens
        self.rounds += part.accept_lengths
        self.drafted, self.cached = self.drafted + part.drafts, part.cached
        return texts

    def _cut_text(self, text: str, last: bool, early: bool) -> str:
        """The text that is certain. early: it is of the first min_tokens tokens, in which no stop string ends."""
        held, stops, before = self._held + text, self.body.stop, len(self._held)
        places = [place for place in (held.find(stop, max(before + 1 - len(stop), 0)) for stop in stops) if place >= 0]
        if places and not early:
            self.finish_reason = "stop"
            return held[: min(places)]
        # Text that may begin a stop string waits for the next token.
        sizes = ((stop, size) for stop in stops for size in range(1, min(len(stop), len(held) + 1)))
        starts = (size for stop, size in sizes if held.endswith(stop[:size]))
        waits = 0 if last else max(starts, default=0)
        self._held = held[len(held) - waits :]
        return held[: len(held) - waits]

    def usage(self) -> dict[str, Any]:
        accepted = sum(self.rounds) - len(self.rounds)
        drafts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": self.drafted - accepted}
        details = {"prompt_tokens_details": {"cached_tokens": self.cached}, "completion_tokens_details": drafts}
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.token_ids)}
        return {**counts, "total_tokens": self.prompt_tokens + len(self.token_ids), **details}

    def chunk(self, text: str, usage: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
        """One object of a stream. The first one has the role: clients take its arrival for that of the first token."""
        first, self._started = not self._started, True
        role = {"role": "assistant"} if first and self.chat else {}
        choice, extra = self.choice({"delta": {**role, "content": text}} if self.chat else {"text": text}, first)
        usage = {"usage": usage} if self.body.include_usage else {}
        return {**self.head(".chunk"), "choices": [choice], **usage, **extra, **more}

    def details(self, texts: Sequence[str]) -> dict[str, Any]:
        """The last part as the page shows it: [text, round in it, whether it is the bonus token] of each token.

        The first token of an answer, from the prefill, has the round -1.
        """
        part = self.cut
        places = [(-1, False)] * (len(self.token_ids) == len(texts))
        for number, length in enumerate(part.accept_lengths):
            places += [(number, place + 1 == length) for place in range(length)]
        if not part.accept_lengths:  # plain decoding: each token is a round
            places = [(number - (part.seconds == 0), False) for number in range(len(part.token_ids))]
        tokens = [[text, *place] for text, place in zip(texts, places, strict=False)]
        return {"tokens": tokens, "rounds": part.accept_lengths, "drafted": self.drafted, "seconds": part.seconds}

    def totals(self) -> dict[str, Any]:
        """The usage, and the acceptance and the times where vLLM has them: AIPerf and `vllm bench serve` read them."""
        acceptance = acceptance_record(Counter(self.rounds), self.drafted)
        return {"usage": self.usage(), "metrics": {"speculative_decoding": acceptance, **self.times}}

    def choice(self, content: dict[str, Any], first: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the choice, fields beside `choices`), of a chunk or of the whole answer. first: its tokens begin here."""
        choice = {"index": self.index, **content, "logprobs": None, "finish_reason": self.finish_reason}
        if not self.body.return_token_ids:
            return choice, {}
        choice["token_ids"] = self.cut.token_ids if self.body.stream else self.token_ids
        prompt = {"prompt_token_ids": self.body.prompt} if first else {}
        return (choice, prompt) if self.chat else (choice | prompt, {})

    def head(self, suffix: str = "") -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def whole(answers: Sequence[Answer], texts: Sequence[str]) -> dict[str, Any]:
    """The object of a request that is not streamed."""
    total = summed(answers)
    contents = ({"message": {"role": "assistant", "content": text}} if total.chat else {"text": text} for text in texts)
    pairs = [answer.choice(content) for answer, content in zip(answers, contents, strict=True)]
    return {**total.head(), "choices": [choice for choice, _ in pairs], **pairs[0][1], **total.totals()}


def summed(answers: Sequence[Answer]) -> Answer:
    """The counts of a request's answers together; times are of a single one."""
    total = copy.copy(answers[0])
    for name in ("prompt_tokens", "drafted", "cached"):
        setattr(total, name, sum(getattr(answer, name) for answer in answers))
    for name in ("rounds", "token_ids"):
        setattr(total, name, [one for answer in answers for one in getattr(answer, name)])
    total.times = total.times if len(answers) == 1 else {}
    return total
