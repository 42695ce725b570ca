"""Runs the command grpo: python -m grpo_trainer train RECIPE."""

from grpo_trainer.cli import main

raise SystemExit(main())
