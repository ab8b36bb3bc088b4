"""What every page must satisfy, as functions from a page to a list of complaints; `test_site.py` also plants faults.

Two families: checks of the HTML text (fast, no browser) and checks in Chromium.
"""

import re
import shutil
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlparse

from axe_playwright_python.sync_playwright import Axe
from bs4 import BeautifulSoup
from playwright.sync_api import TimeoutError as PlaywrightTimeout

WIDTHS = (390, 768, 1440)
THEMES = ("light", "dark")
# Milliseconds that the theme may take, after a resize, to add tab stops to listings that scroll.
PATIENCE = 6000
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


# --- the HTML text -------------------------------------------------------------------------------------------------


def article_text(soup: BeautifulSoup) -> str:
    """The text a reader sees, without code listings and formulas."""
    article = BeautifulSoup(str(soup.find("article") or soup), "html.parser")
    for part in article.select("pre, code, script, style, .math"):
        part.decompose()
    return article.get_text(" ")


def raw_markup(soup: BeautifulSoup) -> list[str]:
    """Directives, fences, roles, labels and tracebacks that reached the reader as text."""
    patterns = {
        "raw directive": r"(^|\s)(:{3,}|`{3,})\s*\{?\w*",
        "raw role": r"\{(ref|prf:ref|glue|cite|doc|numref)[^}]*\}",
        "raw label": r"\\label\b|\\begin\{|\\end\{",
        "raw substitution": r"%s\b|\{\{|\}\}",
        "raw option": r"(^|\s):(class|name|label|tags):\s",
        "traceback": r"Traceback \(most recent call last\)",
        "placeholder": r"<!-- generated",
        "raw table": r"\|\s*[-–—:]+\s*\|",
    }
    text = article_text(soup)
    return [f"{what}: …{m[0].strip()}…" for what, pattern in patterns.items() for m in [re.search(pattern, text)] if m]


def duplicate_ids(soup: BeautifulSoup) -> list[str]:
    """Ids that stand more than once."""
    count = Counter(tag["id"] for tag in soup.find_all(id=True))
    return [f"id {id!r} stands {times} times" for id, times in count.items() if times > 1]


def external_resources(soup: BeautifulSoup) -> list[str]:
    """Scripts, styles, pictures and frames that a browser would fetch from elsewhere."""
    found = []
    for tag, attribute in (("script", "src"), ("img", "src"), ("iframe", "src"), ("link", "href"), ("source", "src")):
        for element in soup.find_all(tag, **{attribute: True}):
            is_resource = tag != "link" or {"stylesheet", "preload", "icon", "modulepreload"} & set(
                element.get("rel", [])
            )
            if (
                is_resource
                and urlparse(element[attribute]).scheme in ("http", "https", "")
                and "//" in element[attribute][:8]
            ):
                found.append(f"<{tag}> from {element[attribute]}")
    return found


def pictures_without_words(soup: BeautifulSoup) -> list[str]:
    """Pictures in the article without a real alternative text, and figures without caption or data."""
    article = soup.find("article") or soup
    found = [
        f"<img> with alt {image.get('alt')!r}"
        for image in article.find_all("img")
        if len((image.get("alt") or "").strip()) < 20 or re.fullmatch(r"[\w./-]+", image["alt"].strip())
    ]
    for figure in article.select("figure.book-figure"):
        caption = figure.find("figcaption")
        if caption is None or not caption.get_text(strip=True):
            found.append(f"figure {figure.get('id')} has no caption")
        if figure.find("table") is None and "keep-colours" not in figure.get("class", []):
            found.append(f"figure {figure.get('id')} shows no data")
    return found


def search_boxes(soup: BeautifulSoup) -> list[str]:
    """The page has exactly one button or box that opens the search in its side bar."""
    boxes = soup.select(".bd-sidebar-primary .search-button-field, .bd-sidebar-primary input[type=search]")
    return [] if len(boxes) == 1 else [f"{len(boxes)} search boxes in the side bar"]


