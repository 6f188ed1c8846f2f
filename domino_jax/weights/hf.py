"""Hugging Face folders: finding them, reading them without trusting them, writing them whole.

Nothing in a folder is ever executed: config.json is plain JSON, `auto_map` is not followed, pickles are not opened.
"""

import contextlib
import glob
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from domino_jax.data.chat import closing_token
from domino_jax.runtime import json_files
from domino_jax.runtime.errors import ConfigError, DataError, DominoError, check_value, first_line, quote
from domino_jax.runtime.file_kinds import HEAD_BYTES, refuse_other_kind
from domino_jax.runtime.files import is_remote, replacing, write_whole
from domino_jax.runtime.remote import exists, fetch_folder
from domino_jax.weights.safetensors_file import Stored, is_finite, read_header

TOKEN_ORDER = "token_order.st"  # tokens by frequency, in a drafter's folder (draft_vocab.py)
FOLDER_FILES = ("*.json", "*.safetensors", "merges.txt", "*.jinja", TOKEN_ORDER)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
COMPARED_ROWS = 4096  # of two matrices, so that the host never holds two embeddings
LISTED = 10  # names in one message
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".npz", ".h5", ".msgpack")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja")

log = logging.getLogger(__name__)


def resolve_folder(path: str | Path) -> Path:
    """A local folder, or the local copy of a hub model (owner/name, owner/name@revision) or of a folder in a bucket.

    Paths that start with / . ~ or exist here are always local. With HF_HUB_OFFLINE=1 only the cache is used.
    """
    path = str(path)
    if is_remote(path):
        return fetch_folder(path, FOLDER_FILES)
    local = Path(os.path.expanduser(path))
    if path.startswith(("/", ".", "~")) or (path and local.exists()):
        if not local.is_dir():
            problem = "is a file, not a folder" if local.exists() else "does not exist"
            raise DominoError(f"{path} {problem}; name a folder.")
        return local
    # Imported here: it costs a fifth of a second, and a local folder never needs it.
    import huggingface_hub

    name, _, revision = path.partition("@")
    try:
        snapshot = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=list(FOLDER_FILES), ignore_patterns=["*/*"]
        )
    except (OSError, ValueError, RuntimeError) as error:  # what the hub's and the HTTP library's errors derive from
        reason = first_line(error, with_class=False)
        raise DominoError(
            f"{quote(path)} is not a local folder, and the hub did not provide it: {reason}\n"
            "Name a local folder (./NAME), or fetch it first and set HF_HUB_OFFLINE=1."
        ) from None
    return Path(snapshot)


def drafter_folder(path: str | Path) -> Path:
    """As resolve_folder; for a train workdir, local or in a bucket, the folder export/ in it."""
    if is_remote(path):
        exported = f"{str(path).rstrip('/')}/export"
        return resolve_folder(exported if exists(f"{exported}/config.json") else path)
    folder = resolve_folder(path)
    return folder / "export" if (folder / "export" / "config.json").is_file() else folder


def inside(folder: Path, name: str) -> Path:
    """The path of a plain file name in `folder`; DataError when it, or its link, leads outside or nowhere.

    A folder whose parent is called "snapshots" may link into the "blobs" beside that parent, as in a hub's cache.
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    try:
        target = (folder / name).resolve() if plain else None
    except (OSError, RuntimeError):  # a loop of links
        target = None
    if target is None or not any(target.is_relative_to(place) for place in allowed):
        place = f"leads to {target}" if target else "is no plain file name"
        raise DataError(f"{folder}: {quote(name)} {place}, and nothing outside the folder is opened; copy the file.")
    return folder / name


def read_json(
    folder: Path, name: str, required: bool = True, kind: str = "a complete Hugging Face folder"
) -> dict[str, Any]:
    """A JSON object of the folder, local or in a bucket; {} when an optional file is absent.

    kind: what a folder without a required file is not.
    """
    path = folder / name if is_remote(folder) else inside(folder, name)
    if path.is_file():
        return json_files.read_json(path)
    if required:
        raise DataError(f"{folder} holds no {name}; it is not {kind}.")
    return {}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json without `auto_map`, which is named in a warning and never followed."""
    raw = read_json(folder, "config.json")
    if raw.pop("auto_map", None):
        log.warning("%s/config.json names code in auto_map; it is ignored, nothing of it is imported.", folder)
    return raw


@contextlib.contextmanager
def naming(folder: Path, name: str = "config.json") -> Iterator[None]:
    """Errors that are raised inside name the path of the file. A value of the wrong kind, such as a list for a number,
    is reported as damaged data."""
    try:
        yield
    except ConfigError as error:
        error.file = f"{folder}/{name}"
        raise
    except DataError as error:
        raise error if str(folder) in str(error) else DataError(f"{folder}/{name}: {error}", error.field) from None
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
        raise DataError(f"{folder}/{name} holds a value of the wrong kind: {quote(str(error))}.") from None


