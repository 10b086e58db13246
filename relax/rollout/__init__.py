"""Sampling responses: engines behind one protocol, and the filter on what they return."""
