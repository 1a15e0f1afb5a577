"""The editor of a running ComfyUI, with the front end that this ComfyUI asks for."""

from __future__ import annotations


def test_the_editor_opens_without_errors(server, open_page, renderer, screenshot):
    page = open_page(server.url, renderer)
    screenshot(page, f"comfyui_{renderer}")
    assert page.errors == []
