"""Addresses in a bucket (gs://): how they differ from local paths, the client for them, and error messages.

Small files and data go through etils.epath and gcsfs, a checkpoint's arrays through tensorstore's own client. Both take
the credentials of GOOGLE_APPLICATION_CREDENTIALS, of gcloud's application default login, or of the machine itself.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from domino_jax.runtime.errors import DominoError, first_line
from domino_jax.runtime.files import is_remote, make_once

SCHEME = "gs://"
CHECK_SECONDS = 60.0  # for each request that is tried before a command starts
CONNECT_SECONDS = 10.0
BUSY = ("408", "429")  # status codes below 500 of a store that may answer later
SILENT_SECONDS = 60.0  # a connection that carries nothing for this long has failed


class BucketError(DominoError, OSError):
    """A request to a bucket that failed for good. As an OSError it is handled wherever a failing disk is."""


class Outage(BucketError):
    """A bucket that does not answer, or says that it cannot now: the same request may work later."""


def is_outage(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, is an Outage."""
    while error is not None and not isinstance(error, Outage):
        error = error.__cause__
    return error is not None


def open_path(path: str | os.PathLike):
    """The etils.epath.Path of a local path or an address, its client ready. DominoError without that client."""
    if is_remote(path):
        connect(os.fspath(path))
    from etils import epath

    return epath.Path(path)


def exists(name: str) -> bool:
    with access(name):
        return open_path(name).exists()


def list_files(name: str) -> list[str]:
    """The names of all objects below an address, relative to it."""
    above = f"{name.removeprefix(SCHEME).rstrip('/')}/"
    return [found.removeprefix(above) for found in filesystem(name).find(name)]


def move_folder(folder, target) -> None:
    """Moves a folder, an etils.epath.Path, to one that does not exist yet, beside or below a folder that does."""
    if not is_remote(folder):
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)
        return
    # Object by object: a folder that has no object yet does not exist for epath's rename().
    store, names = filesystem(os.fspath(folder)), list_files(os.fspath(folder))
    for name in names:
        store.copy(os.fspath(folder / name), os.fspath(target / name))
    store.rm(os.fspath(folder), recursive=True)


def cache_folder() -> pathlib.Path:
    """Where copies of what is in a bucket stay between starts: DOMINO_CACHE, else domino_jax in the user's cache."""
    chosen = os.environ.get("DOMINO_CACHE")
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = pathlib.Path(chosen or f"{above}/domino_jax").expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DominoError(
            f"{folder} cannot hold copies of what is in a bucket ({error.strerror}); set DOMINO_CACHE."
        ) from error
    return folder


def fetch_folder(name: str, patterns: Sequence[str]) -> pathlib.Path:
    """A copy of the files of one folder whose names match, in the cache; made again when one of them has changed.

    Raises:
        DominoError: no such file there, a bucket that cannot be reached, or no room for the copy.
    """
    with access(name):
        store = filesystem(name)
        found = [entry for entry in _entries(store, name) if any(fnmatch(entry["name"], end) for end in patterns)]
        if not found:
            raise DominoError(f"{name} holds none of {', '.join(patterns)}; name the folder of a model in that bucket.")
        known = sorted((entry["name"], entry["size"], entry["generation"]) for entry in found)
        digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]

        def copy(fresh: pathlib.Path) -> None:
            fresh.mkdir()
            for entry in found:
                store.get_file(entry["name"], fresh / entry["name"].rpartition("/")[2])

        return make_once(cache_folder() / "folders" / digest / name.rstrip("/").rpartition("/")[2], copy)


def _entries(store, name: str) -> list[dict[str, Any]]:
    try:
        return [entry for entry in store.ls(name, detail=True) if entry["type"] == "file"]
    except FileNotFoundError:
        return []


# --------------------------------------------------------------------------------------------- before the start


def addresses(value: Any) -> list[str]:
    """Every gs:// address in a value of a recipe: a string, a mixture of files, or tuples and mappings of them."""
    if isinstance(value, str):
        return [part.partition("=")[0] for part in re.findall(r"gs://[^,\s]+", value)]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [name for entry in value for name in addresses(entry)]
    return []


def check(reads: Iterable[str], writes: Iterable[str] = ()) -> None:
    """Refuses addresses that cannot be reached, in bounded time, before anything is loaded.

    Args:
        reads: addresses whose folders are listed, one of each bucket.
        writes: folders in which a small file is written and removed again.
    Raises:
        DominoError: gcsfs is not installed, the bucket does not exist, no credentials, no permission, no network.
    """
    writes = list(dict.fromkeys(writes))
    by_bucket = {_bucket(name): name for name in (*reads, *writes)}
    for name in by_bucket.values():
        with access(name):
            _list_one(name)
    for name in writes:
        probe = f"{name.rstrip('/')}/.write-test-{uuid.uuid4().hex}"
        with access(name):
            filesystem(name).pipe_file(probe, b"domino_jax writes here\n", timeout=CHECK_SECONDS)
            filesystem(name).rm_file(probe, timeout=CHECK_SECONDS)


