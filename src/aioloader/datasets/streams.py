"""Streams, which are datasets read sequentially and composed of steps.

A stream is only a description. Its methods return new streams, and iterating opens a
cursor. The order depends only on the seed, the epoch, and the numbers of slots and
readers. A state is a small position, independent of read-ahead. Memory holds the
read-ahead (``max_bytes``) and, per reader, two windows of each ``shuffle``.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, TypeVar

from aioloader._order.mixture import Schedule, Until, Weights
from aioloader._order.ranks import ReaderShare, Tail
from aioloader.datasets._checks import (
    METHODS,
    check_at_least,
    check_is,
    check_token,
    check_word,
    names_options,
)
from aioloader.datasets._streams.cursors import Cursor, Reading, State, qualname
from aioloader.datasets._streams.interleave import Mixed
from aioloader.datasets._streams.iterated import Iterated
from aioloader.datasets._streams.packing import (
    Last,
    Overlong,
    Packed,
    Strategy,
    Unbatched,
)
from aioloader.datasets._streams.steps import (
    Batched,
    Decoded,
    EpochPart,
    Filtered,
    Mapped,
    MappedAsync,
    Repeated,
    Shuffled,
    Skipped,
    Step,
    Taken,
    Tokenized,
)
from aioloader.datasets._tokens import tokenizer_of
from aioloader.datasets.decoders import Decoder, DecoderSpec
from aioloader.protocols import generator_of, is_async_function

Sample_co = TypeVar("Sample_co", covariant=True)
# Default size limit of a cache, in bytes.
CACHE_BYTES = 10 << 30


class Stream(Iterated[Sample_co]):
    """Base class of all streams, which are datasets for ``async for``.

    A loader reads a stream on the loader's loop, one block per batch; with
    ``fetch="workers"``, each worker reads its share. Each rank reads all samples,
    unless the loader's ``rank`` or the stream's ``shard`` divides them.
    """

    sources: "tuple[Stream[Any], ...]" = ()

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names the equivalent of another library's method."""
            if name in METHODS:
                kind = type(self).__name__
                raise AttributeError(f"{kind} has no {name!r}: {METHODS[name]}")
            return object.__getattribute__(self, name)

    @names_options
    def map(
        self, function: Callable[[Any], Any], *, concurrency: int = 64
    ) -> "Stream[Any]":
        """Return the stream of ``function(sample)``, in order.

        A coroutine function runs on the loop, for ``concurrency`` samples at a time. A
        plain function runs in a thread. Worker processes run a loader's ``transform``.
        """
        check_at_least(concurrency, 1, "concurrency")
        _check_function(function, "async generator")
        is_async = is_async_function(function)
        described = {"function": qualname(function), "is_async": is_async}
        step = MappedAsync if is_async else Mapped
        return _StepStream(
            self, step, described, function=function, concurrency=concurrency
        )

    def decode(self, *specs: DecoderSpec) -> "Stream[Any]":
        """Return the stream with bytes decoded by extension, in threads.

        ``decode("torch")`` decodes images to tensors, and ``cls``, ``json``, ``txt``...
        to values. A sample that cannot be decoded fails, as in ``map``.

        Args:
            specs: As for ``Decoder``.

        Raises:
            ValueError: If a word is unknown.
            ImportError: If images need Pillow, and it is not installed.
        """
        decoder = Decoder(*specs)
        return _StepStream(self, Decoded, decoder.describe(), function=decoder)

    def filter(self, function: Callable[[Any], Any]) -> "Stream[Sample_co]":
        """Return the stream of the samples for which ``function`` returns true."""
        _check_function(function, "async generator", "generator")
        described = {"function": qualname(function)}
        is_async = is_async_function(function)
        return _StepStream(
            self, Filtered, described, function=function, is_async=is_async
        )

    @names_options
    def shuffle(self, size: int, *, seed: int = 0) -> "Stream[Sample_co]":
        """Return the stream with each window of ``size`` samples permuted.

        The permutation differs for each window and epoch. With ``interleave``, a window
        has samples from several shards.
        """
        size = check_at_least(size, 1, "size")
        described = {"size": size, "seed": operator.index(seed)}
        return _StepStream(self, Shuffled, described)

    def take(self, count: int) -> "Stream[Sample_co]":
        """Return the stream of the first ``count`` samples of each reader."""
        count = check_at_least(count, 0, "count")
        return _StepStream(self, Taken, {"count": count}, left=count)

    def skip(self, count: int) -> "Stream[Sample_co]":
        """Return the stream without the first ``count`` samples of each reader."""
        count = check_at_least(count, 0, "count")
        return _StepStream(self, Skipped, {"count": count}, left=count)

    def repeat(self, times: int | None = None) -> "Stream[Sample_co]":
        """Return the stream repeated ``times`` times, or endlessly by default.

        Each pass is shuffled differently.
        """
        times = None if times is None else check_at_least(times, 1, "times")
        return _RepeatedStream(self, times)

    def epoch_length(self, count: int) -> "Stream[Sample_co]":
        """Return the stream with epochs of ``count`` samples, on all ranks together.

        The stream repeats as often as needed. So ranks with uneven shards have equal
        numbers of batches, and none waits for another at the end of an epoch. This must
        be the last step, so that with ``on_error="skip"`` later samples replace failed
        ones. (If ranks share a reader, the same samples must fail on each rank.) If the
        number of ranks does not divide ``count``, the loader's ``tail`` decides about
        the last samples.

        A loader's next epoch, even after a resume, continues where the previous epoch
        stopped: each reader reads every sample once before it repeats any. Shuffles
        depend on a reader's number of passes, and on the number of the loader's first
        epoch; ``set_epoch`` changes neither samples nor order of later epochs. The
        numbers of ranks and workers stay those of the first epoch. ``async for``
        without a loader starts at the beginning each time.
        """
        return _EpochStream(self.repeat(), check_at_least(count, 1, "count"))

    def batch(self, size: int, *, drop_last: bool = False) -> "Stream[Any]":
        """Return the stream in batches: lists of samples, or for tables ``Rows``."""
        size = check_at_least(size, 1, "size")
        described = {"size": size, "drop_last": drop_last}
        return _StepStream(self, Batched, described)

    def unbatch(self) -> "Stream[Any]":
        """Return the stream of all samples' items, one by one.

        This is the reverse of ``batch``; rows of tables stay in columns. Samples are
        lists, arrays, generators or other iterables. Generators run in a thread, no
        further than needed. A sample that is a string, bytes, a dict or not iterable
        fails with a ``TypeError``. If an iterable raises, the error replaces its
        remaining items. A state contains the position among a sample's items. On
        resume, that sample's items are generated again, and must be the same.
        """
        return _StepStream(self, Unbatched, {})

    def flat_map(
        self, function: Callable[[Any], Any], *, concurrency: int = 64
    ) -> "Stream[Any]":
        """Return the stream of the items that ``function`` returns for each sample.

        Short form of ``map(function, concurrency=concurrency).unbatch()``. The function
        returns an iterable, or is a generator function.
        """
        return self.map(function, concurrency=concurrency).unbatch()

    def tokenize(
        self, tokenizer: Any, column: str | None = None, *, batch: int = 256
    ) -> "Stream[Any]":
        """Return the stream of texts as tokens, in one 1-D integer array per text.

        Tokenizing runs in a thread, ``batch`` texts at a time, one batch in advance. A
        sample that is not text, or lacks the column, fails alone. On resume, earlier
        texts are read again, but not tokenized again. A tokenizer (not a function) is
        copied now, without its padding. A state contains a digest of its vocabulary and
        settings, and is refused if they differ.

        Args:
            tokenizer: A ``tokenizers.Tokenizer``, or one of
                ``tokenizers.implementations``; a fast tokenizer of ``transformers``,
                called as ``tokenizer(texts)`` (all add special tokens, and return
                int64); or a plain function of a list of texts that returns a sequence
                of integers for each text, or a dict with these as ``input_ids``.
            column: Key or column of the text, for samples that are dicts or rows.
            batch: Number of texts to tokenize at a time; not part of the state.

        Raises:
            TypeError: If ``tokenizer`` is none of these.
            ValueError: If ``batch`` is below 1.
        """
        batch = check_at_least(batch, 1, "batch")
        if column is not None:
            check_is(column, str, "column", "a name")
        described: State = {"column": column}
        function = copy = tokenizer_of(tokenizer)
        if copy is not None:
            described["tokenizer"] = copy.described
        elif callable(tokenizer) and not (
            is_async_function(tokenizer) or generator_of(tokenizer)
        ):
            function = tokenizer
            described["function"] = qualname(tokenizer)
        else:
            raise TypeError(
                "tokenizer must be a tokenizers.Tokenizer, a fast tokenizer of "
                "transformers, or a plain function of a list of texts, got "
                f"{tokenizer!r}"
            )
        return _StepStream(self, Tokenized, described, function=function, batch=batch)

    def pack(  # noqa: PLR0913  (each is one choice)
        self,
        length: int,
        strategy: Strategy = "concat",
        *,
        window: int = 1000,
        bos: int | None = None,
        eos: int | None = None,
        overlong: Overlong = "split",
        last: Last = "drop",
        pad: int = 0,
        shift: bool = True,
        seed: int = 0,
    ) -> "Stream[dict[str, Any]]":
        """Return the stream of samples of ``length`` tokens, packed from documents.

        Documents are 1-D arrays, tensors or lists of integers, or dicts with such
        ``input_ids`` and an optional ``loss_mask``, true for tokens to predict. Samples
        are dicts of ``input_ids``, ``labels`` and ``position_ids``: int64 arrays of
        shape ``(length,)``. A label is the next token of the same document; it is -100
        at the last token, in padding, and where the mask is false. Positions restart at
        each document and sample; padding counts as a document.

        A sample that is not a document fails with a TypeError, KeyError or ValueError.
        On resume, ``"concat"`` reads the documents of the open sample and at most 64
        others again, ``"best_fit"`` one window. (If user code then fails for different
        documents of the window, the window's samples differ.)

        Args:
            length: Number of tokens per sample.
            strategy: ``"concat"``: concatenate documents and split them;
                ``"best_fit"``: fill samples with whole documents and padding, window by
                window, and permute the samples of a window.
            window: Number of documents per window, for best fit.
            bos: Token to add before each document; it is never predicted.
            eos: Token to add after a document, masked like the document's last token.
            overlong: What best fit does with documents of more than ``length`` tokens.
            last: Whether concat drops or pads an incomplete last sample. Best fit pads
                all samples.
            pad: Token for padding.
            shift: Whether labels are the next tokens. False: the tokens themselves, for
                models that shift labels; a document's first token has the label -100.
            seed: Seed of the permutation, for best fit; it also depends on the epoch.

        Raises:
            ValueError: If ``length`` or ``window`` is below 1, a word is unknown, or
                ``window``, ``overlong`` or ``seed`` is given for concat.
        """
        length = check_at_least(length, 1, "length")
        window = check_at_least(window, 1, "window")
        check_word(strategy, Strategy, "strategy")
        check_word(overlong, Overlong, "overlong")
        check_word(last, Last, "last")
        for_best_fit = {"overlong": overlong, "window": window, "seed": seed}
        if strategy == "concat" and (overlong, window, seed) != ("split", 1000, 0):
            raise ValueError(
                f"overlong, window and seed need strategy='best_fit': 'concat' splits "
                f"documents where they come, in their order; got {for_best_fit}"
            )
        bos = None if bos is None else check_token(bos, "bos")
        eos = None if eos is None else check_token(eos, "eos")
        described: State = {"length": length, "strategy": strategy}
        described |= {"bos": bos, "eos": eos, "pad": check_token(pad, "pad")}
        described |= {"shift": bool(shift)}
        if strategy == "concat":
            return _StepStream(self, Packed, {**described, "last": last})
        described |= {**for_best_fit, "seed": operator.index(seed)}
        return _StepStream(self, Packed, described, size=window)

    def cache(
        self, directory: str | PathLike[str], max_bytes: int = CACHE_BYTES
    ) -> Self:
        """Return the stream with its shards' bytes cached in a directory.

        Processes share the directory; the least recently used entries are evicted.

        Raises:
            TypeError: If the stream does not read shards.
        """
        if not self.sources:
            raise TypeError(f"{self!r} reads no shards: cache the stream that does")
        cached = tuple(stream.cache(directory, max_bytes) for stream in self.sources)
        return self._clone(sources=cached)

    def mix(
        self,
        *others: "Stream[Any]",
        weights: Weights | None = None,
        until: Until = "all",
    ) -> "Stream[Any]":
        """Return a mixture of this and other streams, in proportion to weights.

        Short form of ``aioloader.datasets.mix`` for streams without names: this stream
        is ``"0"``, the next ``"1"``... The ranks and readers of this stream apply.
        """
        named = {str(number): stream for number, stream in enumerate((self, *others))}
        return Mixture(named, weights, until)


