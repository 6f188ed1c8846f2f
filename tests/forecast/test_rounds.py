"""decode --dry_run: bytes of a step and of rounds, from shapes alone."""

import re

import pytest

from tests.helpers.commands import run
from tests.helpers.models import GOLDEN

GB = 1e9


def table(capsys, *words: str) -> dict[str, list[str]]:
    """{drafts: the row's other cells}; nothing is loaded, and a finished table is printed."""
    assert run("decode", *words, "--dry_run") == 0
    rows = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    return {row[0]: row[1:] for row in rows if row[0] == "step" or row[0].isdigit()}


def test_a_round_of_a_mixture_of_experts_reads_those_that_its_rows_use(capsys, monkeypatch):
    """The hub id is enough. By hand, 30B-A3B in bfloat16: attention, routers and lm_head of 48 layers are 2.46 GB, an
    expert of all layers 453 MB, 4,096 slots 403 MB, and draft and lm_head again 1.57 GB."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = table(capsys, "--config=configs/qwen3_30b_a3b.py", "--topology=h200")
    assert list(found) == ["step", "1", "2", "4", "8", "16"]
    assert found["step"][:2] == ["1", "8 of 128"] and found["16"][:2] == ["17", "85 of 128"]
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    dense = 2 * (48 * (attention + 2048 * 128 + 2 * 2048 + 2 * 128) + 2048 + 2048 * 151_936)
    expert, cache = 2 * 48 * 3 * 2048 * 768, 4_096 * 48 * 2 * 4 * 128 * 2
    assert float(found["step"][2]) == pytest.approx((dense + cache + 8 * expert) / GB, abs=0.006)
    assert float(found["step"][3]) == pytest.approx(float(found["step"][2]) / 4.8, abs=0.01)  # ms at 4.8 TB/s
    more = float(found["16"][2]) - float(found["8"][2])  # the same draft
    active = [128 * (1 - (1 - 8 / 128) ** rows) for rows in (9, 17)]
    assert more == pytest.approx((active[1] - active[0]) * expert / GB, abs=0.02)
    ratios = {drafts: float(row[4]) for drafts, row in found.items()}
    assert ratios["16"] > 6 and ratios["1"] < 1.8  # the τ that each must exceed


def test_a_dense_target_pays_the_same_at_every_width_and_fewer_bytes_in_eight_bits(capsys):
    config = "--config=configs/qwen3_8b.py"
    plain = table(capsys, config)
    assert len({row[1] for drafts, row in plain.items() if drafts != "step"}) == 1
    copied = table(capsys, config, "--config.target.quantize=int8", "--config.decode.draft_weights=int8")
    assert float(copied["step"][1]) < 0.54 * float(plain["step"][1])
    assert float(copied["16"][1]) < float(plain["16"][1]) - float(plain["step"][1]) / 2
    drafter = table(capsys, config, "--config.decode.draft_weights=int8")
    assert drafter["step"] == plain["step"]
    read = 2 * 151_936 * 4096 + 2 * 5 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 12_288 + 4096**2)
    saved = (float(plain["16"][1]) - float(drafter["16"][1])) * GB  # half of the lm_head, layers, fc and head
    assert 0.5 * read < saved < 0.57 * read


def test_several_chips_share_the_target_and_a_drafters_folder_gives_its_shape(capsys):
    golden = GOLDEN / "tied_shift"
    words = ["--config=configs/tiny.py", f"--config.target.path={golden / 'target'}"]
    found = table(capsys, *words, f"--config.drafter.path={golden / 'drafter'}")
    assert list(found) == ["step", "1", "2", "4", "8"]  # its block has 8
    sparse = ["--config=configs/qwen3_30b_a3b.py", "--topology=v5p"]
    one, four = (float(table(capsys, *sparse, f"--config.decode.mesh.tensor={count}")["16"][2]) for count in (1, 4))
    assert 0.25 < four / one < 0.3  # the head is whole on each


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--topology=h900"], "no such chip; name one of v4"),
        (["--topology=h200:9"], "without a number of chips, which decode.mesh states"),
        (["--output=DIR"], "--dry_run and --output are both given"),
        (["--config.decode.batch_size=4", "--config.decode.mesh.data=3"], "cannot be cut into decode.mesh.data = 3"),
        (["--config.decode.draft_vocab=200000"], "but the target has 151936 tokens"),
        (["--config.decode.mesh.tensor=3"], "128 experts, which mesh.tensor 3 does not divide"),
        (["--config.decode.mesh.tensor=-1"], "as numbers, not as -1"),
        (["--config.drafter.head=eagle3"], "the head is 'eagle3'"),
    ],
)
def test_what_it_cannot_compute_is_refused_in_one_sentence(capsys, words, message):
    assert run("decode", "--config=configs/qwen3_30b_a3b.py", "--dry_run", *words) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
