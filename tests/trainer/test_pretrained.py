"""Sources of models: names of the hub, and what is shown meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from grpo_trainer.loading import load_lm
from grpo_trainer.pretrained import _announce_hub, load_tokenizer, loading, without_bars
from grpo_trainer.recipe import Model
from grpo_trainer.rewards.reward_model import make
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

ANNOUNCED = "someone/some-model is no folder here: loading it from the Hugging Face hub\n"


@pytest.fixture(autouse=True)
def bars() -> Iterator[None]:
    _announce_hub.cache_clear()
    enable_progress_bar()
    yield
    enable_progress_bar()


def test_a_hub_name_is_announced_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with loading("model.path", str(tmp_path)):
        pass
    assert capsys.readouterr().err == ""
    for _ in range(2):
        with loading("model.path", "someone/some-model"):
            pass
    assert capsys.readouterr().err == ANNOUNCED


def test_what_is_there_and_no_model_is_named_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^model\.path: '.*' cannot be loaded: "):
        load_tokenizer(str(tmp_path))
    file = r"^model\.path: must be a folder, a GGUF file or a hub name, got the file '.*config\.json'"
    with pytest.raises(ValueError, match=file):
        load_tokenizer(str(tmp_path / "config.json"))


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    missing = r"^model\.path: no such model '.*modle': there is no '.*modle'; the nearest is '.*model'$"
    with pytest.raises(FileNotFoundError, match=missing), loading("model.path", str(tmp_path / "modle")):
        pass


@pytest.mark.parametrize("key", ["model.path", "reward_model.path"])
def test_the_hub_has_no_such_model(key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modell").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    load = {
        "model.path": lambda: load_lm(Model(path="model"), "cpu"),
        "reward_model.path": lambda: make(path="model", template="{response}"),
    }[key]
    message = f"^{key}: 'model' is no folder here; the nearest is 'modell', and was not loaded .* hub: .*offline"
    with pytest.raises(OSError, match=message):
        load()


def test_a_folder_of_a_run_names_the_model_in_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "1-000002" / "model").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no model in '.*': the folder has no config\.json$"):
        load_lm(Model(path=str(tmp_path)), "cpu")
    adapters = tmp_path / "checkpoints" / "1-000001" / "model"
    adapters.mkdir(parents=True)
    (adapters / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"config\.json; the last one in it is '.*/1-000001/model'$"):
        load_lm(Model(path=str(tmp_path)), "cpu")
    (tmp_path / "checkpoints" / "1-000002" / "model" / "config.json").write_text("{}")
    (tmp_path / "reference-1" / "model").mkdir(parents=True)
    (tmp_path / "reference-1" / "model" / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"config\.json; the last one in it is '.*/1-000002/model'$"):
        load_lm(Model(path=str(tmp_path)), "cpu")
    with (
        pytest.raises(FileNotFoundError, match=r"^model\.path: no such model './nope'"),
        loading("model.path", "./nope"),
    ):
        pass


def test_a_name_that_the_hub_does_not_allow() -> None:
    with pytest.raises(OSError, match=r"^model\.path: 'no such model!' is no folder here, and was not loaded"):
        load_lm(Model(path="no such model!"), "cpu")


def test_repeated_warnings_of_the_hub_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    from huggingface_hub.utils.logging import get_logger

    root, logger = logging.getLogger("huggingface_hub"), get_logger("huggingface_hub.utils._http")
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    root.addHandler(handler)
    try:
        with loading("model.path", "someone/some-model"):
            for number in (1, 2):
                logger.warning("no route to the hub")
                logger.warning(f"Retrying in {number}s [Retry {number}/5].")
            logger.warning("another")
        logger.warning("no route to the hub")
    finally:
        root.removeHandler(handler)
    assert shown == ["no route to the hub", "another", "no route to the hub"]


def test_bars_are_as_they_were_afterwards() -> None:
    with without_bars():
        assert not is_progress_bar_enabled() and not are_progress_bars_disabled()
    assert is_progress_bar_enabled() and not are_progress_bars_disabled()
    disable_progress_bar()
    with without_bars():
        assert not is_progress_bar_enabled() and are_progress_bars_disabled()
    assert not is_progress_bar_enabled() and are_progress_bars_disabled()
