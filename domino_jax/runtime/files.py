"""Files that readers, and a start after a crash, see complete or not at all. Everything here is local but write_whole.

Temporary names start with a dot and end in .tmp. No two processes, on one machine or several, use the same one.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import TypeVar

Path = TypeVar("Path", bound=pathlib.PurePath)


def is_remote(path: str | os.PathLike) -> bool:
    """True for gs:// and every other address with a scheme."""
    return "://" in os.fspath(path)


def write_whole(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a local file or an object in a bucket.

    path: a pathlib.Path, or the etils.epath.Path of remote.open_path.  content: text is written as UTF-8.
    """
    data = content.encode() if isinstance(content, str) else content
    if is_remote(path):  # an object appears when it is complete
        path.write_bytes(data)
        return
    with replacing(path) as fresh, open(fresh, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # a power cut must not leave the name without the bytes


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A name beside `target` for a new file or folder. It is renamed to `target` at the end, and removed on an error.

    A file replaces an existing file; a folder needs a target that does not exist.
    """
    fresh = target.with_name(f".{target.name}.{os.urandom(6).hex()}.tmp")
    try:
        yield fresh
        os.replace(fresh, target)
    finally:
        if os.path.isdir(fresh):
            shutil.rmtree(fresh, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(fresh)


def make_once(target: pathlib.Path, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """`target`, a file or folder that `make` writes to the path it is given, unless it exists.

    The other processes of this machine wait meanwhile, and then find it.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        with contextlib.suppress(OSError):  # without locks on this file system each process makes one
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            try:
                with replacing(target) as fresh:
                    make(fresh)
            except OSError:
                if not target.exists():  # else a process on another machine was faster
                    raise
    return target
