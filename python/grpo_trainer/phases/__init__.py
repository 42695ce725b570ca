"""The phases of a run: supervised and reinforcement learning."""
