"""The page in a real browser: everything a visitor does, with every other host out of reach.

Needs Debian's chromium (`apt-get install chromium`); `.ci/run` installs it, and axe-core from npm, where it can.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

import convergeflow as cf
from convergeflow.serving.replay import replay
from served import Running, running, until

CHROMIUM = shutil.which("chromium")
AXE = Path(os.environ.get("AXE_CORE", Path(__file__).parents[2] / ".venv/browser/node_modules/axe-core/axe.min.js"))
QUIET = ("quic", "background-networking", "component-update", "sync")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", *(f"--disable-{what}" for what in QUIET)]
SETTINGS = "model=stories-small&preset=sharp&nfe=32&grid=closing&seed=102"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="chromium is not installed: apt-get install chromium (.ci/run does it as root)"
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("stories-weighted", "stories-direct", "stories-small", "stories-ar", "stories-mdlm") as made:
        yield made
        assert not any("Traceback" in line for line in made.lines)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


class Visit:
    """A page whose requests to other hosts are refused and counted, and whose errors are kept; nothing on it moves."""

    def __init__(self, browser: Any, host: str, **how: Any) -> None:
        self.outside: list[str] = []
        self.errors: list[str] = []
        self.context = browser.new_context(accept_downloads=True, **{"reduced_motion": "reduce", **how})
        self.context.route("**/*", lambda route: self._sort(route, host))
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)

    def _sort(self, route: Any, host: str) -> None:
        address = urlparse(route.request.url)
        if address.scheme in ("file", "data", "blob") or address.netloc == host:
            route.continue_()
        else:
            self.outside.append(route.request.url)
            route.abort()

    def finish(self) -> None:
        assert self.outside == [] and self.errors == []
        self.context.close()


def opened(browser: Any, server: Running, settings: str = SETTINGS, **how: Any) -> Visit:
    visit = Visit(browser, urlparse(server.url).netloc, **how)
    visit.page.goto(f"{server.url}/#{settings}")
    ended(visit.page)
    return visit


def ended(page: Any) -> None:
    happens(page, "!document.querySelector('#run')?.disabled && !!document.querySelector('#done')?.textContent")


def happens(page: Any, condition: str) -> None:
    """Asked from outside: the page's policy lets nothing inside it be evaluated from text."""
    until(lambda: bool(page.evaluate(condition)), 60)


def words(page: Any) -> list[str]:
    return list(page.locator("#text .token").all_text_contents())


LINES = """(() => {
  const places = [...document.querySelectorAll("#text .token")].map((word) => word.getBoundingClientRect());
  const first = places.filter((place, k) => k === 0 || place.top > places[k - 1].top + 5);
  return first.map((place) => Math.round(place.left));
})()"""
"""Where the lines of the text begin."""


LABELS = """[...document.querySelectorAll("svg text")].map((label) => {
  const { a, b } = label.getScreenCTM();
  return [label.closest("section").id, Math.hypot(a, b) * parseFloat(getComputedStyle(label).fontSize)];
})"""
"""The labels of all charts: where they are, and how large they are on the screen, in pixels."""


def generated(**more: Any) -> str:
    """What `convergeflow generate` gives for the same seed."""
    model = cf.load("stories-small")
    from convergeflow.systems.options import settings_of

    settings = settings_of({"preset": "sharp", "nfe": 32, "grid": "closing", **more}, model.as_flow().schedule)  # type: ignore[union-attr]
    texts = model.generate(1, seed=102, settings=settings).texts
    assert texts is not None
    return texts[0]


