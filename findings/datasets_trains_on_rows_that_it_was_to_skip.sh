#!/usr/bin/env bash
# datasets 5.2.0, a streaming dataset of several files; torch 2.13.0 for the DataLoader.
# Guess: take(n) and skip(n) part a stream at its nth row, whoever reads it. Workers and nodes share what is left.
# What happens: the number is divided, not the rows. Each of w workers, or of w nodes that divide the number of files,
#   skips the first n/w rows of its own files, and take(n) takes n/w rows of each. One process that evaluates take(n)
#   reads the first n rows of the stream. A training that reads skip(n) with w workers or nodes then sees all of these
#   but n/w, and as many other rows are in neither part. Nothing warns.
# Why it matters: this is the usual way to hold rows out of a stream, and an evaluation usually has fewer workers than
#   the training, or runs on one host. Its loss is then that of rows from the training. Hold out whole files, or choose
#   the rows by a hash with filter.
# Output seen: of 40 rows held out, the training sees, and rows in neither: 1 reader 0, 0; 2 nodes 20, 20; 4 nodes 30,
#   30; 2 workers 20, 20; 4 workers 30, 30; with as many readers of take(40): always 0, 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
install=("$folder/v/bin/pip" install --quiet --disable-pip-version-check)
"${install[@]}" --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
"${install[@]}" "torch==2.13.0" "datasets==5.2.0"
cat >"$folder/run.py" <<'PY'
import json
import pathlib
import sys

import datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

FILES, ROWS, HELD_OUT = 4, 100, 40


def nodes(stream, count):
    return [row["id"] for rank in range(count) for row in split_dataset_by_node(stream, rank, count)]


def workers(stream, count):
    return [row["id"] for row in DataLoader(stream, batch_size=None, num_workers=count)]


def main():
    folder = pathlib.Path(sys.argv[1])
    for i in range(FILES):
        rows = (json.dumps({"id": i * ROWS + k}) for k in range(ROWS))
        (folder / f"{i}.jsonl").write_text("\n".join(rows) + "\n")
    stream = datasets.load_dataset(
        "json", data_files=str(folder / "*.jsonl"), split="train", streaming=True, cache_dir=str(folder / "cache")
    )
    every = {row["id"] for row in stream}
    assert len(every) == FILES * ROWS
    alone = {row["id"] for row in stream.take(HELD_OUT)}
    assert alone == set(range(HELD_OUT))
    for read, counts in ((nodes, (1, 2, 4)), (workers, (0, 2, 4))):
        for count in counts:
            train = read(stream.skip(HELD_OUT), count)
            assert len(train) == len(set(train)) == FILES * ROWS - HELD_OUT, "the control: no row comes twice"
            shared = set(read(stream.take(HELD_OUT), count))
            assert len(shared) == HELD_OUT and shared | set(train) == every, "the control: equal readers part it"
            seen, neither = len(alone & set(train)), len(every - alone - set(train))
            print(f"{count} {read.__name__}: rows held out that the training sees {seen}, rows in neither {neither}")
            wrong = HELD_OUT - HELD_OUT // max(count, 1)
            assert seen == neither == wrong, "datasets now skips other rows"


if __name__ == "__main__":
    main()
PY
HF_HUB_OFFLINE=1 "$folder/v/bin/python" "$folder/run.py" "$folder"
