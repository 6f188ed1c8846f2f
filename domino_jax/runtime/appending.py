"""Files that only grow, on a disk or in a bucket, written by a separate thread so that no step waits."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from domino_jax.runtime import remote
from domino_jax.runtime.errors import DominoError, first_line
from domino_jax.runtime.files import is_remote

# An append to a bucket makes a new object of the old bytes and the new ones, without moving the old ones. Google bills
# the replaced object for some days (soft delete), so the longer the files are, the rarer it is done: at most 1 MB is
# replaced per SECONDS_PER_MB.
BUCKET_SECONDS = 10.0
SECONDS_PER_MB = 10.0
MOST_SECONDS = 300.0
RETRY_SECONDS = 10.0  # after an append that failed
CLOSE_SECONDS = 60.0  # a run ends without its last rows rather than never


class Appendable(Protocol):
    """A file of `size` bytes; append() adds all of `data` or raises OSError and leaves the file as it was."""

    size: int

    def append(self, data: bytes) -> None: ...


class LocalFile:
    """An Appendable on a disk."""

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
    """An Appendable in a bucket: the new bytes are uploaded beside it, and the store joins the two."""

    def __init__(self, path: str | os.PathLike):
        self._path = os.fspath(path)
        self._store = remote.filesystem(self._path)
        self.size, self._generation = self._look()
        self._expected: int | None = None  # the size after a join that was not answered
        self._present = 0  # of the bytes that the caller tries to append: those that are in the file

    def _look(self) -> tuple[int, str]:
        try:
            found = self._store.info(self._path)
        except FileNotFoundError:
            return 0, ""
        return found["size"], found["generation"]

    def append(self, data: bytes) -> None:
        """As Appendable; after an error the next call has to begin with the same bytes."""
        self._settle()
        rest = data[self._present :]
        if not self.size:
            self._store.pipe_file(self._path, rest)
            self.size, self._generation = self._look()
        elif rest:
            self._join(rest)
        self._present = 0

    def _join(self, data: bytes) -> None:
        part = f"{self._path}.part"
        self._store.pipe_file(part, data)
        self._expected = self.size + len(data)
        try:
            # Only onto the bytes that this process knows: a request that is repeated must not append twice.
            self.size, self._generation = self._store.join(self._path, part, self._generation)
        except OSError:
            if not self._settle():
                raise
        self._expected = None
        with contextlib.suppress(OSError):  # the next append overwrites it
            self._store.rm_file(part)

    def _settle(self) -> bool:
        """Finds out what became of a join without an answer: True when its bytes are in the file.

        OSError while the store does not answer; the next append asks again.
        """
        if self._expected is None:
            return False
        size, generation = self._look()
        joined = size == self._expected
        if joined:
            self._present += size - self.size
        self.size, self._generation, self._expected = size, generation, None
        return joined


def open_file(path: str | os.PathLike) -> Appendable:
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
        self._files: dict[str, Appendable] = {}
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