def test_a_visitor_generates_scrubs_hovers_pins_and_saves(browser: Any, server: Running, tmp_path: Path) -> None:
    visit = opened(browser, server)
    page = visit.page
    assert page.locator("#final").text_content() == generated()
    final = words(page)

    # Scrub: the first step is another text, and the triangle, heatmap and distances follow.
    page.locator("#scrubber").fill("0")
    assert "step 1 of" in page.locator(".player .reading").text_content()
    assert words(page) != final
    first = page.locator("#triangle svg").get_attribute("aria-label")
    page.locator("#scrubber").press("End")
    assert words(page) == final and page.locator("#triangle svg").get_attribute("aria-label") != first
    page.locator("canvas.heatmap").click(position={"x": 5, "y": 5})
    assert "step 1 of" in page.locator(".player .reading").text_content()

    # Hover: the five leading words of a position.
    page.locator("#text .token").nth(3).hover()
    assert page.locator(".tip .leader").count() == 5

    # Pin another word and run the same noise again.
    page.locator("#scrubber").press("End")
    page.locator("#text .token").nth(4).click()
    page.locator("#pin-word").fill("clever")
    page.locator("#pin").click()
    assert "5: clever" in page.locator("#pin-status").text_content()
    page.locator("#again").click()
    ended(page)
    assert words(page)[4] == "clever" and "pins=4" in page.url
    assert page.locator("#text .token.known").all_text_contents() == ["clever"]

    # Save the run and open it from disk, where there is no server.
    with page.expect_download() as download:
        page.locator("#save").click()
    saved = tmp_path / "saved.html"
    download.value.save_as(saved)
    text = page.locator("#final").text_content()
    visit.finish()
    alone = Visit(browser, "nowhere")
    alone.page.goto(saved.as_uri())
    assert alone.page.locator("#final").text_content() == text
    alone.page.locator("#scrubber").press("End")
    assert words(alone.page)[4] == "clever"
    alone.finish()


def test_a_newcomer_watches_the_flow_and_is_asked_nothing_hard(browser: Any, server: Running) -> None:
    visit = opened(browser, server, "", viewport={"width": 390, "height": 844}, reduced_motion="no-preference")
    page = visit.page
    # The first text is played, on the first screen.
    happens(page, "document.querySelector('.play').textContent === 'Pause'")
    assert page.evaluate("document.querySelector('#text .token').getBoundingClientRect().bottom") < 844
    happens(page, "document.querySelector('.play').textContent === 'Play'")
    assert "step 17 of 17" in page.locator(".player .reading").text_content()
    begins = page.evaluate(LINES)
    assert len(begins) > 3 and len(set(begins)) == 1, "a wrapped line begins where the first one does"
    # A panel that has not run is a heading, a sentence and a button.
    for name in ("compare", "race"):
        assert page.locator(f"#{name} .lanes").is_hidden()
        said = page.locator(f"#{name} p:visible").all_text_contents()
        assert len(said) == 1 and said[0].count(".") == 1
    assert page.locator("#frontier text").first.bounding_box()["height"] >= 12, "labels can be read on a phone"
    # Models of the comparison come last, under a name that says so.
    assert page.locator("select[name=model] > option").all_text_contents() == ["stories-small"]
    assert page.locator("select[name=model] > :last-child > option").all_text_contents() == ["stories-weighted"]
    assert "comparison" in page.locator("select[name=model] > :last-child").get_attribute("label")
    # Fields for experts are folded until they are set or wrong; each field has a sentence.
    fields = page.locator("form [name]")
    assert [f.get_attribute("name") for f in fields.all() if f.is_visible()] == ["model", "prompt", "seed", "nfe"]
    for field in fields.all():
        why = page.locator(f"#{field.get_attribute('aria-describedby')}").text_content()
        assert why.endswith(".") and why.count(".") == 1
    folded = page.locator("details:not([open])")
    page.evaluate("location.hash = location.hash.replace('seed=11', 'seed=12')")
    happens(page, "document.querySelector('[name=seed]').value === '12'")
    assert folded.count() == 1, "what a visitor starts with is nothing that a link has set"
    page.evaluate("location.hash += '&refine=2'")
    happens(page, "document.querySelector('details').open")
    page.locator("[name=refine]").fill("-1")
    page.locator("summary").press("Enter")
    assert folded.count() == 1
    page.locator("#run").click()
    happens(page, "document.activeElement.name === 'refine'")
    visit.errors = [error for error in visit.errors if "400" not in error]
    visit.finish()


