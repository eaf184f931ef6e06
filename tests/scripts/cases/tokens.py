"""Text of the standard library through a tokenizer with a cache, padded by a lambda."""

import functools
import pydoc_data.topics
import re

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torch.utils.data import Dataset

TEXTS = [text for _, text in sorted(pydoc_data.topics.topics.items())][:40]
WORD = re.compile(r"\w+|[^\w\s]")


class Tokenizer:
    def __init__(self, texts):
        words = sorted({word for text in texts for word in WORD.findall(text)})
        self.vocabulary = {word: number for number, word in enumerate(words, 1)}

    @functools.lru_cache(maxsize=10_000)
    def encode_word(self, word):
        return self.vocabulary[word]

    def __call__(self, text):
        return [self.encode_word(word) for word in WORD.findall(text)]


@functools.lru_cache
def clipped(length):
    return min(length, 200)


class Texts(Dataset):
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __len__(self):
        return len(TEXTS)

    def __getitem__(self, index):
        ids = self.tokenizer(TEXTS[index])
        return torch.tensor(ids[: clipped(len(ids))])


tokenizer = Tokenizer(TEXTS)
tokenizer.encode_word("the")
loader = DataLoader(
    Texts(tokenizer),
    batch_size=8,
    num_workers=2,
    collate_fn=lambda rows: (
        pad_sequence(rows, batch_first=True),
        torch.tensor([len(row) for row in rows]),
    ),
)
for epoch in range(2):
    for padded, lengths in loader:
        print(padded.shape, padded.sum().item(), lengths.tolist())
print(tokenizer.encode_word.cache_info())
