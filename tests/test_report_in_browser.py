"""The report in a browser: everything visible, nothing loaded, and readable in light and dark mode and on a phone."""

import base64
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from browser import LOW_CONTRAST, chromium, get_log, get_requests, set_view
from numpy.typing import NDArray
from report_runs import CONTINUAL, GRADUAL, METHODS, ROUNDS, write_all_methods, write_cell, write_run, write_weather
from selenium import webdriver
from selenium.webdriver.common.by import By

from ctta.benchmark.report import write_report
from ctta.benchmark.report.plots import assign_styles

LONG = "a-very-long-name-without-a-single-space-" * 4

#: Names that run a script where they are not escaped, each in another place of a page.
HOSTILE = [
    '"><img src=x onerror="window.hit = 1">',
    "</script><script>window.hit = 2</script>",
    "</title><script>window.hit = 3</script>",
    "</svg><svg onload='window.hit = 4'>",
    "</style><img src=x onerror=window.hit=5>",
    "javascript:window.hit=6",
    "--><script>window.hit = 7</script><!--",
    "' onmouseover='window.hit = 8' autofocus onfocus='window.hit = 9",
]
#: An element with the color of axes and grid lines, which are faint on purpose.
ADD_FAINT = """
window.faint = document.createElement("i");
faint.style.color = "var(--faint)";
document.body.append(faint);
"""
#: Texts that extend beyond their figure.
CLIPPED = """
return [...document.querySelectorAll("svg text")].filter(text => {
  const inner = text.getBoundingClientRect(), outer = text.closest("svg").getBoundingClientRect();
  return inner.left < outer.left - 2 || inner.right > outer.right + 2 || inner.top < outer.top - 2
    || inner.bottom > outer.bottom + 2;
}).map(text => text.textContent);
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as chrome:
        yield chrome


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    continual = write_all_methods(write_run(folder / "continual"), CONTINUAL)
    for place, method in enumerate(("CoTTA: weight-avg", "CoTTA: + aug-avg", "CoTTA: + restore")):
        write_cell(continual, method, [[40 - place] * 10] * 15, domains=CONTINUAL, seed=0)
    gradual = write_run(folder / "gradual", recipe="cifar10c-gradual")
    write_all_methods(gradual, GRADUAL, num_batches=1, order=0, stream="cifar10c gradual authors order=0")
    rounds = write_run(folder / "rounds", recipe="embedded")
    write_all_methods(rounds, ROUNDS, num_batches=1, stream="embedded continual severity=5 order=standard rounds=10")
    weather = write_weather(write_run(folder / "weather", recipe="acdc"))
    again = write_all_methods(write_run(folder / "again"), CONTINUAL, seeds=[7])
    other = write_run(folder / f"other-{LONG}", command=LONG)
    for method in (LONG, '<script>document.title = "broken"</script>'):
        settings = {LONG: LONG}
        write_cell(other, method, [[50]] * 15, domains=CONTINUAL, stream_hash=LONG, settings=settings)
    (other / "cells" / LONG).mkdir()
    runs = {"continual": [continual], "gradual": [gradual], "rounds": [rounds], "weather": [weather]}
    runs["several"] = [continual, again, other]
    return {name: write_report(folders, folder / f"report of {name}") for name, folders in runs.items()}


def test_hostile_names_run_no_script(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Of methods, settings, domains, streams, commands and folders; pages, plots and links."""
    run = write_run(tmp_path / HOSTILE[0], command=HOSTILE[1])
    for method, other in zip(HOSTILE, [*HOSTILE[1:], HOSTILE[0]], strict=True):
        write_cell(run, method, [[50]] * len(HOSTILE), domains=HOSTILE, settings={other: method}, stream=HOSTILE[2])
    page = write_report([run], tmp_path / "report")
    files = [page, *page.parent.rglob("*.html"), *page.parent.rglob("*.svg")]
    assert len(files) >= 2
    for file in files:
        browser.get(file.as_uri())
        browser.execute_script("document.querySelectorAll('*').forEach(each => each.focus && each.focus())")
        assert browser.execute_script("return window.hit ?? null") is None, file.name
    browser.get(page.as_uri())
    text = browser.find_element(By.TAG_NAME, "body").text
    assert all(name in text for name in HOSTILE), "names are shown as they are"
    links = [link.get_attribute("href") or "" for link in browser.find_elements(By.TAG_NAME, "a")]
    assert not [link for link in links if link.startswith("javascript:")]