def _check_function(function: object, *rejected: str) -> None:
    """Raise a TypeError unless ``function`` is callable and of no ``rejected`` kind."""
    check_is(function, Callable, "function", "callable")
    if generator_of(function) in rejected:
        raise TypeError(
            f"function must return its result, and {qualname(function)!r} makes a "
            "generator"
        )


class _StepStream(Stream[Any]):
    """A stream with one more step; ``step`` is the class of the cursor.

    ``described`` are parameters that a state depends on. ``extras`` are the other
    parameters, and functions; ``described`` has only the functions' names.
    """

    def __init__(
        self, upstream: Stream[Any], step: type[Step], described: State, **extras: Any
    ) -> None:
        super().__init__(upstream)
        self._described = described
        self._step = step
        self._extras = extras
        self.is_endless &= step is not Taken

    @property
    def upstream(self) -> Stream[Any]:
        return self.sources[0]

    async def open(self, reading: Reading, state: State) -> Cursor:
        upstream = await self.upstream.open(reading, state.get("up", {}))
        parameters = {**self._described, **self._extras}
        return self._step(upstream, state, reading, **parameters)

    def total(self) -> int | None:
        return self.upstream.total() if self._step.is_one_to_one else None

    def carried(self, state: State, passed: int, share: ReaderShare) -> State | None:
        """Return the next epoch's first state, or None; this step starts over."""
        passed = passed + state.get("taken", 0) if self._step.is_one_to_one else 0
        up = self.upstream.carried(state.get("up", {}), passed, share)
        return None if up is None else {"up": up}

    def describe(self) -> State:
        upstream = self.upstream.describe()
        return {"kind": self._step.kind, **self._described, "of": upstream}

    def __repr__(self) -> str:
        first, *_ = *self._described.values(), None
        shown = first or "" if self._step in {Shuffled, Repeated, EpochPart} else "..."
        return f"{self.upstream!r}.{self._step.kind}({shown})"


