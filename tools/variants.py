"""Writes the tables of all losses, advantage estimators and published variants, read from the code, into the docs.

python -m tools.variants
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from grpo_kernels import AdvantageConfig, LossConfig
from grpo_kernels.ops.policy_loss import config as loss
from grpo_kernels.ops.policy_loss.trl_fields import TRL_LOSS_TYPES
from grpo_kernels.ops.policy_loss.verl_fields import VERL_LOSSES, VERL_REFUSED

DOCS = Path(__file__).parent.parent / "docs"
MARKS = ("<!-- variants, written by tools/variants.py -->", "<!-- end of variants -->")
FIELDS = {
    "loss": loss.LOSSES,
    "ratio": loss.RATIOS,
    "kl": loss.KLS,
    "aggregation": loss.AGGREGATIONS,
}
# Fields without a default.
REQUIRED = {"dro": {"dro_beta": 1.0}}
# Derived for the kernels, or shown in a column of its own.
HIDDEN = {"modes", "coefficients", "weight_list", "estimator", "loss", "ratio", "aggregation"}

Fields = dict[str, object]


# Published variants, each with its setting here, its source and its test


class Variant(NamedTuple):
    name: str
    setting: str  # an expression of `gk` and the names of arguments
    source: str
    test: str  # below tests, with its function


LOSSES = (
    Variant(
        "IPO",
        "gk.LossConfig(loss='ipo', clip_low=0.3, clip_high=0.3)",
        "prime-rl#3418, #3526",
        "variants/test_losses.py::test_loss_gradient_and_clipped_tokens",
    ),
    Variant(
        "IcePop",
        "gk.LossConfig(loss='icepop', clip_low=0.8, clip_high=4.0)",
        "prime-rl#3418, #3526",
        "variants/test_losses.py::test_loss_gradient_and_clipped_tokens",
    ),
    Variant(
        "TOPR",
        "gk.LossConfig(loss='topr')",
        "arXiv 2503.14286, Trinity-RFT, ROLL",
        "variants/test_losses.py::test_loss_gradient_and_clipped_tokens",
    ),
    Variant(
        "on-policy distillation",
        "gk.policy_loss(logprobs, old_logprobs, teacher_logprobs - old_logprobs, config=gk.LossConfig('reinforce'))",
        "NeMo-RL, ROLL",
        "variants/test_mixtures.py::test_on_policy_distillation",
    ),
    Variant(
        "ROLL's `tis`",
        "gk.LossConfig('cispo', clip_low=1.0, clip_high=0.0)",
        "ROLL",
        "ops/policy_loss/test_which_loss.py::test_row_is_the_systems_loss",
    ),
    Variant(
        "ROLL's `kimi15`",
        "gk.LossConfig('dro', dro_beta=0.1)",
        "arXiv 2501.12599, ROLL",
        "ops/policy_loss/test_which_loss.py::test_row_is_the_systems_loss",
    ),
    Variant(
        "cosmos-rl's `aipo_rho`",
        "gk.LossConfig(clip_low=None, clip_high=1.0, delta=2.0)",
        "arXiv 2505.24034, cosmos-rl",
        "ops/policy_loss/test_which_loss.py::test_row_is_the_systems_loss",
    ),
)
COMPOSED = (
    Variant(
        "Clip-Cov",
        "gk.variants.clip_cov_weights(logprobs, old_logprobs, advantages)",
        "arXiv 2505.22617, verl, SkyRL",
        "variants/test_tokens.py::test_clip_cov_drops_tokens_within_the_bounds",
    ),
    Variant(
        "KL-Cov",
        "gk.variants.kl_cov_penalty(logprobs, old_logprobs, advantages, gk.token_shares(mask))",
        "arXiv 2505.22617, verl, SkyRL",
        "variants/test_tokens.py::test_kl_cov_takes_the_highest_covariances",
    ),
    Variant(
        "OPSM",
        "gk.variants.off_policy_mask(logprobs, sampling_logprobs, advantages, threshold=0.1)",
        "DeepSeek-V3.2, TRL, cosmos-rl",
        "variants/test_tokens.py::test_off_policy_rows_of_negative_advantage_are_dropped",
    ),
    Variant(
        "tokens of high entropy",
        "gk.variants.high_entropy_mask(entropy, mask, 0.2)",
        "arXiv 2506.01939, TRL",
        "variants/test_tokens.py::test_high_entropies_are_those_of_a_quantile",
    ),
    Variant(
        "FIPO",
        "gk.variants.future_kl_weights(logprobs, old_logprobs, advantages, cap=10.0)",
        "arXiv 2603.19835, ms-swift",
        "variants/test_tokens.py::test_future_kl_weights_are_the_published_ones",
    ),
    Variant(
        "GVPO",
        "gk.variants.gvpo_loss(logprobs, old_logprobs, rewards, groups)",
        "arXiv 2504.19599 and its verl recipe",
        "variants/test_rows.py::test_published_formula",
    ),
    Variant(
        "REAL",
        "gk.variants.real_loss(logprobs, old_logprobs, advantages, groups)",
        "arXiv 2602.05630, ms-swift",
        "variants/test_rows.py::test_published_formula",
    ),
    Variant(
        "FlowRL",
        "gk.variants.flowrl_loss(logprobs, old_logprobs, ref_logprobs, rewards, log_z, clip_high=0.28)",
        "arXiv 2509.15207 and its verl recipe",
        "variants/test_rows.py::test_published_formula",
    ),
    Variant(
        "ratio level `average`",
        "gk.variants.average_logprobs(logprobs, old_logprobs)",
        "OpenPipe ART",
        "variants/test_tokens.py::test_ratio_levels_of_art",
    ),
    Variant(
        "ratio level `geometric_average`",
        "gk.variants.geometric_average_logprobs(logprobs, old_logprobs)",
        "OpenPipe ART",
        "variants/test_tokens.py::test_ratio_levels_of_art",
    ),
    Variant(
        "positive-example NLL",
        "loss - 0.1 * logprobs[rewarded].mean()",
        "VAPO (arXiv 2504.05118), cosmos-rl, NeMo-RL",
        "variants/test_mixtures.py::test_cross_entropy_of_positive_examples",
    ),
    Variant(
        "policy gradient and cross-entropy with counts of their own",
        "loss - logprobs[imitated].mean()",
        "prime-rl",
        "variants/test_mixtures.py::test_components_with_counts_of_their_own",
    ),
    Variant(
        "CHORD",
        "(1 - mu) * loss - mu * (probs * (1 - probs) * logprobs)[expert].mean()",
        "arXiv 2508.11408, Trinity-RFT, ms-swift",
        "variants/test_mixtures.py::test_chord",
    ),
    Variant(
        "LUFFY's shaping",
        "loss - (gk.token_shares(mask) * advantages * probs / (probs + 0.1))[expert].sum()",
        "arXiv 2504.14945",
        "variants/test_mixtures.py::test_shaping_of_luffy",
    ),
    Variant(
        "score centering",
        "gk.Teacher(ids, mu_logprobs, tail='bucket', weights=-advantages * is_weights * gk.token_shares(mask))",
        "arXiv 2609.20807, SkyRL#2244, miles#3317",
        "variants/test_mixtures.py::test_score_centering",
    ),
)
CORRECTIONS = (
    Variant(
        "truncated and masked weights of tokens, rows and their geometric means",
        "gk.CorrectionConfig(weights='geometric', weight_max=2.0, outside='mask')",
        "TRL, verl, SkyRL",
        "ops/sampling_correction/test_reference.py::test_any_weights_and_mask_are_their_formulas",
    ),
    Variant(
        "the eleven rejections of verl",
        "gk.CorrectionConfig.verl(rollout_rs='seq_mean_k1', rollout_rs_threshold='0.5_2.0')",
        "verl",
        "ops/sampling_correction/test_peers.py::test_equals_verl",
    ),
    Variant(
        "TRL's corrections",
        "gk.CorrectionConfig.trl()",
        "TRL",
        "ops/sampling_correction/test_peers.py::test_equals_trl",
    ),
    Variant(
        "SkyRL's masks and veto",
        "gk.CorrectionConfig(rejections=(('seq_max_k1', None, 9.2),))",
        "SkyRL#1665",
        "ops/sampling_correction/test_reference.py::test_equals_skyrl",
    ),
    Variant(
        "KPop",
        "gk.CorrectionConfig(rejections=(('token_binary_kl', None, 0.05),))",
        "verl#6800",
        "ops/sampling_correction/test_reference.py::test_any_weights_and_mask_are_their_formulas",
    ),
    Variant(
        "M2PO",
        "gk.CorrectionConfig(m2_threshold=0.04)",
        "arXiv 2510.01161, AReaL",
        "ops/sampling_correction/test_reference.py::test_m2po_found_by_hand",
    ),
)
ADVANTAGES = (
    Variant(
        "GAE",
        "gk.TokenAdvantageConfig('gae')",
        "verl, SkyRL",
        "ops/token_advantages/test_peers.py::test_verl_estimators",
    ),
    Variant(
        "REINFORCE++ of tokens",
        "gk.TokenAdvantageConfig('reinforce_plus_plus')",
        "verl, SkyRL",
        "ops/token_advantages/test_peers.py::test_verl_estimators",
    ),
    Variant(
        "advantages of turns",
        "gk.token_advantages(rewards, values, mask=mask, turns=turns)",
        "verl#7244, ROLL",
        "ops/token_advantages/test_reference.py::test_any_settings_give_the_definition",
    ),
    Variant(
        "step REINFORCE",
        "gk.TokenAdvantageConfig('reinforce')",
        "ROLL",
        "ops/token_advantages/test_reference.py::test_any_settings_give_the_definition",
    ),
    Variant(
        "GiGPO",
        "gk.gigpo_advantages(rewards, returns, 4, states)",
        "arXiv 2505.10978, ROLL",
        "ops/group_advantages/test_reference.py::test_steps_have_the_advantages_of_their_episode_and_of_their_state",
    ),
    Variant(
        "optimal token baseline and its TIR variant",
        "gk.optimal_token_baseline(*tokens, groups, places='rank')",
        "verl",
        "ops/token_advantages/test_peers.py::test_verl_optimal_token_baseline",
    ),
    Variant(
        "moving average of an agent's rewards (RAE)",
        "gk.EmaBaseline(decay=0.95)",
        "SPIRAL, prime-rl",
        "ops/group_advantages/test_running.py::test_as_a_loop_over_the_rows",
    ),
    Variant(
        "running norms",
        "gk.RunningNorm()",
        "ROLL",
        "ops/group_advantages/test_running.py::test_as_a_loop_over_the_rows",
    ),
    Variant(
        "SPO",
        "gk.ValueTracker(half_life=0.06, rho_min=0.875, rho_max=0.96)",
        "arXiv 2509.13232",
        "ops/group_advantages/test_running.py::test_as_a_loop_over_the_rows",
    ),
    Variant(
        "leave-one-out standard deviation",
        "gk.AdvantageConfig('nemo-grpo')",
        "NeMo-RL",
        "ops/group_advantages/test_reference.py::test_estimators_are_the_formulas_of_the_papers",
    ),
)


# Tables


def changed(config: LossConfig | AdvantageConfig, default: LossConfig | AdvantageConfig) -> Fields:
    """Fields of a config that differ from the default's, except those that have a column of their own."""
    names = [field.name for field in dataclasses.fields(config) if field.name not in HIDDEN]
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(default, name)}


