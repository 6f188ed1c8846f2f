"""One prompt or a chat at a terminal, with the text shown as it is committed."""

from collections.abc import Callable, Sequence

import rich.console
import rich.text

from domino_jax.decoding.api import Answer, Decoder, PromptLike
from domino_jax.decoding.programs import Clock
from domino_jax.runtime.errors import DataError

# Alternating, so that the eye sees how much text came at once.
COLOURS = ("cyan", "green")
LEAVE = ("exit", "quit")
CHUNK_ROUNDS = 4  # of one dispatch


def show(decoder: Decoder, prompt: PromptLike, mode: str, console: rich.console.Console, **sampling):
    """Prints one answer as it comes, then a summary line; returns the answer's text."""
    pieces, clock = [], Clock()
    stream = decoder.stream(prompt, mode=mode, chunk_rounds=CHUNK_ROUNDS, clock=clock, **sampling)
    for number, piece in enumerate(stream):
        style = COLOURS[number % len(COLOURS)] if console.is_terminal else ""
        console.print(rich.text.Text(piece.text, style=style), end="", soft_wrap=True)
        pieces.append(piece)
    console.print()
    console.print(summary(pieces, clock), highlight=False, style="dim", soft_wrap=True)
    return "".join(piece.text for piece in pieces)


def summary(pieces: Sequence[Answer], clock: Clock) -> str:
    """Tokens, rounds, τ and speed in one line; the first token comes from the prefill and is not in the rate."""
    tokens = sum(len(piece.token_ids) for piece in pieces)
    rounds = [length for piece in pieces for length in piece.accept_lengths]
    seconds = clock.decode_seconds
    speed = f", {clock.decode_tokens / seconds:,.0f} tokens/s" if clock.decode_tokens and seconds > 0 else ""
    tau = f" in {len(rounds)} rounds, τ {sum(rounds) / len(rounds):.2f}" if rounds else ""
    ended = {"stop": "a stop id", "length": "the limit"}[pieces[-1].finish_reason]
    return f"{tokens} tokens{tau}{speed}, prefill {clock.prefill_seconds * 1e3:,.0f} ms, ended by {ended}"


def chat(
    decoder: Decoder, mode: str, console: rich.console.Console, read: Callable[[str], str] = input, **sampling
) -> None:
    """Asks for messages and answers them with the conversation as context, until an empty line or "exit".

    Without a chat template there are no turns: each line is a separate text to continue.
    """
    messages: list[dict[str, str]] = []
    turns = decoder.tokenizer is not None and bool(decoder.tokenizer.chat_template)
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        except UnicodeError:  # a terminal of another encoding
            console.print("That line is not UTF-8 and was left out; write it again.")
            continue
        if not line or line in LEAVE:
            return
        messages.append({"role": "user", "content": line})
        try:
            if turns and not decoder.fits(messages) and decoder.fits(messages[-1:]):
                console.print("The conversation no longer fits; it begins again with this message.")
                messages = messages[-1:]
            answer = show(decoder, messages if turns else line, mode, console, **sampling)
        except DataError as error:
            console.print(str(error), highlight=False, soft_wrap=True)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
