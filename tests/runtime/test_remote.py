"""remote.py: a bucket that cannot be used is one message and exit code 2, in bounded time, before any loading."""

import http.server
import json
import sys
import threading
import time

import pytest
from gcsfs.retry import HttpError

from domino_jax.recipe import cli
from domino_jax.runtime import remote
from domino_jax.runtime.connection import free_port
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.weights import hf

TINY = "configs/tiny.py"


def refused(reads, writes=()):
    with pytest.raises(DominoError) as error:
        remote.check(reads, writes)
    assert error.value.exit_code == 2 and len(str(error.value).splitlines()) <= 5
    return str(error.value)


@pytest.fixture
def answering(monkeypatch):
    """A function that puts a server in the place of the store which answers every request alike."""
    servers = []

    def start(status, message, seconds=0.0):
        class Answer(http.server.BaseHTTPRequestHandler):
            def answer(self):
                time.sleep(seconds)
                body = json.dumps({"error": {"code": status, "message": message}}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("NO_GCE_CHECK", "true")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_bucket_that_can_be_read_and_written_is_left_as_it_was(bucket):
    remote.check([f"{bucket}/data/*.jsonl"], [f"{bucket}/run"])
    assert remote.filesystem(bucket).find(bucket) == []


def test_a_missing_bucket_is_named(storage_url):
    assert "the bucket gs://no-such-bucket does not exist" in refused(["gs://no-such-bucket/data/rows.jsonl"])
    assert "the bucket gs://no-such-bucket does not exist" in refused([], ["gs://no-such-bucket/run"])


def test_a_missing_object_in_a_bucket_that_exists_is_not_taken_for_a_missing_bucket(bucket):
    with pytest.raises(DominoError, match=f"^{bucket}/rows.jsonl cannot be used: there is no such object") as error:
        with remote.access(f"{bucket}/rows.jsonl"):
            remote.open_path(f"{bucket}/rows.jsonl").read_bytes()
    assert error.value.exit_code == 2 and "bucket" not in str(error.value).partition(": ")[2]


def test_a_missing_package_names_the_file_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs.core", None)
    remote._register.cache_clear()
    try:
        message = refused(["gs://b/data"])
    finally:
        remote._register.cache_clear()
    assert message.startswith("gs://b/data: ") and "pip install -r requirements-gcs.txt" in message


@pytest.mark.parametrize(
    ("status", "text", "reason", "remedy"),
    [
        (401, "Anonymous caller has no access", "no valid credentials", "gcloud auth application-default login"),
        (403, "someone has no access", "permission denied", "roles/storage.objectAdmin"),
    ],
)
def test_no_credentials_and_no_permission_are_named_with_the_remedy(answering, status, text, reason, remedy):
    answering(status, text)
    for message in (refused(["gs://b/data"]), refused([], ["gs://b/run"])):
        assert reason in message and remedy in message


def test_a_store_that_does_not_answer_is_given_up(answering, monkeypatch):
    answering(200, "", seconds=30)
    monkeypatch.setattr(remote, "CHECK_SECONDS", 0.5)
    started = time.monotonic()
    assert "no answer in time" in refused(["gs://b/data"])
    assert time.monotonic() - started < 10


def test_no_network_is_named(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setattr("gcsfs.retry.asyncio.sleep", no_pause)
    message = refused(["gs://b/data"])
    assert "Cannot connect to host 127.0.0.1" in message and "network" in message


@pytest.mark.parametrize(
    ("error", "later"),
    [
        (TimeoutError(), True),
        (ConnectionResetError("reset by peer"), True),
        (HttpError({"code": 503, "message": "try again"}), True),
        (HttpError({"code": 429, "message": "too many"}), True),
        (HttpError({"code": 400, "message": "no such name"}), False),
        (HttpError({"code": 401, "message": "who"}), False),
        (OSError("Forbidden: b/run"), False),
        (FileNotFoundError("b/run"), False),
    ],
)
def test_a_failure_that_may_pass_is_told_from_a_mistake(error, later):
    with pytest.raises(remote.BucketError) as refusal, remote.access("gs://b/run"):
        raise error
    assert remote.is_outage(refusal.value) is later
    outer = DataError("the checkpoint could not be written")
    outer.__cause__ = refusal.value
    assert remote.is_outage(outer) is later and not remote.is_outage(None)


async def no_pause(seconds):
    """Stands in for the pauses between the client's tries."""


def test_another_store_is_refused():
    with pytest.raises(DominoError, match="s3://b/run: only local paths and gs:// addresses can be used"):
        remote.open_path("s3://b/run")


def test_addresses_are_found_wherever_a_recipe_names_them():
    recipe = {
        "data": {"train": "gs://b/x/*.jsonl=0.7,here/y.jsonl=0.3"},
        "target": {"path": "/models/qwen", "names": ("gs://c/target", None, 3)},
        "eval": {"prompts": "gs://d/prompts.jsonl"},
    }
    assert remote.addresses(recipe) == ["gs://b/x/*.jsonl", "gs://c/target", "gs://d/prompts.jsonl"]


@pytest.mark.parametrize(
    "given",
    [
        ("--workdir=gs://no-such-bucket/run",),
        ("--workdir=WORKDIR", "--config.data.train=gs://no-such-bucket/rows.jsonl"),
        ("--workdir=WORKDIR", "--config.target.path=gs://no-such-bucket/target"),
        ("--workdir=WORKDIR", "--config.eval.prompts=gs://no-such-bucket/prompts.jsonl"),
    ],
)
def test_every_flag_and_recipe_value_is_looked_at_before_main(storage_url, tmp_path, capsys, given):
    argv = ["train", f"--config={TINY}", *(word.replace("WORKDIR", str(tmp_path)) for word in given)]
    with pytest.raises(SystemExit) as left:
        cli.run(lambda flags: pytest.fail("main ran"), ("config", "workdir"), argv=argv, writes=("workdir",))
    expected = capsys.readouterr().err
    assert left.value.code == 2 and expected.startswith("error: gs://no-such-bucket/") and "Traceback" not in expected


def test_a_prompt_may_speak_of_a_bucket(monkeypatch, tmp_path):
    monkeypatch.setattr(remote, "connect", None)
    cli.check_addresses(cli.Flags(prompt="what is gs://b?", workdir=str(tmp_path)), ())


def test_a_failure_in_the_middle_of_a_command_is_one_message_and_an_error_like_a_failing_disks(answering, capsys):
    answering(403, "taken away")
    with pytest.raises(SystemExit) as left:
        cli.run(lambda flags: remote.filesystem("gs://b").cat("gs://b/rows.jsonl"), (), argv=["decode"])
    expected = capsys.readouterr().err
    assert left.value.code == 2 and expected.startswith("error: gs://b") and "permission denied" in expected
    with pytest.raises(OSError):
        remote.open_path("gs://b/rows.jsonl").read_bytes()


def test_all_files_below_an_address_are_listed_by_their_place_in_it(bucket):
    for name in ("run/4/state/d/0", "run/4/extra", "run/40/extra"):
        remote.filesystem(bucket).pipe_file(f"{bucket}/{name}", b"x")
    assert sorted(remote.list_files(f"{bucket}/run/4")) == ["extra", "state/d/0"]


def test_folders_are_not_made(bucket, monkeypatch):
    """A request for the bucket itself, or to make it, would ask for more than the rights to its objects."""
    monkeypatch.setattr(type(remote.filesystem(bucket)), "_request", None)
    remote.open_path(f"{bucket}/run/checkpoints").mkdir(parents=True, exist_ok=True)


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
    chosen = {"DOMINO_CACHE": "copies", "XDG_CACHE_HOME": "cache/domino_jax", "HOME": ".cache/domino_jax"}
    monkeypatch.setenv("DOMINO_CACHE", "~/copies")
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    for name, place in chosen.items():
        assert remote.cache_folder() == tmp_path / place
        if name != "HOME":
            monkeypatch.delenv(name)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DOMINO_CACHE", f"{tmp_path}/file/below")
    with pytest.raises(DominoError, match="file/below cannot hold copies.*DOMINO_CACHE"):
        remote.cache_folder()
