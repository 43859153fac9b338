"""Finds, parses and compares the final answers of responses, for reward.py."""
