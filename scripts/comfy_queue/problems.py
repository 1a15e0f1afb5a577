"""ComfyUI's own errors as lines to read."""

from __future__ import annotations

from typing import Any

from .workflow import Workflow


def refusal_lines(answer: Any, workflow: Workflow) -> list[str]:
    """What /prompt answered about a prompt that it did not take, or of which it left parts out."""
    if not isinstance(answer, dict):
        return [str(answer)]
    lines = []
    node_errors = answer.get("node_errors")
    for node, found in (node_errors if isinstance(node_errors, dict) else {}).items():
        for error in found.get("errors", []):
            lines.append(f"{_label(workflow, node, found)}: {_sentence(error)}")
    error = answer.get("error")
    if isinstance(error, dict) and not lines:
        lines.append(_sentence(error))
        extra = error.get("extra_info") or {}
        if error.get("type") == "missing_node_type" and str(extra.get("class_type", "")).startswith("LingBot"):
            lines.append("The server has no LingBot World nodes: its log says what happened to the pack")
    elif isinstance(error, str):
        lines.append(error)
    return lines or ["the server refused the workflow and did not say why"]


def failure_lines(entry: dict[str, Any], workflow: Workflow) -> list[str]:
    """Why a prompt that ended in /history without success did so."""
    for event, data in entry.get("status", {}).get("messages", []):
        node = str(data.get("node_id"))
        label = _label(workflow, node, {"class_type": data.get("node_type")})
        if event == "execution_error":
            lines = [
                f"{label}: {data.get('exception_type', 'error')}: {str(data.get('exception_message', '')).strip()}"
            ]
            trace = [line.rstrip() for line in data.get("traceback") or []]
            return lines + [part for line in trace[-2:] for part in line.splitlines()]
        if event == "execution_interrupted":
            return [f"interrupted in {label}"]
    return ["the server says that it failed and does not say why"]


def was_interrupted(entry: dict[str, Any]) -> bool:
    return any(event == "execution_interrupted" for event, _ in entry.get("status", {}).get("messages", []))


def _label(workflow: Workflow, node: str, found: dict[str, Any]) -> str:
    return workflow.label(node) if node in workflow.nodes else f"{found.get('class_type') or 'node'} (node {node})"


def _sentence(error: dict[str, Any]) -> str:
    message, details = str(error.get("message", "")).strip(), str(error.get("details", "")).strip()
    return f"{message}: {details}" if details and details not in message else message or str(error)