def stop_ids(folder: Path, tokenizer: Any = None) -> tuple[int, ...]:
    """The token ids that end an answer, ascending, for prompts of every form.

    They are eos_token_id (an int or a list) of generation_config.json and of config.json, and the token with which the
    tokenizer's chat template closes an assistant's turn.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder, name, required=False).get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        ids_alone = all(type(item) is int and item >= 0 for item in values)
        check_value(ids_alone, f"{folder}/{name}: eos_token_id", value, "a token id or a list of them")
        ids.update(values)
    if closing := closing_token(tokenizer):
        ids.add(closing[1])
    return tuple(sorted(ids))


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer with its chat template, or None when the folder has no tokenizer files."""
    present = [name for name in _TOKENIZER_FILES if inside(folder, name).is_file()]
    if "tokenizer.json" not in present and not {"vocab.json", "merges.txt"} <= set(present):
        return None
    for name in present:
        with inside(folder, name).open("rb") as file:
            refuse_other_kind(f"{folder}/{name}", file.read(HEAD_BYTES))
    # Imported here: transformers takes over a second to import, and runs on token ids need no tokenizer. It would also
    # warn on stderr that PyTorch is missing, which is as it should be.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    # AutoTokenizer replaces parts of tokenizer.json for some classes: as a GPT2Tokenizer, SmolLM2's would no longer
    # cut numbers into digits. It also takes another second to import.
    whole = "tokenizer.json" in present
    Tokenizer = transformers.PreTrainedTokenizerFast if whole else transformers.AutoTokenizer
    try:
        tokenizer = Tokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        reason = first_line(error, with_class=False)
        raise DataError(f"the tokenizer in {folder} ({', '.join(present)}) cannot be loaded: {reason}") from None
    templates = tokenizer.chat_template
    if isinstance(templates, dict) and "default" not in templates:
        raise DataError(
            f"{folder} has the chat templates {', '.join(templates)} and none named default, which messages without"
            " tools need; write it to chat_template.jinja."
        )
    return tokenizer


class Tensors(dict[str, Stored]):
    """The tensors of a folder by name. Headers are read and checked at once, data on request."""

    def __init__(self, folder: Path, stored: Mapping[str, Stored]):
        super().__init__(stored)
        self.folder = folder

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A copy of the tensor, or of the slice `index` of it; NaN and infinities raise DataError."""
        array = self[name].read(index)
        if not is_finite(array):
            raise DataError(f"{self.folder}: tensor {quote(name)} holds NaN or an infinity; the folder is unusable.")
        return array


def same_matrix(tensors: Tensors, name: str, others: Tensors, other: str, dtype: str = "") -> bool:
    """Whether two stored matrices hold the same values, in `dtype` if one is given."""
    shape = tensors[name].shape
    if others[other].shape != shape or len(shape) != 2:
        return False
    for start in range(0, shape[0], COMPARED_ROWS):
        rows = (slice(start, min(start + COMPARED_ROWS, shape[0])),)
        pair = tensors.read(name, rows), others.read(other, rows)
        if not np.array_equal(*(np.asarray(array, dtype or array.dtype) for array in pair)):
            return False
    return True


def open_tensors(folder: Path) -> Tensors:
    """Opens model.safetensors, or the shards that model.safetensors.index.json names."""
    if inside(folder, SINGLE).is_file():
        return Tensors(folder, read_header(inside(folder, SINGLE)))
    if inside(folder, INDEX).is_file():
        return Tensors(folder, _read_shards(folder))
    pickles = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _PICKLED)
    instead = f" {', '.join(map(quote, pickles[:3]))} can run code and was not opened." if pickles else ""
    raise DataError(f"{folder} holds neither {SINGLE} nor {INDEX}.{instead} Fetch the safetensors files.")


def _read_shards(folder: Path) -> dict[str, Stored]:
    """The tensors of all shards, each from the shard that the index names for it."""
    weight_map = read_json(folder, INDEX).get("weight_map")
    shards = list(weight_map.values()) if isinstance(weight_map, dict) else []
    other = [shard for shard in shards if not isinstance(shard, str) or not shard.endswith(".safetensors")]
    if other or not shards:
        raise DataError(f"{folder}/{INDEX} has no weight_map from tensors to .safetensors files {quote(other[:1])}.")
    paths = {shard: inside(folder, shard) for shard in sorted(set(shards))}  # before the first file is opened
    headers = {shard: read_header(path) for shard, path in paths.items()}
    if lost := [name for name, shard in weight_map.items() if name not in headers[shard]]:
        raise DataError(f"{folder}: {INDEX} places tensors in shards that lack them: {list_names(lost)}.")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def list_names(names: list[str]) -> str:
    """Up to ten names, sorted, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(quote(name)[1:-1] for name in sorted(names)[:LISTED]) + more


def write_folder(folder: str | Path, tensors: Mapping[str, np.ndarray], config: dict[str, Any]) -> None:
    """Writes weights and config.json into a local folder.

    An earlier config.json is removed first and the new one written last, so that a reader never takes half a folder for
    a model.
    """
    folder = Path(os.path.expanduser(folder))
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise DataError(f"tensor {quote(name)} holds NaN or an infinity; it is not written.")
    in_order = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}  # safetensors reads the buffer
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    write_whole(folder / SINGLE, safetensors.numpy.save(in_order, {"format": "pt"}))
    json_files.write_json(folder / "config.json", dict(sorted(config.items())))


@contextlib.contextmanager
def whole_folder(folder: str | Path, replaced: re.Pattern) -> Iterator[Path]:
    """A fresh folder to fill; when the block ends well it takes the place of `folder`, which is never seen half full.

    replaced: names of the entries of `folder` that are lost with it; all others are copied into the fresh one.
    """
    folder = Path(os.path.expanduser(folder)).resolve()
    previous = folder.with_name(f".{folder.name}.previous.tmp")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.parent.glob(f".{glob.escape(folder.name)}.[0-9a-f]*.tmp"):  # of a killed writing
        shutil.rmtree(unfinished, ignore_errors=True)
    with replacing(folder) as fresh:
        fresh.mkdir()
        yield fresh
        for entry in folder.iterdir() if folder.exists() else ():
            if not replaced.fullmatch(entry.name):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.copytree(entry, fresh / entry.name, symlinks=True)
                else:
                    shutil.copy2(entry, fresh / entry.name, follow_symlinks=False)
        if folder.exists():
            shutil.rmtree(previous, ignore_errors=True)
            os.rename(folder, previous)
    shutil.rmtree(previous, ignore_errors=True)  # after a kill it was the one whole copy until here
