"""Reports: the page of a run, of several runs, of evaluated models, and of LoRA adapters."""

from grpo_trainer.report.adapters import write_adapters
from grpo_trainer.report.compare import Comparison, compare
from grpo_trainer.report.comparison import write_comparison, write_evaluation
from grpo_trainer.report.run_page import summary, write_report

__all__ = [
    "Comparison",
    "compare",
    "summary",
    "write_adapters",
    "write_comparison",
    "write_evaluation",
    "write_report",
]
