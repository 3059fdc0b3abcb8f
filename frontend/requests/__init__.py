"""Answers one HTTP request: chat or completion, streamed or whole."""
