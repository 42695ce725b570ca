"""The reference trainer of grpo-kernels."""
