"""Generated passages of chosen length, for benchmarks of time."""

from chunkweave.prompt.tokenizer import TextTokenizer

SENTENCE = "The carrier of day {day} leaves the quay of Skerrow at {hour}, with {day} carts of peat for the mill. "


def passages(tokenizer: TextTokenizer, count: int, tokens: int) -> list[str]:
    """`count` different texts of about `tokens` tokens each."""
    length = len(tokenizer.encode(SENTENCE.format(day=1000, hour=12)))
    sentences = max(1, round(tokens / length))
    return [
        "".join(SENTENCE.format(day=number * sentences + place, hour=place % 24) for place in range(sentences))
        for number in range(count)
    ]
