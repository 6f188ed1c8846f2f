"""The files of a decoding run: groups are whole or not there, wherever a run was cut; a folder holds one run."""

import pytest

from domino_jax.evals.run_files import GENERATIONS, PROGRESS, RunFiles
from domino_jax.runtime.errors import DominoError

RUN = {"settings": {"seed": 0, "modes": ["domino"]}, "drafter": {}}
GROUPS = [{"task": None, "rows": [{"id": f"{number}-{row}", "text": "é\u2028\r"} for row in "ab"]} for number in "01"]


def start(folder, groups=(), run=RUN, restart=False):
    """The groups of earlier starts; then `groups` are appended."""
    with RunFiles(folder, run, restart) as files:
        before = list(files.replay())
        for group in groups:
            files.append(group)
    return before


def test_cut_at_any_byte_a_run_continues_after_its_last_whole_group(tmp_path):
    assert start(tmp_path / "new", GROUPS) == []
    progress, generations = (tmp_path / "new" / name for name in (PROGRESS, GENERATIONS))
    whole, rows = progress.read_bytes(), generations.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in sorted({*range(0, len(whole), 9), *ends, *(end - 1 for end in ends)}):
        progress.write_bytes(whole[:cut])
        generations.write_bytes(rows[: cut // 2])  # these need not have reached the disk
        done = max(0, sum(end <= cut for end in ends) - 1)  # the first line is the header
        assert start(tmp_path / "new", GROUPS[done:]) == GROUPS[:done]
        assert (progress.read_bytes(), generations.read_bytes()) == (whole, rows)


def test_a_folder_begun_with_other_settings_is_refused_and_left_alone_or_starts_from_scratch(tmp_path):
    start(tmp_path, GROUPS)
    before = (tmp_path / PROGRESS).read_bytes(), (tmp_path / GENERATIONS).read_bytes()
    other = {**RUN, "settings": {**RUN["settings"], "seed": 7}}
    with pytest.raises(DominoError, match="holds a decoding of something else") as refused:
        RunFiles(tmp_path, other)
    assert "settings.seed: 0 before, 7 now" in str(refused.value)
    assert ((tmp_path / PROGRESS).read_bytes(), (tmp_path / GENERATIONS).read_bytes()) == before
    assert start(tmp_path, GROUPS[1:], other, restart=True) == []
    assert start(tmp_path, (), other, restart=True) == GROUPS[1:]


def test_a_second_run_on_the_same_folder_is_refused_before_it_cuts_anything(tmp_path):
    with RunFiles(tmp_path, RUN) as files:
        files.append(GROUPS[0])
        with (tmp_path / PROGRESS).open("ab") as rows:
            rows.write(b'{"task": null, "ro')  # the first run is writing its second group
        before = (tmp_path / PROGRESS).read_bytes()
        for restart in (False, True):
            with pytest.raises(DominoError, match="another process is writing"):
                RunFiles(tmp_path, RUN, restart)
        assert (tmp_path / PROGRESS).read_bytes() == before
