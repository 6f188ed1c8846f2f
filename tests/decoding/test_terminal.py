"""decode --prompt and --interactive, through the command: the text, a summary line, and what is refused."""

import io
import re
import types

import pytest
import rich.console

from domino_jax.decoding import terminal
from domino_jax.decoding.api import Answer
from domino_jax.runtime.errors import DataError
from tests.decoding.test_api import PROMPT, answer
from tests.helpers.commands import run
from tests.helpers.paths import ROOT

# Sizes and prompt are those of test_api.py, whose programs are compiled then.
SIZES = ("cache_length=256", "max_new_tokens=96", "num_drafts=0")
SUMMARY = r"\d+ tokens in \d+ rounds, τ \d\.\d\d, [\d,]+ tokens/s, prefill [\d,]+ ms, ended by a stop id"


def start(capsys, *arguments):
    """Runs the command in this process; exit code, stdout, stderr."""
    sizes = [f"--config.decode.{size}" for size in SIZES]
    code = run("decode", f"--config={ROOT / 'configs' / 'tiny.py'}", *sizes, *arguments)
    return code, *capsys.readouterr()


@pytest.mark.long
def test_a_prompt_shows_its_text_and_a_summary_line(capsys):
    code, printed, _ = start(capsys, f"--prompt={PROMPT}")
    assert code == 0
    text, _, line = printed.rstrip("\n").rpartition("\n")
    assert text == answer().text
    assert re.fullmatch(SUMMARY, line)
    assert line.startswith(f"{len(answer().token_ids)} tokens in {len(answer().accept_lengths)} rounds")


@pytest.mark.long
def test_end_of_input_ends_a_chat_as_done(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPT}\n"))
    code, printed, error = start(capsys, "--interactive")
    assert (code, error) == (0, "")
    assert printed.startswith(f"> {answer().text}\n") and printed.endswith("\n> \n")
    assert len(re.findall(SUMMARY, printed)) == 1


class Answering:
    """Says yes to messages of at most `room` letters and refuses longer ones, as a real decoder does."""

    tokenizer = types.SimpleNamespace(chat_template="there is one")

    def __init__(self, room: int):
        self.room, self.asked = room, []

    def fits(self, messages):
        return sum(len(message["content"]) for message in messages) <= self.room

    def stream(self, prompt, **_):
        if not self.fits(prompt):
            raise DataError("the prompt has too many letters.")
        self.asked.append([(message["role"], message["content"]) for message in prompt])
        yield Answer([5, 6], [1], "stop", 4, "yes")


def chat(decoder: Answering, *lines: str) -> str:
    """What a chat of these lines shows."""
    shown, typed = io.StringIO(), iter(lines)
    console = rich.console.Console(file=shown)
    terminal.chat(decoder, "domino", console, read=lambda _: next(typed).encode("latin-1").decode())
    return shown.getvalue()


def test_a_chat_keeps_its_history_until_an_empty_line():
    decoder = Answering(room=100)
    assert chat(decoder, "one", "zwölf", "two", "").count("That line is not UTF-8 and was left out") == 1
    assert decoder.asked[-1] == [("user", "one"), ("assistant", "yes"), ("user", "two")]


def test_a_chat_begins_again_with_the_message_that_no_longer_fits():
    decoder = Answering(room=12)
    shown = chat(decoder, "first", "second", "a line that is far too long", "third", "exit")
    assert decoder.asked == [[("user", text)] for text in ("first", "second", "third")]
    assert shown.count("it begins again with this message.") == 2
    assert shown.count("the prompt has too many letters.") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--output is missing (a folder for the report); without it give --prompt or --interactive"),
        (["--prompt= "], "--prompt is empty"),
        (["--prompt=Hi", "--prompts=rows.jsonl"], "--prompts and --prompt are both given"),
        (["--prompt=Hi", "--interactive"], "--interactive and --prompt are both given"),
        (["--interactive", "--config.decode.tasks=('gsm8k',)"], "but --interactive without --output only shows"),
        (["--prompt=Hi", "--config.decode.concurrency=(2,)"], "config.decode.concurrency is (2,), but --prompt"),
    ],
)
def test_flags_of_which_one_would_be_ignored_are_refused(capsys, arguments, message):
    code, shown, error = start(capsys, *arguments)
    assert (code, shown, "Traceback" in error) == (2, "", False)
    assert message in error and len(error.strip().splitlines()) == 1
