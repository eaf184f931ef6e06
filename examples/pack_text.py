"""Pretrain on packed tokens of Parquet texts; stop in mid-epoch, and resume exactly.

Run it with ``python examples/pack_text.py``. It needs ``tokenizers`` and ``pyarrow``.
"""

import asyncio
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn

from aioloader import DataLoader
from aioloader.datasets import ParquetDataset, write_parquet

LENGTH, VOCAB, WIDTH = 128, 512, 32


class Model(nn.Module):
    """One layer of attention, within documents."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 1, WIDTH, batch_first=True)
        self.scores = nn.Linear(WIDTH, VOCAB)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        document = (batch["position_ids"] == 0).cumsum(1)  # each document starts at 0
        visible = (document[:, :, None] == document[:, None]).tril()
        embedded = self.tokens(batch["input_ids"]) + self.places(batch["position_ids"])
        return self.scores(self.layer(embedded, ~visible)).mT  # type: ignore[no-any-return]


def train(stream: Any, path: Path, steps: int) -> list[float]:
    """Train from the checkpoint, if there is one; return the losses of all steps."""
    torch.manual_seed(0)
    loader: Any = DataLoader(stream, batch_size=16)
    model, losses = Model(), list[float]()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    if path.exists():
        *saved, losses = torch.load(path)
        for part, state in zip((model, adam, loader), saved, strict=True):
            part.load_state_dict(state)
        print(f"resumed after step {len(losses)}")
    while True:
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch), batch["labels"])
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                print(f"step {len(losses)}: loss {losses[-1]:.3f}")
                states = [part.state_dict() for part in (model, adam, loader)]
                torch.save([*states, losses], path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)  # atomic
            if len(losses) == steps:
                return losses


texts = [path.read_text() for path in Path(unittest.__file__).parent.glob("*.py")]
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
options: Any = {"special_tokens": ["<end>"], "show_progress": False}
tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCAB, **options))
with tempfile.TemporaryDirectory() as folder:
    asyncio.run(write_parquet([{"text": t} for t in texts], folder, shard_samples=4))
    files = ParquetDataset(f"{folder}/*.parquet", shuffle=True, interleave=2)
    packed = files.shuffle(8).tokenize(tokenizer, "text").pack(LENGTH, eos=0)
    whole = train(packed, Path(folder, "whole.pt"), steps=80)
    train(packed, Path(folder, "stopped.pt"), steps=35)
    resumed = train(packed, Path(folder, "stopped.pt"), steps=80)
print("the same losses after the stop:", whole == resumed)
