"""The page in Chromium: what a reader sees of an answer and of a race, in light and dark, wide and narrow.

Screenshots go to the folder that DOMINO_SCREENSHOTS names.
"""

import itertools
import os
import pathlib
import shutil

import pytest

from tests.helpers.serving import QUESTION, asked, post

pytest.importorskip("starlette", reason="requirements-serve.txt is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("chromium is not installed", allow_module_level=True)
pytestmark = pytest.mark.tools

WIDTHS = {"wide": {"width": 1280, "height": 800}, "narrow": {"width": 420, "height": 900}}
# Each token's class and background, and what it says on hover.
LOOKS = """box => [...box.querySelectorAll(".t")].map(token => [
  token.className, getComputedStyle(token).backgroundColor, token.title])"""
IDLE = "document.querySelector('#ask button').textContent === 'Send'"
BRIGHTNESS = """() => ["color", "backgroundColor"].map(name =>
  getComputedStyle(document.body)[name].match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0))"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_reader_sees_the_rounds_of_an_answer_and_a_race(browser, port, tmp_path, scheme, width):
    _, _, answer = post(port, asked())
    text = answer["choices"][0]["message"]["content"].strip()
    with browser.new_context(color_scheme=scheme, viewport=WIDTHS[width]) as context:
        page, problems, addresses = context.new_page(), [], []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: addresses.append(request.url))
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_function("document.getElementById('model').textContent.includes('modes')")

        page.fill("#message", QUESTION)
        page.press("#message", "Enter")
        page.wait_for_function(IDLE, timeout=120_000)
        assert page.inner_text(".answer").strip() == text
        first, *tokens = page.locator(".answer").evaluate(LOOKS)
        assert first[0] == "t first"
        rounds = [list(group) for _, group in itertools.groupby(tokens, key=lambda token: token[2].partition(":")[0])]
        tau, _, widest = page.inner_text("#tau").split()
        assert float(tau) == pytest.approx(len(tokens) / len(rounds), abs=0.01)
        assert (widest, page.inner_text("#rounds")) == ("9", str(len(rounds)))
        # A round of several tokens has a colour, and its last token, the target's own, is underlined; one of a single
        # token has none, so that those of several stand out where most have one.
        for group in rounds:
            names = [name for name, _, _ in group]
            assert names == (["t single"] if len(group) == 1 else ["t"] * (len(group) - 1) + ["t bonus"])
            assert {colour == "rgba(0, 0, 0, 0)" for _, colour, _ in group} == {len(group) == 1}
        assert page.inner_text("#context").split()[0] == str(answer["usage"]["total_tokens"])

        page.fill("#prompt", QUESTION)
        page.click("#race button")
        # The first race waits until the programs of plain decoding are compiled.
        page.wait_for_function("document.getElementById('verdict').textContent", timeout=600_000)
        assert page.inner_text("#verdict").startswith("the same text")
        assert [lane.strip() for lane in page.locator(".lane .text").all_inner_texts()] == [text] * 2
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ink, back = page.evaluate(BRIGHTNESS)
        assert (ink > back) == (scheme == "dark")

        folder = pathlib.Path(os.environ.get("DOMINO_SCREENSHOTS", tmp_path))
        page.screenshot(path=folder / f"page_{scheme}_{width}.png", full_page=True)
    assert not problems
    assert all(address.startswith((f"http://127.0.0.1:{port}/", "data:")) for address in addresses)


def test_an_answer_is_stopped_several_lines_are_sent_and_a_new_chat_begins(browser, port, engine, monkeypatch):
    """The engine holds each request until the page has shown that it waits."""
    held, submit = [], engine.submit
    monkeypatch.setattr(engine, "submit", held.append)
    with browser.new_context() as context:
        page, bodies = context.new_page(), []
        page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_function("!document.querySelector('#ask button').disabled")
        page.fill("#message", "Two")
        page.press("#message", "Shift+Enter")
        page.keyboard.type("lines")
        page.press("#message", "Enter")
        page.wait_for_function("document.querySelector('.running:empty').dataset.wait.startsWith('waiting')")
        assert bodies[-1]["messages"] == [{"role": "user", "content": "Two\nlines"}]
        assert page.inner_text("#ask button") == "Stop"
        page.click("#ask button")
        page.wait_for_function(IDLE)
        assert page.inner_text("#log .note") == "stopped" and page.locator(".running").count() == 0

        monkeypatch.setattr(engine, "submit", submit)
        for content in ("And 2 + 3?", "Thanks."):
            page.fill("#message", content)
            page.click("#ask button")
            page.wait_for_function(IDLE, timeout=120_000)
        assert [message["role"] for message in bodies[-1]["messages"]] == ["user", "assistant", "user"]
        page.click("#new")
        assert page.inner_text("#log") == "" and page.inner_text("#context") == "–"
        page.fill("#message", "Once more")
        page.click("#ask button")
        page.wait_for_function(IDLE, timeout=120_000)
        assert [message["content"] for message in bodies[-1]["messages"]] == ["Once more"]