def broken_links(soup: BeautifulSoup, page: Path) -> list[str]:
    """Links inside the book that lead to no file, or to no id on their page."""
    found = []
    for link in soup.select("article a[href]"):
        target = urlparse(link["href"])
        if target.scheme or target.netloc or link["href"] == "#":
            continue
        file = (page.parent / unquote(target.path)).resolve() if target.path else page
        if not file.exists():
            found.append(f"link to {link['href']}: no such file")
        elif target.fragment and file.suffix == ".html" and not _has_id(file, unquote(target.fragment)):
            found.append(f"link to {link['href']}: no such place")
    return found


def _has_id(file: Path, id: str) -> bool:
    return f'id="{id}"' in file.read_text()


def stray_outputs(soup: BeautifulSoup) -> list[str]:
    """What a cell prints by accident: the representation of an object, or a warning with a path."""
    pattern = r"^\s*(Text\(|<[\w.]+( object)? at 0x|\[?<matplotlib|.*\b\w*Warning:)"
    outputs = (part.get_text() for part in soup.select(".cell_output pre"))
    return [f"stray output: {text.strip()[:60]}" for text in outputs if re.search(pattern, text)]


TEXT_CHECKS = (raw_markup, stray_outputs, duplicate_ids, external_resources, pictures_without_words, search_boxes)


# --- in the browser ------------------------------------------------------------------------------------------------


@contextmanager
def opened(browser, url: str):
    """A page opened at ``url`` and settled, with the list of requests that left the machine's own files."""
    context = browser.new_context(viewport={"width": WIDTHS[-1], "height": 900})
    page = context.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(url, wait_until="load")
    page.wait_for_function("!window.MathJax || (MathJax.startup && MathJax.startup.promise)")
    page.evaluate("() => window.MathJax && MathJax.startup && MathJax.startup.promise")
    page.add_style_tag(content="* { transition: none !important; animation: none !important }")
    try:
        yield page, requests
    finally:
        context.close()


def set_theme(page, theme: str) -> None:
    """Switch the page to the light or dark theme as its button would."""
    page.evaluate(
        "t => { document.documentElement.dataset.theme = t; document.documentElement.dataset.mode = t; }", theme
    )


def outside_requests(requests: list[str]) -> list[str]:
    """Requests that are neither local files nor inline data."""
    return [f"request to {url}" for url in requests if not url.startswith(("file:", "data:", "blob:", "about:"))]


def overflows(page) -> list[str]:
    """Elements that make the page wider than the window, at every width and in both themes."""
    found = []
    for width in WIDTHS:  # the outer loop: a change of width lays the page out anew, a change of colours does not
        page.set_viewport_size({"width": width, "height": 900})
        for theme in THEMES:
            set_theme(page, theme)
            excess = page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
            if excess > 0:
                found.append(f"{excess} px too wide at {width} px, {theme}: {page.evaluate(WIDEST)}")
    return found


WIDEST = """() => {
  const beyond = e => e.getBoundingClientRect().right > window.innerWidth + 1;
  const wide = [...document.querySelectorAll('article *')].filter(beyond);
  return wide.slice(0, 3).map(e => e.tagName + '.' + e.className).join(', ');
}"""


# Thousands of elements without text of their own, or in the highlighter's one palette: minutes of axe's time. Hiding
# them from axe is not enough, it measures every element of the page; so they leave the page, once scrolling is tested.
PRUNE = """() => {
  document.querySelectorAll('article pre').forEach(e => { e.textContent = e.textContent.slice(0, 20); });
  document.querySelectorAll('mjx-container').forEach(e => e.replaceChildren());
  const bodies = document.querySelectorAll('article details table tbody');
  bodies.forEach(e => e.replaceChildren(...[...e.children].slice(0, 2)));
}"""


def accessibility(page) -> list[str]:
    """Serious and critical findings of axe: scrolling on a phone, all rules in the light theme, colours in the dark."""
    narrow(page)
    found = _axe(page, "light", WIDTHS[0], ["scrollable-region-focusable", "meta-viewport"])
    page.evaluate(PRUNE)
    return found + _axe(page, "light", WIDTHS[-1]) + _axe(page, "dark", WIDTHS[-1], ["color-contrast"])


