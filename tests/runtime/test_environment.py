"""environment.py: enough to know under what a run ran, and no secret."""

import io
import json
import subprocess

import jax
import numpy as np
import pytest

import domino_jax
from domino_jax.method.blocks import sample_anchors
from domino_jax.recipe import cli
from domino_jax.runtime.environment import SETTINGS, VARIABLES, environment, git_state
from domino_jax.runtime.errors import DominoError

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")


def git(folder, *arguments):
    done = subprocess.run(["git", "-C", str(folder), *IDENTITY, *arguments], check=True, capture_output=True)
    return done.stdout.decode().strip()


def test_env_json_names_versions_devices_and_flags_and_no_secret(monkeypatch):
    jax.devices()  # XLA ends the process at a flag that it does not know
    monkeypatch.setenv("XLA_FLAGS", "--xla_canary_flag=1")
    for name in ("HF_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, "canary-secret")
    text = json.dumps(environment())
    stored = json.loads(text)
    assert stored["packages"]["jax"] == jax.__version__
    assert all("/" not in version and "@" not in version for version in stored["packages"].values())
    assert stored["device_kinds"] == {"cpu": stored["device_count"]} and stored["process_count"] == 1
    assert {"date", "domino_jax", "git", "python", "backend", "cores"} <= stored.keys()
    assert stored["variables"]["XLA_FLAGS"] == "--xla_canary_flag=1" and set(stored["variables"]) <= set(VARIABLES)
    assert "canary-secret" not in text


def test_a_checkouts_commit_and_whether_it_was_changed(tmp_path):
    checkout = tmp_path / "package"
    checkout.mkdir()
    (checkout / "__init__.py").write_text("")
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "one")):
        git(tmp_path, *words)
    assert git_state(checkout) == git(checkout, "rev-parse", "HEAD")
    (checkout / "__init__.py").write_text("x = 1\n")
    assert git_state(checkout) == git(checkout, "rev-parse", "HEAD") + "-dirty"
    installed = checkout / "site-packages"
    installed.mkdir()
    (installed / "__init__.py").write_text("")
    assert git_state(installed) is None


OTHERS = dict(zip(SETTINGS, (True, "strict", "raise", "rbg", False, 7, True), strict=True))  # as variables may set them


def test_a_command_has_its_own_settings_of_jax_and_prints_every_letter(monkeypatch):
    """So the anchors of a row, too, do not follow the rows beside it, as random numbers by rbg would."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", printed)
    mask, ids, seen = np.ones((4, 40), np.float32), np.arange(4, dtype=np.int32), {}

    def main(flags):
        seen.update({name: jax.config.values[name] for name in SETTINGS})
        key = jax.random.key(42)
        alone = [sample_anchors(key, mask[:1], ids[row : row + 1], 8)[0][0] for row in ids]
        np.testing.assert_array_equal(sample_anchors(key, mask, ids, 8)[0], np.stack(alone))
        print("τ 3.5")

    try:
        for name, value in OTHERS.items():
            jax.config.update(name, value)
        with pytest.raises(SystemExit) as left:
            cli.run(main, ("workdir",), (), ["command", "--workdir=w"])
    finally:
        for name, value in SETTINGS.items():
            jax.config.update(name, value)
    printed.flush()
    assert not left.value.code and seen == SETTINGS and printed.buffer.getvalue() == b"? 3.5\n"


def test_load_refuses_float64(tmp_path):
    with jax.enable_x64(True), pytest.raises(DominoError, match="jax_enable_x64 is on"):
        domino_jax.load(str(tmp_path))
