"""The page in a real browser, offline: drawn whole, no errors, readable, usable by keyboard, small screens, print."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from asfp.report import gather, write_page
from asfp.report.live import Server

pytestmark = pytest.mark.slow
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const c = parse(getComputedStyle(node).backgroundColor);
      if (c.length === 3 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = Array.from(node.childNodes).some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.getClientRects().length) continue;
    if (node.closest("svg, script, style, noscript, .skip, .modebar")) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(`${node.tagName} ${node.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return bad;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'asfp[browser]'")
    if CHROMIUM is None:
        pytest.skip("needs chromium, e.g. apt-get install chromium")
    with api.sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def written(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(gather([runs]), path)
    return path


class Opened:
    """A page with what went wrong on it, and what it asked for."""

    def __init__(self, browser: Any, address: str, width: int = 1280, scheme: str = "light") -> None:
        self.problems: list[str] = []
        self.asked: list[str] = []
        offline = address.startswith("file:")
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=offline
        )
        self.page = self.context.new_page()
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.problems.append("a dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("html[data-drawn=yes]", timeout=60_000)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_drawn_offline_without_errors(browser: Any, written: Path, width: int, scheme: str) -> None:
    with Opened(browser, written.as_uri(), width, scheme) as opened:
        page = opened.page
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        page.wait_for_timeout(300)
        assert opened.problems == []
        assert [url for url in opened.asked if not url.startswith(("file:", "data:", "blob:"))] == []
        plots = page.eval_on_selector_all(
            ".plot",
            "all => all.map((p) => { const s = p.querySelector('svg.main-svg');"
            " const r = s ? s.getBoundingClientRect() : { width: 0, height: 0 };"
            " return [p.dataset.chart || p.dataset.heat, r.width, r.height, p.clientWidth]; })",
        )
        assert len(plots) > 12
        for name, drawn, height, room in plots:
            assert drawn > 200, name
            assert height > 60, name
            assert drawn <= room + 1, name
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert page.evaluate(CONTRAST) == []


def test_headings_names_and_keyboard(browser: Any, written: Path) -> None:
    with Opened(browser, written.as_uri()) as opened:
        page = opened.page
        levels = page.eval_on_selector_all("h1, h2, h3", "all => all.map((h) => Number(h.tagName[1]))")
        assert levels[0] == 1
        assert all(b <= a + 1 for a, b in pairwise(levels))
        assert page.get_attribute("html", "lang") == "en"
        names = page.eval_on_selector_all("[role=img]", "all => all.map((n) => n.getAttribute('aria-label'))")
        assert all(len(name) > 30 for name in names)
        unnamed = "all => all.filter((n) => !n.textContent.trim() && !n.getAttribute('aria-label')).length"
        assert page.eval_on_selector_all("button", unnamed) == 0
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.keyboard.press("Tab")
        traces = "document.querySelector('[data-chart=accuracy]').data.length"
        before = page.evaluate(traces)
        page.keyboard.press("Space")
        assert page.get_attribute(".chip", "aria-pressed") == "false"
        page.wait_for_function(f"() => {traces} < {before}")
        assert opened.problems == []


def test_a_layer_can_be_chosen_and_a_cell_read(browser: Any, written: Path) -> None:
    with Opened(browser, written.as_uri()) as opened:
        page = opened.page
        page.select_option("#layer", "layer3.0.conv1")
        rows = "document.querySelector('[data-heat=filters-0]').data[0].z.length"
        page.wait_for_function(f"() => {rows} === 64")
        page.locator("[data-heat=filters-0]").scroll_into_view_if_needed()
        page.locator("[data-heat=filters-0] .nsewdrag").first.hover()
        page.wait_for_function(
            "() => document.querySelector('.readout').textContent.startsWith('layer3.0.conv1, filter')"
        )
        assert opened.problems == []


def test_it_prints(browser: Any, written: Path) -> None:
    with Opened(browser, written.as_uri(), scheme="dark") as opened:
        printed = opened.page.pdf(format="A4", print_background=True)
        assert printed.startswith(b"%PDF")
        assert printed.count(b"/Type /Page\n") + printed.count(b"/Type/Page") > 2 or len(printed) > 50_000
        assert opened.problems == []


def test_hostile_words_do_nothing(browser: Any, runs: Path, tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)><b>"
    folder = Path(shutil.copytree(runs / "asfp-0", tmp_path / "run"))
    record = json.loads((folder / "record.json").read_text())
    record["config"]["name"] = record["config"]["model"]["name"] = record["commit"] = hostile
    (folder / "record.json").write_text(json.dumps(record))
    write_page(gather([folder]), tmp_path / "r.html")
    with Opened(browser, (tmp_path / "r.html").as_uri()) as opened:
        assert opened.problems == []
        assert opened.page.eval_on_selector_all("img", "all => all.length") == 0
        assert hostile in opened.page.inner_text("main")


def test_a_page_of_nothing_is_drawn_too(browser: Any, tmp_path: Path) -> None:
    write_page(gather([tmp_path]), tmp_path / "r.html")
    with Opened(browser, (tmp_path / "r.html").as_uri()) as opened:
        assert "no run that can be read" in opened.page.inner_text("main")
        assert opened.problems == []


def test_the_live_page_updates_by_itself(
    browser: Any, copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asfp.report.live.EVERY", 0.3)
    folder = copied("asfp-0")
    (folder / "record.json").unlink()
    with Server([folder], port=0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with Opened(browser, server.url) as opened:
            page = opened.page
            page.select_option("#layer", "conv1")
            with (folder / "metrics.jsonl").open("a") as file:
                file.write('{"epoch": 4, "loss": 0.1, "accuracy_after": 0.5, "accuracy_before": 0.6, "rate": 0.4}\n')
            grown = "() => document.querySelector('[data-chart=accuracy]').data[0].x.length === 4"
            page.wait_for_function(grown, timeout=30_000)
            assert page.input_value("#layer") == "conv1"
            page.wait_for_function("() => document.getElementById('live').textContent.startsWith('live, updated')")
            assert opened.problems == []
            server.shutdown()
            thread.join()