class _RepeatedStream(_StepStream):
    def __init__(self, upstream: Stream[Any], times: int | None) -> None:
        super().__init__(upstream, Repeated, {"times": times})
        self.is_endless |= times is None
        self.continues = False

    async def open(self, reading: Reading, state: State) -> Cursor:
        # Each pass has its own epoch number, even if repeats are nested.
        shift = 16 + 16 * _repeat_depth(self)

        async def open_pass(number: int, up: State) -> Cursor:
            offset = number << shift
            epoch, begun = reading.epoch + offset, reading.begun + offset
            pass_reading = replace(reading, epoch=epoch, begun=begun)
            return await self.upstream.open(pass_reading, up)

        cursor = await open_pass(state.get("pass", 0), state.get("up", {}))
        return Repeated(cursor, state, reading, open_pass=open_pass, **self._described)

    def carried(self, _state: State, _passed: int, _share: ReaderShare) -> None:
        """Return None, because each epoch starts with the first pass."""


def _repeat_depth(stream: Stream[Any]) -> int:
    """Return the maximum depth of nested repeats."""
    return isinstance(stream, _RepeatedStream) + max(
        map(_repeat_depth, stream.sources), default=0
    )


class _EpochStream(_StepStream):
    _tail: Tail = "uneven"

    def __init__(self, upstream: Stream[Any], count: int) -> None:
        super().__init__(upstream, EpochPart, {"count": count})
        self.is_endless, self.continues = False, True

    async def open(self, reading: Reading, state: State) -> Cursor:
        # The source sees one epoch, so that the shuffle never changes within a pass.
        whole = replace(reading, epoch=reading.begun)
        upstream = await self.upstream.open(whole, state.get("up", {}))
        count, real = reading.share.parts(self.total(), self._tail)
        parameters: Any = {
            "count": count,
            "real": real,
            "leaves_out": self.leaves_out,
            "in_turns": reading.share.in_turns,
        }
        return EpochPart(upstream, state, reading, **parameters)

    def carried(self, state: State, passed: int, share: ReaderShare) -> State:
        """Return the next epoch's first state, which follows the last sample taken."""
        if state.get("next") is not None:
            return {"up": state["next"]}
        left = share.parts(self.total(), self._tail)[1] - state.get("given", 0)
        again = state.get("again", 0) + min(passed + state.get("taken", 0), left)
        return {"up": state.get("up", {}), "again": again}

    def total(self) -> int:
        count: int = self._described["count"]
        return count

    def evened(self, tail: Tail, *, is_skipped: bool = False) -> Self:
        return self._clone(_tail=tail, leaves_out=is_skipped)


