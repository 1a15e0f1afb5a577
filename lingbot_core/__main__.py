"""``python -m lingbot_core VERB``: the same as the command ``lingbot-world VERB``."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
