"""The sweep: every combination once, remembered by what it depends on, resumed after an interruption."""

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import joblib
import pytest

from ditbook import sweep as module
from ditbook.sweep import sources_digest, sweep

ROOT = Path(__file__).parents[1]
OFFSET = 1


def area(width, height, seed):
    return width * height + seed


def shifted(x, seed):
    return doubled(x) + OFFSET


def doubled(x):
    return 2 * x


def counted(path, x, seed):
    """Leaves a mark for each real run."""
    with open(path, "a") as file:
        file.write(f"{x} {seed}\n")
    if x == "stop":
        raise KeyboardInterrupt
    return f"{x}-{seed}"


def runs(path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_every_point_and_seed_is_run_once_in_order(tmp_path):
    rows = sweep(area, {"width": [1, 2], "height": [10, 20]}, seeds=[0, 5], jobs=1, folder=tmp_path)
    assert [(r["width"], r["height"], r["seed"]) for r in rows] == [
        (w, h, s) for w in (1, 2) for h in (10, 20) for s in (0, 5)
    ]
    assert all(r["value"] == r["width"] * r["height"] + r["seed"] for r in rows)


def test_processes_give_what_one_process_gives(tmp_path):
    grid = {"width": [1, 2, 3], "height": [4, 5]}
    alone = sweep(area, grid, seeds=range(3), jobs=1, folder=tmp_path / "a")
    assert sweep(area, grid, seeds=range(3), jobs=2, folder=tmp_path / "b") == alone


def test_a_second_sweep_runs_only_what_is_new(tmp_path):
    marks = tmp_path / "marks"
    first = sweep(counted, {"path": [marks], "x": ["a", "b"]}, seeds=[0, 1], jobs=1, folder=tmp_path)
    again = sweep(counted, {"path": [marks], "x": ["a", "b", "c"]}, seeds=[0, 1], jobs=1, folder=tmp_path)
    assert runs(marks) == 6
    assert again[:4] == first


def test_an_interrupted_sweep_resumes_with_identical_results(tmp_path):
    marks, grid = tmp_path / "marks", {"path": [tmp_path / "marks"], "x": ["a", "b", "stop", "c"]}
    with pytest.raises(KeyboardInterrupt):
        sweep(counted, grid, seeds=[0], jobs=1, folder=tmp_path)
    before = runs(marks)
    grid["x"] = ["a", "b", "c"]
    resumed = sweep(counted, grid, seeds=[0], jobs=1, folder=tmp_path)
    assert (before, runs(marks)) == (3, 4)
    assert resumed == sweep(counted, grid, seeds=[0], jobs=1, folder=tmp_path / "fresh")


def test_a_changed_source_file_invalidates_the_memo(tmp_path, monkeypatch):
    """The package is copied, so that a file of it can be edited between two runs in fresh processes."""
    package = tmp_path / "ditbook"
    package.mkdir()
    for file in ("__init__.py", "sweep.py", "inputs.py"):
        (package / file).write_text((ROOT / "ditbook" / file).read_text())
    (package / "answer.py").write_text("VALUE = 41\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        from ditbook.answer import VALUE
        from ditbook.sweep import sweep

        def answer(x, seed):
            import ditbook.answer
            return ditbook.answer.VALUE

        print(sweep(answer, {"x": [0]}, [0], jobs=1, folder="memo")[0]["value"])
        """)
    )

    def run() -> str:
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert [run(), run()] == ["41", "41"]
    assert len(list((tmp_path / "memo").rglob("*.pkl"))) == 1
    (package / "answer.py").write_text("VALUE = 42\n")
    assert run() == "42"


def test_the_digest_sees_every_file_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    (tmp_path / "one.py").write_text("x = 1")
    first = sources_digest()
    (tmp_path / "one.py").write_text("x = 2")
    second = sources_digest()
    (tmp_path / "two.py").write_text("")
    assert len({first, second, sources_digest()}) == 3


def test_without_the_digest_a_stale_result_would_come_back(tmp_path, monkeypatch):
    """The planted fault: a key that ignores the sources. The results then differ only in what the digest would see."""
    monkeypatch.setattr(module, "PACKAGE", tmp_path / "package")
    (tmp_path / "package").mkdir()
    source, marks = tmp_path / "package" / "answer.py", tmp_path / "marks"

    def runs_after_an_edit() -> int:
        for text in ("old", "new"):
            source.write_text(text)
            monkeypatch.setattr(module, "LOADED", module.sources_digest())
            sweep(counted, {"path": [marks], "x": ["a"]}, [0], jobs=1, folder=tmp_path / "memo")
        return runs(marks)

    assert runs_after_an_edit() == 2
    monkeypatch.setattr(module, "sources_digest", lambda: "the same for ever")
    marks.unlink()
    assert runs_after_an_edit() == 1


def test_sources_edited_after_the_import_keep_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOADED", "older")
    marks = tmp_path / "marks"
    for _ in range(2):
        with pytest.warns(UserWarning, match="changed on disk"):
            sweep(counted, {"path": [marks], "x": ["a"]}, seeds=[0], jobs=1, folder=tmp_path)
    assert runs(marks) == 2


def test_helpers_and_constants_of_the_module_are_part_of_the_key(tmp_path, monkeypatch):
    this = importlib.import_module(__name__)
    assert sweep(shifted, {"x": [1]}, [0], jobs=1, folder=tmp_path)[0]["value"] == 3
    monkeypatch.setattr(this, "OFFSET", 10)
    assert sweep(shifted, {"x": [1]}, [0], jobs=1, folder=tmp_path)[0]["value"] == 12


def test_a_function_without_source_is_run_without_a_memo(tmp_path):
    namespace = {}
    exec("def unseen(x, seed): return x + seed", namespace)
    assert sweep(namespace["unseen"], {"x": [1]}, [2], jobs=1, folder=tmp_path / "memo")[0]["value"] == 3
    assert not (tmp_path / "memo").exists()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_entry_is_recomputed_and_said_so(tmp_path, damage):
    grid, marks = {"path": [tmp_path / "marks"], "x": ["a" * 200]}, tmp_path / "marks"
    value = sweep(counted, grid, [0], jobs=1, folder=tmp_path)[0]["value"]
    (entry,) = tmp_path.rglob("*.pkl")
    content = bytearray(entry.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 0xFF
    entry.write_bytes({"cut": content[:-20], "flip": content, "empty": b""}[damage])
    with pytest.warns(UserWarning, match="damaged"):
        assert sweep(counted, grid, [0], jobs=1, folder=tmp_path)[0]["value"] == value
    assert runs(marks) == 2
    assert sweep(counted, grid, [0], jobs=1, folder=tmp_path)[0]["value"] == value
    assert runs(marks) == 2


def test_damaged_bytes_are_never_unpickled(monkeypatch):
    """A changed byte may announce an object of many gigabytes."""
    content = module._pack({"x": [1.0, 2.0]})
    assert module._unpack(content) == {"x": [1.0, 2.0]}
    monkeypatch.setattr(module.pickle, "loads", lambda _: pytest.fail("damaged bytes were unpickled"))
    for position in range(len(content)):
        damaged = content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]
        with pytest.raises(ValueError, match="checksum"):
            module._unpack(damaged)


@pytest.mark.parametrize(("grid", "seeds", "name"), [({"width": []}, [0], "width"), ({"width": [1]}, [], "seed")])
def test_an_empty_axis_is_named(grid, seeds, name):
    with pytest.raises(ValueError, match=f"{name} must have at least one value"):
        sweep(area, grid, seeds)


def test_progress_is_shown(tmp_path, capsys):
    sweep(area, {"width": [1, 2], "height": [3]}, [0], jobs=1, folder=tmp_path)
    assert "2/2" in capsys.readouterr().err


def test_the_memo_lies_under_build(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path / "notebooks")
    assert module.memo_folder() == tmp_path / "_build" / "memo"


def test_a_dask_scheduler_with_two_worker_processes_runs_the_sweep(tmp_path):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
        ) as cluster,
        distributed.Client(cluster) as client,
        joblib.parallel_config("dask"),
    ):
        client.run(sys.path.append, str(Path(__file__).parent))
        rows = sweep(process_id, {"x": list(range(8))}, seeds=[0], folder=tmp_path)
        workers = set(client.run(os.getpid).values())
        again = sweep(process_id, {"x": list(range(8))}, seeds=[0], folder=tmp_path)
    assert {row["value"] for row in rows} <= workers
    assert len(workers) == 2
    assert os.getpid() not in workers
    assert again == rows


def process_id(x, seed):
    return os.getpid()
