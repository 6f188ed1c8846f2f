"""A running server asked for greedy answers to prompts, through the API of its engine (docs/serving.md).

The model card of /v1/models names the engine. Four engines read a prompt as token ids and state the ids of the answer;
any other server gets texts, and its answers are encoded again.
"""

import http.client
import json
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from domino_jax.data.answer_files import AnswerFiles
from domino_jax.data.chat import TextCodec, closing_token
from domino_jax.decoding.conversations import AnsweredPrompt, output_row
from domino_jax.decoding.generate import Generation
from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.runtime.errors import DominoError, first_line
from domino_jax.runtime.journal import Journal
from domino_jax.runtime.progress import Progress

SECONDS = 600.0  # that a server has for an answer
COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+)_total\{(.*)\} (\S+)$", re.MULTILINE)


class ServerAnswer(NamedTuple):
    """The answer of a server. token_ids: None where it states only a text.  stopped: by a token, not a limit.

    counts: "rounds", their "drafts", and where it is known the rounds that "kept_first", their first draft; None where
        no acceptance is stated.
    """

    token_ids: list[int] | None
    stopped: bool
    prompt_tokens: int
    counts: Mapping[str, int] | None
    text: str = ""


def read_completion(raw: dict[str, Any]) -> ServerAnswer:
    """An answer of domino_jax, or of vLLM, whose counts need --per-request-spec-decode-metrics=summary (0.32, 0.33)."""
    choice, counts = raw["choices"][0], (raw.get("metrics") or {}).get("speculative_decoding")
    if counts:
        rounds, histogram = counts["num_spec_steps"], counts["acceptance_histogram"]
        counts = {"rounds": rounds, "drafts": counts["num_draft_tokens"], "kept_first": rounds - histogram[0]}
    return ServerAnswer(
        choice["token_ids"], choice["finish_reason"] == "stop", raw["usage"]["prompt_tokens"], counts or None
    )


def read_generate(raw: dict[str, Any]) -> ServerAnswer:
    """An answer of SGLang 0.5.23 or sglang-jax, which states no acceptance."""
    meta, counts = raw["meta_info"], None
    if "spec_verify_ct" in meta:
        counts = {"rounds": meta["spec_verify_ct"], "drafts": meta["spec_num_proposed_drafts"]}
        if histogram := meta.get("spec_correct_drafts_histogram"):
            counts["kept_first"] = counts["rounds"] - histogram[0]
    return ServerAnswer(raw["output_ids"], meta["finish_reason"]["type"] == "stop", meta["prompt_tokens"], counts)


def read_llama(raw: dict[str, Any]) -> ServerAnswer:
    """An answer of llama.cpp. The prefill emits the first token, each round its accepted drafts and one token more."""
    timings, counts = raw["timings"], None
    if "draft_n" in timings:
        rounds = timings["predicted_n"] - 1 - timings["draft_n_accepted"]
        counts = {"rounds": rounds, "drafts": timings["draft_n"]}
    return ServerAnswer(raw["tokens"], raw["stop_type"] != "limit", raw["tokens_evaluated"], counts)


