"""The drafters that heads.py compares, as data: what each changes in the tiny recipe, and the arms."""

import dataclasses
from collections.abc import Sequence

from benchmarks.studies.study import Variant

COLOURS = {
    "none": "#555555",
    "domino": "#0072B2",
    "markov_vanilla": "#D55E00",
    "markov_gated": "#E69F00",
    "markov_rnn": "#CC79A7",
    "dflash2": "#009E73",
    "eagle3": "#56B4E9",
    "medusa": "#B8A000",
}
MARKOV_KINDS = ("vanilla", "gated", "rnn")
PLAIN, DRAFT, BACKBONE, TREE = "autoregressive", "draft", "backbone", "tree"
BY_STEPS, BY_CLOCK, BY_PREDICTIONS = "steps", "clock", "predictions"


@dataclasses.dataclass(frozen=True)
class HeadVariant(Variant):
    """One drafter of the comparison.

    backbone: the variant whose backbone it takes over, frozen; "" trains everything.
    modes: it is decoded in, plain decoding first.  published: drafts per round of the published drafter; 0: not decoded
    at another length.
    steps: 0 for those of the command.
    """

    backbone: str = ""
    modes: tuple[str, ...] = (PLAIN, DRAFT, BACKBONE, TREE)
    published: int = 0
    steps: int = 0


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
        "none": ("DFlash (no head)", "none", {"drafter.head": "none"}, width - 1),
        "domino": ("Domino", "domino", {"drafter.head": "domino"}, width),
        **{
            f"markov_{kind}": (
                f"Markov, {kind}",
                f"markov_{kind}",
                {"drafter.head": "markov", "drafter.markov_head_type": kind, "drafter.markov_rank": rank},
                min(7, width),
            )
            for kind in MARKOV_KINDS
        },
        "dflash2": (
            "DFlash2",
            "dflash2",
            {"drafter.head": "dflash2", "drafter.selector_rank": rank},
            min(7, width - 1),
        ),
    }
    made = {
        name: HeadVariant(title, {**block, **changes}, COLOURS[colour], published=published)
        for name, (title, colour, changes, published) in drafters.items()
    }
    made["none"] = dataclasses.replace(made["none"], modes=(PLAIN, DRAFT, TREE))
    rows = {"train.gamma": block["train.gamma"]}
    medusa = {**rows, "drafter.head": "medusa", "drafter.medusa.num_heads": width - 1}
    eagle3 = {**rows, "drafter.head": "eagle3", "drafter.target_layer_ids": "(1,11,20)"}
    made["eagle3"] = HeadVariant("EAGLE-3", eagle3, COLOURS["eagle3"], modes=(PLAIN, DRAFT), published=7)
    made["medusa"] = HeadVariant(
        "Medusa-1", medusa, COLOURS["medusa"], modes=(PLAIN, DRAFT, TREE), published=min(5, width - 1)
    )
    return made | _common(made) | _frozen(made)


def _common(made: dict[str, HeadVariant]) -> dict[str, HeadVariant]:
    """Block heads with the common loss, which knows neither a curriculum nor a confidence."""
    common = {"train.loss": "cross_entropy", "train.lambda_start": 0.0}
    found = {}
    for name in ("domino", *(f"markov_{kind}" for kind in MARKOV_KINDS), "dflash2"):
        one = made[name]
        extra = {"drafter.enable_confidence_head": False} if name.startswith("markov") else {}
        changes = {**one.changes, **common, **extra}
        # They answer one question, what of a difference is the loss: chains are enough.
        found[f"{name}_common"] = dataclasses.replace(
            one, title=f"{one.title}, common loss", changes=changes, modes=(PLAIN, DRAFT, BACKBONE), published=0
        )
    return found


def _frozen(made: dict[str, HeadVariant]) -> dict[str, HeadVariant]:
    """Heads alone on a backbone that was trained without a head; a shifted one and an unshifted one."""
    shifted = {**made["none"].changes, "drafter.shift_label": True}
    found = {
        "backbone_shifted": dataclasses.replace(
            made["none"], title="DFlash, shifted", changes=shifted, colour="#999999"
        )
    }
    for name in ("domino", *(f"markov_{kind}" for kind in MARKOV_KINDS), "dflash2"):
        one = made[name]
        # Plain DFlash has no convolution, so the selector on its backbone has none either.
        extra = {"drafter.conv_kernel_size": 0} if name == "dflash2" else {"train.lambda_start": 0.0}
        backbone = "none" if name == "dflash2" else "backbone_shifted"
        found[f"{name}_frozen"] = dataclasses.replace(one, changes={**one.changes, **extra}, backbone=backbone)
    random = {**found["domino_frozen"].changes, "train.learning_rate": 1e-12}
    found["random_frozen"] = dataclasses.replace(
        found["domino_frozen"], title="random Domino head", changes=random, colour="#000000", steps=1
    )
    return found


BLOCKS = ("domino", *(f"markov_{kind}" for kind in MARKOV_KINDS), "dflash2")
EVERYTHING = ("none", *BLOCKS, "eagle3", "medusa")
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
        ("none", "domino", "dflash2", "eagle3", "medusa"),
        "Steps were chosen so that all see as many supervised predictions as Domino with equal steps: a block drafter "
        "learns from the slots of its anchors, EAGLE-3 and Medusa from every row in each pass or head. The Markov "
        "heads learn from the same slots as Domino, so their rows are those of equal steps.",
        BY_PREDICTIONS,
    ),
}
