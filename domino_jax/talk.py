"""A person at a terminal: one prompt, or a chat, with the text shown as it is committed."""

import itertools
import time
from collections.abc import Callable, Iterable

import rich.console
import rich.text

from domino_jax.api import Decoder, Prompt, TextPiece

# Rounds take turns, so that the eye sees how much of the text came at once.
COLOURS = ("cyan", "green")
LEAVE = ("exit", "quit")


def show(decoder: Decoder, prompt: Prompt, mode: str, console: rich.console.Console, chunk_rounds: int, **sampling):
    """Prints one answer as it comes and a summary line behind it; returns the answer's text.

    On a terminal what one dispatch brought is in one colour, the next one's in another; elsewhere it is plain text.
    """
    # Programs are compiled outside of the time that is told.
    for _ in itertools.islice(decoder.stream(prompt, mode=mode, chunk_rounds=chunk_rounds, **sampling), 2):
        pass
    pieces, text = [], []
    begin = time.perf_counter()
    first = begin
    for number, piece in enumerate(decoder.stream(prompt, mode=mode, chunk_rounds=chunk_rounds, **sampling)):
        first = first if number else time.perf_counter()
        style = COLOURS[number % len(COLOURS)] if console.is_terminal else ""
        console.print(rich.text.Text(piece.text, style=style), end="", soft_wrap=True)
        pieces.append(piece)
        text.append(piece.text)
    console.print()
    console.print(summary(pieces, first - begin, time.perf_counter() - first), highlight=False, style="dim")
    return "".join(text)


def summary(pieces: Iterable[TextPiece], prefill: float, seconds: float) -> str:
    """Tokens, rounds, τ and speed in one line; the first token is the prefill's and not in the rate."""
    pieces = list(pieces)
    tokens = sum(len(piece.token_ids) for piece in pieces)
    rounds = [length for piece in pieces for length in piece.accept_lengths]
    speed = f", {(tokens - 1) / seconds:,.0f} tokens/s" if tokens > 1 and seconds > 0 else ""
    tau = f" in {len(rounds)} rounds, τ {sum(rounds) / len(rounds):.2f}" if rounds else ""
    ended = {"stop": "a stop id", "length": "the limit"}[pieces[-1].finish_reason]
    return f"{tokens} tokens{tau}{speed}, prefill {prefill * 1e3:,.0f} ms, ended by {ended}"


def chat(
    decoder: Decoder,
    mode: str,
    console: rich.console.Console,
    chunk_rounds: int,
    read: Callable[[str], str] = input,
    **sampling,
) -> None:
    """Asks for messages and answers them with the whole conversation as context, until an empty line or "exit".

    A tokenizer without a chat template has no turns: each line is then a text to continue, for itself.
    """
    messages: list[dict[str, str]] = []
    turns = decoder.tokenizer is not None and bool(decoder.tokenizer.chat_template)
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not line or line in LEAVE:
            return
        messages.append({"role": "user", "content": line})
        answer = show(decoder, messages if turns else line, mode, console, chunk_rounds, **sampling)
        messages.append({"role": "assistant", "content": answer})
