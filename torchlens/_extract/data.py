"""What a data set may be: each kind becomes a source of inputs.

`Items` are inputs that can be fetched by number; `Stream` is an iterable of batches, which is read
from its start to its end.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, default_collate

from torchlens._text.error_wording import got

_IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
_Item = TypeVar("_Item")


@dataclass(slots=True)
class Inputs:
    """One batch: the inputs as the data set gives them, and their ids.

    `failed` are the ids of inputs that could not be read, with the reason.
    """

    ids: list[Any]
    data: Any
    failed: list[tuple[Any, str]] = field(default_factory=list)


class Items:
    """Inputs that are fetched by number."""

    def __init__(
        self,
        get: Callable[[int], Any],
        num: int,
        ids: Sequence[Any] | None,
        description: Mapping[str, Any],
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> None:
        self.num = num
        self.ids = _checked_ids(ids, num)
        self.description = dict(description)
        self._get = get
        self._collate = collate or collated_items
        self._num_workers = num_workers

    def id_of(self, number: int) -> Any:
        """The id of an input."""
        return number if self.ids is None else self.ids[number]

    def batches(self, numbers: Sequence[Sequence[int]], skips: bool) -> Iterator[Inputs]:
        """The batches with these inputs; with `skips`, inputs that cannot be read are left out."""
        loader: DataLoader[Any] = DataLoader(
            _Guarded(self._get, self.num),
            batch_sampler=numbers,  # type: ignore[arg-type]
            num_workers=self._num_workers,
            collate_fn=partial(_collated, self._collate),
        )
        read = iter(loader)
        for given in numbers:
            ids = [self.id_of(number) for number in given]
            failed: list[tuple[int, Exception]] = []
            try:
                good, data, failed = next(read)
                if failed and not skips:
                    raise failed[0][1]
            except Exception as error:
                who = named_ids([ids[place] for place, _ in failed[:1]] if failed else ids)
                error.add_note(f"torchlens: raised when reading {who}.")
                raise
            reasons = [(ids[place], reason_of(error)) for place, error in failed]
            yield Inputs([ids[place] for place in good], data, reasons)


class Stream:
    """An iterable of batches."""

    def __init__(
        self, batches: Iterable[Any], ids: Sequence[Any] | None, description: Mapping[str, Any]
    ) -> None:
        self.ids = _checked_ids(ids, None)
        self.description = dict(description)
        self._batches = map(_as_dict, batches)
        self._first: list[Any] = []  # read, but not yet passed on

    def peek(self) -> Inputs:
        """The first batch, which `batches` gives again."""
        self._first = list(islice(self._batches, 1))
        if not self._first:
            raise ValueError("data holds no batches.")
        return Inputs(self._ids_of(0, batch_size_of(self._first[0])), self._first[0])

    def batches(self) -> Iterator[Inputs]:
        """All batches, from the start."""
        start = 0
        for data in chain(self._first, self._batches):
            ids = self._ids_of(start, batch_size_of(data))
            yield Inputs(ids, data)
            start += len(ids)
        if self.ids is not None and start < len(self.ids):
            raise ValueError(f"ids has {len(self.ids)} items, and the data had {start} inputs.")

    def _ids_of(self, start: int, size: int) -> list[Any]:
        if self.ids is None:
            return list(range(start, start + size))
        if start + size > len(self.ids):
            raise ValueError(
                f"ids has {len(self.ids)} items, and the data has more inputs than that. Give one "
                "id for each input, in order."
            )
        return list(self.ids[start : start + size])


def _as_dict(batch: Any) -> Any:
    """A tokenizer's own kind of mapping as a dict."""
    return dict(batch) if isinstance(batch, Mapping) else batch


class _Guarded(torch.utils.data.Dataset[Any]):
    """A data set whose items may be exceptions: those of reading them."""

    def __init__(self, get: Callable[[int], Any], num: int) -> None:
        self._get = get
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, number: int) -> Any:
        try:
            return self._get(number)
        except Exception as error:
            return _Failed(error)


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error


def _collated(collate: Callable[[list[Any]], Any], items: list[Any]) -> Any:
    """The places of the items that could be read, a batch of these, and the failures."""
    good = [place for place, item in enumerate(items) if not isinstance(item, _Failed)]
    failed = [(place, item.error) for place, item in enumerate(items) if isinstance(item, _Failed)]
    return good, _as_dict(collate([items[place] for place in good])) if good else None, failed


def collated_items(items: list[Any]) -> Any:
    """A batch of items; lists of numbers in dicts, as Hugging Face's data sets have them, become
    tensors first.
    """
    return default_collate([
        {name: _as_tensor(value) for name, value in item.items()}
        if isinstance(item, Mapping) else item
        for item in items
    ])  # fmt: skip


