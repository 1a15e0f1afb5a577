"""The editor with the pack, in both renderers, on the newest front end."""

from __future__ import annotations


def test_the_editor_opens_without_errors(stub, open_page, renderer, screenshot):
    page = open_page(stub.url, renderer)
    screenshot(page)

    assert page.errors == []
    assert stub.unknown == set()