def read_text(raw: dict[str, Any]) -> ServerAnswer:
    """A chat or text completion of any server. A text without its thoughts is not whole, so it is read as empty."""
    choice = raw["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    text = "" if message.get("reasoning") or message.get("reasoning_content") else message["content"] or ""
    return ServerAnswer(None, choice["finish_reason"] == "stop", raw["usage"]["prompt_tokens"], None, text)


# By owned_by of the model card: the path, (ids of a prompt, most new tokens) → the body, the reader of the answer.
COMPLETIONS = (
    "/v1/completions",
    lambda ids, most: {"prompt": ids, "max_tokens": most, "temperature": 0, "return_token_ids": True},
    read_completion,
)
ENGINES = {
    "domino_jax": COMPLETIONS,
    "vllm": COMPLETIONS,
    "sglang": (
        "/generate",
        lambda ids, most: {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": most, "skip_special_tokens": False},
        },
        read_generate,
    ),
    "llamacpp": (
        "/completion",
        lambda ids, most: {"prompt": ids, "n_predict": most, "temperature": 0, "return_tokens": True},
        read_llama,
    ),
}


class Server:
    """A server at a URL.  most: new tokens of an answer.

    Raises:
        DominoError: nothing answers there, the key is wrong, or none of several models has the target's name.
    """

    def __init__(self, url: str, key: str | None, target_path: str, most: int):
        self.url, self.most = url, most
        self.parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        cards, name = self.ask("/v1/models", None, lambda raw: raw["data"]), pathlib.PurePath(target_path).name
        named = [card for card in cards if pathlib.PurePath(card.get("root") or card["id"]).name == name]
        if not named and len(cards) != 1:
            listed = ", ".join(card["id"] for card in cards)
            raise DominoError(f"{url} serves {listed or 'no model'}, but config.target.path is {target_path}.")
        card = (named or cards)[0]
        self.model, self.engine = card["id"], card.get("owned_by")
        self.facts = {"url": url, "engine": self.engine, "model": self.model}

    def ask(self, path: str, body: Mapping[str, Any] | None, read: Callable[[Any], Any]) -> Any:
        """`read` of the JSON that answers a GET, or a POST of `body` and the model's name. Raises DominoError."""
        try:
            return read(json.loads(self.send(path, body and {"model": self.model, **body})))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise DominoError(
                f"{self.url}{path} answers in another form than docs/serving.md lists ({first_line(error)}); name a"
                " server of a version that it lists."
            ) from error

    def send(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        connect = http.client.HTTPSConnection if self.parts.scheme == "https" else http.client.HTTPConnection
        path = self.parts.path.rstrip("/").removesuffix("/v1") + path
        try:
            connection = connect(self.parts.hostname or "", self.parts.port, timeout=SECONDS)
            sent = ("GET", path) if body is None else ("POST", path, json.dumps(body))
            connection.request(*sent, headers=self.headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read().decode(errors="replace")
            connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise DominoError(
                f"{self.url} does not answer ({first_line(error)}); start the server, or correct --server."
            ) from error
        if status in (401, 403):
            raise DominoError(f"{self.url} refuses the key ({status}); set DOMINO_API_KEY to the key of the server.")
        if status >= 400:
            raise DominoError(f"{self.url}: {path} has status {status}: {' '.join(text.split())[:400]}")
        return text

    def answer(self, prompt: Prompt) -> ServerAnswer:
        """The answer to a prompt; its prompt_tokens count what the server makes of the row's messages or text."""
        row, ids, known = prompt.row, list(prompt.token_ids), self.engine in ENGINES
        if known:
            path, body, read = ENGINES[self.engine]
            answer = self.ask(path, body(ids, self.most), read)
            if "token_ids" in row or answer.prompt_tokens != len(ids):  # the server adds to ids
                return answer
        path = "/v1/chat/completions" if "messages" in row else "/v1/completions"
        body = {key: row[key] for key in ("messages", "prompt", "tools", "chat_template_kwargs") if key in row}
        body |= {"max_tokens": 1 if known else self.most, "temperature": 0}
        text = self.ask(path, body if "token_ids" not in row else {**body, "prompt": ids}, read_text)
        return answer._replace(prompt_tokens=text.prompt_tokens) if known else text

    def counters(self) -> dict[str, int]:
        """vLLM's counters, summed over its engines; {} for other servers."""
        if self.engine != "vllm":
            return {}
        counts = {"rounds": 0, "drafts": 0, "kept_first": 0}
        names = {"drafts": "rounds", "draft_tokens": "drafts", "accepted_tokens_per_pos": "kept_first"}
        for name, labels, value in COUNTER.findall(self.send("/metrics")):
            if name in names and ('position="' not in labels or 'position="0"' in labels):
                counts[names[name]] += int(float(value))
        return counts


def ask_prompts(
    server: Server, prompts: Sequence[Prompt], files: AnswerFiles, answer_row: Callable[..., dict], requests: int
) -> dict[str, Any]:
    """Stores answer_row(prompt, server.answer(prompt)) for each prompt that has no row yet, `requests` at once.

    Returns:
        "ids" of the prompts of this call, and the increase of vLLM's counters.

    Raises:
        DominoError: a prompt is refused or the server ends; the answers so far stay.
    """
    failures, storing = [], threading.Lock()
    with files.opened() as done:
        missing = [prompt for prompt in prompts if prompt.id not in done]
        before, progress = server.counters(), Progress("server", len(prompts), len(done))
        with Journal(files.part) as rows, ThreadPoolExecutor(requests) as pool:

            def store(prompt: Prompt) -> None:
                if failures:
                    return
                try:
                    answer = server.answer(prompt)
                except DominoError as error:
                    failures.append(DominoError(f"prompt {prompt.id}: {error}"))
                    return
                with storing:
                    rows.append(answer_row(prompt, answer))
                    progress.advance(1)

            try:
                list(pool.map(store, missing))
            finally:
                pool.shutdown(cancel_futures=True)
        if failures:
            raise failures[0]
        files.finish()
    gained = {name: count - before[name] for name, count in server.counters().items()}
    return {"ids": [prompt.id for prompt in missing], **gained}


def server_row(codec: TextCodec, stop_ids: Sequence[int], prompt: Prompt, answer: ServerAnswer) -> dict[str, Any]:
    """The row of a training, with "server": its counts, and whether the answer's text was "whole".

    An answer that a token stopped gets a stop id at its end, so that the target's stop is judged too.
    """
    ids, whole = answer.token_ids, True
    if ids is None:
        ids = codec.tokenizer(answer.text, add_special_tokens=False)["input_ids"]
        # U+FFFD replaces bytes that are no character.
        whole = bool(ids) and codec.tokenizer.decode(ids) == answer.text and "\ufffd" not in answer.text
    if answer.stopped and stop_ids and not (ids and ids[-1] in stop_ids):
        closing = closing_token(codec.tokenizer)
        ids = [*ids, closing[1] if closing else stop_ids[0]]
    generation = Generation(list(ids), [], "stop" if answer.stopped else "length")
    row = output_row(AnsweredPrompt(prompt, generation), codec, DecodeSettings())  # greedy
    return {**row, "server": {"prompt_tokens": answer.prompt_tokens, "counts": answer.counts, "whole": whole}}
