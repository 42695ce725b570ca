"""Tests with Megatron-core, for an environment of their own (`make test-engine`). Without it they are ignored."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("megatron") is not None else ["test_*.py"]