def test_weighted_arrives_where_direct_drifts(browser: Any, server: Running) -> None:
    visit = opened(browser, server, SETTINGS.replace("nfe=32", "nfe=8"))
    page = visit.page
    page.locator("#run-compare").click()
    happens(page, "document.querySelector('#compare output').textContent.includes('farthest')")
    said = page.locator("#compare output").text_content()
    weighted, direct = (float(found) for found in re.findall(r"(?:weighted|direct) ([\d.]+)", said))
    assert weighted < 1.3 < direct and page.locator("#compare .lanes").is_visible()
    visit.finish()


def test_a_race_with_an_autoregressive_and_a_masked_model(browser: Any, server: Running) -> None:
    visit = opened(browser, server, SETTINGS.replace("nfe=32", "nfe=8"))
    page = visit.page
    page.locator("#run-race").click()
    happens(page, "[...document.querySelectorAll('#race output')].every((one) => one.textContent.startsWith('done'))")
    calls = [int(re.findall(r"\d+", text)[0]) for text in page.locator("#race output").all_text_contents()]
    assert calls == [8, 64, 8], "the autoregressive model needs a call for every word"
    alone = cf.load("stories-ar").generate(1, seed=102)
    assert alone.texts is not None and page.locator("#race .text").nth(1).text_content() == alone.texts[0]
    visit.finish()


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "docs/replays").glob("*.html")), ids=lambda f: f.name
)
def test_the_replays_of_the_documentation_play(browser: Any, file: Path) -> None:
    visit = Visit(browser, "nowhere")
    visit.page.goto(file.as_uri())
    visit.page.locator("#scrubber").press("End")
    final = visit.page.locator("#final").text_content()
    shown = words(visit.page)
    assert len(final) > 50 and shown[2].lower() in final.lower()
    assert not any(re.match(" .", word) for word in shown), "a space stands before a word, where a line may break"
    visit.finish()


def test_controls_change_the_run_and_the_link_holds_them(browser: Any, server: Running) -> None:
    visit = opened(browser, server)
    page = visit.page
    page.locator("input[name=temperature]").fill("1")
    page.locator("input[name=nfe]").fill("16")
    happens(page, "document.querySelector('#cost').textContent.startsWith('16 calls')")
    page.locator("#run").click()
    happens(page, "document.querySelector('#done').textContent.startsWith('16 network calls')")
    text = page.locator("#final").text_content()
    assert text == generated(temperature=1.0, nfe=16)
    again = opened(browser, server, page.url.partition("#")[2])
    assert again.page.locator("#final").text_content() == text
    again.finish()
    page.locator("input[name=temperature]").fill("")
    page.locator("select[name=grid]").select_option("langflow")
    page.locator("select[name=preset]").select_option("langflow")
    page.locator("input[name=refine]").fill("3")
    happens(page, "document.querySelector('#cost').textContent.includes('drop them')")
    visit.errors = [error for error in visit.errors if "400" not in error]
    visit.finish()


def test_another_model_or_address_brings_its_own_settings(browser: Any, server: Running) -> None:
    visit = opened(browser, server, "model=stories-small&preset=sharp&nfe=16&temperature=0.5&seed=3&pins=2:5")
    page = visit.page
    page.locator("select[name=model]").select_option("stories-weighted")
    assert [page.locator(f"[name={name}]").input_value() for name in ("preset", "nfe")] == ["", ""]
    page.evaluate("location.hash = 'model=stories-small&preset=sharp&nfe=8&seed=4'")
    happens(page, "document.querySelector('#cost').textContent.startsWith('8 calls')")
    assert page.locator("[name=temperature]").input_value() == "" and "pins" not in page.url
    visit.finish()
    with running("sotu-small") as speeches, running("stories-ar") as rival:
        alone = opened(browser, speeches, "")
        assert alone.page.locator("[name=preset]").input_value() == ""
        happens(alone.page, "document.querySelector('#cost').textContent.includes('in 64 steps')")
        alone.finish()
        none = Visit(browser, urlparse(rival.url).netloc)
        none.page.goto(rival.url)
        assert "no flow to show" in none.page.locator("#asked p").text_content()
        none.finish()


