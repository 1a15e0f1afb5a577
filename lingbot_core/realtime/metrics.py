"""What a server counts, as Prometheus reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

_HELP = {
    "chunks_total": ("counter", "Chunks that were made."),
    "frames_total": ("counter", "Video frames that were made."),
    "stage_seconds_total": ("counter", "Seconds spent on a stage of a chunk."),
    "messages_total": ("counter", "Messages that were read."),
    "errors_total": ("counter", "Errors that were answered, by code."),
    "connections": ("gauge", "Open connections."),
    "sessions": ("gauge", "Sessions, by state."),
    "cache_bytes": ("gauge", "Bytes that the caches of sessions take."),
}
PREFIX = "lingbot_world_"


class Metrics:
    """Counters by name and labels; gauges are asked for when somebody reads them. Used on the event loop only."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
        self._gauges: dict[str, Callable[[], Mapping[tuple[tuple[str, str], ...], float]]] = {}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """name: one of those above, without the prefix."""
        self._counts[name, tuple(sorted(labels.items()))] += amount  # type: ignore[assignment]

    def count(self, name: str, **labels: str) -> float:
        """What was added so far."""
        return self._counts[name, tuple(sorted(labels.items()))]

    def gauge(self, name: str, read: Callable[[], Mapping[tuple[tuple[str, str], ...], float]]) -> None:
        """read: values by labels, such as {(("state", "awake"),): 2}."""
        self._gauges[name] = read

    def chunk(self, frames: int, seconds: Mapping[str, float]) -> None:
        """A chunk was made. seconds: by stage."""
        self.add("chunks_total")
        self.add("frames_total", frames)
        for stage, spent in seconds.items():
            self.add("stage_seconds_total", spent, stage=stage)

    def text(self) -> str:
        """All of it in Prometheus' text format, version 0.0.4."""
        lines = []
        for name, (kind, words) in _HELP.items():
            values: Mapping[tuple[tuple[str, str], ...], float] = (
                self._gauges[name]() if name in self._gauges else
                {labels: value for (known, labels), value in self._counts.items() if known == name}
            )  # fmt: skip
            lines += [f"# HELP {PREFIX}{name} {words}", f"# TYPE {PREFIX}{name} {kind}"]
            lines += [f"{PREFIX}{name}{_labels(labels)} {value:.10g}" for labels, value in sorted(values.items())]
        return "\n".join(lines) + "\n"


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
