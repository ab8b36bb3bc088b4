"""book/pages.py, claims_map.py, gallery.py: what the generated pages say follows from registry and records."""

import math
import re
from dataclasses import replace
from pathlib import Path

import claims_map
import explorer
import ledger as book_ledger
import networkx as nx
import pages
import pytest
import yaml
from gallery import Figure
from ledger import LedgerError
from test_ledger import RUN, entry, record

from ditbook.attention import exp_polynomial
from ditbook.universality import construct

ROOT = Path(__file__).parents[1]


def ledger_of(*entries, records=None, chapters=("one",)):
    entries = [{"see": []} | e for e in entries]
    made = [record(e["id"], chapter=e["chapter"]) for e in entries] if records is None else records
    return book_ledger.build(entries, made, chapters)


def book_of(ledger, folder=ROOT / "book", figures=()):
    run = {"chapter": "one", "title": "One", "seconds": 3.0, "peak_mib": 200, "checks": 2, "scale": "quick", "seed": 0}
    return pages.Book(ledger, {f.name: f for f in figures}, [run | RUN], "abc123", folder)


FIGURE = Figure("gap", "one", "One", "A line that falls from one to zero.", "A gap.", "<svg/>", keep_colours=False)
CHAIN = (entry("a"), entry("b", rests_on=["a"]), entry("c", rests_on=["a", "b"]), entry("d"))


# --- the map --------------------------------------------------------------------------------------------------------


def test_every_statement_stands_once_on_the_map_and_no_two_in_one_place():
    nodes, headings, height = claims_map.place(ledger_of(*CHAIN))
    assert sorted(node.id for node in nodes) == ["a", "b", "c", "d"]
    assert len({(node.x, node.y) for node in nodes}) == 4
    assert all(0 < node.x < claims_map.WIDTH and 0 < node.y < height for node in nodes)
    assert [name for name, _ in headings] == ["Score decomposition"]


def test_lines_that_follow_from_others_are_left_out_and_nothing_becomes_unreachable():
    ledger = ledger_of(*CHAIN)
    drawn = {(a, b) for a, b, _ in claims_map.edges(ledger, claims_map.place(ledger)[0])}
    assert drawn == {("a", "b"), ("b", "c")}
    whole = nx.transitive_closure(claims_map.dependency_graph(ledger))
    assert set(nx.transitive_closure(nx.DiGraph(drawn)).edges) == set(whole.edges)


def test_the_marks_of_two_statuses_differ_in_shape_and_every_status_has_one():
    assert set(claims_map.MARKS) == set(book_ledger.STATUS)
    assert len(set(claims_map.MARKS.values())) == len(claims_map.MARKS)


def test_a_section_without_a_band_gets_one_of_its_own():
    assert list(claims_map.bands(ledger_of(entry("a"), entry("z", section="9.9")))) == [
        "Score decomposition",
        "Section 9.9",
    ]


def test_what_rests_on_a_failed_statement_shows_it():
    failing = [record("a", passed=False), record("b"), record("c"), record("d")]
    page = pages.map_page(book_of(ledger_of(*CHAIN, records=failing)))
    marked = {id: "map-weakened" in kind for kind, id in re.findall(r'class="map-node ([^"]*)" data-id="(\w)"', page)}
    assert marked == {"a": False, "b": True, "c": True, "d": False}
    healthy = pages.map_page(book_of(ledger_of(*CHAIN)))
    assert "map-weakened" not in healthy


def test_the_real_map_is_acyclic_and_names_everything_twice():
    entries = book_ledger.read_registry(ROOT / "book" / "statements.yml")
    ledger = book_ledger.build(entries, [], [])
    page = pages.map_page(book_of(ledger))
    assert nx.is_directed_acyclic_graph(claims_map.dependency_graph(ledger))
    assert len(re.findall('class="map-node', page)) == len(entries)
    assert all(f">{e['number']}</a></th>" in page for e in entries)


@pytest.mark.parametrize(("number", "label"), [("Lemma E.4", "Lem E.4"), ("Book 3", "Book 3"), ("Step S0", "Step S0")])
def test_labels_are_short(number, label):
    assert claims_map.short_label(number) == label


# --- errata ---------------------------------------------------------------------------------------------------------


def test_every_erratum_of_the_registry_stands_on_the_errata_page():
    entries = book_ledger.read_registry(ROOT / "book" / "statements.yml")
    page = pages.errata_page(book_of(book_ledger.build(entries, [], [])))
    found = re.findall(r'class="erratum-card" id="erratum-(\d+)"', page)
    assert sorted(map(int, found)) == list(range(1, 50))


def test_an_erratum_outside_the_groups_stops_the_build():
    entries = book_ledger.read_registry(ROOT / "book" / "statements.yml")
    extra = next(e for e in entries if e["id"] == "erratum-1") | {"id": "erratum-50"}
    with pytest.raises(LedgerError, match="without a group on the errata page: erratum-50"):
        pages.errata_page(book_of(book_ledger.build([*entries, extra], [], [])))


def test_the_witnesses_of_a_chapter_are_numbered_like_its_cards():
    twice = [record("a"), record("a", what="other")]
    ledger = ledger_of(entry("a"), records=twice)
    assert [pages.check_link(r, ledger) for r in ledger.records["a"]] == [
        "../notebooks/one.html#check-a",
        "../notebooks/one.html#check-a-2",
    ]


