"""The files of a decoding run: groups are whole or not there, wherever a run was cut; a folder holds one run."""

import pytest

from domino_jax.evals.run_files import GENERATIONS, PROGRESS, RunFiles
from domino_jax.runtime.errors import DominoError

RUN = {"settings": {"seed": 0, "modes": ["domino"]}, "drafter": None}
GROUPS = [
    ({"group": number}, [{"id": f"{number}-{row}", "text": "é\u2028\r"} for row in range(2)]) for number in range(2)
]


def write(folder, groups=GROUPS):
    with RunFiles(folder, RUN) as files:
        for record, rows in groups:
            files.append(record, rows)


def read(folder):
    """The groups of the next start as they were appended."""
    with RunFiles(folder, RUN) as files:
        return [({"group": record["group"]}, rows) for record, rows in files.replay()]


def test_what_was_appended_is_there_at_the_next_start(tmp_path):
    assert read(tmp_path / "new" / "folder") == []
    write(tmp_path)
    assert read(tmp_path) == read(tmp_path) == GROUPS


def test_cut_at_any_byte_a_run_continues_after_its_last_whole_group(tmp_path):
    write(tmp_path)
    whole = (tmp_path / PROGRESS).read_bytes()
    generations = (tmp_path / GENERATIONS).read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        (tmp_path / PROGRESS).write_bytes(whole[:cut])
        (tmp_path / GENERATIONS).write_bytes(generations)
        lines = sum(end <= cut for end in ends)  # the first one is the header
        groups = read(tmp_path)
        assert groups == GROUPS[: max(0, lines - 1)]
        with RunFiles(tmp_path, RUN) as files:
            for record, rows in GROUPS[len(groups) :]:
                files.append(record, rows)
        assert (tmp_path / GENERATIONS).read_bytes() == generations


def test_rows_that_never_reached_the_disk_take_their_group_with_them(tmp_path):
    write(tmp_path)
    file = tmp_path / GENERATIONS
    file.write_bytes(file.read_bytes()[:-3])
    assert read(tmp_path) == GROUPS[:1]
    assert len(file.read_text().split("\n")) == 3


def test_a_folder_begun_with_other_settings_is_refused_and_left_alone(tmp_path):
    write(tmp_path)
    before = (tmp_path / PROGRESS).read_bytes()
    other = {**RUN, "settings": {**RUN["settings"], "seed": 7}}
    with pytest.raises(DominoError, match="holds a decoding of something else") as refused:
        RunFiles(tmp_path, other)
    assert "settings.seed: 0 before, 7 now" in str(refused.value)
    assert (tmp_path / PROGRESS).read_bytes() == before


def test_a_second_run_on_the_same_folder_is_refused_before_it_cuts_anything(tmp_path):
    with RunFiles(tmp_path, RUN) as files:
        files.append(*GROUPS[0])
        with (tmp_path / GENERATIONS).open("ab") as rows:
            rows.write(b'{"id": "p1"')  # the first run is writing its second group
        before = (tmp_path / GENERATIONS).read_bytes(), (tmp_path / PROGRESS).read_bytes()
        for restart in (False, True):
            with pytest.raises(DominoError, match="another process is writing"):
                RunFiles(tmp_path, RUN, restart)
        assert ((tmp_path / GENERATIONS).read_bytes(), (tmp_path / PROGRESS).read_bytes()) == before


def test_a_folder_begun_with_other_weights_can_start_from_scratch_and_one_with_the_same_continues(tmp_path):
    write(tmp_path)
    other = {**RUN, "weights": {"drafters": ["b"]}}
    with RunFiles(tmp_path, other, restart=True) as files:
        assert files.records == []
        files.append(*GROUPS[0])
    with RunFiles(tmp_path, other, restart=True) as files:
        assert [rows for _, rows in files.replay()] == [GROUPS[0][1]]
