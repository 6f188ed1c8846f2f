#!/usr/bin/env bash
# grain 0.2.18, grain.experimental.RepeatIterDataset of an InterleaveIterDataset over files.
# Guess: each epoch reads each record once, as the class says ("each epoch will be identical"), and an iterator that
#   is set to a saved state goes on as the saved one does.
# What happens: (1) with more files than cycle_length, the third epoch and all that follow read some files twice and
#   others never. The starting state that the repetition goes back to holds a list that the interleave changes as it
#   runs. (2) A state that is saved in the second epoch says that open files are exhausted. The iterator that gets it
#   skips what is left of them. No error and no warning; (1) does not even change the number of records.
# Why it matters: interleaved files that are repeated are an ordinary input of a long training run. The run goes on
#   with part of its data after two epochs, or skips data at each restart. Repeat the list of files instead, before
#   the interleave: that is right in both.
# Output seen: reads of six files in four epochs 2, 2, 2, 6, 6, 6, and 4 each with the list repeated. A restart 2
#   records into the second epoch has 12 records left of 22, and 22 with the list repeated.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "grain==0.2.18"
cat >"$folder/run.py" <<'PY'
import collections

import grain

FILES, RECORDS, OPEN, EPOCHS = 6, 4, 3, 4
files = [grain.MapDataset.range(file * RECORDS, (file + 1) * RECORDS).to_iter_dataset() for file in range(FILES)]


def repeated(epochs):
    """The interleave is repeated."""
    return grain.experimental.RepeatIterDataset(
        grain.experimental.InterleaveIterDataset(files, cycle_length=OPEN), epochs
    )


def list_repeated(epochs):
    """The list of files is repeated, and then interleaved."""
    return grain.experimental.InterleaveIterDataset(files * epochs, cycle_length=OPEN)


def reads(dataset):
    """How often each file is read, as a list."""
    counts = collections.Counter(record // RECORDS for record in dataset)
    assert sum(counts.values()) == EPOCHS * FILES * RECORDS
    return [counts[file] / RECORDS for file in range(FILES)]


def records_left(dataset, read):
    """Records that an iterator still gives after `read` records, and those of one that is set to its state."""
    saved = iter(dataset)
    for _ in range(read):
        next(saved)
    fresh = iter(dataset)
    fresh.set_state(saved.get_state())
    return len(list(saved)), len(list(fresh))


for dataset in (repeated, list_repeated):
    print(f"{dataset.__doc__} Reads of each file: {reads(dataset(EPOCHS))}")
    for epoch in (1, 2):
        saved, fresh = records_left(dataset(2), (epoch - 1) * FILES * RECORDS + 2)
        print(f"  left after 2 records of epoch {epoch}: {saved}, after a restart {fresh}")
        assert (saved == fresh) == (dataset is list_repeated or epoch == 1), "a restart now reads all that is left"
assert reads(list_repeated(EPOCHS)) == [EPOCHS] * FILES
assert reads(repeated(EPOCHS)) != [EPOCHS] * FILES, "all files are now read in all epochs"
PY
"$folder/v/bin/python" "$folder/run.py" 2>"$folder/log" || {
    cat "$folder/log"
    exit 1
}
