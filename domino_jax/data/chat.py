"""Conversations to token ids and loss masks, by the tokenizer's own chat template.

The mask follows from two renderings. The text before an answer is the rendering of the messages before it with the
generation prompt: exactly the prompt of the model. The answer runs from there to the token that closes the turn, which
is supervised too. Pieces are tokenised separately, as in decoding, so that no token straddles the start of an answer;
by a tokenizer that puts a space before every text (Llama 2) at once, where a token belongs to the piece it begins in.
A template may rewrite an earlier turn once later ones follow, as Qwen3's leaves its thoughts out. There such an answer
is context, and it is learned in a row of its own, which ends with it (`training_rows`).

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n|Hello<|im_end|>|\\n
    0 0 0 0 0 ...                                                                      1 1 1 ...        0
"""

import contextlib
import dataclasses
import datetime
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from domino_jax.data.messages import Chat, present, read_chat
from domino_jax.data.prompts import check_prompt, check_text, check_token_ids
from domino_jax.runtime.errors import DataError, check_value, first_line, quote, warn_once

PROBE = "domino-probe"  # no template treats this text specially
WRITTEN = ("content", "reasoning_content", "reasoning", "thinking")  # what a message says, if a template writes it
# Templates that write today's date write this one into rows and prompts of files, which must not change at midnight:
# Llama 3.2's template has it where there is no clock.
DATE = datetime.date(2024, 7, 26)
_CODES = [f"%{flag}{letter}" for letter in "aAbBcdeFHIjmMpSxXyY" for flag in ("-", "")]
# strftime_now for that date. A macro, because transformers gives a template plain data and no functions.
_CLOCK = (
    "{% macro strftime_now(form) %}{{ form"
    + "".join(f"|replace({code!r}, {DATE.strftime(code)!r})" for code in _CODES)
    + " }}{% endmacro %}\n"
)

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrainingRow:
    """One training row.

    token_ids: int32 [T]; loss_mask: float32 [T], 1 on the assistant's tokens.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray


@dataclasses.dataclass(frozen=True)
class TextCodec:
    """From prompt rows to token ids, and back to text.

    tokenizer: the target's; None where it has none (ids only).  thinking: for its chat template.
    today: a template that writes today's date may do so; else it writes DATE.
    """

    tokenizer: Any
    thinking: bool
    today: bool = False

    def encode(self, row: Mapping[str, Any], where: str | None = None) -> list[int]:
        """The ids of a prompt row: messages through the chat template, token_ids unchanged, prompt as plain text with
        what the tokenizer adds to a text, such as the token that begins it, as other engines encode it.

        where: names the row in errors; its id does by default.
        """
        row, where = present(row), where or f"prompt {row['id']}"
        chat = check_prompt(row, where)
        if "token_ids" in row:
            return list(row["token_ids"])
        _refuse_text_without(self.tokenizer, where)
        if chat is None:
            return _encode(self.tokenizer, row["prompt"], where, add_special_tokens=True)["input_ids"]
        template = _template_of(self.tokenizer, self.thinking, where, chat, self.today)
        return _encode(self.tokenizer, template.render(chat.messages, ask=True), where)["input_ids"]

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """The text without special tokens, None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=True)


def training_rows(tokenizer: Any, row: dict, thinking: bool, where: str) -> list[Callable[[], TrainingRow]]:
    """The rows of {"messages"}, ShareGPT {"conversations"} or {"token_ids", "loss_mask"}, each encoded on its call.

    token_ids take precedence over messages: `regenerate` writes both, and only the ids are the target's actual output.
    Its rows have further ones in earlier_turns (decoding/conversations.py).
    With thinking off the empty think block belongs to the prompt; with thinking on the thoughts are part of the answer.
    An answer is learned in the last row that has it as it was generated. There is one row, which ends with the last
    answer, unless the template rewrites earlier answers: then each of these ends a row of its own, before that one.
    """
    if "token_ids" in row:
        earlier = row.get("earlier_turns") or []
        rows = isinstance(earlier, list) and all(isinstance(turn, dict) and "token_ids" in turn for turn in earlier)
        check_value(rows, f"{where}: earlier_turns", earlier, "a list of rows with token_ids")
        return [functools.partial(_row_of_ids, turn, where) for turn in (*earlier, row)]
    chat = read_chat(row, where)
    _refuse_text_without(tokenizer, where)
    template = _template_of(tokenizer, thinking, where, chat)
    return [functools.partial(_encode_pieces, template, *rendered) for rendered in _render_rows(template, chat)]


