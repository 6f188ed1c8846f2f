"""remote.py: files and folders in a bucket, and the message for one that cannot be used."""

import sys

import pytest

from domino_jax.runtime import remote
from domino_jax.runtime.errors import DominoError
from domino_jax.weights import hf


def test_a_missing_package_names_the_file_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(DominoError, match="^gs://b/data: .*\n.*pip install -r requirements-gcs.txt"):
        remote.open_path("gs://b/data")


@pytest.mark.parametrize("name", ["rows.jsonl", "no-such-folder/rows.jsonl"])
def test_an_object_that_cannot_be_read_is_one_message_with_its_address(bucket, name):
    with (
        pytest.raises(DominoError, match=f"^{bucket}/{name} cannot be used") as error,
        remote.access(f"{bucket}/{name}"),
    ):
        remote.open_path(f"{bucket}/{name}").read_bytes()
    assert error.value.exit_code == 2 and len(str(error.value).splitlines()) == 2


def test_another_store_is_refused():
    with pytest.raises(DominoError, match="s3://b/run: only local paths and gs:// addresses can be used"):
        remote.open_path("s3://b/run")


def test_files_that_others_write_are_seen(bucket):
    """Listings are not kept: a second client, as Orbax' is, writes into a folder that was listed before."""
    folder = remote.open_path(f"{bucket}/run")
    assert not folder.exists() and list(remote.open_path(bucket).iterdir()) == []
    other = type(remote.filesystem(bucket))(skip_instance_cache=True)
    other.pipe_file(f"{bucket}/run/a", b"x")
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_a_model_in_a_bucket_is_copied_once_and_again_when_it_changes(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path))
    store = remote.filesystem(bucket)
    store.pipe_file(f"{bucket}/drafter/model.safetensors", b"one")
    for name in ("config.json", "notes.txt", "more/config.json"):
        store.pipe_file(f"{bucket}/drafter/{name}", b"{}")
    first = hf.resolve_folder(f"{bucket}/drafter")
    assert sorted(path.name for path in first.iterdir()) == ["config.json", "model.safetensors"]
    assert first.name == "drafter" and tmp_path in first.parents
    with monkeypatch.context() as patched:
        patched.setattr(type(store), "get_file", None)
        assert hf.resolve_folder(f"{bucket}/drafter/") == first
    store.pipe_file(f"{bucket}/drafter/model.safetensors", b"two")
    assert (hf.resolve_folder(f"{bucket}/drafter") / "model.safetensors").read_bytes() == b"two"
    store.pipe_file(f"{bucket}/run/export/config.json", b'{"a": 1}')
    assert (hf.drafter_folder(f"{bucket}/run") / "config.json").read_bytes() == b'{"a": 1}'
    with pytest.raises(DominoError, match="none holds none of"):
        hf.resolve_folder(f"{bucket}/none")


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DOMINO_CACHE", "~/copies")
    assert remote.cache_folder() == tmp_path / "copies"
    monkeypatch.delenv("DOMINO_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert remote.cache_folder() == tmp_path / ".cache/domino_jax"
