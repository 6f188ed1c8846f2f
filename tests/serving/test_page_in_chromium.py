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
# Each token's background, whether it is underlined, and what it says on hover.
LOOKS = """box => [...box.querySelectorAll(".t")].map(token => [
  getComputedStyle(token).backgroundColor, getComputedStyle(token).boxShadow !== "none", token.title])"""
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
        page.wait_for_function("!document.querySelector('#ask button').disabled", timeout=120_000)
        assert page.inner_text(".answer").strip() == text
        first, *tokens = page.locator(".answer").evaluate(LOOKS)
        rounds = [list(group) for _, group in itertools.groupby(tokens, key=lambda token: token[0])]
        assert float(page.inner_text("#tau")) == pytest.approx(len(tokens) / len(rounds), abs=0.01)
        # In each round the last token is underlined, the target's own; the first token of all has no colour.
        assert all(
            [underlined for _, underlined, _ in group] == [False] * (len(group) - 1) + [True] for group in rounds
        )
        assert first[0] not in {group[0][0] for group in rounds}
        drafts = [{title.partition("rejected drafts: ")[2] for *_, title in group} for group in rounds]
        assert all(len(texts) == 1 for texts in drafts) and any(text for texts in drafts for text in texts)

        page.fill("#prompt", QUESTION)
        page.click("#race button")
        page.wait_for_function("document.getElementById('verdict').textContent", timeout=120_000)
        assert page.inner_text("#verdict").startswith("the same text")
        assert [lane.strip() for lane in page.locator(".lane .text").all_inner_texts()] == [text] * 2
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ink, back = page.evaluate(BRIGHTNESS)
        assert (ink > back) == (scheme == "dark")

        folder = pathlib.Path(os.environ.get("DOMINO_SCREENSHOTS", tmp_path))
        page.screenshot(path=folder / f"page_{scheme}_{width}.png", full_page=True)
    assert not problems
    assert all(address.startswith((f"http://127.0.0.1:{port}/", "data:")) for address in addresses)
