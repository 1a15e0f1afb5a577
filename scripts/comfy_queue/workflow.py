"""A workflow in API format: which nodes it has, and how a value is put into one of them."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any


class WorkflowError(Exception):
    """The workflow cannot be used as it is; the message says what to change."""


@dataclass(frozen=True)
class Setting:
    """One ``node.input=value``, resolved: the node's id, the name of its input, the value as text."""

    node: str
    input: str
    text: str


@dataclass(frozen=True)
class Workflow:
    """The nodes of one prompt: id -> {"class_type", "inputs", "_meta": {"title"}}. Never changed in place."""

    path: Path
    nodes: dict[str, dict[str, Any]]

    @classmethod
    def load(cls, path: Path) -> Workflow:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise WorkflowError(f"{path} cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise WorkflowError(f"{path} is not JSON: {error}") from None
        if isinstance(data, dict) and isinstance(data.get("nodes"), list):
            raise WorkflowError(
                f"{path} is a workflow as ComfyUI's page saves it, and the queue takes the API format: open it "
                "in ComfyUI and export it with File > Export (API). The workflows in workflows/api/ are in that format"
            )
        if isinstance(data, dict) and isinstance(data.get("prompt"), dict):
            data = data["prompt"]  # what is sent to the server, with its wrapping
        if not isinstance(data, dict) or not data or not all(_is_node(node) for node in data.values()):
            raise WorkflowError(
                f"{path} is no workflow in API format: that is an object of nodes, each with a class_type and inputs"
            )
        return cls(path, data)

    def title(self, node: str) -> str:
        """What the user calls the node."""
        meta = self.nodes[node].get("_meta")
        title = meta.get("title") if isinstance(meta, dict) else None
        return title if isinstance(title, str) and title else self.nodes[node]["class_type"]

    def label(self, node: str) -> str:
        """Title, class and id, as in messages."""
        title, kind = self.title(node), self.nodes[node]["class_type"]
        return f"{title} (node {node})" if title == kind else f"{title} (node {node}, {kind})"

    def of_class(self, *class_types: str) -> list[str]:
        return [node for node, content in self.nodes.items() if content["class_type"] in class_types]

    def matching(self, reference: str) -> list[str]:
        """The nodes that ``reference`` may mean: an id, else a title, else a class; letter case as written first."""
        if reference in self.nodes:
            return [reference]
        for fold in (str, str.casefold):
            for name in (self.title, lambda node: self.nodes[node]["class_type"]):
                found = [node for node in self.nodes if fold(name(node)) == fold(reference)]
                if found:
                    return found
        return []

    def find(self, reference: str) -> str:
        """The one node that ``reference`` means; else WorkflowError with the candidates."""
        found = self.matching(reference)
        if len(found) == 1:
            return found[0]
        if found:
            raise WorkflowError(
                f"{reference!r} is {len(found)} nodes: {self._list(found)}; name one of them by its id or its title"
            )
        raise WorkflowError(f"there is no node {reference!r} in {self.path.name}; it has {self._list(self.nodes)}")

    def parse_setting(self, text: str) -> Setting:
        """``node.input=value``; titles and inputs may contain dots themselves, such as ``Save.format.codec=h264``."""
        target, equals, value = text.partition("=")
        if not equals or "." not in target.removesuffix("."):
            raise WorkflowError(f"{text!r} does not say node.input=value, such as LingBotStartWorld.seed=7")
        dots = [index for index, letter in enumerate(target) if letter == "."]
        splits = [(target[:dot], target[dot + 1 :]) for dot in dots]
        known = [(node, name) for node, name in splits if name and self.matching(node)]
        if not known:
            self.find(splits[0][0])
        present = [
            (node, name) for node, name in known if any(name in self.nodes[m]["inputs"] for m in self.matching(node))
        ]
        node, name = (present or known)[0]
        return Setting(self.find(node), name, value)

    def setting_value(self, setting: Setting) -> Any:
        """The value of ``setting``, of the kind that its input holds now; JSON where it holds none or a link."""
        now = self.nodes[setting.node]["inputs"].get(setting.input)
        if isinstance(now, str):
            return setting.text
        try:
            value = json.loads(setting.text)
        except (ValueError, RecursionError):
            value = setting.text
        if isinstance(now, bool):
            value = {"true": True, "false": False}.get(str(value).lower(), value)
        wanted = bool if isinstance(now, bool) else (int, float) if isinstance(now, (int, float)) else object
        if not isinstance(value, wanted) or (wanted == (int, float) and isinstance(value, bool)):
            kind = "true or false" if wanted is bool else "a number"
            raise WorkflowError(
                f"{setting.input} of {self.label(setting.node)} is {kind}, now {now}; {setting.text!r} is not"
            )
        return value

    def with_value(self, node: str, name: str, value: Any) -> Workflow:
        """A copy that differs in one input."""
        nodes = copy.deepcopy(self.nodes)
        nodes[node]["inputs"][name] = value
        return Workflow(self.path, nodes)

    def check_input(self, setting: Setting, offered: set[str]) -> None:
        """WorkflowError when neither the workflow nor ``offered``, the node's inputs on the server, has that input."""
        known = offered | set(self.nodes[setting.node]["inputs"])
        if setting.input in known or setting.input.split(".")[0] in offered:
            return
        close = get_close_matches(setting.input, sorted(known), n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise WorkflowError(
            f"{self.label(setting.node)} has no input {setting.input!r}{hint} It has {', '.join(sorted(known))}"
        )

    def seed_inputs(self) -> list[tuple[str, str]]:
        """Where the workflow holds a seed of its own, as (node, input)."""
        return [
            (node, name)
            for node, content in self.nodes.items()
            for name in ("seed", "noise_seed")
            if isinstance(content["inputs"].get(name), int)
        ]

    def _list(self, nodes: Any) -> str:
        return ", ".join(self.label(node) for node in nodes)


def _is_node(value: Any) -> bool:
    return (
        isinstance(value, dict) and isinstance(value.get("class_type"), str) and isinstance(value.get("inputs"), dict)
    )
