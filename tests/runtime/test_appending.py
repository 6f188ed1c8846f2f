"""appending.py: bytes reach their file once and in order, and nobody waits for them."""

import threading

import pytest

from domino_jax.runtime import appending, remote
from domino_jax.runtime.appending import AppendingThread, BucketFile, LocalFile
from domino_jax.runtime.errors import DominoError


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path):
    """A folder on a disk, and one in a bucket."""
    return str(tmp_path) if request.param == "disk" else request.getfixturevalue("bucket")


def test_parts_are_joined_in_order_and_a_later_start_goes_on(folder):
    for part in (b"one\n", b"two\n", b"three\n"):
        file = appending.open_file(f"{folder}/run/rows")
        file.append(part)
        file.append(part.upper())
    assert remote.open_path(f"{folder}/run/rows").read_bytes() == b"one\nONE\ntwo\nTWO\nthree\nTHREE\n"
    assert file.size == 28
    assert [path.name for path in remote.open_path(f"{folder}/run").iterdir()] == ["rows"]


def test_an_append_whose_answer_is_lost_is_not_done_twice(bucket, monkeypatch):
    file = BucketFile(f"{bucket}/rows")
    file.append(b"one\n")
    write = type(file._path).write_bytes

    def lost(path, data):
        write(path, data)
        raise remote.BucketError("no answer")

    with monkeypatch.context() as outage:
        outage.setattr(type(file._path), "write_bytes", lost)
        with pytest.raises(OSError):
            file.append(b"two\n")
    file.append(b"two\nthree\n")
    assert remote.open_path(f"{bucket}/rows").read_bytes() == b"one\ntwo\nthree\n"


class FullDisk:
    """A file whose second write puts down half of its bytes and then fails."""

    def __init__(self, file):
        self._file, self._writes = file, 0

    def write(self, data):
        self._writes += 1
        if self._writes == 2:
            self._file.write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_a_full_disk_leaves_no_half_line(tmp_path):
    file = LocalFile(tmp_path / "rows")
    file._file = FullDisk(file._file)
    file.append(b"one\n")
    with pytest.raises(OSError, match="No space left"):
        file.append(b"two\n")
    assert (tmp_path / "rows").read_bytes() == b"one\n"
    file.append(b"two\n")
    assert (tmp_path / "rows").read_bytes() == b"one\ntwo\n"


def full(path):
    """Stands in for open_file."""
    raise OSError(28, "No space left on device")


def test_what_failed_is_written_later_once_and_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(appending, "RETRY_SECONDS", 0.1)
    warnings = []
    rows = AppendingThread(tmp_path, warnings.append)
    with monkeypatch.context() as patched:
        patched.setattr(appending, "open_file", full)
        rows.append("rows", b"one\n")
        assert not rows.flush(20)
        rows.append("rows", b"two\n")
        assert not rows.flush(20)
    rows.append("rows", b"three\n")
    rows.close()
    assert (tmp_path / "rows").read_bytes() == b"one\ntwo\nthree\n"
    assert len(warnings) == 1 and "No space left on device" in warnings[0] and "tries again" in warnings[0]


@pytest.mark.parametrize("error", [UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), DominoError(), OSError()])
def test_whatever_opening_a_file_raises_the_thread_goes_on(tmp_path, monkeypatch, error):
    monkeypatch.setattr(appending, "RETRY_SECONDS", 0.1)
    broken = iter([error])

    def prepare():
        for reason in broken:
            raise reason

    warnings = []
    rows = AppendingThread(tmp_path, warnings.append)
    rows.append("rows", b"one\n", prepare)
    rows.flush(20)  # waits for the failure, or for the next try
    rows.close()
    assert (tmp_path / "rows").read_bytes() == b"one\n" and len(warnings) == 1


def test_a_disk_that_stays_full_costs_a_warning_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(appending, "open_file", full)
    warnings = []
    rows = AppendingThread(tmp_path, warnings.append)
    rows.append("rows", b"one\n")
    rows.close()
    assert len(warnings) == 2 and "rows: the last rows could not be written" in warnings[1]


def test_a_store_that_never_answers_blocks_neither_a_step_nor_the_end(tmp_path, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(appending, "open_file", lambda path: answer.wait() and LocalFile(path))
    warnings = []
    rows = AppendingThread(tmp_path, warnings.append)
    for _ in range(1_000):
        rows.append("rows", b"row\n")  # a call that waited would never return
    assert not rows.flush(0.2)
    rows.close(0.2)
    assert len(warnings) == 1 and "could not be written" in warnings[0]
    answer.set()


def test_a_file_is_prepared_once_and_not_before_its_first_byte(tmp_path):
    calls = []
    rows = AppendingThread(tmp_path)
    rows.close()
    assert calls == [] and list(tmp_path.iterdir()) == []
    for data in (b"one\n", b"two\n"):
        rows.append("rows", data, lambda: calls.append(1))
        assert rows.flush(20)
    rows.close()
    assert calls == [1]


@pytest.mark.parametrize(("megabytes", "seconds"), [(0, 10), (0.5, 10), (5, 50), (1_000, 300)])
def test_the_longer_files_in_a_bucket_are_the_rarer_they_are_replaced(bucket, tmp_path, megabytes, seconds):
    file = type("File", (), {"size": int(megabytes * 1e6)})
    for folder, pause in ((bucket, seconds), (tmp_path, 0)):
        rows = AppendingThread(folder)
        rows._files["rows"] = file
        assert rows._interval() == pause
