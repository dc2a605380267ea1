"""ablate: ablation sweeps for GRPO post-training, from a question to an effect with its interval."""

__version__ = "0.1.0"
