"""Where a chunk's time goes, against what the card could do."""