class Mixture(Stream[Any]):
    """A mixture of several streams; arguments and errors are those of ``mix``.

    The ranks and readers of the first stream apply.
    """

    def __init__(
        self,
        streams: Mapping[str, Stream[Any]],
        weights: Weights | None,
        until: Until,
    ) -> None:
        super().__init__(*streams.values())
        for stream in self.sources:
            if stream.ranks not in {None, self.ranks}:
                raise ValueError(f"shard() applies to the mixture, not {stream!r}")
            if stream.num_readers not in {None, self.num_readers}:
                raise ValueError(f"readers() applies to the mixture, not {stream!r}")
        self._names = [*streams]
        self._schedule = Schedule(self._names, weights, until)
        ends = all if until == "first" else any
        self.is_endless: bool = ends(stream.is_endless for stream in self.sources)

    def _paired(self, state: State) -> Iterable[tuple[Stream[Any], State]]:
        states = state.get("up") or [{} for _ in self.sources]
        return zip(self.sources, states, strict=True)

    async def open(self, reading: Reading, state: State) -> Cursor:
        """Open all streams; return a cursor that mixes their samples."""
        cursors = [await stream.open(reading, up) for stream, up in self._paired(state)]
        return Mixed(cursors, state, reading, self._schedule, self.ahead())

    def carried(self, state: State, _passed: int, share: ReaderShare) -> State | None:
        """Return the next epoch's first state, or None; the mixture starts over."""
        ups = [stream.carried(up, 0, share) for stream, up in self._paired(state)]
        return {"up": [up or {} for up in ups]} if any(ups) else None

    def describe(self) -> State:
        """Return the parameters of the mixture, and the streams' descriptions."""
        return {
            "kind": "mix",
            "streams": [stream.describe() for stream in self.sources],
            "names": self._names,
            "weights": [[start, weights] for start, weights in self._schedule.stages],
            "until": self._schedule.until,
        }

    def __repr__(self) -> str:
        first, *rest = map(repr, self.sources)
        return f"{first}.mix({', '.join(rest)})"
