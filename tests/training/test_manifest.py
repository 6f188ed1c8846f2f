"""manifest.py: every changed bit of a checkpoint is found and named, and an unchanged one raises no alarm."""

import json
import os

import pytest

from domino_jax.runtime import remote
from domino_jax.training import manifest


@pytest.fixture
def folder(tmp_path):
    """Three files, one below a folder, and their manifest as of step 7."""
    (tmp_path / "state" / "d").mkdir(parents=True)
    (tmp_path / "state" / "d" / "data").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "extra").write_text("{}")
    (tmp_path / "empty").write_bytes(b"")
    manifest.write(tmp_path, 7)
    return tmp_path


def test_the_manifest_holds_names_sizes_and_sha256(folder):
    written = json.loads((folder / "manifest.json").read_text())
    assert written["step"] == 7
    assert list(written["files"]) == ["empty", "extra", "state/d/data"]
    assert written["files"]["extra"] == {
        "bytes": 2,
        "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    }
    assert manifest.damage(folder, 7) is None


def edit(path, change):
    written = json.loads(path.read_text())
    change(written)
    path.write_text(json.dumps(written))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "extra").unlink(), "extra: missing"),
        (lambda folder: (folder / "extra").write_text("{"), "extra: 1 bytes instead of 2"),
        (lambda folder: (folder / "extra").write_text("[]"), "extra: its content changed (SHA-256 differs)"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: missing"),
        (lambda folder: (folder / "manifest.json").write_text(""), "manifest.json: does not match its own checksum"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json: does not match its own checksum"),
        (
            lambda folder: edit(folder / "manifest.json", lambda written: written["files"].pop("extra")),
            "manifest.json: does not match its own checksum",
        ),
        (lambda folder: manifest.write(folder, 8), "manifest.json: is that of step 8"),
    ],
    ids=["file gone", "cut", "changed", "no manifest", "empty manifest", "a list", "edited manifest", "other step"],
)
def test_damage_names_the_file_and_the_reason(folder, harm, message):
    harm(folder)
    assert manifest.damage(folder, 7) == message


def test_a_manifest_is_written_whole_or_not_at_all(folder, monkeypatch):
    before = (folder / "manifest.json").read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        manifest.write(folder, 7)
    assert (folder / "manifest.json").read_bytes() == before


def test_a_store_that_does_not_answer_is_no_damage(bucket, monkeypatch):
    """Else one outage would set a whole checkpoint aside."""
    folder = remote.open_path(f"{bucket}/7")
    (folder / "extra").write_bytes(b"x")
    manifest.write(folder, 7)
    assert manifest.damage(folder, 7) is None

    def silent(*_):
        raise TimeoutError

    monkeypatch.setattr(type(folder), "open", silent)
    with pytest.raises(OSError):
        manifest.damage(folder, 7)
