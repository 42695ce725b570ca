# %% [markdown]
# # Tutorial: from rewards to a trained policy
#
# Four steps on a CPU, about a minute: rewards become advantages, advantages become a loss, the loss
# is computed without logits, and the bundled trainer does all of it for a few steps. Run it in a
# checkout after `pip install --no-build-isolation ".[trainer]"`, as this notebook or as
# `python examples/tutorial.py`.

# %%
import json
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from grpo_trainer.recipe import Recipe
from grpo_trainer.train import train

import grpo_kernels as gk

torch.manual_seed(0)
print(gk.available_kernels())

# %% [markdown]
# ## 1. Rewards become advantages
#
# A step of GRPO samples several completions of each prompt and compares their rewards. Here are two
# prompts with four completions each. An advantage says how far a reward lies above the mean of its
# prompt, in standard deviations.

# %%
rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.7, 0.7, 0.7, 0.7])
result = gk.group_advantages(rewards, 4)
print("advantages", [round(value, 2) for value in result.advantages.tolist()])
print("degenerate", result.degenerate.tolist())

# %% [markdown]
# **What to look at.** All completions of the second prompt have the same reward. There is nothing to
# compare, so their advantages are exactly 0, and they are marked in `degenerate`. The share of such
# prompts is the first figure to watch in training: if it is near 1, the task is too easy or too hard
# for this policy, and most of the sampling is wasted.
#
# Other estimators are names. Dr. GRPO leaves out the standard deviation; RLOO compares each reward
# with the mean of the others.

# %%
for name in ("grpo", "dr_grpo", "rloo"):
    advantages = gk.group_advantages(rewards, 4, config=name).advantages
    print(f"{name:8}", [round(value, 2) for value in advantages.tolist()])

# %% [markdown]
# ## 2. Advantages become a loss
#
# The loss of a token is -advantage x ratio, where the ratio is its probability now over that when it
# was sampled. Clipping takes the gradient away where the ratio has moved far enough in the direction
# of the advantage. To see it, each row below is one token with a ratio of its own.

# %%
ratios = torch.linspace(0.5, 1.6, 111)
for advantage, style in ((1.0, "-"), (-1.0, "--")):
    logprobs = (ratios.log() - 1).unsqueeze(1).requires_grad_()
    old_logprobs = torch.full_like(logprobs, -1.0)
    config = gk.LossConfig(clip_low=0.2, clip_high=0.28)
    loss, metrics = gk.policy_loss(logprobs, old_logprobs, torch.full((111,), advantage), config=config)
    loss.backward()
    gradient = 111 * logprobs.grad[:, 0]  # of the token's own loss; the loss is the mean over the tokens
    plt.plot(ratios, gradient, style, label=f"advantage {advantage:+.0f}")
plt.xlabel("ratio")
plt.ylabel("gradient of the loss by the log-prob")
plt.legend()
plt.show()

# %% [markdown]
# **What to look at.** A good token (solid) is pushed up until its ratio is 1.28, a bad one (dashed)
# down until 0.8. The gradient does not vanish on the other side: a good token that has become
# unlikely is still pushed up. The share of clipped tokens tells how far a batch has moved the policy.
# It is among the metrics, which are computed with the loss and copied to the host when you ask:

# %%
print({name: round(value, 3) for name, value in metrics.verl().items()})

# %% [markdown]
# ## 3. The loss without logits
#
# The log-probs come from hidden states [B, T, H] and the weight of the LM head [V, H]. Their product,
# the logits [B, T, V], is the largest tensor of a training step. `linear_policy_loss` computes the
# same loss and the same gradients from a chunk of rows at a time.

# %%
hidden = torch.randn(8, 16, 64, requires_grad=True)
head = torch.nn.Linear(64, 5000, bias=False)
tokens = torch.randint(5000, (8, 16))
mask = torch.arange(16) < torch.randint(4, 17, (8, 1))  # completions of different lengths
with torch.no_grad():
    old_logprobs = gk.linear_logprobs(hidden, head.weight, tokens).logprobs

plain = torch.log_softmax(head(hidden), dim=-1).gather(-1, tokens[..., None]).squeeze(-1)
whole = gk.policy_loss(plain, old_logprobs, result.advantages, mask=mask, config="dapo").loss
chunked = gk.linear_policy_loss(
    hidden, head.weight, tokens, old_logprobs, result.advantages, mask=mask, config="dapo"
).loss
for loss in (whole, chunked):
    (gradient,) = torch.autograd.grad(loss, hidden)
    print(f"loss {loss.item():+.6f}, norm of the gradient {gradient.norm().item():.6f}")

