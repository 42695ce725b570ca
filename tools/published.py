"""Published variants, each with its setting here, its source and its test, for docs/variants.md.

python -m tools.variants writes the page; tests/test_readme.py makes every setting and looks for every test.
"""

from __future__ import annotations

from typing import NamedTuple


class Variant(NamedTuple):
    name: str
    setting: str  # an expression of `gk`
    source: str
    test: str  # below tests/ops, with its function


LOSSES = (
    Variant(
        "IPO",
        "gk.LossConfig.prime_rl(type='ipo')",
        "prime-rl#3418, #3526",
        "policy_loss/test_prime_rl.py::test_loss_and_gradient",
    ),
    Variant(
        "IcePop",
        "gk.LossConfig.prime_rl(type='icepop')",
        "prime-rl#3418, #3526",
        "policy_loss/test_prime_rl.py::test_loss_and_gradient",
    ),
    Variant(
        "TOPR",
        "gk.LossConfig(loss='topr')",
        "arXiv 2503.14286, Trinity-RFT, ROLL",
        "policy_loss/test_published.py::test_topr",
    ),
    Variant(
        "Clip-Cov",
        "gk.LossConfig.verl(loss_mode='clip_cov')",
        "arXiv 2505.22617, verl, SkyRL",
        "policy_loss/test_parity_verl.py::test_the_draw_of_clip_cov_is_one_of_verls",
    ),
    Variant(
        "KL-Cov",
        "gk.LossConfig.verl(loss_mode='kl_cov')",
        "arXiv 2505.22617, verl, SkyRL",
        "policy_loss/test_parity_verl.py::test_registered_losses",
    ),
    Variant(
        "positive-example NLL",
        "gk.LossConfig(cross_entropy_coef=0.1, cross_entropy_aggregation='token-mean')",
        "VAPO (arXiv 2504.05118), cosmos-rl, NeMo-RL",
        "policy_loss/test_kinds.py::test_cross_entropy_of_positive_examples",
    ),
    Variant(
        "policy gradient, cross-entropy and reference KL in one batch",
        "gk.policy_loss(*tokens, kinds=kinds)",
        "prime-rl",
        "policy_loss/test_kinds.py::test_components_with_counts_of_their_own",
    ),
    Variant(
        "CHORD",
        "gk.policy_loss(*tokens, kinds=kinds, weights=weights)",
        "arXiv 2508.11408, Trinity-RFT, ms-swift",
        "policy_loss/test_kinds.py::test_chord",
    ),
    Variant(
        "LUFFY's shaping",
        "gk.policy_loss(*tokens, kinds=kinds, weights=weights)",
        "arXiv 2504.14945",
        "policy_loss/test_published.py::test_shaping_of_luffy",
    ),
    Variant(
        "ratio levels `average` and `geometric_average`",
        "gk.LossConfig.art(importance_sampling_level='average')",
        "OpenPipe ART",
        "policy_loss/test_published.py::test_ratio_levels_of_art",
    ),
    Variant("ROLL's `tis`", "gk.LossConfig.roll(pg_variant='tis')", "ROLL", "policy_loss/test_peers.py::test_loss_of"),
    Variant(
        "cosmos-rl's `aipo_rho`",
        "gk.LossConfig.cosmos(aipo_rho=2.0)",
        "arXiv 2505.24034, cosmos-rl",
        "policy_loss/test_peers.py::test_loss_of",
    ),
    Variant(
        "ROLL's `kimi15`",
        "gk.LossConfig.roll(pg_variant='kimi15')",
        "arXiv 2501.12599, ROLL",
        "policy_loss/test_peers.py::test_loss_of",
    ),
    Variant(
        "on-policy distillation",
        "gk.LossConfig(loss='reinforce')",
        "NeMo-RL, ROLL; advantages are the teacher's log-probs minus the sampler's",
        "policy_loss/test_published.py::test_on_policy_distillation",
    ),
    Variant(
        "GVPO",
        "gk.LossConfig(loss='gvpo')",
        "arXiv 2504.19599 and its verl recipe",
        "policy_loss/test_sequence_losses.py::test_published_formula",
    ),
    Variant(
        "REAL",
        "gk.LossConfig.swift(loss_type='real')",
        "arXiv 2602.05630, ms-swift",
        "policy_loss/test_sequence_losses.py::test_published_formula",
    ),
    Variant(
        "FlowRL",
        "gk.LossConfig(loss='flowrl', clip_high=0.28)",
        "arXiv 2509.15207 and its verl recipe",
        "policy_loss/test_sequence_losses.py::test_published_formula",
    ),
    Variant(
        "FIPO",
        "gk.LossConfig.swift(loss_type='fipo', delta=10.0)",
        "arXiv 2603.19835, ms-swift",
        "policy_loss/test_future_kl.py::test_published_formula",
    ),
)
CORRECTIONS = (
    Variant(
        "truncated and masked weights of tokens, rows and their geometric means",
        "gk.LossConfig(correction='geometric_mask', correction_max=2.0)",
        "TRL, verl, SkyRL",
        "policy_loss/test_corrections.py::test_a_correction_is_its_importance_weights",
    ),
    Variant(
        "the eleven rejections of verl",
        "gk.CorrectionConfig.verl(rollout_rs='seq_mean_k1', rollout_rs_threshold='0.5_2.0')",
        "verl",
        "sampling_correction/test_parity_verl.py::test_equals_verl",
    ),
    Variant(
        "TRL's corrections",
        "gk.CorrectionConfig.trl()",
        "TRL",
        "sampling_correction/test_parity_trl.py::test_equals_trl",
    ),
    Variant(
        "SkyRL's masks and veto",
        "gk.CorrectionConfig.skyrl(outlier_token_is_threshold_low=1e-4)",
        "SkyRL#1665",
        "sampling_correction/test_spec.py::test_equals_skyrl",
    ),
    Variant(
        "KPop",
        "gk.CorrectionConfig(rejections=(('token_binary_kl', None, 0.05),))",
        "verl#6800",
        "sampling_correction/test_spec.py::test_a_rejection_drops_what_is_outside_of_its_bounds",
    ),
    Variant(
        "M2PO",
        "gk.CorrectionConfig(m2_threshold=0.04)",
        "arXiv 2510.01161, AReaL",
        "sampling_correction/test_spec.py::test_m2po_drops_the_largest_squares",
    ),
)
ADVANTAGES = (
    Variant("GAE", "gk.TokenAdvantageConfig('gae')", "verl, SkyRL", "token_advantages/test_parity.py::test_verl_gae"),
    Variant(
        "REINFORCE++ of tokens",
        "gk.TokenAdvantageConfig('reinforce_plus_plus')",
        "verl, SkyRL",
        "token_advantages/test_parity.py::test_verl_reinforce_plus_plus",
    ),
    Variant(
        "advantages of turns",
        "gk.token_advantages(rewards, values, mask=mask, turns=turns)",
        "verl#7244, ROLL",
        "token_advantages/test_parity.py::test_turns_as_roll_agentic_reinforce",
    ),
    Variant(
        "step REINFORCE",
        "gk.TokenAdvantageConfig('reinforce')",
        "ROLL",
        "token_advantages/test_parity.py::test_step_rewards_as_roll_step_reinforce",
    ),
    Variant(
        "GiGPO",
        "gk.gigpo_advantages(rewards, returns, 4, states)",
        "arXiv 2505.10978, ROLL",
        "group_advantages/test_gigpo.py::test_both_levels_are_normalised_and_added",
    ),
    Variant(
        "optimal token baseline and its TIR variant",
        "gk.optimal_token_baseline(*tokens, groups, places='rank')",
        "verl",
        "token_advantages/test_optimal_baseline.py::test_verl",
    ),
    Variant(
        "moving average of an agent's rewards (RAE)",
        "gk.EmaBaseline(decay=0.95)",
        "SPIRAL, prime-rl",
        "group_advantages/test_running.py::test_as_a_loop_over_the_rows",
    ),
    Variant(
        "running norms", "gk.RunningNorm()", "ROLL", "group_advantages/test_running.py::test_as_a_loop_over_the_rows"
    ),
    Variant(
        "SPO",
        "gk.ValueTracker(half_life=0.06, rho_min=0.875, rho_max=0.96)",
        "arXiv 2509.13232",
        "group_advantages/test_running.py::test_as_a_loop_over_the_rows",
    ),
    Variant(
        "leave-one-out standard deviation",
        "gk.AdvantageConfig('nemo-grpo')",
        "NeMo-RL",
        "group_advantages/test_leave_one_out.py::test_each_row_against_the_others",
    ),
)
