"""The ablations as data: what each training changes in the tiny recipe, and which of them a table compares.

A training that is in several tables has one name and is run once per workdir.
"""

import dataclasses
import math
from collections.abc import Sequence

from benchmarks.studies.study import Variant

# Of the tables with many lines; the first three are those of the head and its curriculum.
ORANGE, BLUE, GREEN, PURPLE, SKY = "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9"


def variant(title: str, colour: str, **changes) -> Variant:
    """changes: recipe keys with __ for the dot."""
    return Variant(title, {key.replace("__", "."): value for key, value in changes.items()}, colour)


RECIPE_ROW = "curriculum"  # the tiny recipe without a change, in every table

VARIANTS = {
    # Shifted too, where the public DFlash drafters are not: all predict the same tokens of the same anchors, so that
    # their base losses can be compared.
    "dflash": variant("plain DFlash", GREEN, drafter__head="none", drafter__shift_label=True),
    "no_curriculum": variant("Domino, λ = 0", ORANGE, train__lambda_start=0.0),
    "curriculum": variant("Domino, curriculum", BLUE, train__lambda_start=1.0),
    "drafts": variant("own drafts, λ = 0", PURPLE, train__lambda_start=0.0, train__head_tokens="drafts"),
    "drafts_curriculum": variant("own drafts, curriculum", SKY, train__lambda_start=1.0, train__head_tokens="drafts"),
    "lambda_half_run": variant("λ 1 → 0 in half the run", GREEN, train__lambda_decay_ratio=0.5),
    "lambda_from_half": variant("λ 0.5 → 0", PURPLE, train__lambda_start=0.5),
    "lambda_half": variant("λ = 0.5", SKY, train__lambda_start=0.5, train__lambda_decay_ratio=math.inf),
    # γ of the public drafters is 4 for blocks of 8 and 7 for 16; between them the mean.
    "block12": variant("blocks of 12", GREEN, drafter__block_size=12, train__gamma=5.5),
    "block16": variant("blocks of 16", ORANGE, drafter__block_size=16, train__gamma=7.0),
    "gamma2": variant("γ 2", GREEN, train__gamma=2.0),
    "gamma7": variant("γ 7", ORANGE, train__gamma=7.0),
    "gamma_inf": variant("no decay", PURPLE, train__gamma=math.inf),
    "dpace25": variant("D-PACE, α 0.25", GREEN, train__dpace_alpha=0.25),
    "dpace50": variant("D-PACE, α 0.5", ORANGE, train__dpace_alpha=0.5),
    "dpace75": variant("D-PACE, α 0.75", PURPLE, train__dpace_alpha=0.75),
    "tv10": variant("total variation 0.1", GREEN, train__distill=0.1),
    "tv50": variant("total variation 0.5", ORANGE, train__distill=0.5),
    "tv90": variant("total variation 0.9", PURPLE, train__distill=0.9),
    "layers1": variant("1 layer", GREEN, drafter__num_layers=1),
    "layers2": variant("2 layers", ORANGE, drafter__num_layers=2),
    "layers5": variant("5 layers", PURPLE, drafter__num_layers=5),
    "gru32": variant("GRU 32", GREEN, drafter__gru_hidden_dim=32),
    "gru64": variant("GRU 64", ORANGE, drafter__gru_hidden_dim=64),
    "gru256": variant("GRU 256", PURPLE, drafter__gru_hidden_dim=256),
    "rank16": variant("rank 16", GREEN, drafter__emb_dim=16),
    "rank32": variant("rank 32", ORANGE, drafter__emb_dim=32),
    "rank128": variant("rank 128", PURPLE, drafter__emb_dim=128),
}


@dataclasses.dataclass(frozen=True)
class Table:
    """title: of its section.  variants: its rows.  recipe: what the recipe's own value is, for the row `curriculum`.
    paper: what the paper reports of the same change.
    """

    title: str
    variants: Sequence[str]
    recipe: str = ""
    paper: str = ""

    def row_title(self, name: str) -> str:
        title = VARIANTS[name].title
        return f"{title} ({self.recipe})" if name == RECIPE_ROW and self.recipe else title


TABLES = {
    "head": Table(
        "The head and the curriculum",
        ("dflash", "no_curriculum", "curriculum"),
        paper="τ 3.49 without the head, 4.19 with head and curriculum",
    ),
    "tokens": Table(
        "Training-time test and teacher forcing",
        ("drafts", "no_curriculum", "drafts_curriculum", "curriculum"),
        "teacher forcing",
        "τ 3.80 by training-time test, 3.96 by teacher forcing, 4.19 with the curriculum as well",
    ),
    "block": Table("Block size", ("curriculum", "block12", "block16"), "blocks of 8"),
    "lambda": Table(
        "Schedules of λ",
        ("no_curriculum", "lambda_half", "lambda_from_half", "lambda_half_run", "curriculum"),
        "λ 1 → 0",
    ),
    "gamma": Table("Decay over the slots", ("gamma2", "curriculum", "gamma7", "gamma_inf"), "γ 4"),
    "dpace": Table("D-PACE", ("curriculum", "dpace25", "dpace50", "dpace75"), "γ 4"),
    "tv": Table("Total-variation distance to the target", ("curriculum", "tv10", "tv50", "tv90"), "none"),
    "layers": Table("Draft layers", ("layers1", "layers2", "curriculum", "layers5"), "3 layers"),
    "gru": Table("Width of the GRU", ("gru32", "gru64", "curriculum", "gru256"), "GRU 128"),
    "rank": Table("Rank of the head", ("rank16", "rank32", "curriculum", "rank128"), "rank 64"),
}
