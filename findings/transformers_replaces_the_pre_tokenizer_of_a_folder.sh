#!/usr/bin/env bash
# transformers 5.24.0 with tokenizers 0.23.1, AutoTokenizer on a local folder.
# Guess: a folder's tokenizer.json is the tokenizer. tokenizer_class in tokenizer_config.json only picks the Python
#   class around it, and all classes over one file give the same ids.
# What happens: the classes GPT2Tokenizer and Qwen2Tokenizer take vocabulary and merges from the file and make their
#   own normalizer and pre-tokenizer. A file that cuts numbers into digits, as SmolLM2's does, then keeps numbers whole
#   as a GPT2Tokenizer, and one that makes all letters small no longer does. PreTrainedTokenizerFast keeps the file's
#   parts. No warning is given.
# Why it matters: prompts get ids that the model has never seen in such places, and its answers get worse.
# Output seen: GPT2Tokenizer ['A', '12345'], Qwen2Tokenizer ['A', '1', '2', '3', '4', '5'], PreTrainedTokenizerFast and
#   the file alone ['a', '1', '2', '3', '4', '5'].
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "transformers==5.24.0" "tokenizers==0.23.1"
cat >"$folder/run.py" <<'PY'
import json
import pathlib
import sys

import tokenizers
import transformers
from tokenizers import models, normalizers, pre_tokenizers, trainers

folder = pathlib.Path(sys.argv[1])
folder.mkdir()
stored = tokenizers.Tokenizer(models.BPE())
stored.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = pre_tokenizers.ByteLevel.alphabet()
stored.train_from_iterator(["12345"] * 50, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
digits = pre_tokenizers.Digits(individual_digits=True)
stored.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
stored.normalizer = normalizers.Lowercase()
stored.save(str(folder / "tokenizer.json"))
(folder / "config.json").write_text('{"model_type": "llama"}')

cuts = {"the file alone": stored.encode("A12345").tokens}
for name in ("GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"):
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder))
    cuts[name] = loaded.convert_ids_to_tokens(loaded.encode("A12345"))
for name, tokens in cuts.items():
    print(f"{name}: {tokens}")
file = cuts["the file alone"]
assert file == ["a", "1", "2", "3", "4", "5"] == cuts["PreTrainedTokenizerFast"], "the control fails"
assert cuts["GPT2Tokenizer"] == ["A", "12345"], "GPT2Tokenizer keeps the file's parts now"
assert cuts["Qwen2Tokenizer"] == ["A", *file[1:]], "Qwen2Tokenizer keeps the file's normalizer now"
PY
TRANSFORMERS_VERBOSITY=error "$folder/v/bin/python" "$folder/run.py" "$folder/model"
