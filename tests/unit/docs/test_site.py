"""Links of the documents: as the site shows them, and whether their targets exist."""

import inspect
import logging
import pydoc
import re
from pathlib import Path
from typing import Any

import pytest

from scripts import script

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def maker() -> Any:
    return script(ROOT / "docs" / "make_site.py")


@pytest.mark.parametrize(
    ("page", "link", "shown"),
    [
        ("index.md", "[a](docs/security.md#keys)", "[a](security.md#keys)"),
        ("index.md", "[a](docs/adr/)", "[a](adr/README.md)"),
        ("index.md", "[a](#set-up)", "[a](#set-up)"),
        ("index.md", "[`a`](docs/faq.md)", "[`a`](faq.md)"),
        ("faq.md", "[a](../README.md#http)", "[a](index.md#http)"),
        ("faq.md", "[a](https://x.org/y.md)", "[a](https://x.org/y.md)"),
        ("faq.md", "[a](security.md)", "[a](security.md)"),
        ("adr/0001-the-arena-has-no-name.md", "[a](../faq.md)", "[a](../faq.md)"),
        (
            "adr/0001-the-arena-has-no-name.md",
            "[a](0002-waiters-sleep-on-doorbells.md)",
            "[a](0002-waiters-sleep-on-doorbells.md)",
        ),
        # The site has no sources.
        ("faq.md", "[a file](../eaas/errors.py)", "a file (`eaas/errors.py`)"),
        ("faq.md", "[`errors`](../eaas/errors.py)", "`errors`"),
        ("faq.md", "[eaas/errors.py](../eaas/errors.py)", "eaas/errors.py"),
    ],
)
def test_a_link_leads_to_a_page(maker: Any, page: str, link: str, shown: str) -> None:
    assert maker.rewritten(f"See {link}.", page) == f"See {shown}."


def test_code_is_left_alone(maker: Any) -> None:
    block = "```\n[a](../eaas/errors.py)\n```\n"
    assert maker.rewritten(block, "faq.md") == block


def test_a_listed_file_is_shown(maker: Any) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    listing = (ROOT / "examples" / "cluster.yaml").read_text()
    assert f"\n\n```yaml\n{listing}```\n\n" in maker.rewritten(page, "configuration.md")
    # A link in a sentence stays one.
    assert "```" not in maker.rewritten("See [`x.yaml`](../examples/cluster.yaml)", "faq.md")


PYTHON = (ROOT / "docs" / "python.md").read_text()
# Heading, path of the object, what the page says of it.
OBJECTS = re.findall(r"^### (\S+)\n\n<!-- (\S+) -->\n((?:.+\n)+)", PYTHON, re.MULTILINE)


def test_the_site_shows_docstrings(maker: Any) -> None:
    assert len(OBJECTS) == PYTHON.count("<!--") > 10
    shown = maker.rewritten(PYTHON, "python.md")
    for heading, path, _ in OBJECTS:
        assert f"\n::: {path}\n    options: {{heading: {heading}}}\n" in shown
    assert "<!--" not in shown
    assert "Source" not in shown


@pytest.mark.parametrize(("heading", "path", "said"), OBJECTS, ids=[path for _, path, _ in OBJECTS])
def test_the_python_page_says_what_the_source_says(heading: str, path: str, said: str) -> None:
    found: Any = pydoc.locate(path)
    summary, source = inspect.getdoc(found), inspect.getsourcefile(found)
    assert summary is not None
    assert source is not None
    words = summary.splitlines()[0]
    if not inspect.ismodule(found):
        words = f"`{heading.rpartition('.')[2]}({parameters(found)})`: {words}"
    link = f"[Source](../{Path(source).relative_to(ROOT)})"
    assert " ".join(said.split()) == f"{words} {link}"


def parameters(found: Any) -> str:
    """The names of an object's parameters, as its call has them."""
    signature = inspect.signature(found)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return re.sub(r"=[^,)]+", "", text)[1:-1]


def test_a_missing_file_is_reported(maker: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        maker.rewritten("[a](../eaas/none.py)", "faq.md")
    assert "docs/faq.md has a link to eaas/none.py, which does not exist" in caplog.text


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def text_of(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def anchors_of(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)|[`*]", r"\1", title) for title in titles]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", t).strip().lower()) for t in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^()\s]+)\)", text_of(page)):
        name, _, anchor = link.partition("#")
        if "://" in name:
            continue
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link