def _as_tensor(value: Any) -> Any:
    is_list = isinstance(value, list) and value and not isinstance(value[0], str)
    return torch.tensor(value) if is_list else value


def _checked_ids(ids: Any, num: int | None) -> Sequence[Any] | None:
    if ids is None:
        return None
    ids = [item.item() if isinstance(item, np.generic | torch.Tensor) else item for item in ids]
    if num is not None and len(ids) != num:
        raise ValueError(f"ids must have one id for each of the {num} inputs, got {len(ids)} ids.")
    for one in ids:
        if not isinstance(one, str | int):
            raise TypeError(f"An id must be a string or a whole number, got {got(one)}.")
    if len(set(ids)) < len(ids):
        raise ValueError("ids must differ from each other: an id names one input.")
    return ids


# -- which kind it is ------------------------------------------------------------------------------


def source_of(
    data: Any,
    ids: Any = None,
    transform: Callable[[Any], Any] | None = None,
    tokenizer: Callable[..., Any] | None = None,
) -> Items | Stream:
    """The source of inputs that `data` means."""
    described = {"transform": _described(transform), "tokenizer": _tokenizer(tokenizer)}
    if isinstance(data, str | os.PathLike):
        return _from_folder(Path(data).expanduser(), ids, transform, described)
    is_by_number = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, Mapping | DataLoader) or not is_by_number:
        if transform is not None or tokenizer is not None:
            raise ValueError(
                "transform and tokenizer are for data whose inputs are read one by one: a Dataset, "
                f"an array, a list or a folder, got {got(data)}. Apply them in the data."
            )
        return _from_batches(data, ids, described)
    collate = None if tokenizer is None else _Texts(tokenizer)
    if collate is None and isinstance(data, list | tuple) and data and isinstance(data[0], str):
        raise ValueError(
            "data is a list of texts: give tokenizer=, such as AutoTokenizer.from_pretrained(...)."
        )
    return Items(_Transformed(data, transform), len(data), ids, described, collate)


def _from_batches(data: Any, ids: Any, described: Mapping[str, Any]) -> Items | Stream:
    if isinstance(data, DataLoader):
        return _from_loader(data, ids, described)
    if isinstance(data, Mapping):
        sizes = {name: len(column) for name, column in data.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"The arrays in data must have one length, got {sizes}.")
        return Items(_Row(data), next(iter(sizes.values())), ids, described)
    if isinstance(data, Iterable):
        return Stream(data, ids, described)
    raise TypeError(
        "data must be a DataLoader, a Dataset, a tensor or array, a dict of them, a list of inputs "
        f"or texts, a folder of images, or an iterable of batches, got {got(data)}."
    )


class _Transformed:
    """Gets an item of a data set and transforms it."""

    def __init__(self, data: Any, transform: Callable[[Any], Any] | None) -> None:
        self._data = data
        self._transform = transform

    def __call__(self, number: int) -> Any:
        item = self._data[number]
        if self._transform is not None:
            return self._transform(item)
        # A row of an array in a file cannot be collated.
        return np.array(item) if isinstance(item, np.memmap) else item


class _Row:
    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns

    def __call__(self, number: int) -> Any:
        return {name: column[number] for name, column in self._columns.items()}


def _from_loader(
    loader: "DataLoader[Any]", ids: Any, described: Mapping[str, Any]
) -> Items | Stream:
    """A loader that reads a data set in order is read by number, so that it can be resumed."""
    own = {**described, "transform": _described(getattr(loader.dataset, "transform", None))}
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, SequentialSampler) and loader.batch_size is not None:
        items = _Transformed(loader.dataset, None)
        num = len(loader.dataset)  # type: ignore[arg-type]
        return Items(items, num, ids, own, loader.collate_fn, loader.num_workers)
    is_in_order = loader.batch_size is None and isinstance(sampler, SequentialSampler)
    if not isinstance(loader.dataset, IterableDataset) and not is_in_order:
        order = sampler if loader.batch_size is not None else loader.batch_sampler
        raise ValueError(
            f"The DataLoader reads its data by {type(order).__name__}, in an order that is not "
            "that of the data set, so that rows could not be matched with inputs. Use "
            "shuffle=False."
        )
    return Stream(loader, ids, own)


class _Images:
    """Opens an image file and transforms it."""

    def __init__(self, folder: Path, names: Sequence[str], transform: Callable[[Any], Any]) -> None:
        self._folder = folder
        self._names = names
        self._transform = transform

    def __call__(self, number: int) -> Any:
        from PIL import Image

        with Image.open(self._folder / self._names[number]) as image:
            return self._transform(image.convert("RGB"))


