"""A whole run whose target, rows, prompts and workdir are in a bucket of a real server: trained, killed, resumed, its
newest checkpoint damaged, decoded. gcsfs and tensorstore both speak to that server (conftest.storage_url).
"""

import json

import pytest

from domino_jax.evals.run import Runner
from domino_jax.runtime import remote
from domino_jax.training.metrics import MetricsWriter, read_rows
from tests.helpers.commands import run
from tests.helpers.train_runs import GOLDEN, arguments, losses, start, weights

pytestmark = pytest.mark.long

CHANGES = {
    "config__checkpoint__every": 1,
    "config__eval__every": 8,
    "config__decode__max_new_tokens": 8,
    "config__decode__modes": "('domino',)",
}


@pytest.fixture
def stored(bucket, finished_run, tmp_path, monkeypatch):
    """Arguments of a run all of whose paths are in the bucket, and its workdir."""
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Runner, "time_rounds", lambda *_: {})
    store = remote.filesystem(bucket)
    for file in (GOLDEN / "target").iterdir():
        store.pipe_file(f"{bucket}/target/{file.name}", file.read_bytes())
    addresses = []
    for file in finished_run.files:
        addresses.append(f"{bucket}/data/{file.name}")
        store.pipe_file(addresses[-1], file.read_bytes())
    argv = arguments(addresses, f"{bucket}/run", config__target__path=f"{bucket}/target", **CHANGES)
    return argv, remote.open_path(f"{bucket}/run")


def flip_a_bit(folder):
    """In the middle of the largest file of a folder in a bucket."""
    store = remote.filesystem("gs://")
    written = store.find(str(folder), detail=True)
    large = max(written.values(), key=lambda file: file["size"])
    data = bytearray(store.cat(large["name"]))
    data[len(data) // 2] ^= 1
    store.pipe_file(large["name"], bytes(data))


def test_a_run_in_a_bucket_is_resumed_and_falls_back_bit_for_bit(stored, finished_run, tmp_path, monkeypatch, capsys):
    argv, workdir = stored

    # ---- killed at step 3
    write = MetricsWriter.write

    def dies_at_three(self, step, values):
        if step == 3:
            raise KeyboardInterrupt
        write(self, step, values)

    with monkeypatch.context() as patched:
        patched.setattr(MetricsWriter, "write", dies_at_three)
        assert start(argv) == 130
    assert [row["step"] for row in read_rows(workdir / "metrics.jsonl") if "loss" in row] == [1, 2]

    # ---- the newest checkpoint damaged: resumed from the one before it, with the index that this machine keeps
    flip_a_bit(workdir / "checkpoints" / "2")
    argv = [*argv, "--config.eval.final=True"]
    with monkeypatch.context() as patched:
        patched.setattr("domino_jax.data.index._measure", None)
        assert start(argv) == 0
    message = capsys.readouterr().out
    assert "the checkpoint of step 2 is damaged" in message and "continues from step 1" in message
    assert (workdir / "checkpoints" / "corrupt" / "2").exists()
    assert losses(workdir) == losses(finished_run.workdir)
    assert weights(workdir) == weights(finished_run.workdir)
    names = {path.name for path in workdir.iterdir()}
    assert {"metrics.jsonl", "tensorboard", "checkpoints", "export", "plots", "finished.json"} <= names
    assert not any(name.endswith(".part") for name in names)
    assert len([name for name in names if name.startswith("held_out_answers-")]) == 1
    assert [row["step"] for row in read_rows(workdir / "metrics.jsonl") if "eval_tau" in row] == [8]
    assert {"report.json", "generations.jsonl", "report.html"} <= {path.name for path in (workdir / "report").iterdir()}

    # ---- shown, exported and decoded from there
    assert start(argv) == 0 and "holds a finished run" in capsys.readouterr().out
    output = workdir.parent / "exported"
    assert run("export", f"--workdir={workdir}", f"--output={output}") == 0 and (output / "config.json").exists()
    read = ("--config=", "--distributed", "--config.target.path", "--config.eval.prompts", "--config.decode.")
    decoding = [argument for argument in argv if argument.startswith(read)]
    assert run("decode", *decoding, f"--output={tmp_path / 'decoded'}", f"--config.drafter.path={workdir}") == 0
    report = json.loads((tmp_path / "decoded" / "report.json").read_text())
    assert report["modes"]["domino"]["answers"] == 2


def test_a_dry_run_writes_to_a_bucket(stored):
    argv, workdir = stored
    assert run("train", *argv, "--dry_run") == 0
    assert json.loads((workdir / "dry_run.json").read_text())["chips"] >= 1
