"""Checks of model and data before the first step, printed and stored in <workdir>/preflight.json.

The most expensive mistake is to train on answers that are not the target's. They show in the share of their tokens that
the target itself would choose: nearly all of its own greedy answers, fewer of any other text.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from domino_jax.data.rows import TrainingRows, mark_answers
from domino_jax.decoding.answers import AnswerPasses, TargetAnswer, count_cut, last_answer
from domino_jax.decoding.requests import Request
from domino_jax.method.drafters import AnyConfig
from domino_jax.method.pair import Pair
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.models.sharding import row_shards
from domino_jax.runtime.distributed import is_primary
from domino_jax.runtime.errors import DataError
from domino_jax.runtime.json_files import write_json
from domino_jax.weights.loading import LoadedTarget

READ_ROWS = 256  # rows whose answers are looked at, drawn evenly from all
SCORED_ROWS = 64  # the number of them that the target reads


def run_preflight(
    workdir: epath.Path,
    rows: TrainingRows,
    loaded: LoadedTarget,
    drafter: AnyConfig,
    mesh: Mesh,
    fingerprint: str,
    seed: int,
) -> dict[str, Any]:
    """Checks, prints and stores; every process calls it, process 0 prints and writes. Returns the stored facts.

    Args:
        fingerprint: of the data.  seed: of the sample.
    Raises DataError for a mask token in the text of the rows.
    """
    numbers = np.random.default_rng(seed).permutation(len(rows))[:READ_ROWS]
    sample = [rows[int(number)] for number in numbers]
    mask_token_id = drafter.mask_token_id
    row_id = None if mask_token_id is None else rows.first_with(mask_token_id)
    if row_id is not None:  # it would be a draft and a label at once
        raise DataError(
            f"{rows.where(row_id)}: the row has the mask token {mask_token_id} in its text.\n"
            "Set --config.drafter.mask_token_id to a row of the embedding that no text uses."
        )
    drawn = [row for _, row in sample]
    request = Request(0, 0, None, SamplingParams())
    texts = [last_answer(row) for row in drawn]
    answers = [TargetAnswer("", *text, request) for text in texts[:SCORED_ROWS]]
    with jax.set_mesh(mesh):
        passes = AnswerPasses(answers, DraftSettings(), row_shards(mesh))
        share = passes.chosen_share(Pair(loaded.model, loaded.params), "the rows", least=0.0)
    facts = {
        "mask_token_id": mask_token_id,
        "stop_ids": list(loaded.stop_ids),
        "data": {"fingerprint": fingerprint, **rows.counts()},
        "rows_searched": len(drawn),
        "answers_cut": count_cut((ids for _, ids in texts), loaded.stop_ids),
        "chosen_share": share,
    }
    if is_primary():
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / "preflight.json", facts)
        print("pre-flight", *describe(facts, loaded.stop_tokens()), sep="\n")
        print(f"a row ({rows.where(sample[0][0])}):", mark_answers(drawn[0], loaded.tokenizer), sep="\n", flush=True)
    return facts


def describe(facts: dict[str, Any], stop_tokens: Sequence[str]) -> list[str]:
    """Lines for the console; a warning comes with its remedy."""
    data, share = facts["data"], facts["chosen_share"]
    lines = [
        f"mask token {facts['mask_token_id']}, stop ids {', '.join(stop_tokens) or 'none'}",
        f"{data['rows']:,} of {data['rows_read']:,} rows are used, {data['rows_without_anchor']:,} have no anchor",
        f"{data['supervised_tokens'] / data['tokens']:.1%} of {data['tokens']:,} tokens are supervised",
        f"the target itself would choose {share:.1%} of the answers' tokens",
    ]
    if cut := facts["answers_cut"]:
        lines.append(
            f"{cut} of {facts['rows_searched']} rows end within an answer: data.max_length, or the limit that it was"
            " generated with, cut it"
        )
    if share < 0.7:  # sampling with the usual settings gives more
        lines.append("warning: these answers are not its own, and a drafter trained on them is seldom accepted.")
        lines.append("Let it answer the prompts: domino_jax.regenerate or --config.data.regenerate=True.")
    return lines
