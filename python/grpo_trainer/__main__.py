"""`python -m grpo_trainer`: grpo-train, for launchers that take a module."""

from __future__ import annotations

import sys

from grpo_trainer.cli import train

if __name__ == "__main__":
    sys.exit(train())
