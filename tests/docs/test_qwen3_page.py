"""docs/qwen3.md: every command of the page runs at a small scale.

The commands are read from the page and run in its order: paths become folders of the test, buckets too; the recipe is
the page's with small sizes and a random target; data sets of the hub become files. What runs elsewhere (a launcher's
cluster, a cloud) is shown by the launcher's dry run, and the command that it starts runs here.
"""

import glob
import importlib
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from typing import NamedTuple

import pytest

from assets import make_hub_prompts
from assets.target_folder import save_target
from domino_jax.data.tasks import TASKS
from domino_jax.evals.run import Runner
from domino_jax.forecast import topologies
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.training.metrics import read_rows
from domino_jax.weights.drafter import save_drafter
from tests.helpers.commands import COMMANDS
from tests.helpers.commands import run as run_command
from tests.helpers.models import TARGET_FIELDS, random_target, tiny_drafter
from tests.helpers.paths import ASSETS, ROOT

PAGE = (ROOT / "docs" / "qwen3.md").read_text(encoding="utf-8")
ELSEWHERE = ("python3", "gcloud", "tail", "tensorboard")  # programs that are not ours
PROMPTS = 96  # one in twenty is held out of the training, of each part too
# What the page names, as it is in the folder of the test.
PLACES = {
    **{"configs/": "configs/", "gs://BUCKET/": "bucket/", "/data/": "data/", "/shared/": "data/"},
    **{"/tmp/": "dry_runs/", "/machine/": "machine/"},
    "mlabonne/open-perfectblend": "perfectblend.jsonl",
    "Huang2020/Qwen3-8B-Domino-b16": "Domino",
    "z-lab/Qwen3-8B-DFlash-b16": "DFlash",
}
# Sizes that the page gives and a test has no time for.
SMALLER = {
    "config.regenerate.batch_size": "4",
    "config.train.steps": "2",
    "config.decode.num_prompts": "2",
    "config.decode.batch_size": "2",
    "config.decode.num_drafts": "4",
}
RECIPE = """
from configs import {name}

def get_config():
    config = {name}.get_config()
    config.target.path = {target!r}
    config.target.dtype = config.decode.dtype = "float32"
    config.drafter.update({{"num_layers": 1, "block_size": 4, "domino": {{"gru_hidden_dim": 16, "emb_dim": 8}}}})
    config.data.max_length = 96
    config.train.update({{"steps": 4, "batch_size": 4, "num_anchors": 8, "log_every": 1}})
    config.checkpoint.every = 2
    config.eval.update({{"every": 2, "num_prompts": 2}})
    config.regenerate.update({{"batch_size": 8, "max_new_tokens": 8}})
    config.decode.update({{"max_new_tokens": 8, "head_candidates": 8}})
    return config
"""


class Command(NamedTuple):
    """A line of a code block as words. launcher: those before `--`, of a line that starts another command."""

    line: str
    launcher: list[str]
    words: list[str]


def commands() -> list[Command]:
    """All lines of the page's code blocks but comments."""
    blocks = re.findall(r"^( *)```\n(.*?)^ *```", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line for _, block in blocks for line in textwrap.dedent(block).splitlines()]
    found = []
    for line in lines:
        if not line or line.startswith("#"):
            continue
        words = shlex.split(line)
        end = words.index("--") if "--" in words else 0
        launches = " launch" in line
        found.append(Command(line, words[: end or len(words)] if launches else [], words[end + 1 :] if end else words))
    return found


LAUNCHED = [one for one in commands() if one.launcher]
OURS = [one.words for one in commands() if one.words[:2] == ["python", "-m"] and "launch." not in one.words[2]]


# ---------------------------------------------------------------------------------------------------- the commands


def test_every_line_of_the_page_is_of_a_kind_that_is_tested():
    names = {words[2] for words in OURS}
    tested = COMMANDS.keys() - {"serve", "evaluate"}
    assert names == {"assets.make_hub_prompts", *(f"domino_jax.{name}" for name in tested)}
    for one in commands():
        subprocess.run(["bash", "-n"], input=one.line, text=True, check=True)
        assert one.launcher or one.words in OURS or one.words[0] in ELSEWHERE, one.line