def _refuse_text_without(tokenizer: Any, where: str) -> None:
    if tokenizer is None:
        raise DataError(f"{where}: the row is text, but the target holds no tokenizer; give token_ids or add one.")


def _row_of_ids(row: dict, where: str) -> TrainingRow:
    check_token_ids(row["token_ids"], where)
    mask = row["loss_mask"] if "loss_mask" in row else None
    if not isinstance(mask, list) or len(mask) != len(row["token_ids"]) or not all(entry in (0, 1) for entry in mask):
        length = len(mask) if isinstance(mask, list) else "no"
        raise DataError(
            f"{where}: token_ids has {len(row['token_ids'])} entries, loss_mask has {length}; it needs a 0 "
            "or 1 for each."
        )
    return TrainingRow(np.asarray(row["token_ids"], np.int32), np.asarray(mask, np.float32))


def _render_rows(template: "_Template", chat: Chat) -> list[tuple[str, list[tuple[int, int]]]]:
    """(text, start and end of each answer that is learned in it) for every row of a conversation."""
    # A turn of the assistant that opens the conversation answers nothing: it is context.
    messages = chat.messages
    places = range(1, len(messages))
    answers = [place for place in places if messages[place]["role"] == "assistant" and chat.learned[place]]
    if not answers:
        return [(template.render(messages, ask=False), [])]
    renderings, rows = _Renderings(template, messages, answers[-1]), []
    while answers:
        spans = renderings.spans(answers)
        if answers[-1] in spans:
            rows.append((renderings.text(answers[-1] + 1), list(spans.values())))
        answers = [place for place in answers[:-1] if place not in spans]
    return rows[::-1]


def _encode_pieces(template: "_Template", text: str, spans: list[tuple[int, int]]) -> TrainingRow:
    edges = list(itertools.chain(*spans))
    encode = functools.partial(_encode, template.tokenizer, where=template.where)
    if adds_a_space(template.tokenizer):
        encoded = encode(text, return_offsets_mapping=True)
        ids, starts = encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
        numbers = np.searchsorted(edges, starts, side="right")
    else:
        pieces = [encode(text[start:end])["input_ids"] for start, end in itertools.pairwise([0, *edges, len(text)])]
        ids, numbers = sum(pieces, []), np.repeat(np.arange(len(pieces)), list(map(len, pieces)))
    # Every second piece is an answer.
    return TrainingRow(np.asarray(ids, np.int32), np.asarray(numbers % 2, np.float32))


@functools.lru_cache(maxsize=8)
def adds_a_space(tokenizer: Any) -> bool:
    """Whether a tokenizer that knows places in a text puts something before it."""
    return tokenizer.is_fast and "".join(tokenizer.tokenize("a")) != "a"


