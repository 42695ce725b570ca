"""`python -m grpo_trainer`: grpo-train, with the default recipe if none is named."""

from __future__ import annotations

import sys

from grpo_trainer.cli import train

if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(train(given if given else ["arithmetic", "--fresh"]))
