"""GRPO from beginning to end in one file, for reading before you use a trainer.

    python examples/grpo.py                                  # a tiny model with random weights, a minute on a CPU
    python examples/grpo.py --model Qwen/Qwen2.5-0.5B        # a pretrained one, from the hub or a folder

The task is to go on counting: after "three four" a good completion is "five six seven eight". Each step of GRPO

1. samples a group of completions for every prompt,
2. gives each completion a reward,
3. compares the rewards within a group: the advantage of a completion is how far its reward lies above the group's mean,
   in standard deviations,
4. raises the probability of tokens with a positive advantage and lowers that of the others, a clipped step at a time.

There is no critic: the other completions of a prompt are the baseline. Needs transformers.
"""

from __future__ import annotations

import argparse
import random
from itertools import pairwise

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import grpo_kernels as gk

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
NEXT = dict(zip(WORDS, [*WORDS[1:], WORDS[0]], strict=True))

PROMPTS = 16  # prompts a step
GROUP = 8  # completions per prompt
LENGTH = 8  # tokens per completion, at most
UPDATES = 2  # optimizer steps on each batch of completions


def tiny_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Qwen2 of 0.1 million random weights, and a tokenizer that knows the words of the task."""
    vocabulary = {word: i for i, word in enumerate(["<end>", "<unknown>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config), PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
    )


def sample_prompts(count: int) -> list[str]:
    starts = random.choices(WORDS, k=count)
    return [f"{word} {NEXT[word]}" for word in starts]


def reward(prompt: str, completion: str) -> float:
    """Share of the completion's words that follow the word before them in counting; a short completion loses."""
    words = [prompt.split()[-1], *completion.split()]
    return sum(NEXT.get(before) == after for before, after in pairwise(words)) / LENGTH


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> tuple[Tensor, ...]:
    """GROUP completions for each prompt.

    Returns:
        tokens [B, P + T], attention mask [B, P + T] and completion mask [B, T], with B = prompts * GROUP, P the length
        of the prompts, padded on the left, and T that of the completions. Rows of one prompt are neighbours.
    """
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    ids, prompt_mask = inputs["input_ids"], inputs["attention_mask"]
    # top_k=0 and the like switch off every filter: completions must come from the distribution that is trained
    tokens = model.generate(
        input_ids=ids,
        attention_mask=prompt_mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        max_new_tokens=LENGTH,
        num_return_sequences=GROUP,
        pad_token_id=tokenizer.pad_token_id,
    )
    ended = tokens[:, ids.shape[1] :] == tokenizer.eos_token_id
    mask = ended.cumsum(1) - ended.long() == 0  # up to and including the first <end>
    return tokens, torch.cat([prompt_mask.repeat_interleave(GROUP, 0), mask.long()], 1), mask


def hidden_states(model: PreTrainedModel, tokens: Tensor, attention: Tensor, length: int) -> Tensor:
    """Hidden states [B, T, H] from which the last `length` tokens are predicted."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    output = model.base_model(input_ids=tokens, attention_mask=attention, position_ids=positions, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden[:, -length - 1 : -1]


def main() -> list[float]:
    """Train, and return the mean reward of every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model on the hub, or a folder; without it, a tiny one with random weights")
    parser.add_argument("--steps", type=int, default=60, help="steps of GRPO; default: %(default)s")
    parser.add_argument(
        "--learning-rate", type=float, help="default: 3e-3 for the tiny model, 1e-6 for a pretrained one"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, prompts and sampling; default: %(default)s"
    )
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    random.seed(options.seed)

    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    else:
        model, tokenizer = tiny_model()
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()  # no dropout: ratios begin at 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate or (1e-6 if options.model else 3e-3))
    config = gk.LossConfig(clip_low=0.2, clip_high=0.28)
    head = model.get_output_embeddings().weight

    history = []
    for step in range(options.steps):
        prompts = sample_prompts(PROMPTS)
        tokens, attention, mask = sample(model, tokenizer, prompts)
        targets = tokens[:, -mask.shape[1] :]

        texts = tokenizer.batch_decode(targets, skip_special_tokens=True)
        rewards = torch.tensor([reward(prompts[i // GROUP], text) for i, text in enumerate(texts)], device=model.device)
        advantages = gk.group_advantages(rewards, GROUP).advantages  # (reward - mean) / std within each group

        with torch.no_grad():  # log-probs of the policy that sampled, the denominator of the importance ratio
            hidden = hidden_states(model, tokens, attention, mask.shape[1])
            old_logprobs = gk.linear_logprobs(hidden, head, targets).logprobs

        for _ in range(UPDATES):
            hidden = hidden_states(model, tokens, attention, mask.shape[1])
            loss, _ = gk.linear_policy_loss(hidden, head, targets, old_logprobs, advantages, mask=mask, config=config)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        history.append(rewards.mean().item())
        if step % 5 == 0 or step == options.steps - 1:
            print(f"step {step:3d}  reward {history[-1]:.3f}  {prompts[0]} -> {texts[0]}")
    return history


if __name__ == "__main__":
    main()
