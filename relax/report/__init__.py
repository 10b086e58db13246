"""What a run tells: while it goes (progress, metrics, TensorBoard) and afterwards (the report)."""
