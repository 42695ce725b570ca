"""The benchmark runner: the choice of timed peers, and the stored results. No test here depends on speed."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch

import grpo_kernels as gk
from benchmarks import items, machine, measure, plot, run, scaling, tables
from benchmarks.case import Bar, Case, Floor, Provider, Same, Sweep
from benchmarks.cases import OPS, cases, sweeps
from benchmarks.paired import Ratio, least
from tests.test_layout import OPS as PACKAGE_OPS

CPU = torch.device("cpu")
LIMITS = {"copy": 1e10, "float32": 1e11}
ROOT = Path(__file__).parent.parent


def small_case(**changes: Any) -> Case:
    case = Case(
        "sum",
        "of ten",
        "ten numbers",
        Floor(bytes=40),
        lambda device, seed: torch.arange(10.0, device=device),
        lambda x: x.sum(),
        (Provider("mean", lambda x: x.mean() * 10), Provider("twice", lambda x: (x.sum(), x.sum()), agrees=False)),
        (Bar("ratio at least", 0.0, "mean"), Bar("cost at most", 1e9, "twice")),
        Same(rtol=1e-6),
        pairs=3,
        target=1e-4,
    )
    return dataclasses.replace(case, **changes)


def result_of(*cases: dict[str, Any], **more: Any) -> dict[str, Any]:
    return run.document(CPU, list(cases), LIMITS) | more


# Cases and bars


def test_every_op_has_cases_and_a_sweep_of_four_decades() -> None:
    of_head = {"linear_logprobs", "linear_policy_loss", "linear_distillation_loss", "sampled_support"}
    assert {*OPS} == {*PACKAGE_OPS} - {"linear_head"} | of_head
    for op in OPS:
        assert cases(op, device="cpu") and cases(op, device="cuda"), op
        assert any(len(case.providers) > 0 for case in cases(op)), op
        assert max(sweep.sizes[-1] / sweep.sizes[0] for sweep in sweeps(op)) >= 1e4, op


@pytest.mark.parametrize("one", [*cases(), *sweeps()], ids=lambda one: f"{one.op}: {one.name}")
def test_every_case_has_a_floor_and_bars_of_its_providers(one: Case | Sweep) -> None:
    assert one.floor.bytes > 0 or one.floor.flops > 0
    if isinstance(one, Case):
        names = [provider.name for provider in one.providers]
        assert len(names) == len(set(names))
        assert {bar.of for bar in one.bars if bar.of} <= {*names, *one.arrays}
        assert set(one.quick) <= set(names)


def test_names_of_cases_are_unique() -> None:
    names = [(case.op, case.name, device) for device in ("cpu", "cuda") for case in cases(device=device)]
    assert len(names) == len(set(names))


# Every CPU bar by kind, provider and limit. Bars must not be removed or relaxed.
HEADS = ("N=1024 H=256 V=32000", "N=2048 H=512 V=50304")
HALVES = "N=512 H=1024 V=32000"  # in bfloat16
HEAD_PEERS = ("naive autograd", "F.linear_cross_entropy", "F.linear_cross_entropy, chunked", "trl", "verl")
CLIPPED = [f"{head}, PPO with {share}% clipped" for head in HEADS for share in (0, 5, 30, 50)]
TAUGHT = (("ratio at least", "two losses", 1.6), ("cost at most", "linear_policy_loss", 1.2))
WHOLE = (
    ("cost at most", "four bare products", 1.15),
    ("ratio at least", "naive autograd", 1),
    ("memory below", "naive autograd", 0.2),
)
SIZES = (8, 16, 32, 64)
SETTINGS = ("the same again", "ipo", "icepop", "topr", "gspo", "is_weights", "policy_mask")
BARS = {
    ("group_advantages", "groups of 8", "ratio at least", "verl-grpo", 300),
    ("group_advantages", "groups of 8", "ratio at least", "trl", 5),
    ("group_advantages", "groups of 8", "ratio at least", "verl-grpo-vectorized", 5),
    ("group_advantages", "unsorted ids", "ratio at least", "torch, unique + index_add", 3),
    ("group_advantages", "unsorted ids", "ratio at least", "torch, sort + segment_reduce", 3),
    ("group_advantages", "one small call", "microseconds at most", "", 25),
    ("group_advantages", "groups of 8", "ratio at least", "torch.compile", 1),
    ("group_advantages", "unsorted ids", "ratio at least", "torch, index_add, ids known dense", 1),
    ("group_advantages", "groups of 8", "exponent below", "", 1.25),
    ("group_advantages", "unsorted ids", "exponent below", "", 1.25),
    ("token_logprobs", "forward and backward", "ratio at least", "trl", 2),
    ("token_logprobs", "forward and backward", "ratio at least", "torch, log_softmax", 2),
    ("token_logprobs", "forward and backward", "ratio at least", "torch.compile", 1),
    ("token_logprobs", "forward", "ratio at least", "torch.compile", 1),
    ("token_logprobs", "forward and backward", "memory below", "the logits", 1.1),
    ("token_logprobs", "in place, from a head", "memory below", "the logits", 1.1),
    ("policy_loss", "clip and k3", "ratio at least", "trl", 15),
    ("policy_loss", "clip and k3", "ratio at least", "verl", 10),
    ("policy_loss", "clip and k3", "ratio at least", "torch.compile", 3),
    ("policy_loss", "clip and k3", "cost at most", "two torch.exp", 3),
    ("policy_loss", "one small call", "microseconds at most", "", 60),
    ("policy_loss", "half the tokens, packed", "ratio at least", "all tokens", 1.6),
    ("policy_loss", "one token in 16 of many, packed", "ratio at least", "all tokens", 8),
    *(("policy_loss", "clip, and other losses", "ratio at most", setting, 1.5) for setting in SETTINGS),
    *(("linear_logprobs", f"{HEADS[0]}, verl's actor", "memory below", f"verl, {x}", 0.3) for x in ("fused", "logits")),
    *(("linear_policy_loss", head, "cost at most", "three bare products", 1.15) for head in HEADS),
    *(("linear_policy_loss", head, "ratio at least", peer, 1) for head in HEADS for peer in HEAD_PEERS),
    *(("linear_policy_loss", head, "memory below", "naive autograd", 0.15) for head in HEADS),
    ("linear_policy_loss", HALVES, "cost at most", "three bare products", 1.3),
    *(("linear_policy_loss", HALVES, "ratio at least", peer, 1) for peer in HEAD_PEERS),
    ("linear_policy_loss", HALVES, "memory below", "naive autograd", 0.5),
    *(("linear_policy_loss", f"{head}, one row in 16", "ratio at least", "all rows", 10) for head in HEADS),
    *(("linear_policy_loss", f"{head}, half the advantages 0", "ratio at least", "all rows", 1.4) for head in HEADS),
    *(("linear_policy_loss", clip, "memory below", "the logits", 0.4) for clip in CLIPPED),
    *(
        ("linear_policy_loss", f"{head}, an adapter of rank 16", "ratio at least", "merged weight", 1.2)
        for head in HEADS
    ),
    *(("linear_policy_loss", c, "ratio at least", "nothing clipped", 1.3 if "50%" in c else 0.9) for c in CLIPPED),
    *(("linear_distillation_loss", f"{head} k=64", "cost at most", "three bare products", 1.25) for head in HEADS),
    *(("linear_distillation_loss", f"{head} k=64", "cost at most", "linear_policy_loss", 1.2) for head in HEADS),
    *(("linear_distillation_loss", f"{head} k=64", "memory below", "naive autograd", 0.2) for head in HEADS),
    *(("linear_distillation_loss", f"{head} k=64, with the policy loss", *bar) for head in HEADS for bar in TAUGHT),
    *(
        ("linear_distillation_loss", f"{h} k=64", "ratio at least", x, 1)
        for h in HEADS
        for x in ("naive autograd", "trl")
    ),
    *(("linear_distillation_loss", f"{head}, from hidden states", *bar) for head in HEADS for bar in WHOLE),
    ("group_advantages", "rollouts of four rows", "cost at most", "ours, rows as rollouts", 1.5),
    ("group_advantages", "rollouts of four rows", "ratio at least", "ours, of first rows by torch", 1),
    ("endpoint_segments", "norm=none", "ratio at least", "a loop over tokens", 200),
    ("endpoint_segments", "norm=none", "exponent below", "", 1.1),
    ("endpoint_segments", "norm=none", "growth at most", "", 2),
    ("endpoint_segments", "norm=none, with a critic", "cost at most", "exp, expm1 and two cumsum", 3),
    ("endpoint_segments", "norm=none, without a critic", "cost at most", "exp, expm1 and two cumsum", 3),
    ("endpoint_segments", "norm=batch, with a critic", "cost at most", "exp, expm1 and two cumsum", 3),
    ("endpoint_segments", "norm=batch, without a critic", "cost at most", "exp, expm1 and two cumsum", 3),
    *(("sampled_support", f"{head}, 8 ids", "ratio at least", "full head", 20) for head in HEADS),
    ("sampling_correction", "verl's defaults", "ratio at least", "verl", 1),
    ("sampling_correction", "verl's defaults", "memory below", "verl", 2),
    ("sampling_correction", "token weights and two rejections", "ratio at least", "verl", 1),
    ("token_advantages", "gae", "ratio at least", "verl", 30),
    ("token_advantages", "gae", "cost at most", "cumsum in float64", 4),
    ("token_advantages", "gae", "exponent below", "", 1.1),
    ("token_advantages", "gae", "growth at most", "", 2),
    ("token_advantages", "reinforce_plus_plus", "ratio at least", "verl", 20),
    ("token_advantages", "gae of turns", "cost at most", "cumsum in float64", 8),
    *(("similarity_groups", f"K={size}", "ratio at least", "scikit-learn", 600) for size in SIZES),
    *(("similarity_groups", f"K={size}", "ratio at least", "fastcluster", 10) for size in SIZES),
    *(
        ("similarity_groups", f"pairwise_cosine K={size}", "ratio at least", "torch's batched product", 0.7)
        for size in SIZES
    ),
    ("similarity_groups", "K=32, linear in prompts", "ratio at least", "four times the prompts", 3.2),
    ("similarity_groups", "K=32, linear in prompts", "ratio at most", "four times the prompts", 4.8),
    ("similarity_groups", "K=64, many prompts", "memory below", "distances of 256 prompts", 1),
}


def bars_of(ones: list[Any]) -> set[tuple[Any, ...]]:
    return {(one.op, one.name, bar.kind, bar.of, bar.limit) for one in ones for bar in one.bars}


def test_no_bar_is_lost() -> None:
    assert bars_of([*cases(device="cpu"), *sweeps()]) == BARS


def test_bars_of_a_gpu() -> None:
    limits = {bar.limit for case in cases(device="cuda") for bar in case.bars if bar.of == "three bare products"}
    assert limits == {1.2}
    times = [bar.limit for case in cases(device="cuda") for bar in case.bars if bar.kind == "microseconds at most"]
    assert times == [25, 80, 110]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("ratio at least", 3, 2.99),
        ("ratio at most", 3, 3.01),
        ("cost at most", 3, 3.01),
        ("memory below", 2.99, 3),
        ("microseconds at most", 3, 3.01),
        ("exponent below", 2.99, 3),
        ("growth at most", 3, 3.01),
    ],
)
def test_a_bar_is_met_on_its_side_of_the_limit(kind: str, good: float, bad: float) -> None:
    assert Bar(kind, 3).held(good) and not Bar(kind, 3).held(bad)


def test_an_unknown_kind_of_bar_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Bar: kind must be one of ratio at least, .* got 'fast'"):
        Bar("fast", 3)


# Measurements


def test_a_case_is_measured_completely() -> None:
    result = measure.measure(small_case(), CPU, LIMITS)
    assert result["ours"]["low"] <= result["ours"]["us"] <= result["ours"]["high"]
    assert result["ours"]["of_ceiling"] == pytest.approx(40 / 1e10 * 1e6 / result["ours"]["us"])
    assert [bar["held"] for bar in result["bars"]] == [True, True]
    assert set(result["memory"]) == {"ours", "mean"}
    assert result["bars"][1]["value"] == pytest.approx(1 / result["providers"]["twice"]["ratio"])


def test_a_peer_with_other_results_is_refused_and_not_timed() -> None:
    timed: list[int] = []

    def wrong(x: torch.Tensor) -> torch.Tensor:
        timed.append(1)
        return x.sum() * (1 + 1e-5)

    case = small_case(providers=(Provider("wrong", wrong),), bars=(Bar("ratio at least", 0.0, "wrong"),))
    result = measure.measure(case, CPU, LIMITS)
    assert "the results of wrong differ from ours" in result["providers"]["wrong"]["refused"]
    assert "ratio" not in result["providers"]["wrong"]
    assert len(timed) == 1
    assert result["bars"][0]["held"] is None


def test_a_wrong_advantage_is_refused() -> None:
    (case,) = cases("group_advantages", "one small call")
    wrong = Provider("wrong", lambda i: case.ours(i) * 1.01)
    (real,) = cases("group_advantages", "groups of 8", "cpu")
    assert "refused" in measure.verdict(real, wrong, CPU)
    assert measure.verdict(real, Provider("right", lambda i: case.ours(i) * 1.001), CPU) == {}


def test_other_groups_are_refused() -> None:
    (case,) = cases("similarity_groups", "K=8", "cpu")[:1]
    peer = case.provider("fastcluster")
    wrong = dataclasses.replace(peer, call=lambda e: [cut._replace(score=cut.score + 1e-3) for cut in peer.call(e)])
    assert "different silhouette" in measure.verdict(case, wrong, CPU)["refused"]
    assert measure.verdict(case, peer, CPU) == {}


def test_a_provider_that_cannot_run_has_a_reason() -> None:
    providers = (
        Provider("absent", torch.sum, package="no_such_package"),
        Provider("gpu", torch.sum, devices=("cuda",)),
    )
    result = measure.measure(small_case(providers=providers, bars=()), CPU, LIMITS)["providers"]
    assert result == {
        "absent": {"missing": "no_such_package is not installed"},
        "gpu": {"missing": "not made for the device cpu"},
    }


def test_smaller_inputs_count_by_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "paired", lambda *_, **__: Ratio(1.0, 3.0, 3.0, 2.0, 4.0))
    few = Provider("few", lambda x: x.sum(), few=lambda device, seed: torch.arange(5.0), share=0.5)
    result = measure.measure(small_case(providers=(few,), bars=()), CPU, LIMITS)["providers"]["few"]
    assert [result[name] for name in ("us", "ratio", "low", "high")] == [6, 6, 4, 8]


def test_processor_times_are_compared_on_one_thread() -> None:
    threads: list[int] = []

    def busy(rounds: int) -> None:
        threads.append(torch.get_num_threads())
        sum(range(rounds))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    ratio = least(lambda: busy(40_000), lambda: busy(120_000), pairs=15)
    assert torch.get_num_threads() == 2 and set(threads) == {1}
    torch.set_num_threads(before)
    assert 2 < ratio.ratio < 4.5 and ratio.ratio == pytest.approx(ratio.theirs / ratio.ours)


def test_inputs_take_turns() -> None:
    call = measure.in_turn(lambda x: x, [1, 2, 3])
    assert [call() for _ in range(5)] == [1, 2, 3, 1, 2]


def test_quick_measurements_use_one_thread_and_steady_providers() -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        case = small_case(ours=lambda x: seen.append(torch.get_num_threads()) or x.sum(), quick=("mean",))
        result = run.quick(case, CPU)
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert list(result["providers"]) == ["mean"] and result["bars"] == [] and result["memory"] == {}


@pytest.mark.full
def test_memory_is_the_peak_without_the_results() -> None:
    size = 32 * 2**20
    case = small_case(
        inputs=lambda device, seed: torch.ones(size // 4),
        ours=lambda x: (x + 1) * 2,
        providers=(),
        arrays={"x": lambda x: size},
        returned=lambda x: size,
        bars=(Bar("memory below", 1.1, "x"), Bar("memory below", 0.9, "x")),
    )
    if sys.platform != "linux":
        pytest.skip("peak memory of a process is only implemented for Linux")
    assert [bar["held"] for bar in measure.measure(case, CPU, LIMITS)["bars"]] == [True, False]


# Results


@pytest.mark.full
def test_results_survive_json(tmp_path: Path) -> None:
    result = result_of(measure.measure(small_case(), CPU, LIMITS))
    run.write(tmp_path / "a.json", result)
    assert json.loads((tmp_path / "a.json").read_text()) == result


def test_the_machine_is_described_without_names() -> None:
    result = machine.describe()
    assert result["packages"]["torch"] == torch.__version__  # type: ignore[index]
    assert result["grpo_kernels"] == gk.__version__
    text = json.dumps(result)
    for secret in (__import__("socket").gethostname(), str(Path.home()), str(ROOT)):
        assert secret == "/" or secret not in text


def test_the_ceiling_is_of_copies_and_products() -> None:
    result = measure.ceiling(CPU, copied=2**16, side=64)
    assert set(result) == {"copy", "float32", "bfloat16"}
    assert all(1e6 < value < 1e15 for value in result.values())


def test_the_runner_lists_and_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "ceiling", lambda device: LIMITS)
    run.main(["--list", "--op", "linear_policy_loss", "--device", "cpu"])
    listed = capsys.readouterr().out
    assert "not made for the device cpu" in listed and "bar: ratio to trl, at least 1" in listed
    out = tmp_path / "a.json"
    run.main(["--op", "group_advantages", "--case", "one small", "--device", "cpu", "--json", str(out), "--date"])
    assert "bar" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert set(result) == {"machine", "device", "ceiling", "cases", "date"}
    assert result["cases"][0]["bars"][0]["limit"] == 25


@pytest.mark.full
def test_the_first_of_each_op_comes_first_and_the_budget_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = cases(device="cpu")
    firsts = [case.op for case in run.round_robin(table)][: len(OPS)]
    assert sorted(firsts) == OPS and len(list(run.round_robin(table))) == len(table)
    clock = iter([0.0, 1.0, 99.0, 99.0])  # at the start and before each case
    monkeypatch.setattr(run, "ceiling", lambda device: LIMITS)
    monkeypatch.setattr(run, "cases", lambda op, name, device: [small_case(name=name) for name in "abc"])
    monkeypatch.setattr(run, "OPS", ["sum"])
    monkeypatch.setattr(items, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    out = tmp_path / "a.json"
    run.main(["--budget", "60", "--device", "cpu", "--json", str(out)])
    result = json.loads(out.read_text())
    assert len(result["cases"]) == 1 and result["left_out"] == ["sum, b", "sum, c"]
    assert "left out: sum, b" in capsys.readouterr().out


@pytest.mark.full
def test_a_failing_case_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(run, "ceiling", lambda device: LIMITS)
    monkeypatch.setattr(run, "cases", lambda op, name, device: [small_case(name="broken", ours=fails), small_case()])
    out = tmp_path / "a.json"
    with pytest.raises(SystemExit, match=r"(?s)run: not measured:.*sum, broken: MemoryError"):
        run.main(["--device", "cpu", "--json", str(out)])
    result = json.loads(out.read_text())
    assert len(result["cases"]) == 1 and result["failed"] == ["sum, broken: MemoryError: no room"]


def test_no_such_case_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no case of policy_loss on cpu has 'nonsense' in its name"):
        run.main(["--op", "policy_loss", "--case", "nonsense", "--device", "cpu"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("main", [run.main, scaling.main])
def test_a_missing_gpu_is_an_error(main: Callable[[list[str]], None]) -> None:
    with pytest.raises(SystemExit, match="--device must be available, got 'cuda'"):
        main(["--device", "cuda", "--op", "policy_loss"])


def test_rounds_below_zero_are_an_error() -> None:
    with pytest.raises(SystemExit, match=r"run: --rounds must be at least 1, or 0 .* got -1"):
        run.main(["--rounds", "-1"])


# Pictures and tables


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    points = [{"size": 10**e, "us": 2.0 * 10**e + 5, "floor_us": 10.0**e} for e in range(5)]
    sweep = {
        "op": "sum",
        "name": "all",
        "unit": "numbers",
        "points": points,
        "exponent": 1.0,
        "fit_from": 100,
        "bars": [],
    }
    return [result_of(measure.measure(small_case(), CPU, LIMITS)), result_of(sweeps=[sweep])]


@pytest.mark.full
def test_plots_are_light_and_dark(
    results: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "SUMMARY", {"sum": ("mean",)})
    total = {"seconds_median": 0.2}
    rows = [{"who": who, "phase": phase, "seconds_median": 0.1} for who in "ab" for phase in ("model", "rest")]
    step = {"device": "cpu", "model": {"name": "tiny"}, "rows": rows, "totals": [total | {"who": who} for who in "ab"]}
    written = plot.write_all([*results, step], tmp_path)
    assert [path.name for path in written] == [
        f"{name}_{theme}.png" for name in ("summary", "ratios", "scaling", "step") for theme in ("light", "dark")
    ]
    for path in written:
        image = matplotlib.image.imread(path)
        assert image.shape[1] == 1660
        corner = float(image[0, 0, :3].mean())
        assert corner > 0.9 if "light" in path.name else corner < 0.1
        assert math.isclose(float(image.std()), 0, abs_tol=1e-3) is False


def test_tables_go_between_the_marks(results: list[dict[str, Any]], tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text("before\n<!-- measured on cpu -->\nold\n<!-- end of cpu -->\nafter\n")
    files = []
    for i, result in enumerate(results):
        files.append(str(tmp_path / f"{i}.json"))
        run.write(Path(files[-1]), result)
    tables.main([*files, "--into", str(document)])
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| `sum`, of ten, float32 |" in text and "| `sum`, all | 1 numbers" in text
    with pytest.raises(SystemExit, match="once each"):
        tables.replaced("no marks", "cpu", "new")


def test_the_document_has_a_place_for_each_device() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    for device in ("cpu", "cuda"):
        assert tables.replaced(text, device, "new").count("new") >= 1


def test_scaling_prints_the_exponent(results: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    scaling.show(results[1]["sweeps"][0])
    assert "time grows like n^1.000 from 100 numbers on" in capsys.readouterr().out


# Providers that fail


def test_a_peer_that_breaks_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(_: Any) -> Any:
        raise MemoryError("no room")

    case = small_case(providers=(*small_case().providers, Provider("broken", breaks)))
    result = measure.measure(case, CPU, LIMITS)
    assert result["providers"]["broken"] == {"failed": "MemoryError: no room"} and result["providers"]["mean"]["ratio"]
    assert run.broken(result) == ["broken: FAILED: MemoryError: no room"]
    run.show(result)
    assert "FAILED: MemoryError: no room" in capsys.readouterr().out


def test_a_feature_that_a_package_lacks_is_reported() -> None:
    provider = Provider("new", lambda x: x, lacks=lambda: "torch 2.11 has none")
    assert provider.missing(CPU) == "torch 2.11 has none"


@pytest.mark.full
def test_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "python -m benchmarks.compare A.json B.json" in done.stdout
