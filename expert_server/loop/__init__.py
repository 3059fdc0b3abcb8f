"""The serving loop: poll, batch, compute, reply."""