class _Renderings:
    """A conversation's texts in its template, each rendered once, with the bounds of answers in them."""

    def __init__(self, template: "_Template", messages: list[dict], last: int):
        """last: the last answer, which has to be known; earlier ones need not be."""
        self.template, self.messages, self.last, self.where = template, messages, last, template.where
        token = closing_token(template.tokenizer)
        if token is None:
            template.render(messages, ask=False)  # a template that refuses them says why
            raise DataError(
                f"{self.where}: the chat template closes an assistant's turn with no special token, so the end of an"
                " answer is unknown.\nGive such rows as token_ids and loss_mask."
            )
        self.closing, _ = token
        # The generation prompt may hold an empty think block, which the template drops from earlier turns. Most rows
        # need the first of the two alone, and a rendering is much of a row's time.
        bare = dataclasses.replace(template, thinking=True)
        self.variants = (template,) if template == bare else (template, bare)
        self.text = functools.cache(lambda count: template.render(messages[:count], ask=False))
        self.prompt = functools.cache(lambda count, number: self.variants[number].render(messages[:count], ask=True))

    def spans(self, answers: list[int]) -> dict[int, tuple[int, int]]:
        """{message: start and end, closing token included} of the answers that the text up to the last of them has as
        they were generated; others were rewritten, and are context."""
        spans, text, after = {}, self.text(answers[-1] + 1), 0
        for place in answers:
            answer, start = self.generated(place), self.start(place, text, after)
            if answer is not None and start is not None and text.startswith(answer, start):
                after = start + len(answer)
                spans[place] = start, after
        return spans

    def start(self, place: int, text: str, after: int = 0) -> int | None:
        """Where the answer `messages[place]` begins in a text, at `after` or later; None if the template wrote the text
        before it in another way."""
        prompts = (self.prompt(place, number) for number in range(len(self.variants)))
        return next((len(prompt) for prompt in prompts if len(prompt) >= after and text.startswith(prompt)), None)

    def generated(self, place: int) -> str | None:
        """The answer as the target writes it, with the closing token; None where that is unknown.

        Raises DataError: it is unknown of the last answer, or an answer contains the closing token.
        """
        text, message = self.text(place + 1), self.messages[place]
        closed = [key for key, value in message.items() if self.closing in str(value)]
        if closed:
            raise DataError(
                f"{self.where}: message {place} contains {self.closing!r} in its {', '.join(closed)}, which closes a"
                " turn in this chat template: no answer of the target goes on after it. Correct or remove the row."
            )
        start = self.start(place, text)
        end = -1 if start is None else text.find(self.closing, start)
        written = "".join(text.split())
        lost = [key for key in WRITTEN if key in message and "".join(str(message[key]).split()) not in written]
        if end < 0 or lost:
            if place != self.last:
                return None
            problem = f"leaves out the {lost[0]}" if lost else f"does not close with {self.closing!r} the end"
            problem = "changes the text before" if start is None else f"{problem} of"
            raise DataError(
                f"{self.where}: the chat template {problem} the answer of message {place}, the last one, so it is"
                " unknown what the target writes there.\nGive such rows as token_ids and loss_mask."
            )
        return text[start : end + len(self.closing)]


@functools.lru_cache(maxsize=8)  # once per tokenizer, not once per row
def closing_token(tokenizer: Any) -> tuple[str, int] | None:
    """Text and id of the token that ends an assistant's turn; None without a chat template or such a token.

    It is the first added token (as special tokens are) that the template writes after an answer. A line end or a space
    before it is part of the turn.
    """
    if tokenizer is None or not tokenizer.chat_template:
        return None
    probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
    template, rest = _Template(tokenizer, False, "the target's chat template"), ""
    for start in ([], [{"role": "system", "content": "?"}]):  # some templates demand a system message
        with contextlib.suppress(DataError):  # a row of messages is refused with its line
            text = template.render(start + probe, ask=False)
            rest = rest or (text.rpartition(PROBE)[2] if PROBE in text else "")
    added = {token: str(entry) for token, entry in tokenizer.added_tokens_decoder.items() if str(entry).strip()}
    return next(((added[token], token) for token in _encode(tokenizer, rest, "")["input_ids"] if token in added), None)


