"""The Python blocks of the documentation run, and the reference names everything public.

The blocks of one file run in order in one namespace. A fence that says `python no-run` is left out.
"""

import re
from pathlib import Path
from textwrap import dedent

import pytest

import kvcache
import kvcache.engine
import kvcache.hf
import kvcache.prefix
import kvcache.verify

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(py[^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_blocks_run(page):
    text = page.read_text(encoding="utf-8")
    namespace = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        if block[2].split() != ["python", "no-run"]:
            # Empty lines before the code make a traceback name the page's own lines.
            lines_before = text.count("\n", 0, block.start(3))
            exec(compile("\n" * lines_before + dedent(block[3]), page, "exec"), namespace)


def test_the_reference_names_everything_public():
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    packages = (kvcache, kvcache.engine, kvcache.hf, kvcache.prefix, kvcache.verify)
    public = [name for package in packages for name in package.__all__]
    assert [name for name in public if not re.search(rf"`{name}\b", reference)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_page_waits_for_a_capture(page):
    assert not re.findall(r"CAPTURE_\w*", page.read_text(encoding="utf-8"))
