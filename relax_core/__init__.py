"""Pure, shape-typed functions for reinforcement-learning post-training."""
