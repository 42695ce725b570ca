"""Settings that an algorithm does not use or cannot have: assignments, and the error, which begins with the key."""

from __future__ import annotations

OF_ALGORITHMS = [
    ("rl.algorithm.loss.clip_hihg=0.3", "rl.algorithm.loss.clip_hihg: no such key; the nearest is 'clip_high'"),
    ("rl.algorithm.loss.clip_high=0.3", ".*clip_high: must be left out, got 0.3; set algorithm.epsilon_high: 0.3"),
    ("rl.algorithm={name: cispo, epsilon: 0.2}", ".*epsilon: must be left out without epsilon_high, .* 'cispo'$"),
    (
        "rl.algorithm={name: dapo} + model.reference_model_path=runs",
        "model.reference_model_path: must be null without a KL term, .*, got 'runs' with 'dapo'$",
    ),
    ("rl.algorithm={loss: {kl: none}, beta: 0.1}", ".*beta: must be 0 with loss.kl: none, got 0.1 with 'grpo'$"),
    ("rl.algorithm={name: dapo, loss: {kl: k3}}", ".*loss.kl: needs algorithm.beta, .*, got 'k3' with 'dapo'$"),
    (
        "rl.algorithm.loss={entropy_coef: 0.1, entropy_aggregation: local-token-mean}",
        ".*loss.entropy_aggregation: must not be a mean over each micro-batch, .*; give token-mean, got 'local-token-m",
    ),
    (
        "rl.algorithm.loss={aggregation: seq-mean-token-mean, count_empty_rows: true}",
        ".*loss.count_empty_rows: must be left out, as responses without a token .*, got True with 'grpo'$",
    ),
    ("rl.algorithm={name: gpg, advantage: {gain: nonzero}}", ".*advantage.gain: must be left out with drop_flat"),
    ("rl.algorithm={name: ppo, segments: {group_max_size: 8}}", ".*segments.group_max_size: .*; use group_ppo, got 8"),
    ("rl.algorithm={name: ppo, segments: {max_threshold: 8.0}}", ".*segments.max_threshold: .*; use group_ppo, got 8"),
    (
        "rl.algorithm={name: polychromic, similarity: {embedder: hashed}} + rl.rollout.num_generations=2",
        ".*rollout.num_generations: must be at least 3, as a set of all .*, got 2 with 'polychromic'$",
    ),
    ("rl.algorithm.similarity.config.linkag=x", ".*similarity.config.linkag: .* nearest is 'linkage'"),
    ("rl.algorithm.loss.loss=gvpo", "rl.algorithm.loss: LossConfig: loss must be .* got 'gvpo'"),
    ("rl.algorithm.loss.ratio=segment", ".*loss.ratio: must not be of segments, .* 'segment' with 'grpo'$"),
    ("rl.algorithm.advantage.estimator=remax", ".*advantage.estimator: must not need baselines, .* 'remax'"),
    ("rl.algorithm.advantage.shrinkage=2.0", ".*advantage.shrinkage: applies within clusters: .* got 2.0"),
    (
        "rl.algorithm.advantage.reward_weights=[1.0]",
        ".*reward_weights: must be left out, got .*; set the weight of each",
    ),
    ("rl.algorithm={name: polychromic, advantage: {clip: 1.0}}", ".*advantage: applies to algorithms other than"),
    ("rl.algorithm={name: polychromic, similarity: {sharing: 1.0}}", ".*sharing: applies to algorithms other"),
    ("rl.algorithm={name: ppo, drop_flat: false}", ".*drop_flat: applies to .* without a critic, got False"),
    ("rl.algorithm.sparse=true", "rl.algorithm.sparse: applies to group_ppo, got True with 'grpo'$"),
    ("rl.algorithm.critic={}", "rl.algorithm.critic: applies to ppo and group_ppo"),
    ("rl.algorithm.set_size=3", "rl.algorithm.set_size: applies to polychromic, got 3"),
]
