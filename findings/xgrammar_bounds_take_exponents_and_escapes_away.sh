#!/usr/bin/env bash
# xgrammar 0.2.9 and llguidance 1.9.1, the grammar engines of OpenAI-style servers, with a JSON schema.
# Guess: a bound of a schema (minimum, maximum, maxLength) forbids what is out of bounds and nothing else.
# What happens: it also forbids ways to write what is in bounds. A number with a minimum or a maximum cannot have an
#   exponent, in either engine. In xgrammar it has six decimals at most, so below 0.000001 only 0 is left. A string with
#   a length bound, say maxLength 8000, cannot have an escape in xgrammar: no newline, quote or backslash. Without the
#   bound both engines take all of these. Nothing warns; the schema compiles and the answer is valid.
# Why it matters: the mask forbids the token "e" after the "2" of 2e-05. The number goes on as 2 or 2.0, or ends there,
#   and is wrong by five orders of magnitude. Python writes every number below 0.0001 so. Pydantic's ge, le, gt, lt and
#   max_length give such schemas. A text goes on without its line breaks, or ends at its first quote. Bounds that the
#   client checks afterwards cost none of this.
# Output seen: written as wanted, unbounded and bounded, of 2e-05, 0.00002, 0.0000002, 3.0E+8: xgrammar 4, 1; llguidance
#   4, 2; of four strings with escapes: xgrammar 4, 0; llguidance 4, 4. The answer that wants {"rate": 2e-05} and may
#   only end otherwise: {"rate": 2} in both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
install=("$folder/v/bin/pip" install --quiet --disable-pip-version-check)
"${install[@]}" --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
"${install[@]}" "torch==2.13.0" "transformers==5.24.0" "xgrammar==0.2.9" "llguidance==1.9.1" "jsonschema==4.26.0"
cat >"$folder/run.py" <<'PY'
import json

import jsonschema
import llguidance
import xgrammar

BYTES = xgrammar.TokenizerInfo([f"<0x{b:02X}>" for b in range(256)] + ["</s>"], xgrammar.VocabType.BYTE_FALLBACK,
                               stop_token_ids=[256])  # fmt: skip
LL_BYTES = llguidance.LLTokenizer("byte")
UNBOUNDED = {"number": {"type": "number"}, "string": {"type": "string"}}
BOUNDED = {"number": {"type": "number", "minimum": 0, "maximum": 1e9}, "string": {"type": "string", "maxLength": 8000}}
TEXTS = {
    "number": ["2e-05", "0.00002", "0.0000002", "3.0E+8"],
    "string": [json.dumps(text) for text in ("one\ntwo", 'say "no"', "C:\\x", "a\tb")],
}


class Xgrammar:
    def __init__(self, schema):
        compiled = xgrammar.GrammarCompiler(BYTES).compile_json_schema(json.dumps(schema))
        self.matcher = xgrammar.GrammarMatcher(compiled)

    def take(self, byte):
        return self.matcher.accept_token(byte)

    def whole(self):
        return self.matcher.accept_token(256)


class Llguidance:
    def __init__(self, schema):
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        self.matcher = llguidance.LLMatcher(LL_BYTES, grammar, log_level=0)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def take(self, byte):
        return self.matcher.try_consume_tokens([byte]) == 1

    def whole(self):
        return self.matcher.is_accepting()


def accepts(engine, schema, text):
    matcher = engine(schema)
    return all(matcher.take(byte) for byte in text.encode()) and matcher.whole()


def answer(engine, schema, wanted):
    """The wanted text, byte by byte, which closes its object as soon as its next byte is masked."""
    matcher, written = engine(schema), b""
    for byte in wanted.encode():
        if not matcher.take(byte):
            byte = ord("}")
            assert matcher.take(byte)
        written += bytes([byte])
        if byte == ord("}"):
            break
    assert matcher.whole()
    return written.decode()


taken = {}
for engine in (Xgrammar, Llguidance):
    for kind, texts in TEXTS.items():
        for schemas in (UNBOUNDED, BOUNDED):
            for text in texts:
                jsonschema.validate(json.loads(text), schemas[kind])
            good = [text for text in texts if accepts(engine, schemas[kind], text)]
            if schemas is UNBOUNDED:
                assert good == texts, "the control: without a bound all are taken"
        taken[engine, kind] = good
        print(f"{engine.__name__} {kind}: {len(texts)} unbounded, {len(good)} bounded: {good}")
    rate = {"type": "object", "properties": {"rate": BOUNDED["number"]}, "required": ["rate"]}
    short = answer(engine, rate, '{"rate": 2e-05}')
    print(f"{engine.__name__} answer: {short}")
    assert json.loads(short) == {"rate": 2}, "bounded numbers now have exponents"
assert taken[Xgrammar, "number"] == ["0.00002"], "xgrammar's bounded numbers have changed"
assert taken[Llguidance, "number"] == ["0.00002", "0.0000002"], "llguidance's bounded numbers have changed"
assert taken[Xgrammar, "string"] == [], "xgrammar's bounded strings now have escapes"
assert taken[Llguidance, "string"] == TEXTS["string"], "llguidance's bounded strings have changed"
PY
"$folder/v/bin/python" "$folder/run.py"
