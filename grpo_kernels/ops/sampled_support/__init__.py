"""Log-probs over the token ids that sampling kept, for the `support=` of the ops of the head."""
