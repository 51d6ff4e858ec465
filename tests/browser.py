"""A real Chromium for tests of pages: one a test file, a fresh profile for each test, and a record of errors.

    def test_page_opens(open_page):
        page = open_page(path.as_uri())
        assert page.locator("h1").inner_text() == "digits"

A test fails if the page has written an error to the console, has raised an error, or has sent a request beyond
loopback.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
PATIENT_MS = 120_000  # CI is slow and busy; the awaited changes take a second or two
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--disable-dev-shm-usage"),
]

# The least contrast (WCAG 2.1, 1.4.3) of the matching texts, each against the background painted behind it.
_CONTRAST = """
(selector) => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const channels = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (rgb) => rgb.slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll(selector)) {
    const isOwn = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!isOwn || !element.getClientRects().length) continue;
    const style = getComputedStyle(element), isSvg = element.namespaceURI.endsWith("svg");
    const text = luminance(channels(isSvg ? style.fill : style.color)), back = luminance(behind(element));
    const ratio = (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
    found.push([Math.round(100 * ratio) / 100, element.textContent.trim().slice(0, 40)]);
  }
  return found.sort((one, other) => one[0] - other[0]).slice(0, 5);
}
"""


@dataclass
class Seen:
    """A record of a test's pages: `requests` are all requested addresses, `errors` all errors."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        """Record the page's requests and errors from now on."""
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(f"raised: {error}"))
        page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)

    @property
    def far(self) -> list[str]:
        """Return the addresses that are neither a file nor on this machine."""
        near = ("127.0.0.1", "localhost", "::1")
        return [url for url in self.requests if urlsplit(url).scheme in ("http", "https", "ws", "wss")
                and urlsplit(url).hostname not in near]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return the machine's Chromium, headless.

    One for each file: an open playwright runs the thread's event loop, and other tests need their own loop.
    """
    from playwright.sync_api import sync_playwright

    path = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if path is None:
        pytest.fail("there is no chromium on this machine: apt-get install chromium fonts-dejavu-core", pytrace=False)
    with pytest.MonkeyPatch.context() as patch:  # else a process left by the first test
        for name in [name for name in os.environ if name.startswith("CLOUDTRAIN_")]:
            patch.delenv(name)
        driver = sync_playwright().start()
        found = driver.chromium.launch(executable_path=path, args=FLAGS, timeout=PATIENT_MS)
    yield found
    found.close()
    driver.stop()


@pytest.fixture
def page_seen() -> Seen:
    """Return the record of the test's pages."""
    return Seen()


@pytest.fixture
def open_page(browser: Browser, page_seen: Seen) -> Iterator[Callable[..., Page]]:
    """Return a function that opens an address in a fresh profile: `open_page(url, width=400, color_scheme="dark")`.

    Other names are playwright's for a context. After the test the record must have no errors and no far requests.
    """
    contexts: list[BrowserContext] = []

    def open_one(url: str, *, width: int = 1200, height: int = 900, **more: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **more)
        contexts.append(context)
        context.set_default_timeout(PATIENT_MS)
        page = context.new_page()
        page_seen.watch(page)
        page.goto(url)
        return page

    yield open_one
    for context in contexts:
        context.close()
    assert page_seen.errors == []
    assert page_seen.far == []


def contrast(page: Page, selector: str = "body *") -> list[tuple[float, str]]:
    """Return the lowest contrasts of the matching texts, with the texts: below 4.5 a text is hard to read."""
    return [(ratio, text) for ratio, text in page.evaluate(_CONTRAST, selector)]
