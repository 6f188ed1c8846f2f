"""Answer the held-out prompts greedily with the tiny target and print the checkers' score by kind.

    python -m assets.score_tiny_target --target=assets/tiny_qwen3

--show=5 also prints the first five wrong answers.
"""

import argparse
import pathlib
from collections import defaultdict

import numpy as np

from assets.references import Reference
from assets.tiny_answers import KINDS, reference
from domino_jax.data.chat import TextCodec
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.method.pair import Pair
from domino_jax.weights.loading import load_target

MAX_NEW_TOKENS = 192  # the longest right answer has 180
CACHE_LENGTH = 448


def greedy_answers(folder: pathlib.Path, rows: list[dict]) -> list[str]:
    """The answer to every row, without special tokens."""
    target = load_target(str(folder), "float32")
    models = Pair(target.model, target.params)
    settings = DecodeSettings(cache_length=CACHE_LENGTH, max_new_tokens=MAX_NEW_TOKENS, batch_size=64)
    prompts = [TextCodec(target.tokenizer, thinking=False).encode(row) for row in rows]
    generations = new_generator(models, settings, target.stop_ids).generate(models, prompts, "autoregressive").answers
    return [target.tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in generations]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=pathlib.Path, required=True)
    parser.add_argument("--show", type=int, default=0)
    args = parser.parse_args()
    rows = read_prompts(args.target / "prompts_heldout.jsonl")
    answers = greedy_answers(args.target, rows)
    right = defaultdict(list)
    for row, answer in zip(rows, answers, strict=True):
        right[row["kind"]].append(Reference(**reference(row)).accepts(answer))
        if not right[row["kind"]][-1] and args.show > 0:
            args.show -= 1
            print(f"--- {row['id']} {row['kind']}\n{row['messages'][0]['content']}\n>>>\n{answer}")
    for kind in KINDS:
        print(f"{kind:12s} {np.mean(right[kind]):6.1%} of {len(right[kind])}")
    everything = [value for values in right.values() for value in values]
    distinct = len(set(answers)) / len(answers)
    print(f"{'all':12s} {np.mean(everything):6.1%} of {len(everything)}; {distinct:.1%} of the answers distinct")


if __name__ == "__main__":
    main()