@pytest.mark.parametrize("one", LAUNCHED, ids=lambda one: " ".join(one.launcher[:4]))
def test_the_launchers_take_the_pages_flags(one, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DOMINO_LOCK", str(tmp_path / "lock"))
    if one.launcher[0] == "sbatch":
        *options, script = one.launcher[1:]
        assert all(re.fullmatch(r"--[a-z-]+=\d+", option) for option in options)
        shown = subprocess.check_output(["bash", script, "--dry_run", "--", *one.words], text=True)
        assert shlex.split(shown)[-len(one.words) :] == one.words
        return
    launcher, flags = importlib.import_module(one.launcher[2]), one.launcher[3:]
    if flags[-1] == "--stop":
        # There is no run on this machine, and that of a cloud is only shown.
        assert launcher.main(flags if launcher.__name__ == "launch.host" else [*flags, "--dry_run"]) == 0
        return
    assert launcher.main([*flags, "--dry_run", "--", *one.words]) == 0
    assert one.words[2] in capsys.readouterr().out


def test_the_topologies_of_the_page_are_known():
    named = re.findall(r"--topology=(\S+)", PAGE)
    assert set(named) == {"h100:8", "v5e:4x4"} and all(map(topologies.chip_of, named))


# -------------------------------------------------------------------------------------------------------- the run


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with what the page takes from elsewhere: target, published drafters, data sets."""
    folder = tmp_path_factory.mktemp("qwen3")
    for name in ("data", "bucket/prompts", "bucket/rows", "machine", "configs", "tasks"):
        (folder / name).mkdir(parents=True)
    # 1,536 tokens: the shipped tokenizer's.
    target = random_target(Qwen3Config.from_dict({**TARGET_FIELDS, "vocab_size": 1_536}))
    save_target(folder / "target", target.config, target.params, "float32", token_ids={"eos_token_id": 2})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ASSETS / "tiny_qwen3" / name, folder / "target" / name)
    for name, head in (("Domino", "domino"), ("DFlash", "none")):
        drafter = tiny_drafter(target.config, shift_label=head == "domino", head=head, layers=1)
        save_drafter(folder / name, drafter.config, drafter.params, "float32")
    for name in ("qwen3_4b", "qwen3_8b"):
        recipe = RECIPE.format(name=name, target=str(folder / "target"))
        (folder / "configs" / f"{name}.py").write_text(recipe)
    for name, task in TASKS.items():
        row = {field: ["First?", "Second?"] if task.listed else f"A {field}?" for field in task.fields}
        (folder / "tasks" / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    asked = [f"What is {number} and {number}?" for number in range(PROMPTS)]
    rows = [[{"from": "human", "value": text}, {"from": "gpt", "value": "No."}] for text in asked]
    lines = [json.dumps({"conversations": turns}) + "\n" for turns in rows]
    (folder / "perfectblend.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def untimed(monkeypatch):
    """Decode's timings are tested elsewhere."""
    monkeypatch.setattr(Runner, "time_rounds", lambda *_: {})


def here(world: pathlib.Path, word: str) -> str:
    """A word of the page with the test's folders for paths and hub ids, and its files for tasks."""
    names = "|".join(map(re.escape, PLACES))
    # A path begins after a flag's =, a quote, or the word.
    word = re.sub(rf"(?<![\w/.])(?:{names})", lambda found: f"{world}/{PLACES[found[0]]}", word)
    word = re.sub(rf"'({'|'.join(TASKS)})'", rf"'\1:1={world}/tasks/\1.jsonl'", word)
    name, _, value = word.removeprefix("--").partition("=")
    return f"--{name}={SMALLER[name]}" if value and name in SMALLER else word


def copy_as_gcloud(world: pathlib.Path, words: list[str]) -> None:
    """What `gcloud storage cp` does, also on a machine: its home holds the repository's folder."""
    nested = [word.partition("=")[2] for word in words if word.startswith("--command=")]
    if nested:
        words = shlex.split(nested[0].replace(" domino_jax/", " /machine/"))
    assert words[:3] == ["gcloud", "storage", "cp"]
    sources = [name for word in words[3:-1] for name in glob.glob(here(world, word))]
    assert sources, words
    for name in sources:
        shutil.copy(name, here(world, words[-1]))


def run(world: pathlib.Path, words: list[str], monkeypatch) -> None:
    """One command of the page, in this process."""
    name, argv = words[2], [here(world, word) for word in words[3:] if not word.startswith("--topology=")]
    if name == "assets.make_hub_prompts":
        monkeypatch.setattr(sys, "argv", [name, *argv])
        make_hub_prompts.main()
        return
    command = name.removeprefix("domino_jax.")
    if command in ("train", "regenerate"):
        argv.append("--distributed=off")  # the devices of this process are in use already
    assert run_command(command, *argv) == 0, " ".join(words)


@pytest.mark.slow(minutes=3)
def test_the_page_runs_from_prompts_to_the_table(world, untimed, monkeypatch):
    monkeypatch.chdir(world / "machine")
    rows, before = world / "data" / "rows.jsonl", ""
    for one in commands():
        if one.words[0] == "gcloud":
            copy_as_gcloud(world, one.words)
        elif one.words[0] == "tail":
            shown = subprocess.run([here(world, word) for word in one.words], capture_output=True, check=True).stdout
            assert json.loads(shown)["step"] == 4
        elif one.words in OURS:
            again = "domino_jax.regenerate" in one.words and "/rows.jsonl" in one.line and rows.exists()
            if again:  # the same answers, in another way
                before = rows.read_text()
                rows.unlink()
            run(world, one.words, monkeypatch)
            assert not again or rows.read_text() == before
    check_files(world, rows)


def check_files(world: pathlib.Path, rows: pathlib.Path) -> None:
    assert len(rows.read_text().splitlines()) == PROMPTS
    assert len((world / "data" / "qwen3-8b" / "held_out.jsonl").read_text().splitlines()) == PROMPTS // 20
    assert (world / "data" / "qwen3-8b" / "tensorboard").is_dir() and (world / "dry_runs" / "h100").is_dir()
    for workdir, steps in (("data/qwen3-8b", 4), ("bucket/qwen3-8b", 4), ("bucket/try", 2)):
        found = read_rows(world / workdir / "metrics.jsonl")
        assert [row["step"] for row in found if "loss" in row] == list(range(1, steps + 1))
        taus = [row["eval_tau"] for row in found if "eval_tau" in row]
        assert taus and min(taus) >= 1
    for folder in ("data/drafter", "data/drafter-tpu"):
        assert (world / folder / "model.safetensors").is_file()
    report = json.loads((world / "data" / "decoded" / "report.json").read_text())
    assert set(report["tasks"]) == set(TASKS) - {"speed-bench"}
    assert list(report["modes"]) == ["autoregressive", "backbone", "domino"]
    assert (world / "data" / "decoded" / "report.html").is_file()
