"""report.html: parses, loads nothing, escapes what it shows, and has a span for each token of an answer."""

import base64
import dataclasses
import html.parser
import json
import re
import types

from domino_jax.evals.examples import Example, ShownAnswer, collect_examples
from domino_jax.evals.lanes import Lane
from domino_jax.evals.page import render_page, token_spans
from domino_jax.evals.prompts import Prompt, TextCodec
from domino_jax.evals.run_files import GENERATIONS, generation_row
from tests.helpers.decoding_models import make_generator, random_models, random_prompts
from tests.helpers.report_runs import INFO, report_of, two_runs

HOSTILE = "</span><script src=https://evil.example/x.js></script><img src=http://evil.example/i.png onerror=x>\x00&amp;"
VOID = {"meta", "img", "br"}


class Page(html.parser.HTMLParser):
    """Elements as (name, attributes, text); a tag that is closed out of order is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append(types.SimpleNamespace(tag=tag, attrs=dict(attrs), text=""))
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        for element in self.open:
            element.text += data

    def all(self, tag, kind=""):
        return [one for one in self.elements if one.tag == tag and kind in one.attrs.get("class", "").split() + [""]]


class Words:
    """Token n is word n; id 0 is a special token without text."""

    words = ["", "one ", "two ", HOSTILE, "\n", "caf", "é"]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.words[token] for token in ids)


CODEC = TextCodec(Words(), False)
PICTURE = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (1000).to_bytes(4) + (500).to_bytes(4)
ANSWER = ShownAnswer("domino", 1, [[2, 3, 4], [5, 6], [1, 0]])


def page_of(answer=ANSWER, name="p1", **changes):
    prompt = Prompt(name, (1, 2), 0)
    report = {**report_of(two_runs(), dataclasses.replace(INFO, target=name)), **changes}
    return render_page(report, {"accept_lengths.png": PICTURE}, [Example(prompt, HOSTILE, [answer])], CODEC)


def test_a_page_is_whole_html_that_loads_nothing():
    text = page_of()
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>") and [one.tag for one in page.elements[:2]] == ["html", "head"]
    assert {one.tag for one in page.elements} & {"script", "link", "iframe", "object", "base", "form"} == set()
    loaded = [value for one in page.elements for key, value in one.attrs.items() if key in ("src", "href", "srcset")]
    assert loaded == [f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"]
    assert page.all("img")[0].attrs["width"] == "470"
    assert not re.search(r"url\(|@import", text)
    assert "default-src 'none'" in page.all("meta")[2].attrs["content"]


def test_what_comes_out_of_files_and_models_is_text():
    page = Page(page_of(name=f"p{HOSTILE}"))
    assert not page.all("script") and len(page.all("img")) == 1
    visible = HOSTILE.replace("\x00", "\ufffd")
    assert page.all("h3")[0].text == f"p{visible}" and page.all("pre")[0].text == visible
    assert all(not key.startswith("on") for one in page.elements for key in one.attrs)
    assert page.all("dd")[0].text == f"p{visible}"


def test_the_spans_are_the_tokens_of_the_answer():
    tokens = [1, 2, 3, 4, 5, 6, 1, 0]
    spans = Page("".join(token_spans(ANSWER, CODEC))).all("span")
    assert len(spans) == len(tokens)
    assert "".join(span.text for span in spans) == Words().decode(tokens).replace("\x00", "\ufffd")
    rounds = [re.search(r"first|r\d", span.attrs["class"])[0] for span in spans]
    assert rounds == ["first", "r0", "r0", "r0", "r1", "r1", "r2", "r2"]
    assert [place for place, span in enumerate(spans) if "bonus" in span.attrs["class"]] == [3, 5, 7]


# ----------------------------------------------------------------------------------------------- examples


def test_examples_spread_over_tau_and_hold_the_tokens_of_their_rows(tmp_path):
    models = random_models()
    generator = make_generator(models, max_new_tokens=12)
    ids = random_prompts(6, 4, 8)
    prompts = [Prompt(f"p{index}", tuple(prompt), index) for index, prompt in enumerate(ids)]
    pairs = zip(prompts, generator.generate(ids, "domino"), strict=True)
    rows = {prompt.id: generation_row(prompt.id, "domino", answer, None) for prompt, answer in pairs}
    (tmp_path / GENERATIONS).write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    lanes = [Lane(mode, mode, models, generator.generator) for mode in ("autoregressive", "domino")]
    examples = collect_examples(lanes, prompts, TextCodec(None, False), tmp_path)
    taus = [example.answers[0].tau for example in examples]
    assert len(examples) == 4 and taus == sorted(taus)
    for example in examples:
        [answer] = example.answers
        row = rows[example.prompt.id]
        assert [answer.first, *sum(answer.rounds, [])] == row["token_ids"]
        assert [len(tokens) for tokens in answer.rounds] == row["accept_lengths"]
