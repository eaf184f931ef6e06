"""Train with transformers' Trainer and this loader, which reads files; stop and resume.

Run it with ``python examples/hf_trainer.py``. It needs ``transformers`` and the extra
``accelerate``. The model is made from a config: nothing is downloaded.
"""

import sysconfig
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, set_seed

from aioloader.accelerate import TrainerMixin
from aioloader.datasets import FileDataset

LENGTH, STEPS = 128, 44


def tokenize(data: bytes) -> dict[str, torch.Tensor]:
    """Return the first tokens of a file; here, each byte is a token."""
    tokens = torch.tensor([*data[:LENGTH].ljust(LENGTH)])
    return {"input_ids": tokens, "labels": tokens}


class AsyncTrainer(TrainerMixin, Trainer):
    """The Trainer, with loader arguments that transformers does not know."""

    loader_options = {"transform": tokenize, "concurrency": 64}  # noqa: RUF012


def train(folder: str, max_steps: int) -> list[float]:
    """Train from the last checkpoint, if there is one; return the logged losses."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    arguments = TrainingArguments(
        folder,
        max_steps=max_steps,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=5,
        save_steps=10,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = AsyncTrainer(
        LlamaForCausalLM(config),
        arguments,
        train_dataset=FileDataset("*.py", root=sysconfig.get_path("stdlib")),
    )
    checkpoint = get_last_checkpoint(folder)
    print(f"training starts from {checkpoint}")
    trainer.train(resume_from_checkpoint=checkpoint)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        whole = train(f"{folder}/whole", STEPS)
        train(f"{folder}/stopped", 25)
        resumed = train(f"{folder}/stopped", STEPS)
    print(f"losses {whole}; the same after the stop: {whole == resumed}")
