#!/usr/bin/env bash
# transformers 5.24.0, apply_chat_template.
# Guess: a keyword argument replaces a variable of the chat template, also strftime_now, the function that templates
#   of the Llama 3 type call for today's date. So a fixed date is one argument away, and prompts stay equal from day
#   to day.
# What happens: the function reaches the template as text, so the call in the template ends in a TypeError. Without
#   the argument the template has the real clock.
# Why it matters: prompts of an evaluation, and caches of encoded rows, change at midnight. What does work is a macro
#   of that name in front of the template's text.
# Output seen: TypeError: 'str' object is not callable; with a macro in front of the template: 26.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "transformers==5.24.0" "jinja2>=3.1.6,<4"
cat >"$folder/run.py" <<'PY'
import tokenizers
import transformers

core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, "[UNK]": 1}, unk_token="[UNK]"))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")
messages = [{"role": "user", "content": "x"}]
tokenizer.chat_template = "{{ strftime_now('%d') }}"
try:
    text = tokenizer.apply_chat_template(messages, tokenize=False, strftime_now=lambda form: "26")
except TypeError as error:
    text = f"TypeError: {error}"
print(text)
assert text == "TypeError: 'str' object is not callable", "a function given to a template now stays one"
tokenizer.chat_template = "{% macro strftime_now(form) %}26{% endmacro %}" + tokenizer.chat_template
text = tokenizer.apply_chat_template(messages, tokenize=False)
print(text)
assert text == "26"
PY
"$folder/v/bin/python" "$folder/run.py"
