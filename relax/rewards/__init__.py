"""Reward functions that ship, and the way to a user's own."""
