"""environment.py: enough to know under what a run ran, and no secret."""

import json
import subprocess

import jax
import pytest

from domino_jax.runtime.environment import VARIABLES, git_state, write_environment

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")


def git(folder, *arguments):
    done = subprocess.run(["git", "-C", str(folder), *IDENTITY, *arguments], check=True, capture_output=True)
    return done.stdout.decode().strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository that tracks package/__init__.py."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    return package


def test_env_json_names_versions_devices_and_flags_and_no_secret(tmp_path, monkeypatch):
    jax.devices()  # XLA ends the process at a flag that it does not know
    monkeypatch.setenv("XLA_FLAGS", "--xla_canary_flag=1")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_canary=2")
    for name in ("HF_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, "canary-secret")
    write_environment(tmp_path)
    text = (tmp_path / "env.json").read_text()
    found = json.loads(text)
    assert found["packages"]["jax"] == jax.__version__
    assert all("/" not in version and "@" not in version for version in found["packages"].values())
    assert found["device_kinds"] == {"cpu": found["device_count"]} and found["backend"] == "cpu"
    assert found["process_count"] == 1 and found["python"].startswith("3.")
    assert {"date", "domino_jax", "git", "local_device_count", "cores"} <= found.keys()
    assert found["variables"]["XLA_FLAGS"] == "--xla_canary_flag=1"
    assert found["variables"]["LIBTPU_INIT_ARGS"] == "--xla_tpu_canary=2"
    assert set(found["variables"]) <= set(VARIABLES) and "canary-secret" not in text


def test_a_checkouts_commit_and_whether_it_was_changed(checkout):
    assert git_state(checkout) == git(checkout, "rev-parse", "HEAD")
    (checkout / "__init__.py").write_text("x = 1\n")
    assert git_state(checkout) == git(checkout, "rev-parse", "HEAD") + "-dirty"
    installed = checkout / "site-packages"
    installed.mkdir()
    (installed / "__init__.py").write_text("")
    assert git_state(installed) is None
