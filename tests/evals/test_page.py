"""report.html: parses, loads nothing, escapes what it shows, and has a span for each token of an answer."""

import base64
import dataclasses
import html.parser
import json
import re
import types

import numpy as np
import pytest

from domino_jax.decoding.requests import Request
from domino_jax.evals.examples import Example, Round, ShownAnswer, chain_drafts, collect_examples, with_drafts
from domino_jax.evals.lanes import Lane
from domino_jax.evals.page import render_page, token_spans
from domino_jax.evals.prompts import Prompt, TextCodec
from domino_jax.evals.run_files import GENERATIONS, generation_row
from domino_jax.method.propose import NO_DRAFT
from domino_jax.method.settings import SamplingParams, TreeSettings
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
ANSWER = ShownAnswer("domino", 1, [Round([2, 3, 4], True, [3, 4]), Round([5, 6], True, None), Round([1, 0], False, [])])


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
    assert [place for place, span in enumerate(spans) if "bonus" in span.attrs["class"]] == [3, 5]
    hovers = {place: span.attrs["data-rejected"] for place, span in enumerate(spans) if "data-rejected" in span.attrs}
    assert list(hovers) == [3] and hovers[3].startswith("rejected: ") and '"\\n"' in hovers[3]


def test_without_a_tokenizer_the_spans_are_ids():
    spans = Page("".join(token_spans(ANSWER, TextCodec(None, False)))).all("span")
    assert "".join(span.text for span in spans) == "1 2 3 4 5 6 1 0 "


def test_a_simulated_run_is_marked_at_its_answers():
    assert "SIMULATED acceptance" in Page(page_of(simulated=7.17)).all("p", "warning")[0].text


# ----------------------------------------------------------------------------------------------- examples


def test_the_last_token_of_a_chain_is_the_targets_unless_the_answer_ended_at_a_draft():
    for emitted, drafts, expected in (
        ([5, 6, 9], [5, 6, 7, 8], Round([5, 6, 9], True, [7, 8])),
        ([5, 6, 9], [5, 6], Round([5, 6, 9], True, [])),
        ([5, 6], [5, 6, 7], Round([5, 6], False, [])),
        # The drafter was not sure of more than one draft, or of any.
        ([5, 9], [5, NO_DRAFT, NO_DRAFT], Round([5, 9], True, [])),
        ([9], [NO_DRAFT, NO_DRAFT], Round([9], True, [])),
    ):
        assert chain_drafts(emitted, np.array([drafts])) == expected


def test_recomputed_rounds_count_up_to_the_first_that_differs():
    again = [Round([2, 3, 4], True, [1]), Round([5, 5], True, [1]), Round([1, 0], True, [1])]
    measured = ShownAnswer("domino", 1, [Round(one.token_ids) for one in ANSWER.rounds])
    assert [one.rejected for one in with_drafts(measured, again).rounds] == [[1], None, None]


@pytest.mark.parametrize("own", [None, SamplingParams(temperature=1.0)])
@pytest.mark.parametrize("mode", ["domino", "tree"])
def test_examples_spread_over_tau_and_their_rejected_drafts_are_not_what_was_emitted(tmp_path, mode, own):
    """Also where the prompts are sampled and the generator's default is greedy."""
    models = random_models()
    made = make_generator(models, max_new_tokens=12, tree=TreeSettings(nodes=8, lanes=2, candidates=4))
    ids = random_prompts(6, 4, 8)
    requests = [Request(index, sampling=own) for index in range(len(ids))]
    pairs = enumerate(zip(ids, requests, strict=True))
    prompts = [Prompt(f"p{index}", tuple(prompt), request) for index, (prompt, request) in pairs]
    answers = made.generate(ids, mode, requests)
    pairs = zip(prompts, answers, strict=True)
    rows = {prompt.id: generation_row(prompt.id, mode, answer, None) for prompt, answer in pairs}
    (tmp_path / GENERATIONS).write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    lanes = [Lane(kind, kind, models, made.generator) for kind in ("autoregressive", mode)]
    examples = collect_examples(lanes, prompts, TextCodec(None, False), tmp_path)
    taus = [example.answers[0].tau for example in examples]
    assert len(examples) == 4 and taus == sorted(taus)
    for example in examples:
        [answer] = example.answers
        tokens = [answer.first, *(token for one in answer.rounds for token in one.token_ids)]
        assert tokens == rows[example.prompt.id]["token_ids"]
        assert all(one.rejected is not None for one in answer.rounds)
        assert all(one.token_ids[-1] not in one.rejected[:1] for one in answer.rounds if one.bonus)
