"""Changes of the logits after the head in transformers' models, against those that our head in verl knows of."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("tensordict")

import transformers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from grpo_kernels.integrations.verl import head as _head


@pytest.mark.full
def test_every_change_of_logits_in_transformers_is_known() -> None:
    """Reads transformers' sources for models with an lm_head whose results are changed."""
    known = {*_head._SOFTCAPS, *_head._SCALES, _head._SCALING, "final_logit_softcapping"}
    # heads that are not linear layers, or models without the attribute `model`: verl cannot run them either
    beyond = {"ModernBertDecoderForCausalLM", "ClvpForCausalLM", "ProphetNetForCausalLM"}
    beyond |= {"Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM", "ProphetNetForConditionalGeneration"}
    unknown, seen = set(), set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for kind, change in _changes(path.read_text()):
            parts = list(ast.walk(change))
            names = {part.attr for part in parts if isinstance(part, ast.Attribute)}
            names |= {part.id for part in parts if isinstance(part, ast.Name)}
            seen |= names & known
            is_cap = {"tanh", "cap", "soft_cap"} & names
            is_of_encoder_decoder = "final_logits_bias" in names
            if not (names & known or is_cap or is_of_encoder_decoder or kind in beyond):
                unknown.add((path.parent.name, ast.unparse(change)))
    assert {model_type for model_type, _ in unknown} == set(_head._UNSUPPORTED_MODELS), unknown
    assert {"final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"} <= seen


def _changes(source: str) -> Iterator[tuple[str, ast.stmt]]:
    """Statements that change logits after the head, with the names of their classes."""
    lines = source.splitlines()
    for kind in ast.parse(source).body if "self.lm_head(" in source else ():
        for function in kind.body if isinstance(kind, ast.ClassDef) else ():
            is_forward = isinstance(function, ast.FunctionDef) and function.name == "forward"
            if not is_forward or not any("self.lm_head(" in x for x in lines[function.lineno : function.end_lineno]):
                continue
            for line in ast.walk(function):
                if not isinstance(line, ast.Assign | ast.AugAssign):
                    continue
                targets = line.targets if isinstance(line, ast.Assign) else [line.target]
                places = [target.value if isinstance(target, ast.Subscript) else target for target in targets]
                if not any(isinstance(place, ast.Name) and place.id in ("logits", "lm_logits") for place in places):
                    continue
                called = ast.unparse(line.value.func) if isinstance(line.value, ast.Call) else ""
                if called != "self.lm_head" and not called.endswith((".float", ".contiguous")):
                    yield kind.name, line
