"""The base of all parts of a recipe."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from grpo_trainer.messages import nearest

Rule = tuple[str, bool, str]  # the key that errors name, whether the rule is met, the rule
EMBEDDERS = ("auto", "hashed", "minilm")
NAMES_OF_EMBEDDERS = "hashed, minilm, or a sentence-transformers name or folder; auto: minilm if installed"

PathText = Annotated[str, AfterValidator(os.path.expanduser)]  # ~ is the home folder, as in a shell
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of a recipe. Other keys are refused, and so are values that would have to be converted."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="after")
    def _check(self) -> Any:
        for key, is_met, rule in self.rules():
            if not is_met:
                value = getattr(self, key.partition(".")[0])
                for name in key.split(".")[1:]:
                    value = getattr(value, name)
                raise ValueError(f"{key}: {rule}, got {value!r}")
        return self

    def rules(self) -> Iterator[Rule]:
        """Yields the rules over several keys."""
        yield from ()


def embedder_rule(name: str) -> Rule:
    """A name that is none of ours is sought on the hub, unless it looks like one of ours misspelt."""
    is_own = name in EMBEDDERS or "/" in name or Path(name).exists()
    near = difflib.get_close_matches(name, EMBEDDERS, 1, 0.75)
    return "embedder", is_own or not near, f"must be {NAMES_OF_EMBEDDERS}{nearest(name, EMBEDDERS)}"