def _axe(page, theme: str, width: int, rules: list[str] | None = None) -> list[str]:
    set_theme(page, theme)
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    # Preloading would wait for style sheets that a page opened from a file cannot fetch.
    options = {"resultTypes": ["violations"], "preload": False}
    if rules:
        options["runOnly"] = {"type": "rule", "values": rules}
    found = []
    for violation in Axe().run(page, {"exclude": [["mjx-container"]]}, options).response["violations"]:
        if violation["impact"] in ("serious", "critical"):
            where = [node["target"][0] for node in violation["nodes"]]
            found.append(f"{violation['id']} ({theme}, {width} px) at {where[:3]}, {len(where)} in all")
    return found


def unreadable_formulas(page) -> list[str]:
    """Formulas that MathJax did not typeset, or typeset as an error."""
    raw = page.evaluate(
        """() => [...document.querySelectorAll('article .math')]
              .filter(e => !e.querySelector('mjx-container')).map(e => e.textContent.slice(0, 60))"""
    )
    errors = page.evaluate("() => [...document.querySelectorAll('mjx-merror')].map(e => e.textContent.slice(0, 80))")
    return [f"not typeset: {text}" for text in raw] + [f"MathJax error: {text}" for text in errors]


FOLDS = {
    "article .admonition.dropdown > summary, article details > summary": "e => e.parentElement.open",
    "article button.toggle-button": "e => !e.classList.contains('toggle-button-hidden')",
}
STUCK = """([selector, isOpen]) => {
  const open = eval(isOpen);
  const seen = [...document.querySelectorAll(selector)].filter(e => e.getClientRects().length);
  const stuck = seen.filter(e => {
    const before = open(e); e.click(); const once = open(e); e.click();
    return once === before || open(e) !== before;
  });
  return stuck.map(e => e.parentElement.textContent.trim().slice(0, 50));
}"""


def stuck_folds(page) -> list[str]:
    """Folded boxes and details that do not open and close again: all by click, the first of a kind also on Enter."""
    page.set_viewport_size({"width": WIDTHS[-1], "height": 900})
    found = []
    for selector, is_open in FOLDS.items():
        found += [f"does not fold: {text}" for text in page.evaluate(STUCK, [selector, is_open])]
        first = next((handle for handle in page.query_selector_all(selector) if handle.is_visible()), None)
        if first is not None:
            before = first.evaluate(is_open)
            first.press("Enter")
            if first.evaluate(is_open) == before:
                found.append(f"does not open on Enter: {first.evaluate('e => e.textContent.trim().slice(0, 50)')}")
            first.press("Enter")
    return found


def hidden_in_print(page) -> list[str]:
    """Proofs and solutions that stay folded on paper."""
    page.emulate_media(media="print")
    page.evaluate("() => window.dispatchEvent(new Event('beforeprint'))")
    found = page.evaluate(
        """() => [...document.querySelectorAll('article .dropdown > *, article details > *')]
              .filter(e => !e.matches('button, summary') && e.getClientRects().length === 0)
              .map(e => e.parentElement.textContent.trim().slice(0, 50))"""
    )
    page.emulate_media(media="screen")
    return [f"folded in print: {text}" for text in found]


UNREACHABLE = """() => [...document.querySelectorAll('article .table-scroll, article pre')].filter(
  e => e.scrollWidth > e.clientWidth && e.tabIndex < 0).length"""


def narrow(page) -> int:
    """Make the window a phone's; the number of scrolling tables and listings that stay without a tab stop."""
    set_theme(page, "light")
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    page.wait_for_timeout(300)
    with suppress(PlaywrightTimeout):
        page.wait_for_function(f"() => ({UNREACHABLE})() === 0", timeout=PATIENCE)
    return page.evaluate(UNREACHABLE)


def unreachable_by_keyboard(page) -> list[str]:
    """The first Tab reaches a visible element, and scrolling regions can be focused."""
    regions = narrow(page)
    page.keyboard.press("Tab")
    focused = page.evaluate("() => document.activeElement !== document.body")
    found = [] if focused else ["Tab focuses nothing"]
    return found + ([f"{regions} scrolling tables or listings cannot be focused"] if regions else [])


# The last one takes parts of the page away.
BROWSER_CHECKS = (overflows, unreadable_formulas, stuck_folds, unreachable_by_keyboard, hidden_in_print, accessibility)
