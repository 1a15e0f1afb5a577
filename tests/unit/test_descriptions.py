"""Help pages and translations say something about every node, input and output, and about nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import node_info
import pytest

ROOT = Path(__file__).resolve().parents[2]
NODES = node_info.pack_nodes()
PAGES = ROOT / "js" / "docs"
LOCALES = ROOT / "locales"
LANGUAGES = ("en", "zh")


@pytest.mark.parametrize("node", sorted(NODES))
def test_a_help_page_has_the_nodes_own_lists_an_example_and_limits(node):
    page = (PAGES / f"{node}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {NODES[node]['display_name']}\n")
    assert node_info.with_lists(page, NODES[node]) == page, "run scripts/update_node_info"
    names = [*node_info.inputs_of(NODES[node]), *(name for name, _ in node_info.outputs_of(NODES[node]))]
    sections = dict(zip(*[iter(re.split(r"^## (.+)$", page, flags=re.MULTILINE)[1:])] * 2, strict=True))
    assert list(sections) == ["Inputs", "Outputs", "Example", "Limits"]
    assert re.findall(r"^- `([^`]+)`", sections["Inputs"] + sections["Outputs"], re.MULTILINE) == names
    assert len(sections["Example"].split()) >= 10
    assert len(sections["Limits"].split()) >= 10


def test_no_help_page_is_left_of_a_node_that_is_gone():
    assert {page.stem for page in PAGES.glob("*.md")} == set(NODES)


@pytest.mark.parametrize("language", LANGUAGES)
def test_translations_cover_every_text_and_nothing_else(language):
    texts = json.loads((LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8"))
    assert paths_of(texts) == paths_of(node_info.english(NODES))
    assert [path for path, text in leaves(texts) if not text.strip()] == []


def test_english_is_what_the_nodes_say_themselves():
    texts = json.loads((LOCALES / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    assert texts == node_info.english(NODES), "run scripts/update_node_info"


@pytest.mark.parametrize("language", LANGUAGES)
def test_categories_are_translated(language):
    texts = json.loads((LOCALES / language / "main.json").read_text(encoding="utf-8"))
    parts = {part for node in NODES.values() for part in node["category"].split("/")}
    assert set(texts["nodeCategories"]) == parts


def test_chinese_is_chinese_and_keeps_the_names_of_things():
    """A text that nobody translated is found by having no Chinese letter."""
    chinese = dict(leaves(json.loads((LOCALES / "zh" / "nodeDefs.json").read_text(encoding="utf-8"))))
    untranslated = [
        path for path, text in chinese.items() if not path.endswith(".name") and not re.search(r"[一-鿿]", text)
    ]
    assert untranslated == []
    for path, english in leaves(node_info.english(NODES)):
        # Numbers are facts: whoever changes one in English has to change it here.
        assert set(re.findall(r"\d+", chinese[path])) == set(re.findall(r"\d+", english)), path


def leaves(value, path=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    else:
        yield path, value


def paths_of(texts):
    return [path for path, _ in leaves(texts)]
