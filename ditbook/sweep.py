"""Parameter sweeps: many runs of one function, in parallel, remembered on disk.

A run is recognised by its arguments, by the source of the function, and by the sources of `ditbook`: whatever is
edited, no stale result comes back. Results are written as they arrive, so an interrupted sweep goes on where it
stopped.
"""

import hashlib
import inspect
import os
import pickle
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent


def sweep(
    function: Callable[..., Any],
    grid: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    *,
    jobs: int = -1,
    folder: Path | str | None = None,
) -> list[dict[str, Any]]:
    """Call ``function(**point, seed=seed)`` for every point of the grid and every seed.

    Runs go through ``joblib.Parallel`` without a backend: processes on this machine, or wherever a surrounding
    ``joblib.parallel_config`` sends them. On a Dask cluster, for example::

        from dask.distributed import Client

        with Client("tcp://scheduler:8786"), joblib.parallel_config("dask"):
            rows = sweep(train, {"n": [256, 1024], "depth": [1, 2]}, seeds=range(5))

    Only this process reads and writes the memo, so workers need no common disk. A function whose source cannot be
    read (typed at a prompt, say) is run without a memo.

    :param function: called with keyword arguments; its result is pickled. What it depends on are its arguments, and
        functions and constants of its own module or notebook: all are part of the key. So is `ditbook`; other
        packages count by the versions of torch and numpy.
    :param grid: argument names to the values they take; all combinations are run.
    :param seeds: values of the argument ``seed``.
    :param jobs: how many runs at a time; -1 means one for each processor, 1 means in this process.
    :param folder: where results are kept; by default ``_build/memo`` of the clone around the working directory.
    :return: one row for each run, in the order of the grid with seeds varying fastest: its arguments, ``seed`` and
        ``value``, the result.
    :raises ValueError: an empty axis or no seeds.
    """
    import joblib
    from tqdm import tqdm

    rows = _rows(grid, seeds)
    folder = memo_folder() if folder is None else Path(folder)
    keys = _keys(function, rows)
    found = {i: value for i, key in enumerate(keys) for value in _recall(folder, key)}
    missing = [i for i in range(len(rows)) if i not in found]
    calls = (joblib.delayed(_run)(function, i, rows[i]) for i in missing)
    arriving = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")(calls)
    name = getattr(function, "__name__", "sweep")
    with tqdm(total=len(rows), initial=len(found), desc=name, unit="run", disable=not missing) as progress:
        for i, value in arriving:
            _remember(folder, keys[i], value)
            found[i] = value
            progress.update()
    return [row | {"value": found[i]} for i, row in enumerate(rows)]


def sources_digest() -> str:
    """Fingerprint of all source files of the package, as they are on disk now."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


# What this process has imported; sources edited since then would be credited with results of the old code.
LOADED = sources_digest()


def memo_folder() -> Path:
    """``_build/memo`` in the nearest folder above the working directory that has a ``pyproject.toml``, or here."""
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / "pyproject.toml").exists()), here)
    return root / "_build" / "memo"


def _rows(grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    axes = {**grid, "seed": seeds}
    for name, values in axes.items():
        if len(values) == 0:
            raise ValueError(f"{name} must have at least one value, got none")
    return [dict(zip(axes, point, strict=True)) for point in product(*axes.values())]


def _run(function: Callable[..., Any], index: int, row: dict[str, Any]) -> tuple[int, Any]:
    return index, function(**row)


def _keys(function: Callable[..., Any], rows: list[dict[str, Any]]) -> list[str | None]:
    """One key for each run; None where nothing may be remembered."""
    import joblib

    digest = sources_digest()
    if digest != LOADED:
        warnings.warn(
            "ditbook changed on disk after it was imported: results are not kept until a restart", stacklevel=3
        )
        return [None] * len(rows)
    try:
        code = sorted(_code(function, {}).items())
    except (OSError, TypeError):
        return [None] * len(rows)
    versions = version("torch"), version("numpy")
    return [joblib.hash((code, digest, versions, sorted(row.items()))) for row in rows]


def _code(function: Callable[..., Any], seen: dict[str, str]) -> dict[str, str]:
    """Sources of the function and of the functions of its module that it names; fingerprints of constants it names."""
    import joblib

    seen[function.__qualname__] = inspect.getsource(function)
    names = inspect.getclosurevars(function)
    for name, value in (names.globals | names.nonlocals).items():
        if isinstance(value, types.FunctionType) and value.__module__ == function.__module__:
            if value.__qualname__ not in seen:
                _code(value, seen)
        elif not isinstance(value, types.ModuleType) and not callable(value):
            seen[name] = joblib.hash(value)
    return seen


def _path(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.pkl"


def _recall(folder: Path, key: str | None) -> Iterator[Any]:
    """The remembered result, if there is a sound one."""
    if key is None or not _path(folder, key).exists():
        return
    try:
        value = _unpack(_path(folder, key).read_bytes())
    except Exception as problem:
        warnings.warn(f"memo entry {_path(folder, key)} is damaged ({problem}); the run is repeated", stacklevel=3)
        return
    yield value


def _remember(folder: Path, key: str | None, value: Any) -> None:
    """Write the result so that it is there whole or not at all."""
    if key is None:
        return
    path = _path(folder, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(_pack(value))
    partial.replace(path)


def _pack(value: Any) -> bytes:
    pickled = pickle.dumps(value)
    return hashlib.sha256(pickled).digest() + pickled


def _unpack(content: bytes) -> Any:
    # The checksum comes first: what damaged bytes unpickle to may be wrong, or larger than the memory.
    checksum, pickled = content[:32], content[32:]
    if hashlib.sha256(pickled).digest() != checksum:
        raise ValueError("its checksum does not fit")
    return pickle.loads(pickled)
