"""Ops that decide by comparing numbers launch with rounding as written in the source (docs/numerics.md).

tests/test_triton_aot.py checks the effect of the option on the declared cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import grpo_kernels as gk

interpreter = pytest.importorskip("triton.runtime.interpreter")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the launches of Triton's interpreter")


def test_launches_ask_for_no_contraction(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, Any] = {}
    launch = interpreter.GridExecutor.__call__

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched[f"{self.fn.__module__.split('.')[2]}.{self.fn.__name__.lstrip('_')}"] = kwargs.get("enable_fp_fusion")
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", record)
    with gk.use_backend("triton"):
        distances = gk.pairwise_cosine(torch.randn(8, 5), 4)
        gk.similarity_groups(torch.randn(8, 5), 4)
        gk.agglomerate(distances)
        gk.silhouette(distances, torch.zeros(2, 4, dtype=torch.int64))
    kernels = {
        "similarity_groups": ("products", "distances", "tree", "cuts", "silhouette"),
    }
    assert launched == {f"{op}.{name}_kernel": False for op, names in kernels.items() for name in names}
