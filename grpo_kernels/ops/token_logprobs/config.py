"""Constants of token_logprobs that all backends share."""

IGNORED = -100  # target of a row that is not read