def test_markup_in_a_prompt_is_shown_as_text(browser: Any, server: Running, tmp_path: Path) -> None:
    nasty = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
    visit = opened(browser, server)
    page = visit.page
    page.locator("input[name=prompt]").fill(nasty)
    page.locator("#run").click()
    page.wait_for_selector(".complaint")
    assert "vocabulary" in page.locator(".complaint").text_content()
    assert page.title() == "ConvergeFlow: watch it converge" and page.locator("main img").count() == 0
    visit.errors = [error for error in visit.errors if "400" not in error]
    visit.finish()
    frame = {"step": 0, "steps": 1, "t": 0.5, "log_snr": 0.0, "calls": 1, "block": 0, "start": 0, "tokens": [1]}
    frame |= {"nearest": [1.0], "second": [1.1], "entropy": [0.1], "agreement": {}}
    frame |= {"top_tokens": [[1]], "top_weights": [[0.9]]}
    sample = {"seed": 1, "calls": 1, "tokens": [1], "text": nasty, "known": [], "frames": [frame]}
    file = tmp_path / "nasty.html"
    made = {"format": 1, "about": nasty, "words": {"1": nasty}, "spaced": True, "samples": [sample]}
    file.write_text(replay(made, nasty), encoding="utf-8")
    alone = Visit(browser, "nowhere")
    alone.page.goto(file.as_uri())
    assert alone.page.locator("#final").text_content() == nasty and words(alone.page) == [nasty]
    assert alone.page.locator("img").count() == 0 and alone.page.title() != "owned"
    alone.finish()


def test_the_page_works_by_keyboard_and_on_a_phone(browser: Any, server: Running) -> None:
    visit = opened(browser, server, viewport={"width": 390, "height": 800}, color_scheme="dark")
    page = visit.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "nothing runs out of the screen"
    page.locator("#run-compare").click()
    happens(page, "document.querySelectorAll('#compare blockquote:empty').length === 0")
    charts = page.evaluate(LABELS)
    assert {name for name, _ in charts} == {"triangle", "distances", "compare", "frontier"}
    assert min(size for _, size in charts) >= 11, charts
    page.locator("#text .token.selected").focus()
    before = page.locator("#pin-where").text_content()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#pin-where").text_content() != before
    assert page.locator(".tip .leader").count() == 5
    page.keyboard.press("[")
    reading = page.locator(".player .reading").text_content()
    steps = int(reading.partition(" of ")[2].partition(",")[0])
    assert reading.startswith(f"step {steps - 1} of {steps}")
    visit.finish()


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: npm install --prefix .venv/browser axe-core")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, server: Running, scheme: str) -> None:
    visit = opened(browser, server, color_scheme=scheme)
    visit.page.evaluate(AXE.read_text(encoding="utf-8"))
    visit.page.wait_for_timeout(300)  # opacity of the words is animated
    found = visit.page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    serious = [
        (each["id"], each["nodes"][0]["target"], each["nodes"][0].get("failureSummary"))
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == []
    visit.finish()


def test_a_server_with_a_token_asks_for_it_on_the_page(browser: Any, models: list[str]) -> None:
    with running(models[0], "--token", "open-sesame") as server:
        visit = Visit(browser, urlparse(server.url).netloc)
        visit.page.goto(server.url)
        visit.page.locator("#asked input").fill("open-sesame")
        visit.page.locator("#asked button").click()
        ended(visit.page)
        assert len(words(visit.page)) == 12
        # What is missing here is said plainly.
        assert "no model of the kind ar, mdlm" in visit.page.locator("#race").text_content()
        assert "no pair of such models" in visit.page.locator("#compare").text_content()
        visit.errors = [error for error in visit.errors if "401" not in error]
        visit.finish()
        assert not any("open-sesame" in line for line in server.lines)