# --- headlines and quoted numbers -----------------------------------------------------------------------------------


def headlines(tmp_path, **changes):
    card = {"id": "a", "sentence": "It holds.", "figure": "gap", "check": "gap"} | changes
    (tmp_path / "headlines.yml").write_text(yaml.safe_dump([card]))
    return pages.headlines(book_of(ledger_of(*CHAIN), tmp_path, [FIGURE]))


def test_a_card_shows_sentence_figure_number_and_link(tmp_path):
    page = headlines(tmp_path)
    assert "It holds." in page
    assert 'src="../_static/figures/gap.svg"' in page
    assert "<b>1e-12</b> gap" in page
    assert 'href="../notebooks/one.html"' in page


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"figure": "lost"}, "shows figure 'lost'"), ({"check": "lost"}, "0 checks of a begin with 'lost'")],
)
def test_a_card_whose_figure_or_number_is_not_there_stops_the_build(tmp_path, changes, message):
    with pytest.raises(LedgerError, match=message):
        headlines(tmp_path, **changes)


def test_a_number_on_a_prose_page_is_quoted_from_its_check():
    text = "It is <!-- number: a | gap -->in the chapter<!-- end -->."
    filled = pages.fill("prose", text, book_of(ledger_of(*CHAIN)))
    assert filled == 'It is <a href="../notebooks/one.html#check-a">1e-12</a>.'
    with pytest.raises(LedgerError, match="0 checks of a begin with 'gone'"):
        pages.fill("prose", text.replace("gap", "gone"), book_of(ledger_of(*CHAIN)))


def test_two_checks_that_begin_alike_cannot_be_quoted():
    twice = ledger_of(entry("a"), records=[record("a"), record("a", what="gap, again")])
    with pytest.raises(LedgerError, match="2 checks of a begin with 'gap'"):
        pages.find_record(twice, "a", "gap")


def test_a_page_without_generated_part_stays_as_it_is():
    assert pages.fill("prose", "Words.", book_of(ledger_of(*CHAIN))) == "Words."


# --- gallery and runs -----------------------------------------------------------------------------------------------


def test_the_gallery_links_each_figure_to_its_place():
    other = replace(FIGURE, name="photo", keep_colours=True)
    page = pages.gallery_page(book_of(ledger_of(*CHAIN), figures=[FIGURE, other]))
    assert 'href="../notebooks/one.html#fig-gap"' in page
    assert page.count("keep-colours") == 1
    assert page.count("\n## One\n") == 1


def test_the_status_page_names_time_memory_scale_seed_versions_and_commit():
    page = pages.runs_page(book_of(ledger_of(*CHAIN)))
    for part in ("3.0", "200", "quick, 0", "2.13.0", "abc123", "Linux"):
        assert part in page


def test_the_status_page_shows_recorded_runs_in_the_order_of_the_book(tmp_path):
    (tmp_path / "_static").mkdir()
    rows = ["kind,name,seconds,peak_mib,note,machine,versions,commit", "full,one,77,333,,M,V,fedcba"]
    rows += ["bench,attention,900,444,8 of 9 bars met,M,V,fedcbb", "full,gone,1,1,,M,V,fedcbc"]
    (tmp_path / "_static" / "runs.csv").write_text("\n".join(rows))
    page = pages.runs_page(book_of(ledger_of(*CHAIN), folder=tmp_path))
    full, benchmarks = page.split("## The full scale, as recorded")[1].split("## The benchmarks, as recorded")
    assert all(part in full for part in ("one.html", "77", "333", "fedcba"))
    assert "fedcbc" not in page  # a chapter that is no longer there
    assert all(part in benchmarks for part in ("attention", "900", "444", "8 of 9 bars met", "fedcbb"))


# --- explorer -------------------------------------------------------------------------------------------------------


def test_the_explorers_tables_are_what_the_package_says():
    tables = explorer.tables()
    depth = tables["depth"]["log10"][1][0][explorer.CELLS.index(4)]
    assert depth == pytest.approx(math.log10(sum(construct(lambda X: X, 2, 2, 1 / 4).layer_counts.values())), abs=1e-3)
    rate = tables["rate"]["log10"][explorer.SAMPLES.index(1000)][explorer.ACCURACIES.index(0.5)][0]
    assert rate == pytest.approx(math.log10((2**16 + 1) / 10 + 0.25), abs=0.01)
    d, B, scale = explorer.HEAD_SIZES.index(8), explorer.BOUNDS.index(0.5), list(explorer.SCALES).index("1/d")
    assert tables["attention"]["logit"][d][B][scale] == pytest.approx(0.25)


@pytest.mark.parametrize("bound", [0.5, 2.0, 6.0])
def test_a_degree_of_the_explorer_is_enough_and_two_less_is_not(bound):
    g = explorer.degree(bound, 1e-3)
    assert exp_polynomial(bound, g).error_bound <= 5e-4 < exp_polynomial(bound, g - 2).error_bound


def test_the_explorer_reads_without_script():
    page = pages.explorer_page(book_of(ledger_of(*CHAIN)))
    assert page.count("<table") == 3
    assert page.count("hidden>") == 3  # sliders appear with the script
