#!/usr/bin/env bash
# transformers 5.24.0, apply_chat_template with a template that reads reasoning_content alone.
# Guess: a template sees the keys of a message as they are, so thoughts under "thinking" or "reasoning" are not written.
# What happens: the first of reasoning_content, thinking and reasoning that is not null becomes reasoning_content (and
#   thinking). So the thoughts are written, but an empty reasoning_content hides the text that is under another name.
# Why it matters: the same rows give another text by another reader of the template, as vLLM's or minja's. And a table
#   that fills reasoning_content with "" loses the thoughts of rows that have them under thinking.
# Output seen: thinking <hm>, reasoning <hm>, an empty reasoning_content beside thinking <>.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "transformers==5.24.0" "jinja2==3.1.6"
cat >"$folder/run.py" <<'PY'
import tokenizers
from transformers import PreTrainedTokenizerFast

core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
tokenizer.chat_template = "{% for m in messages %}<{{ m.reasoning_content }}>{{ m.content }}{% endfor %}"


def written(**thoughts):
    return tokenizer.apply_chat_template([{"role": "assistant", "content": "b", **thoughts}], tokenize=False)


seen = [written(thinking="hm"), written(reasoning="hm"), written(reasoning_content="", thinking="hm")]
print(seen, "no thoughts:", written())
assert written(reasoning_content="hm") == "<hm>b", "the control: the template writes reasoning_content"
assert seen[:2] == ["<hm>b", "<hm>b"], "thinking and reasoning are no longer given as reasoning_content"
assert seen[2] == "<>b", "an empty reasoning_content no longer hides thinking"
PY
"$folder/v/bin/python" "$folder/run.py"
