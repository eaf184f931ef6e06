"""transformers' Trainer: steps, accumulation, evaluation, checkpoints."""

import warnings
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

from aioloader.accelerate import TrainerMixin
from aioloader.datasets import from_iterable
from compat.kit import Cases, Kit, Numbers, Stream, number, seed, shift

cases = Cases()


class Samples(Numbers):
    """Dicts of one number."""

    def __getitem__(self, index: int) -> Any:
        return {"x": number(index)}


class AsyncSamples(Samples):
    async def __getitem__(self, index: int) -> Any:
        return {"x": number(index)}


class SampleStream(Stream):
    def __iter__(self) -> Any:
        for tensor in super().__iter__():
            yield {"x": tensor}


class Model(PreTrainedModel):
    """One weight; records its batches."""

    config_class = PretrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[Any] = []
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        torch.nn.init.ones_(self.weight)

    def forward(self, x: Any, **_kwargs: Any) -> dict[str, Any]:
        mode = "train" if self.training else "eval"
        self.seen.append([mode, x.flatten().tolist()])
        return {"loss": ((x / 1000 * self.weight) ** 2).mean(), "logits": x}


class Ours(TrainerMixin, Trainer):
    """As in the documentation."""

    loader_options = {"transform": shift}  # noqa: RUF012


def samples(kit: Kit, kind: str, n: int = 23) -> Any:
    if kind == "epochs":
        return from_iterable(range(n)).map(Samples(n).__getitem__).epoch_length(8)
    if kind == "ours" and kit.is_ours:
        return from_iterable(range(n)).map(Samples(n).__getitem__)
    if kind in {"stream", "ours"}:
        return kit.data(SampleStream(n))
    return kit.data(AsyncSamples(n) if kind == "async" and kit.is_ours else Samples(n))


def trainer(kit: Kit, workers: int, kind: str = "map", **options: Any) -> Trainer:
    seed()
    AcceleratorState._reset_state()
    GradientState._reset_state()
    if kit.world == 1:
        PartialState._reset_state()
    arguments = TrainingArguments(
        output_dir=str(kit.folder / f"{kind}-{workers}-{len(options)}"),
        use_cpu=True,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        dataloader_num_workers=workers,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        learning_rate=0.01,
        seed=5,
        **options,
    )
    cls = Ours if kit.is_ours else Trainer
    return cls(
        Model(PretrainedConfig()),
        arguments,
        train_dataset=samples(kit, kind),
        eval_dataset=samples(kit, "map" if kind == "async" else kind, 9),
    )


def summary(run: Any) -> list[Any]:
    """Return batches, steps, logged losses, and the weight at the end."""
    losses = [entry.get("loss") for entry in run.state.log_history]
    return [run.model.seen, run.state.global_step, losses, run.model.weight.item()]


@cases.add(
    {"workers": 0, "kind": "map"},
    {"workers": 2, "kind": "map"},
    {"workers": 0, "kind": "async"},
)
def train(kit: Kit, workers: int, kind: str) -> Any:
    """Two epochs, gradients of four batches: the last group is smaller."""
    run = trainer(
        kit,
        workers,
        kind,
        num_train_epochs=2,
        gradient_accumulation_steps=4,
        save_strategy="no",
    )
    run.train()
    if kit.is_ours:
        kit.check_engine(run.get_train_dataloader().base_dataloader)
    predictions = [run.predict(run.eval_dataset).predictions for _ in range(2)]
    run.evaluate()
    return [summary(run), predictions]


@cases.add({"workers": 2})
def train_on_async(kit: Kit, workers: int) -> Any:
    """One epoch: its workers start clean and import what the samples need."""
    run = trainer(kit, workers, "async", num_train_epochs=1, save_strategy="no")
    run.train()
    return summary(run)


@cases.add({"workers": 0}, {"workers": 2})
def train_on_a_stream(kit: Kit, workers: int) -> Any:
    """Its length is unknown, so the number of steps is given."""
    run = trainer(kit, workers, "stream", max_steps=9, save_strategy="no")
    run.train()
    return summary(run)


@cases.add(*[{"workers": w, "step": s} for w in (0, 2) for s in (2, 8)])
def resume(kit: Kit, workers: int, step: int) -> Any:
    """From a checkpoint in mid-epoch, in the first epoch and in the second."""
    options: dict[str, Any] = {"max_steps": 12, "save_steps": step}
    first = trainer(kit, workers, f"map-{step}", **options)
    first.train()
    second = trainer(kit, workers, f"map-{step}", **options)
    second.train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-{step}")
    return [summary(first), summary(second)]


@cases.add({"workers": 0}, {"workers": 2})
def own_stream(kit: Kit, workers: int) -> Any:
    """One of our streams, from the beginning and from a checkpoint within an epoch."""
    options: dict[str, Any] = {"max_steps": 9, "save_steps": 2, "num_train_epochs": 3}
    # Torch's workers would each read a part of the stream.
    count = workers if kit.is_ours else 0
    first = trainer(kit, count, "ours", **options)
    first.train()
    if kit.is_ours:
        kit.check_engine(first.get_train_dataloader().base_dataloader)
    predicted = first.predict(first.eval_dataset).predictions
    second = trainer(kit, count, "ours", **options)
    second.train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-2")
    batches = [batch for mode, batch in first.model.seen if mode == "train"]
    assert [batch for _, batch in second.model.seen] == batches[2:]
    return [summary(first), predicted, summary(second)]


@cases.add({"workers": 0})
def warn_of_later_epochs(kit: Kit, workers: int) -> Any:
    """One of our streams whose epochs continue, resumed in the third one."""
    options: dict[str, Any] = {"max_steps": 6, "save_steps": 5}
    if not kit.is_ours:
        return True
    first = trainer(kit, workers, "epochs", **options)
    first.train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second = trainer(kit, workers, "epochs", **options)
        second.train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-5")
    return any("training resumes in epoch" in str(w.message) for w in caught)