# %% [markdown]
# **What to look at.** Both lines agree. All ratios are 1 here, so the value of the loss is the mean of
# -advantage over the tokens, whatever the policy is. It says nothing about progress: watch the reward.
#
# ## 4. A few steps of the trainer
#
# The trainer takes a recipe: a model, data, SFT and RL. Ours counts on: after "three four" a good
# completion is "five six seven eight". The reward is a function with TRL's signature in a module of
# its own, as a recipe names it `module:function`. A tiny transformer first learns from a few noisy
# demonstrations, and then from the reward.

# %%
folder = Path(tempfile.mkdtemp())
words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def counted(start: int, length: int) -> str:
    return " ".join(words[(start + i) % 10] for i in range(length))


lines = []
for start in range(10):
    good, noisy = counted(start + 2, 4), f"{counted(start + 2, 2)} {counted(start, 2)}"
    lines.append({"prompt": counted(start, 2), "demonstration": [good, noisy, noisy], "answer": good})
(folder / "counting.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
(folder / "counting_reward.py").write_text(
    '''
def share_of_words(prompts, completions, answer, **columns):
    """Share of the four words that stand where they should."""
    pairs = [(text.split(), right.split()) for text, right in zip(completions, answer)]
    return [sum(a == b for a, b in zip(text, right)) / 4 * (len(text) <= 4) for text, right in pairs]
'''
)

# %%
sys.path.append(str(folder))
recipe = Recipe(
    output=str(folder / "run"),
    threads=1,
    model={"path": "tiny", "tiny": {"hidden": 64, "layers": 2, "heads": 2, "intermediate": 128, "vocabulary": 60}},
    data={"task": None, "train": str(folder / "counting.jsonl"), "test": str(folder / "counting.jsonl")},
    sft={"steps": 80, "batch": 16, "micro_batch": 16, "optimizer": {"lr": 4e-3}},
    rl={
        "steps": 25,
        "num_iterations": 2,
        "micro_batch": 80,
        "optimizer": {"lr": 1e-3},
        "rollout": {"prompts": 10, "num_generations": 8, "max_completion_length": 12},
        "rewards": [{"name": "counting_reward:share_of_words"}],
        "algorithm": {"name": "grpo", "epsilon_high": 0.28},
    },
    evaluation={"every": 0, "samples": 0},
    logging={"progress": False},
)
results = train(recipe)
print(f"reward of greedy answers after training: {results['eval/test_reward']:.2f}")

# %% [markdown]
# Everything is in the folder of the run: `metrics.jsonl` has a line per step.

# %%
lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
steps = [line for line in lines if line["kind"] == "train" and line["phase"] == "rl"]
shown = {
    "mean reward": [step["rewards/mean"] for step in steps],
    "prompts without a signal": [step["group_stats/flat_groups"] / step["group_stats/num_groups"] for step in steps],
    "clipped tokens": [step["train/clip_low"] + step["train/clip_high"] for step in steps],
    "entropy": [step["train/entropy"] for step in steps],
}
for name, values in shown.items():
    plt.plot(range(1, len(steps) + 1), values, label=name)
plt.xlabel("step")
plt.legend()
plt.show()
first, last = shown["mean reward"][0], sum(shown["mean reward"][-3:]) / 3
print(f"mean reward of sampled answers: {first:.2f} in the first step, {last:.2f} in the last three")

# %% [markdown]
# **What to look at.**
#
# - The **mean reward** rises. If it does not, read samples first (`samples.jsonl`): most often the
#   reward is not what was meant.
# - **Prompts without a signal** become more as answers become right, and learning slows down. Harder
#   prompts, or more completions of each, are the remedy.
# - **Clipped tokens** near 0 mean that the policy stays close to the one that sampled. A share that
#   grows from step to step means that the updates are too large for the samples.
# - The **entropy** falls as the policy decides. If it reaches 0 while the reward is low, the policy has
#   stopped exploring: see `entropy_coef`, `clip_high` and [diversity](diversity.md).
#
# ## Next
#
# - [Which loss do I have?](which_loss.md) gives the config for the method that you know by name.
# - [Moving from TRL, verl or Liger](moving.md) has code before and after.
# - `examples/grpo.py` is the loop of section 4 without the trainer, in one file.
# - [The trainer](trainer.md) explains recipes, reports and resumed runs.
