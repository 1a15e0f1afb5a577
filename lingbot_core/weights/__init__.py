"""Checkpoints: what lies in a folder, and how it gets into the models."""
