"""The status page: what it shows, and that nothing which it shows can become markup, as a browser sees it."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvprefetch.daemon.store.fill import StoreFill
from kvprefetch.daemon.telemetry import overview, status_page
from kvprefetch.daemon.telemetry.board import Picture
from tests.support.telemetry import picture, served

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "<script>document.title='owned'</script><img src=http://203.0.113.1/x onerror=alert(1)>\x1b[2J\"'&"
FILL = {"memory_used_bytes": 512 << 20, "memory_bytes": 1 << 30}


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(*engines: dict[str, int | str], store_open: bool = True) -> Picture:
    return picture(
        store_open=store_open,
        engines=list(engines),
        engine_count=len(engines),
        outcomes={HOSTILE: 3.0, "loaded": 12.0},
        rates={"memory": {"now": 1.5 * (1 << 20)}},
        store=StoreFill().model_dump() | FILL,
    )


def hostile() -> Picture:
    return shown({"engine": HOSTILE, "model": HOSTILE, "mode": HOSTILE, "hints": 10, "requests": 4})


def test_the_page_shows_engines_store_rates_and_outcomes() -> None:
    text = Page(status_page.page(shown({"engine": "first", "model": "llama", "mode": "on"})).decode()).text
    for words in ("ready, serving", "first", "llama", "512 MiB of 1 GiB", "now 1.5 MiB/s", "loaded"):
        assert words in text
    assert "no engine is attached" in Page(status_page.page(shown()).decode()).text


def test_the_page_has_of_each_engine_what_top_has() -> None:
    """Each column of `top`, the engine's model, process, user and mode, others' engines, refusals and slow causes."""
    engine: dict[str, int | str] = {"engine": "first", "model": "llama", "mode": "on", "pid": 77, "uid": 0, "age_s": 7}
    seen = shown(engine | {"hints": 4321})
    seen = dataclasses.replace(
        seen,
        status={
            **seen.status,
            "engine_count": 2,
            "causes": {"link": [3, 1500.0]},
            "refused": [{"pid": 78, "uid": 0, "tries": 2, "error": "protocol 3"}],
        },
    )
    text = Page(status_page.page(seen).decode()).text
    status = overview.as_status(seen.status, seen.health())
    assert "".join(overview.COLUMNS).lower() in text
    lines = [*overview.names(status), *overview.others(status), *overview.refused(status)]
    lines += overview.slow_causes(status)
    assert len(lines) == 4
    assert [line for line in lines if line not in text] == []
    assert "llama, pid 77, user root" in text


def test_the_page_says_what_is_wrong() -> None:
    text = Page(status_page.page(shown(store_open=False)).decode()).text
    assert "not ready, serving" in text
    assert "the store is not open: everything is a miss" in text


def test_names_from_elsewhere_become_no_markup() -> None:
    """Ids, models and outcomes with markup and control characters are text, and the rest of the page is as without."""
    page, plain = (Page(status_page.page(each).decode()) for each in (hostile(), shown({"engine": "e"})))
    assert page.tags == plain.tags
    assert page.text.count(HOSTILE.replace("\x1b", "\N{REPLACEMENT CHARACTER}")) == 5
    assert not {"script", "img", "link", "iframe", "object", "form"} & {tag for tag, _ in page.tags}
    links = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("href", "src")]
    assert links == ["metrics", "readyz", "healthz"]


def test_the_page_is_read_only_and_lets_nothing_in() -> None:
    with served(hostile) as port:
        url = f"http://127.0.0.1:{port}/"
        with urllib.request.urlopen(url) as answer:
            policy = answer.headers["Content-Security-Policy"]
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy
        for method in ("POST", "PUT", "DELETE"):
            with pytest.raises(urllib.error.HTTPError, match="405") as refused:
                urllib.request.urlopen(urllib.request.Request(url, data=b"x", method=method))
            refused.value.close()


def browse(folder: Path, url: str, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", "--enable-logging=stderr"]
    return subprocess.run([CHROMIUM, *flags, *options, url], capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.stress
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_it_and_runs_nothing(tmp_path: Path) -> None:
    """Headless Chromium: its console is silent, the style applies, and no name from elsewhere became an element."""
    with served(hostile) as port:
        url = f"http://127.0.0.1:{port}/"
        page = browse(tmp_path, url, "--dump-dom")
        assert ":CONSOLE" not in page.stderr
        assert "<title>kvprefetchd: ready</title>" in page.stdout
        assert not re.search("<(script|img)", page.stdout)
        assert "&lt;script&gt;" in page.stdout
        picture = tmp_path / "page.png"
        browse(tmp_path, url, f"--screenshot={picture}", "--window-size=1200,700")
        assert picture.stat().st_size > 10_000, "more than an empty page"
