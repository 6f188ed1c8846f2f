"""The answers of a decoding, and how many of its rounds one pass over them predicts: all, but for near ties."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_jax.data.prompts import read_jsonl
from domino_jax.decoding.answers import AnswerPasses, TargetAnswer
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.requests import with_defaults
from domino_jax.decoding.settings import BACKBONE, BASELINE, DRAFT, TREE, DecodeSettings
from domino_jax.evals.run_files import GENERATIONS
from domino_jax.method.pair import Pair

ROWS = 4  # of a pass


def predicted_rounds(
    models: Pair, settings: DecodeSettings, prompts: Sequence[Prompt], folder: Path
) -> dict[str, dict[str, int]]:
    """{mode that drafts chains: {"same": rounds that emitted what was predicted, "of": rounds}}.

    Args:
        settings: in effect; those of a fixed width, or nothing is predicted.
        folder: with the generations.jsonl of these prompts.
    """
    modes = [mode for mode in settings.modes if mode not in (BASELINE, TREE)]
    if not modes or settings.adaptive or not AnswerPasses.runs(models):
        return {}
    generator = new_generator(models, settings)
    rows = [row for _, row in read_jsonl(folder / GENERATIONS) if row["mode"] in modes]
    texts = decoded_answers(rows, prompts, settings)
    passes = AnswerPasses(list(texts.values()), generator.drafting(DRAFT), ROWS)
    accepted = dict(zip(texts, passes(models), strict=True))
    counts = {mode: {"same": 0, "of": 0} for mode in modes}
    for row in filter(lambda row: key_of(row) in texts, rows):
        answer, count = accepted[key_of(row)], counts[row["mode"]]
        drafts = answer.backbone if row["mode"] == BACKBONE else answer.drafts
        width, place = generator.drafting(row["mode"]).width(generator.drafter), 0
        for emitted in row["accept_lengths"]:
            count["of"] += 1
            count["same"] += min(min(int(drafts[place]), width) + 1, len(drafts) - place) == emitted
            place += emitted
    return counts


def decoded_answers(
    rows: Iterable[Mapping[str, Any]], prompts: Sequence[Prompt], settings: DecodeSettings
) -> dict[tuple, TargetAnswer]:
    """By key_of, the different answers in rows of generations.jsonl to these prompts; most are those of all modes."""
    by_id, answers = {prompt.answer_id: prompt for prompt in prompts}, {}
    for row in rows:
        if prompt := by_id.get(row["id"]):
            request = with_defaults(prompt.request, settings)
            answers[key_of(row)] = TargetAnswer(row["id"], prompt.token_ids, row["token_ids"], request, prompt.task)
    return answers


def key_of(row: Mapping[str, Any]) -> tuple:
    return row["id"], tuple(row["token_ids"])
