"""The rules of a recipe about its head: what it reads in training, what it starts from, and its rank."""

from domino_jax.method.kind import Rule
from domino_jax.method.kinds import KINDS

HEADED = tuple(head for head, kind in KINDS.items() if kind.has_head)
WITH_TABLES = tuple(head for head in HEADED if KINDS[head].table_fields)  # whose codes come from a table of tokens
READERS = tuple(head for head in HEADED if KINDS[head].reads_drafts)


def head_rules(drafter, train) -> list[Rule]:
    """The rules between the recipe's sections drafter and train."""
    head, reads, path, tables = drafter.head, train.head_tokens, train.frozen_backbone, train.head_from
    parts = [f"train.{key}" for key in ("frozen_backbone", "head_from") if train[key]]
    return [
        (
            reads == "text" or head in READERS,
            "train.head_tokens",
            reads,
            f"drafter.head is {head}, and only {' and '.join(READERS)} read their drafts; leave it out",
        ),
        (
            train.start_from is None or (bool(train.start_from) and not KINDS[head].counts_tokens),
            "train.start_from",
            train.start_from,
            f"name a drafter's folder, or leave it out; the draft vocabulary of drafter.head {head} is counted in the"
            " rows of each run, so it takes no weights",
        ),
        (
            train.start_from is None or not parts,
            "train.start_from",
            train.start_from,
            f"it gives all weights, and {' and '.join(parts)} would replace some of them; leave one of the two out",
        ),
        (
            path is None or (bool(path) and head in HEADED),
            "train.frozen_backbone",
            path,
            f"name a drafter's folder for a drafter.head of {', '.join(HEADED)} (it is {head}), or leave it out",
        ),
        (
            tables is None or (bool(tables) and head in WITH_TABLES),
            "train.head_from",
            tables,
            f"name a drafter's folder for a drafter.head of {' or '.join(WITH_TABLES)} (it is {head}), whose tables"
            " depend on tokens alone, or leave it out",
        ),
        (
            tables is not None or not train.frozen_tables,
            "train.frozen_tables",
            train.frozen_tables,
            "it freezes the tables that train.head_from names; name a drafter's folder there, or leave it out",
        ),
        *_scale_rules(drafter, train),
    ]


def _scale_rules(drafter, train) -> list[Rule]:
    scales, key = train.rank_scales, "train.rank_scales"
    if not scales:
        return []
    numbers = all(isinstance(scale, int | float) and 0 < scale <= 1 for scale in scales)
    example = 'list shares of the rank above 0, the largest of them 1, as --config.train.rank_scales="(0.25,0.5,1.0)"'
    if not numbers or max(scales) != 1 or drafter.head not in HEADED:
        fine = numbers and max(scales) == 1
        change = f"drafter.head {drafter.head} has no rank; leave it out" if fine else example
        return [(False, key, scales, change)]
    rank = head_rank(drafter)
    broken = [scale for scale in scales if (scale * rank) % 1 or scale * rank < 1]
    return [
        (
            not broken,
            key,
            scales,
            f"{', '.join(map(str, broken))} of drafter.{KINDS[drafter.head].rank_key} {rank} is no whole number; change"
            " one of the two",
        ),
        (
            train.head_tokens == "text",
            key,
            scales,
            "a head that is cut at random reads the text; set --config.train.head_tokens=text",
        ),
    ]


def head_rank(drafter) -> int:
    """The rank of the recipe's head; 0 without one."""
    return drafter[KINDS[drafter.head].rank_key] if drafter.head in HEADED else 0


def decoded_rank_rule(drafter, decode) -> Rule:
    """decode.head_rank against the rank of the drafter that the recipe trains."""
    rank, largest = decode.head_rank, head_rank(drafter)
    change = f"the head of drafter.head {drafter.head} has rank {largest}; give at most that, or 0 for all of it"
    return rank <= largest, "decode.head_rank", rank, change
