"""Hooks of the documents' site (mkdocs.yml): the checkout's own documents become pages, and links follow them.

The documents link each other and sources as GitHub shows them. A link to a document of the site stays one, a link to
another file of the checkout leads to the repository, and one that leads nowhere is left to mkdocs, which refuses it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# Documents outside docs/, and their pages.
OUTSIDE = {
    "README.md": "overview.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?(\))")
_MARK = re.compile(r"^(```\w+) .*$", re.MULTILINE)  # a second word, which tests read and Markdown's parser does not
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


def slug(text: str, separator: str) -> str:
    """Return a heading's anchor as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def on_files(files: Any, config: Any) -> Any:
    """Add the documents that lie outside docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with the links of the site."""
    place = page.file.src_uri
    source = next((name for name, made in OUTSIDE.items() if made == place), f"docs/{place}")

    def link(match: re.Match[str]) -> str:
        before, path, anchor, after = match.groups("")
        target = os.path.normpath(os.path.join(os.path.dirname(source), path))
        there = OUTSIDE.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else "")
        if there and files.get_file_from_path(there) is not None:
            return f"{before}{os.path.relpath(there, os.path.dirname(place) or '.')}{anchor}{after}"
        if (ROOT / target).exists():
            return f"{before}{config.repo_url.rstrip('/')}/blob/main/{target}{anchor}{after}"
        return match[0]

    parts = _CODE.split(_MARK.sub(r"\1", text))
    return "".join(part if i % 2 else _LINK.sub(link, part) for i, part in enumerate(parts))


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"]["slugify"] = slug
    return config