def spelled(fields: Fields) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in fields.items())


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ("---",) * len(header), *rows))


def loss_rows(configs: Mapping[str, LossConfig], sentence: str, name: str) -> str:
    """A table of a peer's losses, below a sentence that lists the fields they have in common."""
    changes = {key: changed(config, LossConfig()) for key, config in configs.items()}
    first = next(iter(changes.values()))
    shared = {k: v for k, v in first.items() if all(k in fields and fields[k] == v for fields in changes.values())}
    rows = []
    for key, config in configs.items():
        own = {field: value for field, value in changes[key].items() if field not in shared}
        rows.append((f"`{key}`", f"`{config.loss}`", f"`{config.ratio}`", f"`{config.aggregation}`", spelled(own)))
    header = (name, "loss", "ratio", "aggregation", "other fields")
    in_common = f"All have {spelled(shared)}.\n\n" if shared else ""
    return f"{sentence}\n\n{in_common}{table(header, rows)}"


def policy_loss() -> str:
    choices = [(f"`{name}`", ", ".join(f"`{value}`" for value in values)) for name, values in FIELDS.items()]
    trl = {name: LossConfig.trl(loss_type=name) for name in TRL_LOSS_TYPES}
    verl = {name: LossConfig.verl(loss_mode=name, **REQUIRED.get(name, {})) for name in VERL_LOSSES}
    refused = [(f"`{name}`", instead) for name, instead in VERL_REFUSED.items()]
    return "\n\n".join(
        [
            table(("field of `LossConfig`", "values"), choices),
            loss_rows(trl, "`LossConfig.trl(loss_type=...)`, with TRL's defaults.", "TRL's `loss_type`"),
            loss_rows(
                verl,
                "`LossConfig.verl(loss_mode=...)`, with verl's defaults; `dro_beta` has none.",
                "verl's `loss_mode`",
            ),
            table(("refused `loss_mode`", "instead"), refused),
        ]
    )


