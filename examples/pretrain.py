"""Pretrain a small transformer; kill it, and resume bit-identically on other ranks.

Run it with ``torchrun --nproc-per-node 2 examples/pretrain.py RUN.pt``, kill it, and
continue with ``--nproc-per-node 1``.
"""

import gc
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from aioloader import DataLoader, merge_states
from aioloader.datasets import FileDataset, from_dataset, mix

LENGTH, BATCH, PARTS, STEPS, VOCABULARY = 128, 8, 2, 30, 512
TEXTS = Path(sysconfig.get_path("stdlib"))
WEIGHTS = {"asyncio": 0.5, "email": 0.3, "json": 0.2}


def stream(tokenizer: Tokenizer) -> Any:
    """Return three packages' sources, shuffled, tokenized, packed and mixed."""

    def packed(package: str) -> Any:
        files = from_dataset(FileDataset(f"{TEXTS}/{package}/*.py"), shuffle=True)
        texts = files.map(lambda data: data.decode())
        return texts.tokenize(tokenizer).pack(LENGTH, eos=0).repeat()

    return mix({name: packed(name) for name in WEIGHTS}, WEIGHTS).readers(2)


class Model(nn.Module):
    """One layer of attention, within documents."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LENGTH, width)
        self.mixed = nn.Linear(width, 3 * width)
        self.last = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return scores, of shape (batch, length, vocabulary)."""
        document = (places == 0).cumsum(1)
        seen = (document[:, :, None] == document[:, None]).tril()
        x = self.tokens(tokens) + self.places(places)
        query, key, value = self.mixed(x).chunk(3, -1)
        x = x + scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.last(x)  # type: ignore[no-any-return]


def train(path: Path, rank: int, ranks: int) -> None:
    """Train from the checkpoint, if there is one; write one after each step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<end>"])
    tokenizer.train([*map(str, sorted(TEXTS.glob("json/*.py")))], trainer)
    loader: Any = DataLoader(stream(tokenizer), BATCH // ranks, rank="auto")
    model, losses = Model(), []
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    if path.exists():
        *saved, losses = torch.load(path)
        for part, state in zip((model, adam, loader), saved, strict=True):
            part.load_state_dict(state)
    for batch in loader:
        # Sum parts of the global batch, so that one and two ranks agree to the bit.
        adam.zero_grad()
        total = torch.zeros(())
        for part in range(PARTS // ranks):
            mine = {key: one[part :: PARTS // ranks] for key, one in batch.items()}
            scores = model(mine["input_ids"], mine["position_ids"])
            loss = cross_entropy(scores.mT, mine["labels"]) / PARTS
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        for tensor in (total, *(weight.grad for weight in model.parameters())):
            dist.all_reduce(tensor)
        adam.step()
        losses.append(total.item())
        states: list[Any] = [None] * ranks
        dist.all_gather_object(states, loader.state_dict())
        if rank == 0:
            parts = model.state_dict(), adam.state_dict(), merge_states(states)
            torch.save([*parts, losses], path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)  # atomic
            print(f"step {len(losses)}: loss {losses[-1]:.4f}", flush=True)
        if len(losses) == STEPS:
            break
    loader.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        train(Path(sys.argv[1]), dist.get_rank(), dist.get_world_size())
    finally:
        gc.collect()  # the model's reference cycles keep the group's threads alive
        dist.destroy_process_group()