@functools.lru_cache(maxsize=8)
def generation_prompts(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids of the generation prompt in an earlier turn, and those of one that asks for an answer without thoughts,
    which may end with an empty think block. Both are empty where no template takes a single question."""
    probe = [{"role": "user", "content": PROBE}]
    with contextlib.suppress(DataError):
        templates = (_Template(tokenizer, on, "") for on in (True, False))
        texts = [template.render(probe, ask=True).rpartition(PROBE)[2] for template in templates]
        earlier, asked = (list(_encode(tokenizer, text, "")["input_ids"]) for text in texts)
        return earlier, asked
    return [], []


@dataclasses.dataclass(frozen=True)
class _Template:
    """A tokenizer's chat template with its thinking switch; `where` names the row in messages.

    variables: Chat.variables without enable_thinking.  today: of TextCodec.
    """

    tokenizer: Any
    thinking: bool
    where: str
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    today: bool = False

    def render(self, messages: list[dict], ask: bool) -> str:
        """The template's text; `ask` adds the generation prompt. Templates without enable_thinking ignore it."""
        if not self.tokenizer.chat_template:
            raise DataError(f"{self.where}: the target has no chat template for messages; give prompt or token_ids.")
        variables = {"add_generation_prompt": ask, "enable_thinking": self.thinking, **self.variables}
        try:
            if not self.today and "strftime_now" in str(self.tokenizer.chat_template):
                template = self.tokenizer.get_chat_template(None, self.variables.get("tools"))
                variables["chat_template"] = _CLOCK + template
                warn_once(log, f"the chat template writes today's date; rows and prompts of files have {DATE}.")
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        except Exception as error:  # a template is a program of the folder and may raise anything
            raise DataError(f"{self.where}: the chat template refuses the messages ({first_line(error)}).") from error


def _template_of(tokenizer: Any, thinking: bool, where: str, chat: Chat, today: bool = False) -> _Template:
    """The template for one row, whose chat_template_kwargs go before the switch."""
    variables = {"enable_thinking": thinking, **chat.variables}
    for name in variables if thinking else chat.variables:
        _is_read(tokenizer, name)
    for key in ("tool_calls", "function_call"):
        if any(message.get(key) for message in chat.messages) and not _is_read(tokenizer, key):
            raise DataError(f"{where}: a message has {key}, which the chat template does not write; remove the row.")
    for role in dict.fromkeys(message["role"] for message in chat.messages):
        if not _is_written(tokenizer, role):
            raise DataError(
                f"{where}: a message has the role {quote(role)}, which the chat template leaves out; give it another"
                " role, or remove the row."
            )
    return _Template(tokenizer, variables.pop("enable_thinking"), where, variables, today)


@functools.lru_cache(maxsize=64)
def _is_written(tokenizer: Any, role: str) -> bool:
    """Whether the chat template writes messages of a role. One that it refuses is refused with its row."""
    template, said = _Template(tokenizer, False, ""), {"role": role, "content": PROBE}
    asked, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    if role == "tool":
        answer["tool_calls"] = [{"type": "function", "id": "0" * 9, "function": {"name": "f", "arguments": {}}}]
    texts = []
    for messages in ([said, asked], [asked, answer, said]):
        with contextlib.suppress(DataError):
            texts.append(template.render(messages, ask=False))
    return not texts or any(PROBE in text for text in texts)


@functools.lru_cache(maxsize=64)  # one line per run, not per row
def _is_read(tokenizer: Any, name: str) -> bool:
    """Whether the chat template has a variable or key of this name; a warning if not."""
    template = tokenizer.chat_template
    text = "\n".join(template.values()) if isinstance(template, dict) else template or ""
    try:
        words = {word.strip("'\"") for _, kind, word in jinja2.Environment().lex(text) if kind in ("name", "string")}
    except jinja2.TemplateSyntaxError:  # refused where it is rendered
        return True
    if name not in words:
        shown = "decode.thinking or enable_thinking" if name == "enable_thinking" else quote(name)
        log.warning("the target's chat template never reads %s: nothing of it is in the prompts.", shown)
    return name in words


def _encode(tokenizer: Any, text: str, where: str, **choices: Any) -> Mapping[str, Any]:
    check_text(text, where)
    try:
        return tokenizer(text, **{"add_special_tokens": False, **choices})
    except Exception as error:  # the tokenizer's Rust code raises plain Exceptions
        raise DataError(f"{where}: the text cannot be encoded ({first_line(error)}).") from error
