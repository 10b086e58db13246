"""Prompts, tokens and samples: what moves between the stages."""