def group_advantages() -> str:
    rows = []
    for name in AdvantageConfig.names():
        config = AdvantageConfig(name)
        fields = changed(config, AdvantageConfig())
        center, scale = fields.pop("center", "mean"), fields.pop("scale", "std")
        rows.append((f"`{name}`", f"`{center}`", f"`{scale}`", spelled(fields)))
    return table(("name", "center", "scale", "other fields"), rows)


def published() -> str:
    def rows(variants: tuple[Variant, ...]) -> str:
        cells = [(v.name, f"`{v.setting}`", v.source, f"`{v.test}`") for v in variants]
        return table(("variant", "here", "source", "test below `tests`"), cells)

    return "\n\n".join(
        [
            "## Losses",
            rows(LOSSES),
            "## Masks, weights and terms beside a loss",
            rows(COMPOSED),
            "## Mismatch between sampler and trainer",
            rows(CORRECTIONS),
            "## Advantages",
            rows(ADVANTAGES),
        ]
    )


PAGES = {"ops/policy_loss.md": policy_loss, "ops/group_advantages.md": group_advantages, "variants.md": published}


def updated(page: str, text: str) -> str:
    """The text of a page with its tables written anew."""
    begin, end = MARKS
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"variants: {page} must have {begin} and {end} once each")
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n\n{PAGES[page]()}\n\n{end}", text, flags=re.DOTALL)


def main() -> None:
    for page in PAGES:
        (DOCS / page).write_text(updated(page, (DOCS / page).read_text()))


if __name__ == "__main__":
    main()
