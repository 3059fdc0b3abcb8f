"""The frontend: the HTTP endpoint, prompts and text of answers, in front of any number of engines."""
