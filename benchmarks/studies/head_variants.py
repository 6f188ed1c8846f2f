"""The drafters that heads.py compares, as data: what each changes in the tiny recipe, and the arms."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.decoding.settings import BACKBONE, BASELINE, DRAFT, TREE

MARKOV_KINDS = ("vanilla", "gated", "rnn")
XPRESS = {f"xpress_{passes}": passes for passes in (2, 4, 6)}
BY_STEPS, BY_CLOCK, BY_PREDICTIONS = "steps", "clock", "predictions"


@dataclasses.dataclass(frozen=True)
class HeadVariant:
    """One drafter of the comparison: its title in the table and what it changes in the recipe.

    backbone: the variant whose backbone it takes over, frozen; "" trains everything.
    modes: it is decoded in, plain decoding first.  published: drafts per round of the published drafter; 0: not decoded
    at another length.
    steps: 0 for those of the command.
    passes: over a block, in which it drafts; 0: as it was trained to.  trained_as: the training whose drafter it takes,
    by name; "" for a separate one.
    """

    title: str
    changes: Mapping[str, Any]
    backbone: str = ""
    modes: tuple[str, ...] = (BASELINE, DRAFT, BACKBONE, TREE)
    published: int = 0
    steps: int = 0
    passes: int = 0
    trained_as: str = ""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One section: title, the names of its rows, a sentence about them, and what is equal in it."""

    title: str
    variants: Sequence[str]
    says: str
    equal: str = BY_STEPS


def variants(width: int) -> dict[str, HeadVariant]:
    """By name all drafters, for a verify width of one anchor and width-1 drafts.

    Sizes of heads are those of the tiny recipe. Optimizer, learning rate and γ are the same for all; the losses are the
    published ones, and in rows named "common" the cross-entropy with decay over contiguous labels that all block heads
    can have. γ is 7 at blocks of 16, in proportion for others.
    """
    block = {"drafter.block_size": width, "train.gamma": 7.0 * width / 16}
    rank = 64  # as the recipe's Domino head
    drafters = {
        "none": ("DFlash (no head)", {"drafter.head": "none"}, width - 1),
        "domino": ("Domino", {"drafter.head": "domino"}, width),
        **{
            f"markov_{kind}": (
                f"Markov, {kind}",
                {"drafter.head": "markov", "drafter.markov.head_type": kind, "drafter.markov.rank": rank},
                min(7, width),
            )
            for kind in MARKOV_KINDS
        },
        "dflash2": (
            "DFlash2",
            {"drafter.head": "dflash2", "drafter.dflash2.rank": rank},
            min(7, width - 1),
        ),
    }
    all_ = {
        name: HeadVariant(title, {**block, **changes}, published=published)
        for name, (title, changes, published) in drafters.items()
    }
    all_["none"] = dataclasses.replace(all_["none"], modes=(BASELINE, DRAFT, TREE))
    eagle3 = {"drafter.head": "eagle3", "drafter.target_layer_ids": "(1,11,20)"}
    all_["eagle3"] = HeadVariant("EAGLE-3", eagle3, modes=(BASELINE, DRAFT), published=7)
    head = {"drafter.head": "xpress", "drafter.xpress.rank": rank}
    for name, passes in XPRESS.items():
        all_[name] = HeadVariant(
            f"xPress, {passes} passes", {**block, **head}, published=width - 1, passes=passes, trained_as="xpress"
        )
    return all_ | _common(all_) | _frozen(all_)


def _common(drafters: dict[str, HeadVariant]) -> dict[str, HeadVariant]:
    """Block heads with the common loss, which knows neither a curriculum nor a confidence."""
    common = {"train.loss": "cross_entropy", "train.lambda_start": 0.0}
    common_rows = {}
    for name in ("domino", *(f"markov_{kind}" for kind in MARKOV_KINDS), "dflash2"):
        one = drafters[name]
        changes = {**one.changes, **common}
        # They answer one question, what of a difference is the loss: chains are enough.
        common_rows[f"{name}_common"] = dataclasses.replace(
            one, title=f"{one.title}, common loss", changes=changes, modes=(BASELINE, DRAFT, BACKBONE), published=0
        )
    return common_rows


def _frozen(drafters: dict[str, HeadVariant]) -> dict[str, HeadVariant]:
    """Heads alone on a backbone that was trained without a head; a shifted one and an unshifted one."""
    shifted = {**drafters["none"].changes, "drafter.shift_label": True}
    rows = {"backbone_shifted": dataclasses.replace(drafters["none"], title="DFlash, shifted", changes=shifted)}
    for name in ("domino", *(f"markov_{kind}" for kind in MARKOV_KINDS), "dflash2"):
        one = drafters[name]
        # Plain DFlash has no convolution, so the selector on its backbone has none either.
        extra = {"dflash2": {"drafter.conv_kernel_size": 0}, "domino": {"train.lambda_start": 0.0}}.get(name, {})
        backbone = "none" if name == "dflash2" else "backbone_shifted"
        rows[f"{name}_frozen"] = dataclasses.replace(one, changes={**one.changes, **extra}, backbone=backbone)
    random = {**rows["domino_frozen"].changes, "train.learning_rate": 1e-12}
    rows["random_frozen"] = dataclasses.replace(
        rows["domino_frozen"], title="random Domino head", changes=random, steps=1
    )
    return rows


BLOCKS = ("domino", *(f"markov_{kind}" for kind in MARKOV_KINDS), "dflash2")
EVERYTHING = ("none", *BLOCKS, *XPRESS, "eagle3")
ARMS = {
    "a": Arm(
        "Frozen backbones, the head alone trained",
        ("none", "backbone_shifted", "random_frozen", *(f"{name}_frozen" for name in BLOCKS)),
        "The backbones were trained as plain DFlash, so no head was trained together with its backbone. DFlash2 is its "
        "selector alone, without convolutions, on the usual, unshifted one; the other heads are on the shifted one. "
        "Each head has its published loss, Domino cross-entropy without the curriculum.",
    ),
    "b": Arm(
        "Everything trained, equal steps",
        (*EVERYTHING, *(f"{name}_common" for name in BLOCKS)),
        'Each drafter has its published loss; in rows named "common loss" all block heads have one loss, '
        "cross-entropy with decay over contiguous labels.",
    ),
    "c": Arm(
        "Everything trained, equal wall-clock",
        EVERYTHING,
        "Seconds per step were measured first, and the steps chosen so that all take the same time, data and the "
        "target's pass included; the learning rate decays to the end of each run.",
        BY_CLOCK,
    ),
    "d": Arm(
        "Everything trained, equal supervised predictions",
        ("none", "domino", "dflash2", "eagle3"),
        "Steps were chosen so that all see as many supervised predictions as Domino with equal steps: a block drafter "
        "learns from the slots of its anchors, EAGLE-3 from every row in each pass. The Markov "
        "heads learn from the same slots as Domino, so their rows are those of equal steps.",
        BY_PREDICTIONS,
    ),
}
