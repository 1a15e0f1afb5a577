"""The engine: loaded models, sessions, and what goes in and out of them."""
