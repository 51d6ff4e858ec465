"""The site of `make docs`, opened as files in a real browser."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site; a warning of mkdocs is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("start", ["index.html", "tutorials/ssh.html"])
def test_search_finds_pages_without_a_server(start: str, site: Path, open_page: Callable[..., Any]) -> None:
    """A word that is typed on any page gives results, and a result opens its page; no file is from the network."""
    page = open_page((site / start).as_uri())
    page.locator("[data-md-component=search-query]").focus()  # which loads the index
    page.locator(".md-search-result__meta", has_text="Type to start").wait_for(timeout=20_000)
    page.locator("[data-md-component=search-query]").press_sequentially("preemption")
    result = page.locator(".md-search-result__item > a[href*='queue.html']")
    result.first.click(timeout=20_000)
    page.wait_for_url("**/queue.html**", timeout=20_000)
    assert "line for machines" in page.locator("h1").inner_text()
