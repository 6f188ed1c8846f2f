"""A checkpoint's manifest: the size and SHA-256 of each of its files. Orbax reads a flipped bit without complaint.

<step>/manifest.json, written last:

    {"files": {"state/d/8f02": {"bytes": 4096, "sha256": "…"}, …}, "sha256": "…", "step": 15}

The outer sha256 covers the rest, so a flipped bit in the manifest shows as well. Files that it does not name are
not looked at.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
from collections.abc import Callable

from etils import epath

from domino_jax.runtime.files import is_remote, write_whole
from domino_jax.runtime.json_files import parse_json
from domino_jax.runtime.remote import SCHEME, filesystem

NAME = "manifest.json"
THREADS = 4  # hashing releases the interpreter; more would take the cores that feed the device


def write(folder: epath.PathLike, step: int) -> None:
    """Hash every file under `folder` and write its manifest, whole or not at all. OSError when that fails."""
    folder = epath.Path(folder)
    names = sorted(name for name in _files(folder) if name != NAME)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        files = dict(zip(names, pool.map(lambda name: _measure(folder / name), names), strict=True))
    write_whole(folder / NAME, _render({"step": step, "files": files}))


def damage(folder: epath.PathLike, step: int) -> str | None:
    """The first problem of a checkpoint in `folder`, "<file>: <reason>"; None when every byte is as it was written."""
    folder, manifest = epath.Path(folder), {}

    def check_manifest(path: epath.Path) -> str | None:
        written = path.read_bytes()
        manifest.update(_parse(written))
        if _render(manifest) != written:
            return "does not match its own checksum"
        return None if manifest["step"] == step else f"is that of step {manifest['step']}"

    def check_file(path: epath.Path) -> str | None:
        name = path.relative_to(folder).as_posix()
        return None if _measure(path) == manifest["files"][name] else "its content changed (SHA-256 differs)"

    if reason := _problem(folder, NAME, check_manifest):
        return reason
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        reasons = pool.map(lambda name: _problem(folder, name, check_file), manifest["files"])
        return next((reason for reason in reasons if reason), None)


def _problem(folder: epath.Path, name: str, check: Callable[[epath.Path], str | None]) -> str | None:
    try:
        reason = check(folder / name)
    except FileNotFoundError:
        reason = "missing"
    except OSError as error:  # a sector that cannot be read
        if is_remote(folder):  # a store that does not answer says nothing about the file
            raise
        reason = error.strerror or str(error)
    return reason and f"{name}: {reason}"


def _files(folder: epath.Path) -> list[str]:
    """Names of the files below `folder`, relative to it, with forward slashes."""
    if is_remote(folder):
        above = f"{os.fspath(folder).removeprefix(SCHEME).rstrip('/')}/"
        return [name.removeprefix(above) for name in filesystem(os.fspath(folder)).find(os.fspath(folder))]
    return [path.relative_to(folder).as_posix() for path in pathlib.Path(folder).rglob("*") if path.is_file()]


def _measure(path: epath.Path) -> dict:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _render(manifest: dict) -> bytes:
    plain = json.dumps(manifest, sort_keys=True)
    checksum = hashlib.sha256(plain.encode()).hexdigest()
    return f"{json.dumps({**manifest, 'sha256': checksum}, sort_keys=True, indent=1)}\n".encode()


def _parse(written: bytes) -> dict:
    """A manifest without its checksum; {} where it holds no JSON object."""
    try:
        manifest = parse_json(written)
    except ValueError:
        return {}
    return {key: manifest[key] for key in manifest if key != "sha256"} if isinstance(manifest, dict) else {}
