"""Judges a server by its answers: whether they are the target's own, its template, and the τ that it reaches."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from domino_jax.decoding.acceptance import accept_lengths, tau_pooled
from domino_jax.decoding.answers import NEAR_TIE, AnswerPasses, TargetAnswer, count_cut
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.method.exact import Accepted, TargetChoice
from domino_jax.method.pair import Pair
from domino_jax.weights.loading import LoadedTarget

AROUND = 12  # tokens that are shown before and after a wrong one
LOW = 0.9  # of the τ of one pass: below it the report names a cause
EQUAL = 0.02  # relative difference up to which two τ are the same
CHECKS = 'docs/choose.md, "When τ is low"'


def judge_server(
    passes: AnswerPasses,
    target: Pair,
    stated: Mapping[str, Mapping[str, Any]],
    asked: Mapping[str, Any],
    loaded: LoadedTarget,
    settings: DecodeSettings,
) -> dict[str, Any]:
    """The "server" of evaluation.json, but for τ.

    Args:
        stated: by id of the answer, "server" of its row.  asked: the server, and the increase of its counters.
    """
    answers, choices, limit = passes.answers, passes.choices(target), NEAR_TIE[settings.dtype]
    lengths = {answer.id: (stated[answer.id]["prompt_tokens"], len(answer.prompt)) for answer in answers}
    other = [{"id": name, "server": there, "here": here} for name, (there, here) in lengths.items() if there != here]
    short = [answer.token_ids for answer in answers if len(answer.token_ids) < settings.max_new_tokens]
    return {
        **{name: asked[name] for name in ("url", "engine", "model")},
        "chosen": float(np.mean(np.concatenate([choice.margin for choice in choices]) <= limit)),
        "texts": text_verdicts(answers, choices, limit, loaded),
        "not_whole": sum(not facts["whole"] for facts in stated.values()),
        "cut": count_cut(short, loaded.stop_ids),
        "prompts": {"same": len(lengths) - len(other), "of": len(lengths), "first_other": next(iter(other), None)},
        "acceptance": acceptance_of(stated, asked["gained"]),
    }


def text_verdicts(
    answers: Sequence[TargetAnswer], choices: Sequence[TargetChoice], limit: float, loaded: LoadedTarget
) -> dict[str, Any]:
    """Counts of the answers that are the target's own, that leave it at a near tie, and that are wrong.

    An answer that continues after a stop token is wrong too.
    """

    def text(ids: Sequence[int]) -> str:
        ids = [int(token) for token in ids]
        return str(ids) if loaded.tokenizer is None else repr(loaded.tokenizer.decode(ids))

    counts, first = {"own": 0, "near_tie": 0, "wrong": 0}, None
    for answer, choice in zip(answers, choices, strict=True):
        ids = np.asarray(answer.token_ids)
        ended = np.isin(np.roll(ids, 1), loaded.stop_ids) & (np.arange(len(ids)) > 0)
        wrong = (choice.margin > limit) | ended
        counts["wrong" if wrong.any() else "near_tie" if choice.margin.any() else "own"] += 1
        if wrong.any() and not first:
            place = int(wrong.argmax())
            before, right = ids[max(place - AROUND, 0) : place], [] if ended[place] else [int(choice.token[place])]
            first = {
                **{"id": answer.id, "token": place, "server_id": int(ids[place])},
                "target_id": right[0] if right else None,
                "margin": float(choice.margin[place]),
                "server_text": text([*before, *ids[place : place + AROUND]]),
                "target_text": text([*before, *right]),
            }
    return {**counts, "first_wrong": first}


def acceptance_of(stated: Mapping[str, Mapping[str, Any]], gained: Mapping[str, Any]) -> dict[str, Any] | None:
    """The acceptance that a server stated, and the ids of the answers it covers; None where it states none.

    gained: by its counters (ask_prompts), where the answers themselves state nothing.
    """
    counts, total = {name: facts["counts"] for name, facts in stated.items() if facts["counts"]}, gained
    if counts:
        names = set.intersection(*(set(count) for count in counts.values()))
        total = {"ids": list(counts), **{name: sum(count[name] for count in counts.values()) for name in names}}
    return dict(total) if total.get("rounds", 0) > 0 else None


def compare_tau(
    answers: Sequence[TargetAnswer], accepted: Sequence[Accepted], acceptance: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Sets τ of the server beside τ of one pass with the same number of drafts, with a hint where it is low."""
    if acceptance is None:
        return None
    ids, rounds = set(acceptance["ids"]), acceptance["rounds"]
    pairs = [(answer, one) for answer, one in zip(answers, accepted, strict=True) if answer.id in ids]
    width = min(max(round(acceptance["drafts"] / rounds), 1), accepted[0].log_q.shape[1])
    walks = [accept_lengths(one.drafts, width) for _, one in pairs]
    server, ours = sum(len(answer.token_ids) - 1 for answer, _ in pairs) / rounds, tau_pooled(walks)
    backbone = None
    if accepted[0].backbone is not None:
        backbone = tau_pooled([accept_lengths(one.backbone, width) for _, one in pairs])
    hint = None
    if server < LOW * ours:
        kept, expected = acceptance.get("kept_first", 0) / rounds, (np.concatenate(walks) > 1).mean()
        if backbone and abs(server - backbone) <= EQUAL * backbone:
            hint = f"This is the τ of the backbone alone, {backbone:.2f}: the head is missing (7 and 10 of {CHECKS})."
        elif "kept_first" not in acceptance:
            hint = f"The server does not state which drafts are lost: check 2, 3 and 10 of {CHECKS}."
        elif kept < LOW * expected:
            hint = f"{kept:.0%} of the rounds keep the first draft, {expected:.0%} in the pass: check the shift, the"
            hint += f" mask token and the layers that are read (2 and 3 of {CHECKS})."
        else:
            hint = "The first draft is kept and later ones are lost: check the head and its candidate pool"
            hint += f" (10 of {CHECKS})."
    return {"drafts": width, "tau": server, "tau_one_pass": ours, "tau_backbone": backbone, "hint": hint}