def show(browser: webdriver.Chrome, page: Path, *, width: int = 1280, theme: str = "light", media: str = "") -> None:
    set_view(browser, width=width, theme=theme, media=media)
    browser.get(page.as_uri())


ALL_PAGES = pytest.mark.parametrize("name", ["continual", "gradual", "rounds", "weather", "several"])


@ALL_PAGES
def test_the_page_loads_nothing_and_logs_nothing(browser: webdriver.Chrome, pages: dict[str, Path], name: str) -> None:
    get_requests(browser), get_log(browser, "browser")  # drop those of earlier pages
    show(browser, pages[name])
    assert get_requests(browser) == [pages[name].as_uri()]
    assert get_log(browser, "browser") == []
    assert browser.title.startswith("Results: ")


@ALL_PAGES
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_screen(
    browser: webdriver.Chrome, pages: dict[str, Path], name: str, width: int
) -> None:
    show(browser, pages[name], width=width)
    assert browser.execute_script("return window.innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    table = browser.find_element(By.TAG_NAME, "table")
    assert table.is_displayed() and "CoTTA" in table.text and "mean" in table.text
    if width == 1280 and name != "several":  # its names are longer than any screen
        outside = (
            "return [...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth + 1)"
        )
        assert browser.execute_script(outside) == []


@ALL_PAGES
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_and_lines_have_contrast(
    browser: webdriver.Chrome, pages: dict[str, Path], name: str, theme: str
) -> None:
    show(browser, pages[name], theme=theme)
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 20, 22)"}[theme]
    browser.execute_script(ADD_FAINT)
    count, found = browser.execute_script(LOW_CONTRAST)
    assert count > 100 and found == []
    assert browser.execute_script(CLIPPED) == []


@ALL_PAGES
def test_print_is_white_and_fits_the_whole_table(browser: webdriver.Chrome, pages: dict[str, Path], name: str) -> None:
    show(browser, pages[name], width=700, theme="dark", media="print")  # A4 without its margins
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.execute_script(ADD_FAINT)
    assert browser.execute_script(LOW_CONTRAST)[1] == []
    if name != "several":
        right = "return Math.max(...[...document.querySelectorAll('table')].map(t => t.getBoundingClientRect().right))"
        assert browser.execute_script(right) <= 701
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert base64.b64decode(pdf["data"]).startswith(b"%PDF")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_svg_files_follow_the_color_scheme(browser: webdriver.Chrome, pages: dict[str, Path], theme: str) -> None:
    for figure in ("error-over-time.svg", "reliability.svg", "cost.svg"):
        show(browser, pages["continual"].parent / figure, theme=theme)
        color = browser.execute_script("return getComputedStyle(document.querySelector('text')).fill")
        assert color == {"light": "rgb(26, 26, 27)", "dark": "rgb(233, 233, 234)"}[theme]


#: Transforms of linear RGB that simulate the absence of one type of cone (Machado et al., 2009).
COLOR_BLINDNESS = {
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def test_styles_differ_and_have_contrast() -> None:
    styles = assign_styles([*METHODS, "CoTTA: weight-avg", "CoTTA: + aug-avg", "mine", "yours"])
    assert len({(style.color, style.dash) for style in styles.values()}) == len(styles)
    assert styles["CoTTA"] == assign_styles(["CoTTA"])["CoTTA"]
    for style in styles.values():
        assert compute_contrast(style.color, "#ffffff") >= 3 and compute_contrast(style.dark_color, "#141416") >= 3


@pytest.mark.parametrize("condition", COLOR_BLINDNESS)
@pytest.mark.parametrize("attribute", ["color", "dark_color"])
def test_colors_differ_for_color_blind_readers(condition: str, attribute: str) -> None:
    styles = assign_styles([*METHODS, "CoTTA: weight-avg", "CoTTA: + aug-avg"])
    colors = [
        to_lab(np.array(COLOR_BLINDNESS[condition]) @ to_linear(getattr(style, attribute))) for style in styles.values()
    ]
    distances = [np.linalg.norm(one - other) for one, other in combinations(colors, 2)]
    assert min(distances) > 8  # a difference of 2 is just noticeable side by side


def to_linear(color: str) -> NDArray[np.float64]:
    """Return the linear RGB values of a hexadecimal sRGB color."""
    channels = np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def to_lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return CIE L*a*b* of linear RGB, with white point D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ rgb.clip(0, 1) / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def compute_contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colors as WCAG defines it."""
    low, high = sorted(float(to_linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (first, second))
    return (high + 0.05) / (low + 0.05)
