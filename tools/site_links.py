"""A hook of mkdocs.yml: in the site, a link to a file outside docs/ becomes the text of the link.

tests/docs/test_pages.py checks these links in the repository, where the files exist.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\.?/[^)\s]*)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page without links that leave docs/."""
    folder = posixpath.dirname(page.file.src_uri)

    def inside(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if path.startswith("..") else link[0]

    return LINK.sub(inside, markdown)
