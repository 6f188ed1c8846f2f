"""How many rounds of a decoding one pass over its answers predicts (decoding/answers.py): all, but for near ties."""

from collections.abc import Sequence
from pathlib import Path

import jax

from domino_jax.data.prompts import read_jsonl
from domino_jax.decoding.answers import AnswerPasses, TargetAnswer
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import BACKBONE, BASELINE, DRAFT, TREE, DecodeSettings
from domino_jax.evals.prompts import Prompt
from domino_jax.evals.run_files import GENERATIONS
from domino_jax.method.pair import Models

ROWS = 4  # of a pass


def predicted_rounds(
    models: Models, settings: DecodeSettings, prompts: Sequence[Prompt], folder: Path
) -> dict[str, dict[str, int]]:
    """{mode that drafts chains: {"same": rounds that emitted what was predicted, "of": rounds}}.

    Args:
        settings: in effect; those of a fixed width, or nothing is predicted.
        folder: with the generations.jsonl of these prompts.
    """
    modes = [mode for mode in settings.modes if mode not in (BASELINE, TREE)]
    if not modes or settings.adaptive or not AnswerPasses.runs(models):
        return {}
    generator, asked = new_generator(models, settings), {prompt.answer_id: prompt for prompt in prompts}
    rows = [row for _, row in read_jsonl(folder / GENERATIONS) if row["mode"] in modes and row["id"] in asked]
    texts = {}
    for row in rows:  # most texts are those of all modes
        prompt = asked[row["id"]]
        request = generator.request(prompt.request)
        texts[row["id"], tuple(row["token_ids"])] = TargetAnswer(row["id"], prompt.token_ids, row["token_ids"], request)
    mesh = jax.sharding.get_mesh()
    passes = AnswerPasses(list(texts.values()), generator.drafting(DRAFT), ROWS, None if mesh.empty else mesh)
    judged = dict(zip(texts, passes(models), strict=True))
    found = {mode: {"same": 0, "of": 0} for mode in modes}
    for row in rows:
        one, count = judged[row["id"], tuple(row["token_ids"])], found[row["mode"]]
        accepted = one.backbone if row["mode"] == BACKBONE else one.drafts
        width, place = generator.drafting(row["mode"]).width(generator.drafter), 0
        for emitted in row["accept_lengths"]:
            count["of"] += 1
            count["same"] += min(min(int(accepted[place]), width) + 1, len(accepted) - place) == emitted
            place += emitted
    return found
