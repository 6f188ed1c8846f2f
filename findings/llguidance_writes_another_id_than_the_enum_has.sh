#!/usr/bin/env bash
# llguidance 1.9.1, a grammar engine of OpenAI-style servers, with a JSON schema that has 64-bit integers.
# Guess: an answer under const or enum is one of the listed values, digit for digit. At worst a long integer is refused
#   when the schema is compiled.
# What happens: the schema's integers above 2**53 go through float64. The grammar holds the rounded number, forbids the
#   listed one at the first digit that differs, and hands the wrong digits to the engine as forced ones, which no model
#   has a say in. Two ids that differ in their last digits become one. minimum and maximum are rounded too, so a value
#   in bounds is refused. There is no error and no grammar warning, and the answer looks like an id.
# Why it matters: row keys and ids of messages and users have 18 or 19 digits. An enum of them is the way to let a model
#   choose a record and never invent one. Here nearly every answer is an invented one. List ids as strings.
# Output seen: const 9007199254740991 writes itself; 9007199254740993 writes 9007199254740992; 1234567890123456789
#   writes 1234567890123456768, and itself as a string. An enum of two ids: both refused, one answer left.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "llguidance==1.9.1" "jsonschema==4.26.0"
cat >"$folder/run.py" <<'PY'
import json

import jsonschema
from llguidance import LLMatcher, LLTokenizer

BYTES = LLTokenizer("byte")
SAFE, NEXT, LONG = 2**53 - 1, 2**53 + 1, 1234567890123456789


def matcher(schema):
    made = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
    assert not made.is_error() and not made.get_grammar_warnings(), made.get_error()
    return made


def forced(schema):
    """The whole answer, where the grammar leaves the model no choice."""
    made = matcher(schema)
    text = made.compute_ff_bytes()
    assert made.try_consume_tokens(list(text)) == len(text) and made.is_accepting()
    return json.loads(text)


def accepts(schema, value):
    jsonschema.validate(value, schema)
    made, text = matcher(schema), json.dumps(value).encode()
    return made.try_consume_tokens(list(text)) == len(text) and made.is_accepting()


for value in (SAFE, str(LONG)):
    assert forced({"const": value}) == forced({"enum": [value]}) == value, "the control: these are kept"
    assert accepts({"enum": [value, 1]}, value)
for value in (SAFE, NEXT, LONG, str(LONG)):
    print(f"const {value!r} writes {forced({'const': value})!r}")
assert forced({"const": NEXT}) == forced({"enum": [NEXT]}) == NEXT - 1, "const now keeps 2**53 + 1"
assert forced({"const": LONG}) == int(float(LONG)) != LONG, "const now keeps 19 digits"

two = {"type": "integer", "enum": [LONG, LONG + 1]}
print("enum of two ids: accepted", [accepts(two, value) for value in two["enum"]], "writes", forced(two))
assert not any(accepts(two, value) for value in two["enum"]), "enum now keeps 19 digits"
assert forced(two) not in two["enum"]

bounds = {"type": "integer", "minimum": 10, "maximum": NEXT}
print("maximum", NEXT, "accepts it:", accepts(bounds, NEXT), "and the integer before it:", accepts(bounds, NEXT - 1))
assert not accepts(bounds, NEXT) and accepts(bounds, NEXT - 1), "integer bounds are now exact"
PY
"$folder/v/bin/python" "$folder/run.py"
