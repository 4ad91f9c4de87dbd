"""A reward of one's own, in TRL's contract; smollm2.yaml names it rewards/last_number.py:last_number."""

import re

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(completions, answer, **kwargs):
    """1 if the completion is the answer and nothing else, 0.5 if its last number is the answer, else 0.

    completions: one list of messages per row (or text); answer: that column of the data, one per row. Other columns
    (question, metadata), prompts and completion_ids come in kwargs.
    """
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        numbers = NUMBER.findall(text)
        right = bool(numbers) and float(numbers[-1]) == float(wanted)
        alone = text.strip().rstrip(".") == numbers[-1] if numbers else False
        rewards.append(0.0 if not right else 1.0 if alone else 0.5)
    return rewards
