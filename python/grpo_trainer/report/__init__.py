"""Reports: the page of a run, of several runs, of evaluated models, and of LoRA adapters."""
