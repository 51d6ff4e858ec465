"""The page's templates and filters: figures formatted as in all commands, and all values escaped."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlsplit

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from cloudtrain.entrypoints.format import amount, span
from cloudtrain.launcher.text.terminal import when

__all__ = ["Pages", "assets"]

_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}


def assets() -> dict[str, tuple[bytes, str]]:
    """Return the static files: name to content and media type. No further file is served."""
    found = {}
    for folder, names in (("ui", ("ui.css", "ui.js", "icon.svg")), ("report", ("charts.css", "charts.js"))):
        for name in names:
            content = (files("cloudtrain.templates") / folder / name).read_bytes()
            found[name] = content, _TYPES[name.rpartition(".")[2]]
    return found


class Pages:
    """The templates, read once."""

    def __init__(self, static: Mapping[str, tuple[bytes, str]], **shared: Any) -> None:
        folder = files("cloudtrain.templates") / "ui"
        texts = {item.name: item.read_text() for item in folder.iterdir() if item.name.endswith(".html")}
        self._templates = Environment(
            loader=DictLoader(texts), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        digests = {name: hashlib.sha256(content).hexdigest()[:12] for name, (content, _) in static.items()}
        self._templates.globals.update(shared, asset=lambda name: f"/static/{name}?v={digests[name]}")
        self._templates.filters.update(
            ago=when, span=span, money=_money, clock=_clock, day=_day, number=_number, link=_link, part=_part
        )

    def render(self, name: str, **values: Any) -> str:
        """Return the page or a part."""
        return self._templates.get_template(name).render(**values)


def _money(usd: float | None) -> str:
    """Return dollars without the unit, which the page shows once."""
    return "?" if usd is None else amount(round(usd * 1e6))


def _clock(time_s: float | None) -> Markup:
    """Return a time by this machine's clock, to the second."""
    if time_s is None:
        return Markup("-")
    text = time.strftime("%d %b %Y %H:%M:%S", time.localtime(time_s))
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))
    return Markup('<time datetime="{}">{}</time>').format(stamp, text)


def _day(time_s: float | None) -> str:
    return "-" if time_s is None else time.strftime("%d %b %Y", time.localtime(time_s))


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}".replace(",", "\u202f") if isinstance(value, int) and abs(value) >= 10_000 else str(value)


def _link(url: Any) -> str:
    """Return the address if a browser may open it, else ""; this excludes `javascript:` addresses."""
    text = str(url or "")
    try:
        parts = urlsplit(text)
    except ValueError:
        return ""
    return text if parts.scheme in ("http", "https") and parts.netloc else ""


def _part(text: Any) -> str:
    """Return the text encoded as a part of a path."""
    return quote(str(text), safe="")