def _list_one(name: str) -> None:
    """One request for at most one name: it fails for a missing bucket, while a missing folder is an empty list."""
    fixed = re.split(r"[*?\[]", name.removeprefix(SCHEME).partition("/")[2], maxsplit=1)[0]
    query = {"prefix": fixed, "maxResults": 1, "json_out": True}
    try:
        filesystem(name).call("GET", "b/{}/o", _bucket(name), **query, timeout=CHECK_SECONDS)
    except FileNotFoundError as error:
        raise BucketError(
            f"{name} cannot be used: the bucket {SCHEME}{_bucket(name)} does not exist. Create it, or correct its name."
        ) from error


def _bucket(name: str) -> str:
    return name.removeprefix(SCHEME).partition("/")[0]


# --------------------------------------------------------------------------------------------- mistakes as sentences


@contextlib.contextmanager
def access(name: str) -> Iterator[None]:
    """A failure of the storage client inside becomes a DominoError that names the address."""
    try:
        yield
    except DominoError:
        raise
    except Exception as error:  # the boundary to gcsfs, aiohttp and Google's libraries, whose classes nothing joins
        reason = "no answer in time" if isinstance(error, TimeoutError) else first_line(error, with_class=False)
        raise _refusal(name, reason, error) from error


def _refusal(name: str, reason: str, error: BaseException) -> BucketError:
    code = str(getattr(error, "code", None) or "")
    if isinstance(error, FileNotFoundError):
        return BucketError(
            f"{name} cannot be used: there is no such object. Correct the address, or copy the file there."
        )
    if code == "401" or "anonymous caller" in reason.lower() or "credentials" in reason.lower():
        return BucketError(
            f"{name} cannot be used: there are no valid credentials ({reason}).\n"
            "Run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS, or give the machine a "
            "service account."
        )
    if reason.startswith("Forbidden"):
        return BucketError(
            f"{name} cannot be used: permission denied ({reason}).\n"
            "Give this account the role Storage Object Admin (roles/storage.objectAdmin) on the bucket."
        )
    later = not code or code in BUSY or code.startswith("5")
    kind = Outage if later else BucketError
    return kind(f"{name} cannot be used: {reason}. Check the address and this machine's network.")


# --------------------------------------------------------------------------------------------- the client


def connect(name: str) -> None:
    """Makes the client for gs:// known to fsspec, and so to etils.epath. DominoError when it cannot be used."""
    if not name.startswith(SCHEME):
        raise DominoError(
            f"{name}: only local paths and {SCHEME} addresses can be used; copy the files to one of them."
        )
    try:
        _register()
    except ImportError as error:
        raise DominoError(
            f"{name}: addresses in a bucket need a package that is not installed ({error}).\n"
            "Install it with: pip install -r requirements-gcs.txt"
        ) from error


@functools.cache
def _register() -> None:
    import aiohttp
    import fsspec
    from gcsfs.core import GCSFileSystem
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError

    class Bucket(GCSFileSystem):
        """gcsfs whose listings are never old, whose requests end, and whose failures are OSErrors.

        Listings are not cached: Orbax and the other processes of a run write files that this client does not know of.
        """

        def __init__(self, *args, **options):
            timeout = aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS)
            super().__init__(*args, use_listings_cache=False, requests_timeout=timeout, **options)

        async def _request(self, method, path, *args, **options):
            try:
                return await super()._request(method, path, *args, **options)
            except (FileNotFoundError, FileExistsError):
                raise
            except (HttpError, GoogleAuthError, aiohttp.ClientError, OSError) as error:
                with access(_address(path, args)):
                    raise error

        def mkdir(self, path, *args, **options) -> None:
            """Nothing: a bucket has no folders. gcsfs asks for the bucket itself, which takes another permission."""

        def makedirs(self, path, exist_ok=False) -> None:
            """Nothing, as mkdir."""

    # Every failure reaches the user as one message; gcsfs would print its own traceback for each beside it.
    if "GCSFS_DEBUG" not in os.environ:
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    for scheme in ("gs", "gcs"):
        fsspec.register_implementation(scheme, Bucket, clobber=True)


def _address(path: str, args: tuple) -> str:
    """gs://bucket/name of a request, from its URL or from what is put into it."""
    if path.startswith("b/{}") and args:
        return SCHEME + "/".join(map(str, args))
    found = re.search(r"/b/([^/?]+)", path)
    return SCHEME + (found[1] if found else "")


def filesystem(name: str):
    """The client for an address."""
    connect(name)
    import fsspec

    return fsspec.filesystem("gcs")
