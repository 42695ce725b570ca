"""Log-probs over the token ids that sampling kept; the `support` argument of linear_logprobs and linear_policy_loss."""
