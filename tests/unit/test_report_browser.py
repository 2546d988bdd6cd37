"""The report in a real browser: readable on a phone, in light and dark, and nothing from a run is executed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.report import render
from chaos.report.index import Outcome, Row, render_index
from tests.browser import CHROMIUM, Browser

from .report_samples import drill, killed_and_hung, spoiled

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: install the package chromium")

NASTY = "</title></style></script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"

FAINT = """
(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (color) => {
    const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = numbers(color).map((v) => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const background = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if (color.startsWith("rgb") && (numbers(color)[3] ?? 1) === 1) return color;
    }
    return "rgb(255,255,255)";
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || element.closest("script, style, title")) continue;
    const style = getComputedStyle(element);
    const color = element instanceof SVGElement ? style.fill : style.color;
    const [light, dark] = [luminance(color), luminance(background(element))].sort((a, b) => b - a);
    const ratio = (light + .05) / (dark + .05);
    if (ratio < 4.5) faint.push(`${node.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return faint;
})()
"""
SEARCH = """
(() => {
  const field = document.querySelector("[type=search]");
  field.value = %r;
  field.dispatchEvent(new Event("input"));
  return [...document.querySelectorAll("details.values li")].filter((row) => row.checkVisibility()).length;
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a drill that failed, with text in it that wants to be executed."""
    records = spoiled(spoiled(killed_and_hung().records, 4, "policy/optimizer"), 5, NASTY)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(drill(records, title=f"a drill {NASTY}", reasons=[NASTY, "x" * 500])))
    return path


def test_nothing_from_a_run_is_executed_and_nothing_is_asked_for(browser: Browser, page: Path) -> None:
    browser.requests.clear()
    browser.open(page)
    assert browser.evaluate("document.title").startswith("Failed: a drill </title>")
    assert browser.requests == [page.as_uri()]
    assert browser.complaints == []


def test_a_script_that_got_in_would_not_run(browser: Browser, page: Path) -> None:
    broken = page.with_name("broken.html")
    broken.write_text(page.read_text().replace("<main>", "<main><script>document.title = 'run'</script>"))
    browser.open(broken)
    assert browser.evaluate("document.title") != "run"
    assert "Content Security Policy" in browser.complaints.pop()


@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_never_scrolls_sideways(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width, touch=width == 360)
    browser.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    zoom = "const zoom = document.querySelector('.zoom input'); zoom.value = 4; zoom.dispatchEvent(new Event('input'))"
    browser.evaluate(f"{{ {zoom} }}")
    assert browser.evaluate("document.querySelector('.scroll').scrollWidth > 4 * innerWidth"), "the timeline does"
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out(browser: Browser, page: Path, scheme: str) -> None:
    browser.open(page, scheme=scheme)
    assert browser.evaluate(FAINT) == []


def test_it_follows_the_readers_scheme(browser: Browser, page: Path) -> None:
    seen = []
    for scheme in ("light", "dark"):
        browser.open(page, scheme=scheme)
        seen.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert seen == ["rgb(246, 247, 249)", "rgb(16, 19, 23)"]


def test_headings_and_drawings_have_names(browser: Browser, page: Path) -> None:
    browser.open(page)
    levels = browser.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((one) => one.tagName).join(' ')")
    assert levels == "H1 H2 H2 H2 H3 H3 H2 H2 H2 H2"
    assert (
        browser.evaluate("document.querySelectorAll('svg:not([aria-hidden], [aria-label], [aria-labelledby])').length")
        == 0
    )


@pytest.mark.parametrize(
    ("words", "rows"),
    [("policy/optimizer", 7), ("optimizer, step 4", 1), ("ffffffff", 2), ("as restored, step 2", 4), ("no such", 0)],
)
def test_digests_are_found(browser: Browser, page: Path, words: str, rows: int) -> None:
    browser.open(page)
    assert browser.evaluate(SEARCH % words) == rows
    assert browser.evaluate("document.querySelector('output').textContent") == f"{rows} found"


def test_only_what_differs(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.evaluate("document.querySelector('.search [type=checkbox]').click()")
    assert browser.evaluate(SEARCH % "") == 2
    assert browser.evaluate("document.querySelector('.is-first').checkVisibility()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_index_of_many_drills_too(browser: Browser, tmp_path: Path, scheme: str) -> None:
    outcomes: list[Outcome] = ["failed", "inconclusive", "passed", "unavailable"]
    rows = [Row(f"drills/{NASTY}", NASTY, one, [NASTY, "x" * 500], 61.0, "c" * 200, 7, "r.html") for one in outcomes]
    path = tmp_path / "index.html"
    path.write_text(render_index(rows, 5, "now", {"ray": "2"}, "c" * 40))
    browser.requests.clear()
    browser.open(path, 360, touch=True, scheme=scheme)
    assert browser.evaluate("document.title") == "Failed: 5 recovery drills"
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.evaluate(FAINT) == []
    assert browser.requests == [path.as_uri()] and browser.complaints == []
    browser.evaluate("document.querySelector('li a').focus()")
    assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
