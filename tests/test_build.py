"""book/build.py, execute.py, stage.py: the road from text notebooks to the site, on a book of two tiny chapters."""

import shutil
import subprocess
from pathlib import Path

import build
import execute
import ledger
import nbformat
import pytest
import stage
import yaml
from execute import BuildError
from site_html import mend

ROOT = Path(__file__).parents[1]
HEAD = """---
jupytext:
  text_representation: {extension: .md, format_name: myst}
kernelspec: {display_name: Python 3, language: python, name: python3}
---

# Chapter

```{code-cell} ipython3
:tags: [parameters]

scale = "quick"
seed = 0
```
"""


def chapter(*cells: str) -> str:
    return HEAD + "".join(f"\n```{{code-cell}} ipython3\n{cell}\n```\n" for cell in cells)


def claim(id: str, value: str) -> str:
    return f"from ditbook.claims import check\ncheck('{id}', 'gap', {value}, below=1.0)"


BOX = "\n:::{admonition} Lemma A (First)\n:class: statement\n:name: a\n\nA formula.\n:::\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A book of two chapters with the real configuration and package."""
    root = tmp_path_factory.mktemp("project")
    (root / "notebooks").mkdir()
    (root / "book").mkdir()
    shutil.copytree(ROOT / "ditbook", root / "ditbook", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("_static", "_ext"):
        shutil.copytree(ROOT / "book" / folder, root / "book" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("_config.yml", "requirements.lock"):
        shutil.copy(ROOT / name, root)
    (root / "book" / "references.bib").write_text("")
    (root / "book" / "index.md").write_text("# Index\n\n[One](../notebooks/one.md)\n")
    (root / "book" / "ledger.md").write_text("# Ledger\n\n<!-- generated -->\nnothing yet\n<!-- end -->\n")
    (root / "_toc.yml").write_text(
        "format: jb-book\nroot: book/index\nchapters:\n"
        "- file: book/ledger\n- file: notebooks/one\n- file: notebooks/two\n"
    )
    common = {
        "kind": "lemma",
        "title": "T",
        "section": "2.2",
        "rests_on": [],
        "evidence": "identity",
        "plain": "Words.",
    }
    entries = [
        common | {"id": "a", "number": "Lemma A", "chapter": "one"},
        common | {"id": "b", "number": "Lemma B", "chapter": "two", "rests_on": ["a"]},
    ]
    (root / "book" / "statements.yml").write_text(yaml.safe_dump(entries))
    (root / "notebooks" / "one.md").write_text(chapter(claim("a", "0.5")) + BOX)
    (root / "notebooks" / "two.md").write_text(chapter("from myst_nb import glue\nx = seed + 0.25", claim("b", "x")))
    return root


@pytest.fixture(scope="module")
def good(project) -> Path:
    """The project after one successful build."""
    assert build.main([], project) == 0
    return project


pytestmark = pytest.mark.xdist_group("build")


def test_the_site_carries_badges_ledger_and_records(good):
    page = (good / "_build" / "html" / "notebooks" / "one.html").read_text()
    assert 'class="status status-verified" href="../book/ledger.html#claim-a"' in page
    assert "Words." in page
    assert 'id="check-a"' in page
    ledger_page = (good / "_build" / "html" / "book" / "ledger.html").read_text()
    assert "2 statements: 2 verified; 2 checks" in ledger_page
    assert "nothing yet" not in ledger_page
    assert (good / "_build" / "html" / "_static" / "claims.csv").read_text().count("\n") == 3


def test_nothing_is_generated_outside_the_build_folder(good):
    names = {path.name for path in good.iterdir()}
    assert names == {"_build", "_config.yml", "_toc.yml", "book", "ditbook", "notebooks", "requirements.lock"}
    assert not list((good / "notebooks").glob("*.ipynb"))


def test_executed_notebooks_name_no_path_and_no_time_of_day(good):
    text = (good / "_build" / "executed" / "quick" / "two.ipynb").read_text()
    assert str(good) not in text
    assert "start_time" not in text
    assert "iopub" not in text


def test_the_injected_parameters_do_not_show(good):
    assert "Parameters" not in (good / "_build" / "html" / "notebooks" / "two.html").read_text()


def test_unchanged_chapters_are_not_run_again(good):
    assert execute.plan(["one", "two"], "quick", {}, good)[1] == []


@pytest.mark.parametrize("file", ["ditbook/subspace.py", "requirements.lock", "notebooks/one.md"])
def test_a_change_of_source_package_or_lock_makes_the_chapter_stale(good, file):
    path = good / file
    before = path.read_text()
    path.write_text(before + "\n")
    assert "one" in [job.name for job in execute.plan(["one", "two"], "quick", {}, good)[1]]
    path.write_text(before)


def test_a_prose_page_makes_no_chapter_stale(good):
    (good / "book" / "index.md").write_text("# Index\n\nAnother sentence. [One](../notebooks/one.md)\n")
    assert execute.plan(["one", "two"], "quick", {}, good)[1] == []


def test_other_parameters_make_a_chapter_stale(good):
    assert len(execute.plan(["one", "two"], "quick", {"seed": 1}, good)[1]) == 2


def test_a_chapter_that_shows_measurements_is_stale_when_they_change(good):
    source = good / "notebooks" / "one.md"
    before = source.read_text()
    source.write_text(before + "\nAs measured in benchmarks/results.csv.\n")
    (good / "benchmarks").mkdir()
    first = execute.run_key(source, {}, good)
    (good / "benchmarks" / "results.csv").write_text("ratio\n2\n")
    assert execute.run_key(source, {}, good) != first
    shutil.rmtree(good / "benchmarks")
    source.write_text(before)


def test_an_unknown_parameter_is_refused(good):
    with pytest.raises(BuildError, match=r"one\.md has no parameter sed \(it has: scale, seed\)"):
        execute.plan(["one"], "quick", {"sed": 1}, good)


def test_a_missing_chapter_is_named(good):
    with pytest.raises(BuildError, match=r"notebooks/three\.md does not exist"):
        execute.plan(["three"], "quick", {}, good)


def test_a_failing_claim_keeps_what_is_good_and_names_the_place(good, capfd):
    index = (good / "_build" / "html" / "index.html").read_bytes()
    one, two = good / "notebooks" / "one.md", good / "notebooks" / "two.md"
    before = one.read_text(), two.read_text()
    one.write_text(chapter(claim("a", "float('nan')")))
    two.write_text(before[1] + "\nAnother line.\n")
    assert build.main([], good) == 1
    captured = capfd.readouterr()
    assert "notebooks/one.md, cell 3 (In [3]): claim a: gap is nan, expected at most 1" in captured.err
    partial = good / "_build" / "failed" / "quick" / "one.ipynb"
    records = ledger.records_of(nbformat.read(partial, as_version=4))
    assert [record["id"] for _, record in records if not record["passed"]] == ["a"]
    assert str(partial.relative_to(good)) in captured.err
    executed = nbformat.read(good / "_build" / "executed" / "quick" / "two.ipynb", as_version=4)
    assert executed.metadata["ditbook"]["key"] == execute.run_key(two, {"scale": "quick"}, good)
    assert (good / "_build" / "html" / "index.html").read_bytes() == index
    assert not list((good / "_build" / "executed").rglob("*.running.ipynb"))
    one.write_text(before[0])
    two.write_text(before[1])


def test_an_unregistered_check_stops_the_build_and_keeps_the_site(good, capfd):
    index = (good / "_build" / "html" / "index.html").read_bytes()
    one = good / "notebooks" / "one.md"
    before = one.read_text()
    one.write_text(chapter(claim("a", "0.5"), claim("lemma-99", "0.5")))
    assert build.main([], good) == 1
    assert "check of 'lemma-99', which is not registered" in capfd.readouterr().err
    assert (good / "_build" / "html" / "index.html").read_bytes() == index
    one.write_text(before)


def test_a_sphinx_warning_stops_the_build_and_keeps_the_site(good, capfd):
    index = (good / "_build" / "html" / "index.html").read_bytes()
    page = good / "book" / "index.md"
    before = page.read_text()
    page.write_text(before + "\n[Nowhere](nowhere.md)\n")
    assert build.main([], good) == 1
    assert "nowhere.md" in capfd.readouterr().err
    assert (good / "_build" / "html" / "index.html").read_bytes() == index
    page.write_text(before)


def test_launch_buttons_appear_with_the_address_of_a_repository(good):
    page, config = good / "_build" / "html" / "notebooks" / "one.html", good / "_config.yml"
    assert "mybinder.org" not in page.read_text()
    before = config.read_text()
    config.write_text(before + "\nrepository: {url: https://github.com/someone/book, branch: main}\n")
    assert build.main([], good) == 0
    text = page.read_text()
    assert "https://mybinder.org/v2/gh/someone/book/main?urlpath=lab/tree/notebooks/one.md" in text
    assert "https://github.com/someone/book/issues/new" in text
    config.write_text(before)
    assert build.main([], good) == 0
    assert "mybinder.org" not in page.read_text()


def test_outside_a_checkout_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError("git")))
    assert build.commit(tmp_path) == "unknown"


def test_links_to_chapters_follow_them_into_the_staged_book():
    text = "[a](../notebooks/one.md) [b](one.md#part) [c](other.md)"
    assert stage.link_notebooks(text, ["one"]) == "[a](../notebooks/one.ipynb) [b](one.ipynb#part) [c](other.md)"


def test_no_id_stands_twice_after_mending():
    page = '<div id="x"></div><div class="claim claim-passed" data-claim="a"></div>' * 2
    mended = mend(page)
    assert mended.count('id="x"') == 1
    assert 'id="x-2"' in mended
    assert 'data-claim="a" id="check-a"' in mended
    assert 'data-claim="a" id="check-a-2"' in mended
