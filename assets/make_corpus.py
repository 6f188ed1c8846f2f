"""Make the data of the tiny target: tokenizer, chat template, shipped prompts, and the training corpus.

    python -m assets.make_corpus --output=assets/tiny_qwen3 --workdir=/tmp/tiny_target

The tokenizer files and the two prompt files go to --output, the tokenised conversations (`corpus.npz`, `heldout.npz`)
to --workdir, where make_tiny_target.py reads them. A tokenizer that is in --output is kept; --tokenizer copies that of
another folder there first. Everything is seeded; the functions are those of the Python that runs this.
"""

import argparse
import json
import pathlib
import random
import shutil
import zlib

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from assets import tiny_tasks
from assets.tiny_answers import (
    KINDS,
    expected_answer,
    first_function,
    function_parameters,
    prompt_code,
    reference,
)

MAX_CONVERSATION = 300
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|mask|>"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # of write_tokenizer

# Qwen's split with one difference: a word takes at most a space with it, not any sign ("(self" is "(" and "self"), so
# that a name is the same tokens wherever it occurs, which makes copying learnable for a small model. Digits stay
# single.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Qwen3's template without tools: the last assistant turn carries its (here empty) thinking block, and
# enable_thinking=False puts the empty block into the generation prompt.
CHAT_TEMPLATE = """\
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and loop.index0 > ns.last_query %}
        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def prompt_text(row: dict) -> str:
    """What the template writes before the answer, thinking off."""
    user = row["messages"][0]["content"]
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def is_held_out(function: tiny_tasks.Function) -> bool:
    """One function in twelve, by a hash of its source, so that the split does not depend on the order of files."""
    return zlib.crc32(function.code.encode()) % 12 == 0


def is_steady(row: dict, tokenizer: Tokenizer) -> bool:
    """Whether the names that an answer repeats elsewhere are the same tokens with a space before them and without.

    A name that the tokenizer cuts differently after a space ("ma|ilbox", "mail|box") cannot be copied token by token.
    """
    names = [row["answer_check"]["old"]] if row["kind"] == "rename" else []
    if row["kind"] == "parameters":
        code = prompt_code(row)
        names = [first_function(code).name] + [name.lstrip("*") for name, _ in function_parameters(code)]

    def pieces(text: str) -> list[str]:
        return tokenizer.encode(text).tokens

    return all(["Ġ" + pieces(name)[0], *pieces(name)[1:]] == pieces(" " + name) for name in names)


def train_tokenizer(texts: list[str], rows: int) -> Tokenizer:
    """Byte-level BPE whose last ids are the special tokens; `rows` counts all of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=rows - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    if tokenizer.get_vocab_size() != rows:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} rows, not {rows}: too little text")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """tokenizer.json, tokenizer_config.json and the template, as transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "bos_token": None,
        "unk_token": None,
        "mask_token": "<|mask|>",
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def shipped_rows(
    functions: list[tiny_tasks.Function], tokenizer: Tokenizer, count: int, seed: int, prefix: str
) -> list[dict]:
    """`count` rows, the same number of each kind, shuffled, no prompt and no pair of function and kind twice."""
    random_ = random.Random(seed)
    rows, seen = [], set()
    for kind in KINDS:
        pool, made = random_.sample(functions, len(functions)), 0
        while made < count // len(KINDS):
            if kind == "arithmetic":
                row = tiny_tasks.arithmetic_task(random_)
            elif pool:
                row = tiny_tasks.code_task(kind, pool.pop(), random_)
            else:
                raise ValueError(f"too few functions for {count} rows: {kind} has {made}")
            if row is None or row["messages"][0]["content"] in seen or not is_steady(row, tokenizer):
                continue
            seen.add(row["messages"][0]["content"])
            rows.append(row)
            made += 1
    random_.shuffle(rows)
    return [{"id": f"{prefix}-{i:04d}", **row} for i, row in enumerate(rows)]


def write_jsonl(path: pathlib.Path, rows: list[dict]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def encode(tokenizer: Tokenizer, rows: list[dict]) -> dict[str, np.ndarray]:
    """Conversations end to end: flat `ids`, and of each its `length`, its prompt's length and the index of its kind."""
    prompts = [e.ids for e in tokenizer.encode_batch([prompt_text(row) for row in rows])]
    answers = [e.ids for e in tokenizer.encode_batch([expected_answer(row) + "<|im_end|>" for row in rows])]
    kept = [i for i in range(len(rows)) if len(prompts[i]) + len(answers[i]) <= MAX_CONVERSATION]
    return {
        "ids": np.concatenate([np.array(prompts[i] + answers[i], np.uint16) for i in kept]),
        "length": np.array([len(prompts[i]) + len(answers[i]) for i in kept]),
        "prompt": np.array([len(prompts[i]) for i in kept]),
        "kind": np.array([KINDS.index(rows[i]["kind"]) for i in kept]),
    }


def corpus_rows(functions: list[tiny_tasks.Function], count: int, seed: int) -> list[dict]:
    random_ = random.Random(seed)
    return [tiny_tasks.any_task(functions, random_) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--tokenizer", type=pathlib.Path, help="folder of a tokenizer to take over")
    parser.add_argument("--vocabulary", type=int, default=1536, help="rows of the embedding, special tokens included")
    parser.add_argument("--conversations", type=int, default=90_000)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    args.workdir.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES if args.tokenizer else ():
        shutil.copyfile(args.tokenizer / name, args.output / name)

    library = tiny_tasks.harvest()
    held_out = [f for f in library if is_held_out(f)]
    training = [f for f in tiny_tasks.harvest(include_tests=True) if not is_held_out(f)]
    library_training = [f for f in library if not is_held_out(f)]
    print(f"functions: {len(library)} in the library, {len(held_out)} held out; {len(training)} to train, with tests")

    if (args.output / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_file(str(args.output / "tokenizer.json"))
    else:
        sample = corpus_rows(training, 20_000, 3)
        tokenizer = train_tokenizer([prompt_text(row) + expected_answer(row) for row in sample], args.vocabulary)
        write_tokenizer(tokenizer, args.output)
    for name, functions, count, seed in (("train", library_training, 3200, 1), ("heldout", held_out, 512, 2)):
        rows = shipped_rows(functions, tokenizer, count, seed, name)
        if name == "heldout":  # decode counts right answers by them
            rows = [{**row, "reference": reference(row)} for row in rows]
        write_jsonl(args.output / f"prompts_{name}.jsonl", rows)
    for name, functions, count, seed in (("corpus", training, args.conversations, 3), ("heldout", held_out, 600, 4)):
        some = [row for row in corpus_rows(functions, count, seed) if is_steady(row, tokenizer)]
        data = encode(tokenizer, some)
        np.savez(args.workdir / f"{name}.npz", **data)
        print(
            f"{name}: {len(data['length'])} of {len(some)} conversations, {len(data['ids'])} tokens, "
            f"prompt {data['prompt'].mean():.0f}, answer {(data['length'] - data['prompt']).mean():.0f} on average"
        )


if __name__ == "__main__":
    main()
