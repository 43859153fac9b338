from reward import encode_prompt, task_of  # noqa: F401  (until reward.py is divided)
