"""cli.py: every mistake on the command line is one message on stderr and exit code 2."""

import pytest

from domino_jax.recipe import cli
from domino_jax.runtime.errors import DataError, NonFiniteError
from domino_jax.runtime.preemption import Preempted
from tests.helpers.paths import ROOT

TINY = f"--config={ROOT / 'configs' / 'tiny.py'}"


def start(
    capsys, *arguments, main=lambda flags: None, required=("config", "workdir"), optional=("allow_config_change",)
):
    """Run a command in this process; its exit code and what it wrote to stderr."""
    with pytest.raises(SystemExit) as left:
        cli.run(main, required, optional, ["command", *arguments])
    return left.value.code, capsys.readouterr().err


def test_given_flags_and_overrides_arrive_typed(capsys):
    seen = []
    values = {"steps": 7, "learning_rate": 1}
    words = [TINY, "--workdir=w", "--allow_config_change=train,data.regenerate", "--noconfig.data.regenerate"]
    words += [f"--config.train.{name}={value}" for name, value in values.items()]
    words += ["--config.decode.modes=('autoregressive','domino')", "--config.drafter.mask_token_id=5"]
    code, _ = start(capsys, *words, main=seen.append)
    (flags,) = seen
    assert code == 0
    assert (flags.workdir, flags.allow_config_change, flags.prompts) == ("w", ("train", "data.regenerate"), None)
    assert {name: flags.config.train[name] for name in values} == values
    assert isinstance(flags.config.train.learning_rate, float)
    assert flags.config.decode.modes == ("autoregressive", "domino")
    assert (flags.config.drafter.mask_token_id, flags.config.data.regenerate) == (5, False)
    keys = {*(f"train.{name}" for name in values), "data.regenerate", "decode.modes", "drafter.mask_token_id"}
    assert flags.set_keys == keys


RUN_FLAGS = ("distributed", "dry_run", "topology")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TINY, "--workdir=w", "--config.tran.steps=3"], "config.train.steps"),
        ([TINY, "--workdir=w", "--config.train.selector_rank=3"], "config.drafter.dflash2.rank"),
        ([TINY, "--workdir=w", "--config.zzz=3"], "There is checkpoint, data"),
        ([TINY, "--workdir=w", "--config.train.steps.more=3"], "config.train.steps"),
        ([TINY, "--workdir=w", "--config.train={}"], "is a section"),
        ([TINY, "--workdir=w", "--config.train.steps=abc"], "train.steps=abc: the value is not of the kind int"),
        ([TINY, "--workdir=w", "--config.train.steps"], "Missing value for flag --config.train.steps"),
        ([TINY, "--wrkdir=w"], "--wrkdir. Did you mean --workdir?"),
        ([TINY, "--workdir=w", "--prompts=p"], "--prompts. This command knows"),
        ([TINY, "--workdir=w", "more"], "'more' is not a flag"),
        ([TINY, "--workdir="], "--workdir is missing"),
        (["--config", "--workdir=w"], "--config: expected one argument"),
        (["--workdir=w", "--config.train.steps=3"], "--config is missing"),
        (["--workdir=w", "--config=nowhere.py"], "--config=nowhere.py: there is no such file"),
        ([TINY, "--workdir=w", "--distributed=on"], "--distributed: invalid choice: 'on'"),
        ([TINY, "--workdir=w", "--topology=v5e:4x4"], "--topology=v5e:4x4 is for --dry_run alone"),
    ],
)
def test_a_mistake_exits_2_with_one_short_message(capsys, arguments, message):
    code, error = start(capsys, *arguments, main=lambda flags: pytest.fail("main ran"), optional=RUN_FLAGS)
    assert code == 2
    assert message in error
    assert len(error.strip().splitlines()) <= 5
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ndef get_config(:\n", "recipe.py:2: SyntaxError"),
        ("def other():\n    pass\n", "AttributeError"),
        ("def get_config():\n    return 1 / 0\n", "recipe.py:2: ZeroDivisionError"),
        ("def get_config():\n    return {}\n", "returned dict"),
    ],
)
def test_a_recipe_that_does_not_load_exits_2_and_names_the_line(capsys, tmp_path, source, message):
    (tmp_path / "recipe.py").write_text(source)
    code, error = start(capsys, f"--config={tmp_path / 'recipe.py'}", "--workdir=w")
    assert code == 2
    assert message in error


@pytest.mark.parametrize("error", [ZeroDivisionError, FileNotFoundError(2, "No such file")])
def test_an_unexpected_exception_keeps_its_traceback(error):
    def main(flags):
        raise error

    with pytest.raises((ZeroDivisionError, FileNotFoundError)):
        cli.run(main, ("workdir",), (), ["command", "--workdir=w"])


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (NonFiniteError("a loss"), 4, "error: a loss\n"),
        (DataError("a row"), 3, "error: a row\n"),
        (KeyboardInterrupt(), 130, ""),
        (Preempted(), 42, ""),
    ],
)
def test_a_failure_has_its_own_code(capsys, error, code, message):
    def main(flags):
        raise error

    assert start(capsys, TINY, "--workdir=w", main=main) == (code, message)


def test_help_lists_the_flags_of_the_command(capsys):
    with pytest.raises(SystemExit) as left:
        cli.run(lambda flags: pytest.fail("main ran"), ("config",), ("output",), ["command", "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "--config" in shown and "--output" in shown and "--prompts" not in shown


def test_an_error_message_neither_fills_the_terminal_nor_commands_it(capsys):
    def main(flags):
        raise DataError("the name is \x1b[2J" + "x" * 100_000 + "\nremove it")

    with pytest.raises(SystemExit) as left:
        cli.run(main, argv=["command"])
    error = capsys.readouterr().err
    assert left.value.code == 3 and error.startswith("error: the name is ?[2Jxxx") and error.endswith("…\nremove it\n")
    assert len(error) < 1_100
