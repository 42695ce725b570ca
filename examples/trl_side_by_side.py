# %% [markdown]
# # The same training with TRL's trainer and with ours
#
# SmolLM2-135M-Instruct learns word problems from a reward: first with TRL's `GRPOTrainer`,
# then with `FusedGRPOTrainer` in its place. `examples/trl_smollm2.py` is the training; the class
# and its two options are all that differs: `head="fused"` computes the loss from hidden states, and
# `masked_rows="vote"` lets masked completions vote in the baseline as TRL does. Run this in a
# checkout, as a notebook or as `python examples/trl_side_by_side.py`.

# %%
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = next(path for path in (Path.cwd(), *Path.cwd().parents) if (path / "examples").is_dir())  # of the checkout
TRAINERS = ("GRPOTrainer", "FusedGRPOTrainer")
STEPS = 5
results = {}
for name in TRAINERS:
    out = ROOT / "runs" / f"smollm2-{name}"
    options = ["--steps", str(STEPS), "--batch", "16", "--out", str(out)]
    program = [sys.executable, ROOT / "examples/trl_smollm2.py", name, *options]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    results[name] = json.loads((out / "metrics.json").read_text())

# %% [markdown]
# ## What each takes
#
# Each ran in a process of its own, one after the other. Seconds are those of the processors, of both
# threads together, as other programs shared the machine. A large part of a step is sampling, which
# TRL does in both. The peak is that of the process, with the model, its optimizer and the libraries.

# %%
print(f"{'':18}{'CPU s':>9}{'peak, GiB':>11}{'first reward':>14}{'last three':>12}")
for name, result in results.items():
    last = sum(result["rewards"][-3:]) / 3
    print(
        f"{name:18}{result['processor_seconds']:9.0f}{result['peak_gib']:11.2f}{result['rewards'][0]:14.3f}{last:12.3f}"
    )
pairs = [*zip(*(results[name]["rewards"] for name in TRAINERS), strict=True)]
same = next((step for step, (theirs, ours) in enumerate(pairs) if abs(theirs - ours) > 1e-6), len(pairs))
print(f"the mean rewards of the first {same} of {STEPS} steps are the same")

# %% [markdown]
# ## The rewards
#
# Both sample the same completions until a rounding of the weights changes one of 32 x 20 sampled
# tokens; from there on they are two runs of the same training.

# %%
for name, style in zip(TRAINERS, ("o-", "x--"), strict=True):
    plt.plot(range(1, STEPS + 1), results[name]["rewards"], style, label=name)
plt.xlabel("step")
plt.ylabel("mean reward of 32 completions")
plt.legend()
plt.show()
