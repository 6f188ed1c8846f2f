"""Files that a run or a person left: reading any content gives one sentence or a value, never a traceback."""

from types import SimpleNamespace

import pytest
from etils import epath

from domino_jax import export, train
from domino_jax.data.answer_files import AnswerFiles, find_rows
from domino_jax.evals import report
from domino_jax.evals.run_files import RunFiles
from domino_jax.runtime.errors import DominoError
from domino_jax.training import manifest, metrics
from domino_jax.training.step_folders import StepFolders
from domino_jax.weights import hf

RECIPE = SimpleNamespace(train=SimpleNamespace(steps=1))
READERS = {
    "metrics.jsonl": metrics.read_rows,
    "finished.json": lambda file: train.is_finished(epath.Path(file.parent), RECIPE, {}, ()),
    "tau.json": lambda file: StepFolders(epath.Path(file.parent), print).best(),
    "report.json": lambda file: report.read_report(file.parent),
    "config.json": lambda file: hf.read_json(epath.Path(file.parent), file.name),
    "preflight.json": lambda file: export.read_data(epath.Path(file.parent)),
    "generation_config.json": lambda file: hf.stop_ids(file.parent),
    "manifest.json": lambda file: manifest.damage(epath.Path(file.parent), 1),
    "progress.jsonl": lambda file: RunFiles(file.parent, {}).__exit__(),
    "answers.jsonl": lambda file: find_rows([file]),
    "out.jsonl.meta.json": lambda file: AnswerFiles(file.with_name("out.jsonl"), ["a"], {"x": 1}).check_origin(),
}
CONTENTS = {
    "nothing": b"",
    "zeros": b"\0" * 50,
    "no UTF-8": b"\xff\xfe{",
    "cut": b'{"step": ',
    "brackets": b"[" * 200_000,
    "braces": b'{"a":' * 3_000 + b"1" + b"}" * 3_000,
    "braces that Python reads": b'{"a":' * 800 + b"1" + b"}" * 800,
    "null": b"null",
    "a number": b"5",
    "a list": b"[]",
    "an empty object": b"{}",
    "an int of 5000 digits": b'{"step": ' + b"9" * 5_000 + b"}",
    "infinity": b'{"step": 1e400, "1": 1e400}',
    "a step in words": b'{"step": "8", "exported_step": 8}',
    "a step without its τ": b'{"8": {}}',
    "other kinds": b'{"chosen": 5, "id": 5, "eos_token_id": {}, "files": 5}',
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
@pytest.mark.parametrize("name", READERS)
def test_no_content_of_a_file_is_a_traceback(tmp_path, name, content):
    for end in (b"", b"\n"):
        (tmp_path / name).write_bytes(content + end)
        try:
            READERS[name](tmp_path / name)
        except DominoError as error:
            assert len(str(error).splitlines()) <= 5 and error.exit_code in (2, 3)
