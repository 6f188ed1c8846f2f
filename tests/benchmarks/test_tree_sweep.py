"""benchmarks/tree_sweep.py: its figures are those of replays called by hand, for drafters with and without a head."""

import itertools
import json

import pytest

from benchmarks import tree_sweep
from domino_jax.decoding.acceptance import tau_pooled
from domino_jax.decoding.settings import TreeSettings
from domino_jax.evals.tree_replay import record, replayed_tau
from domino_jax.recipe import cli
from domino_jax.runtime.errors import DominoError
from tests.helpers.decoding_models import (
    VOCAB,
    decode_settings_of,
    golden_models,
    make_generator,
    random_models,
    random_prompts,
)
from tests.helpers.models import GOLDEN, load_golden

NODES, BETAS = (4, 12), (0.0, -0.5)
PAIR = "tied_shift"
SHAPE = {"cache_slots": 96, "max_new_tokens": 16}
PLAIN_DRAFTER = {"projector": "dflash", "shift_label": False}


@pytest.fixture
def small(monkeypatch):
    """The sweep with few of everything; 128 nodes are more than 4 lanes give, and are left out."""
    monkeypatch.setattr(tree_sweep, "NODES", (*NODES, 128))
    monkeypatch.setattr(tree_sweep, "BETAS", BETAS)
    monkeypatch.setattr(tree_sweep, "LANES", (4,))
    monkeypatch.setattr(tree_sweep, "CANDIDATES", (4, None))


def printed(capsys, models, prompts) -> tuple[str, list[list[str]], list[list[str]]]:
    """What the sweep prints: its first line, and the rows of its two tables."""
    tree = TreeSettings(temperature=0.8)
    settings = decode_settings_of(
        ("draft", "tree"), max_new_tokens=SHAPE["max_new_tokens"], cache_length=SHAPE["cache_slots"], tree=tree
    )
    tree_sweep.show(models, (), settings, prompts)
    first, picked, details = capsys.readouterr().out.strip().split("\n\n")
    return first, *([line.strip("| ").split(" | ") for line in text.splitlines()[2:]] for text in (picked, details))


def by_hand(models, mode, prompts, sizes) -> tuple[float, dict[tuple, tuple[float, float]]]:
    """The chain's τ on the first half, and (nodes, candidates, beta) → τ of a tree of 4 lanes on either half."""
    answers = make_generator(models, **SHAPE).generate(prompts, mode)
    half, found = len(prompts) // 2, {}
    for candidates, nodes, beta in itertools.product(sizes, NODES, BETAS):
        tree = TreeSettings(nodes, 4, candidates, beta, temperature=0.8)
        if (nodes, beta) == (NODES[0], BETAS[0]):
            made = make_generator(models, tree=tree, **SHAPE)
            recordings = record(models, made.generator, prompts, answers)
        both = (replayed_tau(part, tree) for part in (recordings[:half], recordings[half:]))
        found[nodes, candidates, beta] = tuple(both)
    return tau_pooled(answers[:half]), found


def pairs(kind: str):
    """(models, prompts, the chain's mode, numbers of candidates)"""
    if kind == "domino":
        rows = load_golden(PAIR).figures["generate"]
        prompts = [rows[place]["prompt"] for place in (0, 2, 1, 3)]  # candidates matter in the first half
        return golden_models(PAIR), prompts, kind, (4, 260)
    return random_models(4, **PLAIN_DRAFTER), random_prompts(4), kind, (4, VOCAB)


@pytest.mark.parametrize("kind", [pytest.param("domino", marks=pytest.mark.slow(minutes=1)), "backbone"])
def test_what_is_printed_is_what_replays_by_hand_give(capsys, small, kind):
    models, prompts, mode, sizes = pairs(kind)
    first, picked, details = printed(capsys, models, prompts)
    chain, found = by_hand(models, mode, prompts, sizes)
    assert first.startswith(f"chain: τ {chain:.3f}, ")
    expected = []
    for nodes, candidates in itertools.product(NODES, sizes):
        ratios = (found[nodes, candidates, beta][0] / chain for beta in BETAS)
        expected.append([str(nodes), str(candidates), "4", *(f"{ratio:.3f}" for ratio in ratios)])
    assert details == expected
    assert [row[0] for row in picked] == list(map(str, NODES))
    for nodes, row in zip(NODES, picked, strict=True):
        some = {key: both for key, both in found.items() if key[0] == nodes}
        best = max(some, key=lambda key: some[key][1])  # on the second half
        spread = [both[0] / chain for both in some.values()]
        shares = f"{min(spread):.3f} to {max(spread):.3f}"
        tau = some[best][0]
        assert row[1:] == [f"{best[1]}, 4, {best[2]:g}", f"{tau:.3f}", f"{tau / chain:.3f}", shares]


def rows_file(tmp_path, count: int):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"token_ids": [5, number]}) + "\n" for number in range(count)))
    return path


@pytest.mark.parametrize(("there", "asked", "wanted"), [(3, 2, 4), (1, 0, 2)])
def test_too_few_prompts_are_refused_before_anything_is_loaded(tmp_path, there, asked, wanted):
    config = GOLDEN.parents[1] / "configs" / "tiny.py"
    values = {"prompts": rows_file(tmp_path, there), "num_prompts": asked}
    argv = ["sweep", f"--config={config}", "--config.target.path=./nowhere"]
    argv += [f"--config.decode.{name}={value}" for name, value in values.items()]
    with pytest.raises(DominoError, match=f"has {there} prompts, and the sweep reads {wanted}, .* or name a longer"):
        tree_sweep.main(cli.parse(argv, ("config",)))


def test_twice_the_prompts_asked_for_are_read_and_without_a_number_all_but_an_odd_one(tmp_path):
    path = rows_file(tmp_path, 5)
    assert len(tree_sweep.read_rows(str(path), 2)) == len(tree_sweep.read_rows(str(path), 0)) == 4
