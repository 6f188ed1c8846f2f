"""A person at a terminal: one prompt, or a chat, with the text shown as it is committed."""

import io
import itertools
import time
from collections.abc import Callable, Iterable

import jax
import rich.console
import rich.text

from domino_jax.decoding.api import Decoder, Prompt, TextPiece
from domino_jax.decoding.generate import new_generator
from domino_jax.evals.models import Loader
from domino_jax.recipe import cli
from domino_jax.runtime import distributed
from domino_jax.runtime.errors import DataError, DominoError

# Rounds take turns, so that the eye sees how much of the text came at once.
COLOURS = ("cyan", "green")
LEAVE = ("exit", "quit")


def check_flags(flags: cli.Flags) -> None:
    """Raises DominoError for flags of which one would be ignored, before anything is loaded."""
    decode, shown = flags.config.decode, "--interactive" if flags.interactive else "--prompt"
    if flags.prompt is not None and not flags.prompt.strip():
        raise DominoError("--prompt is empty; give it a text, or leave it out to decode the recipe's prompts.")
    try:
        (flags.prompt or "").encode()
    except UnicodeEncodeError as error:
        raise DominoError(f"--prompt={flags.prompt!a} holds bytes that are no UTF-8; write it in UTF-8.") from error
    if flags.prompts and flags.prompt:
        raise DominoError("--prompts and --prompt are both given; decode the rows of a file or one text, not both.")
    if flags.interactive:
        for name, value in (("--output", flags.output), ("--prompt", flags.prompt), ("--prompts", flags.prompts)):
            if value:
                raise DominoError(
                    f"--interactive and {name} are both given, and a chat has no use for it; take one out."
                )
    several = distributed.meant_for_several(flags.distributed)
    if several and (decode.mesh.data, decode.mesh.tensor) == (1, 1):
        raise DominoError(
            f"{several} is for several processes, and config.decode.mesh is 1 x 1, one device of this one: set"
            " config.decode.mesh.data or .tensor (-1 is all the rest), or pass --distributed=off."
        )
    if decode.compare and decode.concurrency:
        raise DominoError(
            "config.decode.compare and config.decode.concurrency are both given, and drafters are compared at"
            " decode.batch_size alone; take one out."
        )
    if flags.output:
        return
    if not (flags.prompt or flags.interactive):
        raise DominoError("--output is missing (a folder for the report); without it give --prompt or --interactive.")
    for name in ("tasks", "compare"):
        if decode[name]:
            raise DominoError(
                f"config.decode.{name} is {decode[name]!r}, but {shown} without --output only shows one text: add"
                f" --output=FOLDER, or take decode.{name} out."
            )


def at_terminal(flags: cli.Flags, loader: Loader) -> None:
    """--prompt or --interactive without --output: the last of decode.modes, its text shown as it comes."""
    if flags.interactive and jax.process_count() > 1:
        raise DominoError(
            f"--interactive reads one terminal, and there are {jax.process_count()} processes: chat with one process,"
            " or give all of them --prompt."
        )
    config = flags.config
    settings = loader.settings
    loaded = loader.target()
    mode = settings.modes[-1]
    models = loader.models(loaded, config.drafter.path, (mode,))
    generator = new_generator(models, settings.generator(loaded.stop_ids, batch_size=1))
    decoder = Decoder(models, generator, loaded.tokenizer, settings.thinking)
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    sampling = {name: getattr(settings, name) for name in names}
    console = rich.console.Console(file=None if distributed.is_primary() else io.StringIO())
    if flags.interactive:
        chat(decoder, mode, console, settings.chunk_rounds, **sampling)
    else:
        show(decoder, flags.prompt, mode, console, settings.chunk_rounds, **sampling)


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
    line = summary(pieces, first - begin, time.perf_counter() - first)
    console.print(line, highlight=False, style="dim", soft_wrap=True)
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
    """Asks for messages and answers them with the conversation as context, until an empty line or "exit".

    When the conversation no longer fits, its oldest turns are left out, and a line says so. A message that does not fit
    by itself is refused, and the chat goes on.

    A tokenizer without a chat template has no turns: each line is then a text to continue, for itself.
    """
    messages: list[dict[str, str]] = []
    turns = decoder.tokenizer is not None and bool(decoder.tokenizer.chat_template)
    while True:
        try:
            line = read("> ").strip()
            line.encode()  # what a terminal sends in another encoding may arrive as halves of surrogate pairs
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        except UnicodeError:
            console.print("That line is no UTF-8 and was left out; write it again.")
            continue
        if not line or line in LEAVE:
            return
        messages.append({"role": "user", "content": line})
        try:
            forgotten = drop_oldest(decoder, messages) if turns else 0
            if forgotten:
                console.print(
                    f"The conversation no longer fits; its oldest turns are left out from here on: {forgotten}."
                )
            answer = show(decoder, messages if turns else line, mode, console, chunk_rounds, **sampling)
        except DataError as error:
            console.print(str(error), highlight=False, soft_wrap=True)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def drop_oldest(decoder: Decoder, messages: list[dict[str, str]]) -> int:
    """Takes as few of the oldest turns out of `messages` as make the rest fit; returns how many.

    A system message at the front and the newest message stay. None goes if these two do not fit by themselves.
    """
    first = int(messages[0]["role"] == "system")
    rest, turns = list(messages), 0
    while not decoder.fits(rest):
        if len(rest) <= first + 1:
            return 0
        del rest[first : first + 2]
        turns += 1
    messages[:] = rest
    return turns
