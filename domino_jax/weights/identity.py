"""The identity of a model: its tensors and config, for a target also tokenizer, chat template and stop ids.

Names, paths and the division into files do not count. Reading 16 GB takes a while, so the digests of a file's tensors
are kept in the cache folder with its size and times, and the file is read again only after a change.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from domino_jax.data.index import tokenizer_digest
from domino_jax.runtime.environment import usable_cores
from domino_jax.runtime.errors import DataError
from domino_jax.runtime.json_files import read_json, write_json
from domino_jax.runtime.progress import Progress
from domino_jax.runtime.remote import cache_folder
from domino_jax.weights import hf
from domino_jax.weights.safetensors_file import Stored, read_header
from domino_jax.weights.target import read_target_config

DIGITS = 16  # of a SHA-256, as messages and reports show it
PIECE = 1 << 22  # bytes
# A file that was written again within a tick of its file system's clock shows no change, so one as young is not kept.
YOUNG = 2_000_000_000  # nanoseconds
UNREAD = ("_name_or_path", "transformers_version", "auto_map")  # keys of config.json that decide nothing


def target_identity(path: str | Path) -> dict[str, Any]:
    """JSON values that are equal for two targets iff they answer alike; with the config alone where weights are absent.

    path: a folder or hub id, as for hf.resolve_folder.
    """
    folder = hf.resolve_folder(path)
    tokenizer = hf.load_tokenizer(folder)
    config = read_target_config(folder)
    return {
        "weights": _digest_folder(folder, f"{config}{config.experts or ''}"),
        "tokenizer": tokenizer_digest(tokenizer)[:DIGITS],
        "stop_ids": list(hf.stop_ids(folder, tokenizer)),
    }


def drafter_identity(path: str | Path) -> dict[str, str]:
    """The same for a drafter's folder, hub id or train workdir (its export/), with its order of tokens."""
    folder = hf.drafter_folder(path)
    raw = hf.read_json(folder, "config.json")
    return {"weights": _digest_folder(folder, json.dumps({key: raw[key] for key in sorted(raw) if key not in UNREAD}))}


def _digest_folder(folder: Path, config: str) -> str:
    tensors = hf.open_tensors(folder) if any(folder.glob("*.safetensors")) else {}
    order = hf.inside(folder, hf.TOKEN_ORDER)
    stored = [*tensors.values(), *(read_header(order).values() if order.is_file() else ())]
    digests = _digest_tensors(stored)
    parts = sorted([tensor.name, tensor.dtype, tensor.shape, digests[tensor.path][tensor.name]] for tensor in stored)
    return hashlib.sha256(json.dumps([config, parts]).encode()).hexdigest()[:DIGITS]


def _digest_tensors(stored: Sequence[Stored]) -> dict[Path, dict[str, str]]:
    """By file and name, the digests of tensors."""
    digests = {path: _read_record(path) for path in {tensor.path for tensor in stored}}
    work = [tensor for tensor in stored if tensor.name not in digests[tensor.path]]
    states = {path: _state(path) for path in {tensor.path for tensor in work}}
    with concurrent.futures.ThreadPoolExecutor(usable_cores()) as threads:
        progress = Progress("reading weights for the identity of the model", len(work))
        for tensor, digest in zip(work, threads.map(_digest_bytes, work), strict=True):
            digests[tensor.path][tensor.name] = digest
            progress.advance(1)
    for path, state in states.items():
        if state == _state(path) and time.time_ns() - state[1] > YOUNG:
            with contextlib.suppress(OSError):
                _record(path).parent.mkdir(exist_ok=True)
                write_json(_record(path), {"state": state, "tensors": digests[path]})
    return digests


def _digest_bytes(tensor: Stored) -> str:
    digest, left = hashlib.sha256(), tensor.size
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.start)
        while left and (piece := file.read(min(PIECE, left))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def _read_record(path: Path) -> dict[str, str]:
    """The digests that an earlier start kept; none where the file has changed."""
    try:
        record = read_json(_record(path))
        return record["tensors"] if record["state"] == _state(path) else {}
    except (DataError, OSError, KeyError):
        return {}


def _record(path: Path) -> Path:
    return cache_folder() / "digests" / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()}.json"


def _state(path: Path) -> list[int]:
    """Size and times of a file; the last one also changes when another file gets this size and date."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