def server_lines(evaluation: Mapping[str, Any]) -> list[str]:
    """The verdicts as sentences, for the console and the page."""
    server = evaluation["server"]
    texts, prompts = server["texts"], server["prompts"]
    judged = texts["own"] + texts["near_tie"] + texts["wrong"]
    lines = [
        f"Texts of {server['model']} at {server['url']}: {texts['own']} of {judged} are the target's own,"
        f" {texts['near_tie']} leave it at a near tie, {texts['wrong']} are wrong."
    ]
    if first := texts["first_wrong"]:
        lines.append(_first_wrong(first, evaluation["dtype"]))
    if server["not_whole"]:
        lines.append(f"Not judged: {server['not_whole']} texts, which do not encode back to themselves.")
    if server["cut"]:
        lines.append(
            f"{server['cut']} answers were cut before decode.max_new_tokens by a limit of the server; raise it."
        )
    line = f"Prompts: {prompts['same']} of {prompts['of']} have the same number of tokens there."
    if other := prompts["first_other"]:
        line += (
            f" {other['id']} has {other['server']}, here {other['here']}: compare the chat template, thinking"
            f" (decode.thinking) and the first token (1 of {CHECKS})."
        )
    lines.append(line)
    for name, figures in evaluation["drafters"].items():
        line = "the server states no acceptance."
        if tau := figures["server"]:
            line = f"{tau['tau']:.2f} of {tau['tau_one_pass']:.2f} with {tau['drafts']} drafts a round."
            line += f" {tau['hint']}" if tau["hint"] else ""
        lines.append(f"τ of the server with {name}: {line}")
    return lines


def _first_wrong(first: Mapping[str, Any], dtype: str) -> str:
    line = f"First wrong answer: {first['id']}, token {first['token']} is {first['server_id']}, but "
    if first["target_id"] is None:
        line += "the answer ended with the stop token before it."
    else:
        line += f"the target chooses {first['target_id']}, {first['margin']:.3g} above it."
        if dtype != "bfloat16" and first["margin"] <= NEAR_TIE["bfloat16"]:
            line += " That is a near tie in bfloat16: judge a server in bfloat16 with decode.dtype=bfloat16."
    return f"{line} The server: {first['server_text']}. The target: {first['target_text']}."
