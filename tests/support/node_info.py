"""What ComfyUI says of the pack's nodes: the part of /object_info that is kept in tests/browser/object_info.json.

From it the browser tests make the editor's nodes where there is no ComfyUI, and the help pages and translations are
checked. ``python tests/support/node_info.py`` (in ComfyUI's environment; scripts/update_node_info does it) writes that
file, locales/en/nodeDefs.json and the lists of the help pages anew.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OBJECT_INFO = ROOT / "tests" / "browser" / "object_info.json"
PAGES = ROOT / "js" / "docs"
ENGLISH = ROOT / "locales" / "en" / "nodeDefs.json"
PREFIX = "LingBot"
START_PICTURE = "lingbot_tiny_day.png"
CORE_NODES = ("CLIPTextEncode", "LoadImage", "SaveVideo")
"""Of ComfyUI itself, in the pack's workflows."""


def kept(object_info: dict[str, Any]) -> dict[str, Any]:
    """The pack's nodes and CORE_NODES, without what differs from machine to machine."""
    found = {
        name: copy.deepcopy(node)
        for name, node in sorted(object_info.items())
        if name.startswith(PREFIX) or name in CORE_NODES
    }
    # The files that lie in the input folder at the moment; the workflows' start picture is taken to be among them.
    found["LoadImage"]["input"]["required"]["image"][0] = [START_PICTURE]
    for name, node in found.items():
        if name.startswith(PREFIX):
            node["python_module"] = "custom_nodes.lingbot-world"
    return found


def load() -> dict[str, Any]:
    """The committed part."""
    return json.loads(OBJECT_INFO.read_text(encoding="utf-8"))


def pack_nodes() -> dict[str, Any]:
    """The committed part, the pack's own nodes only."""
    return {name: node for name, node in load().items() if name.startswith(PREFIX)}


def inputs_of(node: dict[str, Any]) -> dict[str, list[Any]]:
    """Name -> [type, options] of all inputs that a person sees."""
    return {name: spec for group in ("required", "optional") for name, spec in (node["input"].get(group) or {}).items()}


def outputs_of(node: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, tooltip) of each output."""
    tooltips = node.get("output_tooltips") or [None] * len(node["output"])
    return [(name, tooltip or "") for name, tooltip in zip(node["output_name"], tooltips, strict=True)]


def english(nodes: dict[str, Any]) -> dict[str, Any]:
    """The nodes' own texts in the form of a locale's nodeDefs.json."""
    texts = {}
    for name, node in nodes.items():
        inputs = {
            key: {"name": spec[1].get("display_name") or key, "tooltip": spec[1].get("tooltip", "")}
            for key, spec in inputs_of(node).items()
        }
        outputs = {str(i): {"name": key, "tooltip": tip} for i, (key, tip) in enumerate(outputs_of(node))}
        texts[name] = {
            "display_name": node["display_name"],
            "description": node["description"],
            "inputs": inputs,
            "outputs": outputs,
        }
    return texts


def with_lists(page: str, node: dict[str, Any]) -> str:
    """A help page whose heading and sections Inputs and Outputs are the node's own texts; the rest is written by hand.

    They stand before the section Example. Lists, not tables: the page is shown in a narrow panel.
    """
    before, example, after = page.partition("\n## Example\n")
    about = re.sub(r"^# .*\n", "", before.partition("\n## Inputs\n")[0].strip()).strip()
    inputs = [f"- `{name}` ({_kind(spec)}): {_meaning(spec)}" for name, spec in inputs_of(node).items()]
    outputs = [
        f"- `{name}` ({kind}): {_line(tip)}" for (name, tip), kind in zip(outputs_of(node), node["output"], strict=True)
    ]
    heading = f"# {node['display_name']}"
    parts = [heading, about, "## Inputs", "\n".join(inputs), "## Outputs", "\n".join(outputs)]
    return "\n\n".join(parts) + "\n" + example + after


def _kind(spec: list[Any]) -> str:
    kind = spec[0] if isinstance(spec[0], str) else "COMBO"
    return "any" if kind == "*" else kind


def _meaning(spec: list[Any]) -> str:
    text, default = _line(spec[1].get("tooltip", "")), spec[1].get("default")
    if default is None or default == "" or "\n" in str(default):
        return text
    return f"{text} Default: {json.dumps(default) if isinstance(default, bool) else default}."


def _line(text: str) -> str:
    return " ".join(text.split())


def as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def main() -> int:
    from comfy_server import make_server

    with make_server(helper_suite=False) as server:
        found = kept(server.client.object_info())
        mine = {name: node for name, node in found.items() if name.startswith(PREFIX)}
        if not mine:
            print(server.log(200), file=sys.stderr)
            return 1
    OBJECT_INFO.write_text(as_text(found), encoding="utf-8")
    ENGLISH.parent.mkdir(parents=True, exist_ok=True)
    ENGLISH.write_text(as_text(english(mine)), encoding="utf-8")
    for name, node in mine.items():
        page = PAGES / f"{name}.md"
        if page.is_file():
            page.write_text(with_lists(page.read_text(encoding="utf-8"), node), encoding="utf-8")
        else:
            print(f"write {page.relative_to(ROOT)}: a heading, what the node is for, ## Example and ## Limits")
    print(f"{len(mine)} nodes: {OBJECT_INFO.relative_to(ROOT)}, {ENGLISH.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
