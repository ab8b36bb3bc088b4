"""The built site, page by page: its HTML text, and the page in Chromium. Each check finds a planted fault."""

import os
from pathlib import Path

import pytest
import site_checks
from bs4 import BeautifulSoup
from execute import toc_files
from playwright.sync_api import sync_playwright
from site_checks import BROWSER_CHECKS, CHROMIUM, FLAGS, TEXT_CHECKS, opened, outside_requests

SITE = Path(__file__).parents[1] / "_build" / "html"
PAGES = toc_files()

needs_site = pytest.mark.skipif(not SITE.exists(), reason="no site; run make book first")


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("continuous integration needs Chromium for the browser checks")
        pytest.skip("Chromium is not installed; the browser checks need it")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@needs_site
def test_every_page_of_the_contents_is_there_and_no_other():
    rendered = {path.relative_to(SITE).with_suffix("").as_posix() for path in SITE.rglob("*.html")}
    rendered -= {path for path in rendered if path.startswith(("_static", "_modules", "_sources"))}
    assert rendered == {*PAGES, "index", "genindex", "search", "py-modindex"}


@needs_site
@pytest.mark.parametrize("page", PAGES)
def test_the_text_of_a_page(page):
    path = SITE / f"{page}.html"
    soup = BeautifulSoup(path.read_text(), "html.parser")
    complaints = [complaint for check in TEXT_CHECKS for complaint in check(soup)]
    assert complaints + site_checks.broken_links(soup, path) == []


@needs_site
@pytest.mark.browser
@pytest.mark.parametrize("page", PAGES)
def test_a_page_in_the_browser(browser, page):
    with opened(browser, (SITE / f"{page}.html").as_uri()) as (tab, requests):
        complaints = [complaint for check in BROWSER_CHECKS for complaint in check(tab)]
        assert complaints + outside_requests(requests) == []


@needs_site
@pytest.mark.browser
def test_the_ledger_filters_and_a_permanent_link_finds_its_row(browser):
    with opened(browser, (SITE / "book/ledger.html").as_uri()) as (tab, _):
        rows = tab.locator("#ledger-table tbody tr:visible")
        everything = rows.count()
        tab.select_option("select[data-filter=status]", "corrected")
        assert 0 < rows.count() < everything
        assert tab.locator("#ledger-count").inner_text() == f"{rows.count()} of {everything} statements"
        tab.evaluate("location.hash = '#claim-lemma-2.1'")
        tab.wait_for_function("document.getElementById('claim-lemma-2.1').getClientRects().length > 0")


# --- planted faults ------------------------------------------------------------------------------------------------

PAGE = """<!doctype html><html lang="en" data-theme="light"><head><title>A page</title><style>
html[data-theme=dark] body {{ background: #111; color: #eee }} a {{ color: inherit }}
.dropdown.closed > p {{ display: none }} @media print {{ .dropdown.closed > p {{ display: block }} }}
</style></head><body><div class="bd-sidebar-primary"><button class="search-button-field">Search</button></div>
<main><article><h1>A page</h1><a href="#x">first link</a>{}</article></main></body></html>"""
GOOD = (
    '<figure class="book-figure" id="x"><img alt="A line that rises from one to nine." src="data:,">'
    "<figcaption>A line.</figcaption><details><summary>Data</summary><table><tr><td>1</td></tr></table></details>"
    "</figure>"
    "<p>Plain text with <code>:::{note}</code> in a listing.</p>"
)


@pytest.mark.parametrize("check", TEXT_CHECKS)
def test_a_good_page_has_no_complaints(check):
    assert check(BeautifulSoup(PAGE.format(GOOD), "html.parser")) == []


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        ("raw_markup", "<p>:::{admonition} Lost</p>"),
        ("raw_markup", "<p>```{note} Lost</p>"),
        ("raw_markup", "<p>see {ref}`lemma-2.1`</p>"),
        ("raw_markup", r"<p>\label{eq}</p>"),
        ("raw_markup", "<div>Traceback (most recent call last)</div>"),
        ("raw_markup", "<p> :class: dropdown </p>"),
        ("raw_markup", "<p>| a | b | |—|—| | 1 | 2 |</p>"),
        ("stray_outputs", '<div class="cell_output"><pre>Text(0.02, 0.98, "title")</pre></div>'),
        ("stray_outputs", '<div class="cell_output"><pre>cell.py:15: UserWarning: the layout has changed</pre></div>'),
        ("duplicate_ids", '<p id="a"></p><p id="a"></p>'),
        ("external_resources", '<script src="https://cdn.example/mathjax.js"></script>'),
        ("external_resources", '<link rel="stylesheet" href="//cdn.example/style.css">'),
        ("external_resources", '<img src="http://example/x.png" alt="A picture from elsewhere, really.">'),
        ("pictures_without_words", '<img src="x.svg">'),
        ("pictures_without_words", '<img src="x.svg" alt="../_images/0123456789abcdef0123456789.svg">'),
        ("pictures_without_words", '<figure class="book-figure"><img alt="A line that rises to nine."></figure>'),
        ("search_boxes", '<div class="bd-sidebar-primary"><button class="search-button-field"></button></div>'),
    ],
)
def test_a_fault_in_the_text_is_found(check, fault):
    assert getattr(site_checks, check)(BeautifulSoup(PAGE.format(GOOD + fault), "html.parser"))


@pytest.mark.parametrize("target", ["missing.html", "page.html#nowhere", "#nowhere"])
def test_a_broken_link_is_found(tmp_path, target):
    page = tmp_path / "page.html"
    page.write_text(PAGE.format(f'<a href="{target}">there</a><p id="x"></p>'))
    assert site_checks.broken_links(BeautifulSoup(page.read_text(), "html.parser"), page) == [
        f"link to {target}: no such {'file' if 'missing' in target else 'place'}"
    ]


FOLD = '<div class="dropdown closed"><p>A proof.</p></div>'


@pytest.mark.browser
@pytest.mark.parametrize(
    ("check", "fault"),
    [
        ("overflows", '<table style="width:1200px"><tr><td>wide</td></tr></table>'),
        ("unreadable_formulas", '<span class="math">\\(x\\)</span>'),
        ("stuck_folds", '<details><summary onclick="event.preventDefault()">A proof</summary>text</details>'),
        (
            "unreachable_by_keyboard",
            '<div class="table-scroll" style="overflow:auto;width:100px"><pre>' + "x" * 99 + "</pre></div>",
        ),
        ("accessibility", '<p style="color:#ccc;background:#fff">pale</p>'),
        ("accessibility", "<button></button>"),
        ("hidden_in_print", '<div class="dropdown"><p style="display:none">A proof.</p></div>'),
    ],
)
def test_a_fault_in_the_browser_is_found(browser, tmp_path, check, fault):
    page = tmp_path / "page.html"
    run = getattr(site_checks, check)
    page.write_text(PAGE.format(FOLD))
    with opened(browser, page.as_uri()) as (tab, _):
        assert run(tab) == []
    page.write_text(PAGE.format(FOLD + fault))
    with opened(browser, page.as_uri()) as (tab, _):
        assert run(tab)


@pytest.mark.browser
def test_a_request_that_leaves_is_found(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(PAGE.format('<img alt="" src="http://127.0.0.1:9/x.png">'))
    with opened(browser, page.as_uri()) as (_, requests):
        assert outside_requests(requests) == ["request to http://127.0.0.1:9/x.png"]
