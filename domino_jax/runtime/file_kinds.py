"""Files that are something else than what their reader needs: their first bytes tell."""

import re

from domino_jax.runtime.errors import DataError

HEAD_BYTES = 256
# (pattern of the first bytes, what the file is, how to get the right one)
KINDS = (
    (
        rb"version https://git-lfs",
        "a pointer of Git LFS; the file itself was not downloaded",
        "Run git lfs pull in its repository, or fetch it with hf download.",
    ),
    (
        rb"\s*<(!doctype|html|\?xml)",
        "a web page",
        "Download the file itself; on the Hugging Face hub its address has /resolve/ in place of /blob/.",
    ),
)
ROW_KINDS = (
    (
        rb"PAR1",
        "a Parquet file",
        "Convert it to JSONL: datasets.Dataset.from_parquet(FILE).to_json(FILE.jsonl) with pip install datasets.",
    ),
    (rb"\x1f\x8b", "a gzip archive", "Let its name end in .gz."),
    (rb"\x28\xb5\x2f\xfd", "a Zstandard archive", "Unpack it with zstd -d, or pack it with gzip."),
    (rb"\s*\[", "a JSON array", "Write one row on each line: jq -c '.[]' FILE > FILE.jsonl."),
)


def refuse_other_kind(name: str, head: bytes, rows: bool = False) -> None:
    """Refuse a file that starts with `head` and is no file of a model, or with `rows` no file of rows.

    Raises DataError: what the file is, and how to get the right one.
    """
    for pattern, kind, remedy in (*KINDS, *(ROW_KINDS if rows else ())):
        if re.match(pattern, head.removeprefix(b"\xef\xbb\xbf"), re.IGNORECASE | re.DOTALL):
            raise DataError(f"{name} is {kind}.\n{remedy}")
