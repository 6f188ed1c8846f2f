"""A checkpoint's manifest: the size and SHA-256 of each of its files. Orbax reads a flipped bit without complaint.

<step>/manifest.json, written last:

    {"files": {"state/d/8f02": {"bytes": 4096, "sha256": "…"}, …}, "sha256": "…", "step": 15}

The outer sha256 is that of the rest, so a flipped bit in the manifest shows as well. Files that it does not name are
not looked at.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib

from etils import epath

from domino_jax.runtime.files import is_remote, write_whole
from domino_jax.runtime.json_files import parse_json
from domino_jax.runtime.remote import SCHEME, filesystem

NAME = "manifest.json"
CHUNK = 4 << 20  # bytes read at a time: a checkpoint is larger than the host's memory may be
THREADS = 4  # hashing releases the interpreter; more would take the cores that feed the device


def write(folder: epath.PathLike, step: int) -> None:
    """Hash every file under `folder` and write its manifest, whole or not at all. OSError when that fails."""
    folder = epath.Path(folder)
    names = sorted(name for name in _files(folder) if name != NAME)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        measured = pool.map(lambda name: measure(folder / name), names)
        files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in zip(names, measured, strict=True)}
    write_whole(folder / NAME, _render({"step": step, "files": files}))


def damage(folder: epath.PathLike, step: int) -> str | None:
    """What is wrong with the checkpoint in `folder`, "<file>: <reason>"; None when every byte is as it was written."""
    folder = epath.Path(folder)
    try:
        written = (folder / NAME).read_bytes()
    except FileNotFoundError:
        return f"{NAME}: missing"
    except OSError as error:
        if is_remote(folder):  # a store that does not answer says nothing about the file
            raise
        return f"{NAME}: {error.strerror or error}"
    manifest = _parse(written)
    if manifest is None:
        return f"{NAME}: does not match its own checksum"
    if manifest["step"] != step:
        return f"{NAME}: is that of step {manifest['step']}"
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        reasons = pool.map(lambda item: _compare(folder, *item), manifest["files"].items())
        return next((reason for reason in reasons if reason), None)


def _files(folder: epath.Path) -> list[str]:
    """Names of the files below `folder`, relative to it, with forward slashes."""
    if is_remote(folder):
        above = f"{os.fspath(folder).removeprefix(SCHEME).rstrip('/')}/"
        return [name.removeprefix(above) for name in filesystem(os.fspath(folder)).find(os.fspath(folder))]
    return [path.relative_to(folder).as_posix() for path in pathlib.Path(folder).rglob("*") if path.is_file()]


def measure(path: epath.Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file."""
    size, digest = 0, hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size += len(chunk)
            digest.update(chunk)
    return size, digest.hexdigest()


def _compare(folder: epath.Path, name: str, expected: dict) -> str | None:
    path = folder / name
    try:
        size, digest = measure(path)
    except FileNotFoundError:
        return f"{name}: missing"
    except OSError as error:  # a sector that cannot be read
        if is_remote(folder):
            raise
        return f"{name}: {error.strerror or error}"
    if size != expected["bytes"]:
        return f"{name}: {size} bytes instead of {expected['bytes']}"
    return None if digest == expected["sha256"] else f"{name}: its content changed (SHA-256 differs)"


def _render(manifest: dict) -> bytes:
    plain = json.dumps(manifest, sort_keys=True)
    checksum = hashlib.sha256(plain.encode()).hexdigest()
    return f"{json.dumps({**manifest, 'sha256': checksum}, sort_keys=True, indent=1)}\n".encode()


def _parse(written: bytes) -> dict | None:
    """The manifest, None when a single bit of it is not as _render() made it."""
    try:
        manifest = parse_json(written)
    except ValueError:
        return None
    if not isinstance(manifest, dict):
        return None
    manifest = {key: value for key, value in manifest.items() if key != "sha256"}
    return manifest if _render(manifest) == written else None