def _from_folder(
    folder: Path, ids: Any, transform: Callable[[Any], Any] | None, described: dict[str, Any]
) -> Items:
    if not folder.is_dir():
        raise ValueError(f"data names the folder {str(folder)!r}, and there is no such folder.")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _IMAGES)
    if not files:
        raise ValueError(
            f"The folder {str(folder)!r} holds no images ({', '.join(sorted(_IMAGES))})."
        )
    names = [path.relative_to(folder).as_posix() for path in files]
    if transform is None:
        transform = _default_transform()
    described = {**described, "transform": _described(transform)}
    get = _Images(folder, names, transform)
    return Items(get, len(names), names if ids is None else ids, described)


def _default_transform() -> Callable[[Any], Any]:
    """What models trained on ImageNet are given."""
    try:
        from torchvision import transforms
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            "A folder of images needs torchvision (pip install torchvision), or "
            "transform=, a function from a PIL image to a tensor."
        ) from error
    normalize = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    steps = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normalize]
    made: Callable[[Any], Any] = transforms.Compose(steps)
    return made


class _Texts:
    """A batch of tokens, padded as the tokenizer does it: from texts, from dicts with one text, or
    from dicts of tokens.
    """

    def __init__(self, tokenizer: Callable[..., Any]) -> None:
        self._tokenizer = tokenizer

    def __call__(self, items: list[Any]) -> Any:
        if isinstance(items[0], Mapping) and "input_ids" in items[0]:
            names = ("input_ids", "attention_mask", "token_type_ids")
            rows = [{name: item[name] for name in names if name in item} for item in items]
            return self._tokenizer.pad(rows, return_tensors="pt")  # type: ignore[attr-defined]
        texts = [_text_of(item) for item in items]
        return self._tokenizer(texts, padding=True, truncation=True, return_tensors="pt")


def _text_of(item: Any) -> str:
    if isinstance(item, str):
        return item
    texts = (
        [one for one in item.values() if isinstance(one, str)] if isinstance(item, Mapping) else []
    )
    if len(texts) != 1:
        raise TypeError(f"With a tokenizer, an input must be a text, or have one, got {got(item)}.")
    return texts[0]


# -- what is written down about it -----------------------------------------------------------------


def _described(transform: Any) -> str | None:
    """The repr of a transform, without addresses in memory."""
    if transform is None:
        return None
    text = repr(transform)
    if " at 0x" in text:
        return getattr(transform, "__qualname__", type(transform).__qualname__)
    return text


def _tokenizer(tokenizer: Any) -> dict[str, str] | None:
    """The name of a tokenizer, and a digest of its vocabulary."""
    if tokenizer is None:
        return None
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    text = json.dumps(sorted(vocabulary.items()), default=str)
    return {"name": str(name), "vocabulary": hashlib.sha256(text.encode()).hexdigest()[:16]}


# -- wording ---------------------------------------------------------------------------------------


def named_ids(ids: Sequence[Any]) -> str:
    """Some inputs, in a message."""
    return f"input {ids[0]!r}" if len(ids) == 1 else f"inputs {ids[0]!r} to {ids[-1]!r}"


def reason_of(error: Exception) -> str:
    """What is written down of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


# -- batches ---------------------------------------------------------------------------------------


def batch_size_of(data: Any) -> int:
    """The number of inputs in a batch: the length of its first tensor or array."""
    for leaf in torch.utils._pytree.tree_leaves(data):
        if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim:
            return len(leaf)
    if isinstance(data, Sequence) and not isinstance(data, str):
        return len(data)
    raise TypeError(f"A batch must hold a tensor or an array, got {got(data)}.")


def prefetched(items: Iterable[_Item], depth: int = 2) -> Iterator[_Item]:
    """The items, read ahead in a thread."""
    queue: Queue[Any] = Queue(depth)
    is_over = Event()
    end = object()

    def put(item: Any) -> None:
        while not is_over.is_set():
            try:
                queue.put(item, timeout=0.1)
                return
            except Full:
                continue

    def read() -> None:
        try:
            for item in items:
                put((item, None))
                if is_over.is_set():
                    return
            put((end, None))
        except BaseException as error:  # raised again where the items are used
            put((end, error))

    thread = Thread(target=read, name="torchlens-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item, error = queue.get()
            if error is not None:
                raise error
            if item is end:
                return
            yield item
    finally:
        is_over.set()
        while True:
            try:
                queue.get_nowait()
            except Empty:
                break
        thread.join()
