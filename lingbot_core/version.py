"""The version of the pack: the one place that reports, videos and pyproject.toml take it from."""

__version__ = "0.1.0"
