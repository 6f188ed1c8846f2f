"""Addresses in a bucket (gs://): small files and data through etils.epath and gcsfs, arrays through tensorstore.

Both take the credentials of GOOGLE_APPLICATION_CREDENTIALS, of gcloud's application default login, or of the machine.
"""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

from etils import epath

from domino_jax.runtime.errors import DominoError, first_line
from domino_jax.runtime.files import is_remote, make_once

SCHEME = "gs://"


def filesystem(name: str):
    """gcsfs' client for an address. DominoError for another scheme, or where gcsfs is not installed."""
    if not name.startswith(SCHEME):
        raise DominoError(f"{name}: only local paths and {SCHEME} addresses can be used; copy the files to one.")
    try:
        import fsspec
        import gcsfs  # noqa: F401
    except ImportError as error:
        raise DominoError(
            f"{name}: addresses in a bucket need a package that is not installed ({error}).\n"
            "Install it with: pip install -r requirements-gcs.txt"
        ) from error
    # Listings are not cached: Orbax and the other processes of a run write files that this client does not know of.
    fsspec.config.conf["gcs"] = {"use_listings_cache": False}
    return fsspec.filesystem("gcs")


def open_path(path: str | os.PathLike) -> epath.Path:
    """The etils.epath.Path of a local path or an address, its client ready."""
    if is_remote(path):
        filesystem(os.fspath(path))
    return epath.Path(path)


@contextlib.contextmanager
def access(name: str | os.PathLike) -> Iterator[None]:
    """A failure of the storage client inside becomes a DominoError that names the address; nothing for a local path."""
    try:
        yield
    except Exception as error:  # the boundary to gcsfs, aiohttp and Google's libraries, whose classes nothing joins
        if isinstance(error, DominoError) or not is_remote(name):
            raise
        raise DominoError(
            f"{name} cannot be used ({first_line(error)}).\nCheck the address, this machine's network and its"
            " credentials (gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS), and that they"
            " have the role Storage Object Admin on the bucket."
        ) from error


def exists(name: str) -> bool:
    with access(name):
        return open_path(name).exists()


def move_folder(folder: epath.Path, target: epath.Path) -> None:
    """Moves a folder to one that does not exist yet, beside or below a folder that does."""
    if is_remote(folder):
        filesystem(os.fspath(folder)).mv(os.fspath(folder), os.fspath(target), recursive=True)
    else:
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)


def copy_folder(source: pathlib.Path, target: epath.Path, last: str) -> None:
    """Copies every file of a local folder, and at the end the one called `last`, by which readers know it is whole."""
    files = [path for path in source.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == last):
        copy = target / path.relative_to(source).as_posix()
        copy.parent.mkdir(parents=True, exist_ok=True)
        epath.Path(path).copy(copy, overwrite=True)


def cache_folder() -> pathlib.Path:
    """Where copies of what is in a bucket stay between starts: DOMINO_CACHE, else domino_jax in the user's cache."""
    chosen = os.environ.get("DOMINO_CACHE")
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = pathlib.Path(chosen or f"{above}/domino_jax").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fetch_folder(name: str, patterns: Sequence[str]) -> pathlib.Path:
    """A copy of the files of one folder whose names match, in the cache; made again when one of them has changed.

    Raises DominoError: no such file there, or a bucket that cannot be reached.
    """
    with access(name):
        store = filesystem(name)
        entries = store.ls(name, detail=True) if store.exists(name) else []
        entries = [entry for entry in entries if any(fnmatch(entry["name"], end) for end in patterns)]
        if not entries:
            raise DominoError(f"{name} holds none of {', '.join(patterns)}; name the folder of a model in that bucket.")
        known = sorted((entry["name"], entry["size"], entry["generation"]) for entry in entries)
        digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]

        def copy(fresh: pathlib.Path) -> None:
            fresh.mkdir()
            for entry in entries:
                store.get_file(entry["name"], fresh / entry["name"].rpartition("/")[2])

        return make_once(cache_folder() / "folders" / digest / name.rstrip("/").rpartition("/")[2], copy)
