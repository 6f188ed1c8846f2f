"""Files that only grow, on a disk or in a bucket, written by a separate thread so that no step waits."""

import os
import threading
import time
from collections.abc import Callable

from domino_jax.runtime import remote
from domino_jax.runtime.errors import DominoError, first_line
from domino_jax.runtime.files import is_remote

# Objects cannot grow, so an append replaces the whole one. The longer the files are, the rarer it is done: at most 1 MB
# is sent per SECONDS_PER_MB. (Google bills replaced objects for some days more: soft delete.)
BUCKET_SECONDS = 10.0
SECONDS_PER_MB = 10.0
MOST_SECONDS = 300.0
RETRY_SECONDS = 10.0  # after an append that failed
CLOSE_SECONDS = 60.0  # a run ends without its last rows rather than never


class LocalFile:
    """A file of `size` bytes on a disk; append() adds all of `data`, or raises OSError and leaves it as it was."""

    def __init__(self, path: str | os.PathLike):
        os.makedirs(os.path.dirname(os.fspath(path)) or ".", exist_ok=True)
        # Unbuffered: what is written is in the file, whatever ends the process.
        self._file = open(path, "ab", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size

    def append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(self.size)  # no half line on a full disk
            raise
        self.size += len(data)


class BucketFile:
    """As LocalFile, in a bucket: the object is replaced by a longer one, from the bytes kept here."""

    def __init__(self, path: str | os.PathLike):
        self._path = remote.open_path(path)
        self._content = self._path.read_bytes() if self._path.exists() else b""

    @property
    def size(self) -> int:
        return len(self._content)

    def append(self, data: bytes) -> None:
        self._path.write_bytes(self._content + data)
        self._content += data


def open_file(path: str | os.PathLike) -> LocalFile | BucketFile:
    """The file to append to; OSError where it cannot be opened."""
    return BucketFile(path) if is_remote(path) else LocalFile(path)


class AppendingThread:
    """Takes bytes for files at any time and appends them in the background, in order, each byte once.

    A file is written to as soon as there is something on a disk, and every BUCKET_SECONDS or less often in a bucket.
    Bytes whose write fails stay in memory and are tried again; the first failure is one warning.
    """

    def __init__(self, folder: str | os.PathLike, report: Callable[[str], None] = print):
        """
        Args:
            folder: of all files.  report: takes the warnings.
        """
        self._folder, self._report = remote.open_path(folder), report
        self._in_bucket = is_remote(folder)
        self._openers: dict[str, Callable[[], None]] = {}
        self._files: dict[str, LocalFile | BucketFile] = {}
        self._waiting: dict[str, bytearray] = {}
        self._changed = threading.Condition()
        self._hurry = self._busy = self._failed = self._ended = self._warned = False
        self._thread: threading.Thread | None = None

    def append(self, name: str, data: bytes, prepare: Callable[[], None] | None = None) -> None:
        """Hands bytes over and returns at once.

        Args:
            name: of the file, relative to the folder.  prepare: called in the thread before the file is first opened.
        """
        with self._changed:
            if prepare is not None:
                self._openers.setdefault(name, prepare)
            self._waiting.setdefault(name, bytearray()).extend(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="append-files", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, seconds: float = CLOSE_SECONDS) -> bool:
        """True once everything handed over is written; False when that takes longer, or has failed once more."""
        with self._changed:
            self._hurry, self._failed = True, False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failed or not (self._waiting or self._busy), seconds)
            return not (self._waiting or self._busy)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Writes what is left, for at most `seconds`, and reports what is lost."""
        if self._thread is None:
            return
        written = self.flush(seconds)
        with self._changed:
            self._ended = True
            lost = {name: len(data) for name, data in self._waiting.items()}
            self._changed.notify_all()
        if written:
            self._thread.join(seconds)
        else:
            names = ", ".join(lost) or "the last rows"
            self._report(f"warning: {names}: the last rows could not be written to {self._folder} and are lost")

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    return
                self._changed.wait_for(lambda: self._hurry or self._ended, max(due - time.monotonic(), 0))
                pending, self._waiting = self._waiting, {}
                self._busy = True
            left = {name: data for name, data in pending.items() if not self._write(name, bytes(data))}
            due = time.monotonic() + (RETRY_SECONDS if left else self._interval())
            with self._changed:
                for name, data in left.items():
                    self._waiting[name] = data + self._waiting.get(name, bytearray())
                self._busy, self._failed = False, bool(left)
                self._hurry = self._hurry and not left and bool(self._waiting)
                self._changed.notify_all()

    def _interval(self) -> float:
        if not self._in_bucket:
            return 0.0
        megabytes = sum(file.size for file in self._files.values()) / 1e6
        return min(max(BUCKET_SECONDS, SECONDS_PER_MB * megabytes), MOST_SECONDS)

    def _write(self, name: str, data: bytes) -> bool:
        try:
            if name not in self._files:
                if name in self._openers:
                    self._openers[name]()
                self._files[name] = open_file(self._folder / name)
            self._files[name].append(data)
        except (OSError, ValueError, DominoError) as error:  # an exception that left here would end the thread
            if not self._warned:
                self._warned = True
                self._report(
                    f"warning: {self._folder / name} cannot be written ({first_line(error)}); the run goes on and "
                    "tries again"
                )
            return False
        self._warned = False
        return True
